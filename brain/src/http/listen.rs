//! Connections: how many, how long they may take, TLS, and their end.

use std::{pin::pin, sync::Arc, time::Duration};

use axum::Router;
use futures::StreamExt as _;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto::Builder, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use marathon_proto::net::{Connection, Listener};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls};
use tokio_util::sync::CancellationToken;

/// Connections at a time; more wait in the system's queue.
const MAX_CONNECTIONS: usize = 4096;
/// Time for a TLS handshake, and for the head of a request.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);
/// Largest head of a request.
const MAX_HEAD: usize = 64 << 10;
/// A pause after the system refused a connection (no descriptors left, for one).
const BREATH: Duration = Duration::from_millis(50);

/// Serves until `closing` is cancelled, then takes no new connection and waits for the open ones.
pub(super) async fn serve(
    listener: Listener,
    tls: Option<Arc<rustls::ServerConfig>>,
    routes: Router,
    closing: CancellationToken,
) {
    let server = server();
    let acceptor = tls.map(TlsAcceptor::from);
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut incoming = pin!(listener.incoming());
    loop {
        let next = async {
            // The semaphore is never closed; a connection without a permit is only uncounted.
            let permit = connections.clone().acquire_owned().await.ok();
            (permit, incoming.next().await)
        };
        let (permit, accepted) = tokio::select! {
            next = next => next,
            () = closing.cancelled() => break,
        };
        let connection = match accepted {
            Some(Ok(connection)) => connection,
            Some(Err(error)) => {
                tracing::debug!(%error, "a connection was not taken");
                sleep(BREATH).await;
                continue;
            }
            None => break,
        };
        let (server, routes, acceptor) = (server.clone(), routes.clone(), acceptor.clone());
        let watcher = graceful.watcher();
        tokio::spawn(async move {
            let service = TowerToHyperService::new(routes);
            let result = match acceptor {
                None => {
                    let io = TokioIo::new(connection);
                    watcher
                        .watch(server.serve_connection(io, service).into_owned())
                        .await
                }
                Some(acceptor) => {
                    let Some(stream) = handshake(&acceptor, connection).await else {
                        return;
                    };
                    let io = TokioIo::new(stream);
                    watcher
                        .watch(server.serve_connection(io, service).into_owned())
                        .await
                }
            };
            if let Err(error) = result {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(permit);
        });
    }
    graceful.shutdown().await;
}

async fn handshake(
    acceptor: &TlsAcceptor,
    connection: Connection,
) -> Option<tokio_rustls::server::TlsStream<Connection>> {
    match timeout(HEAD_PATIENCE, acceptor.accept(connection)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => None,
    }
}

fn server() -> Builder<TokioExecutor> {
    let mut server = Builder::new(TokioExecutor::new());
    server
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(MAX_HEAD)
        .half_close(false);
    server
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(256)
        .max_header_list_size(MAX_HEAD as u32)
        .keep_alive_interval(HEAD_PATIENCE)
        .keep_alive_timeout(HEAD_PATIENCE);
    server
}
