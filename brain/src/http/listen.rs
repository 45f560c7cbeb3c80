//! Connections: what is served over them, how long a head may take, and their end. How many there are
//! at a time, and TLS, is the listener's.

use std::{pin::pin, sync::Arc, time::Duration};

use axum::Router;
use futures::StreamExt as _;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto::Builder, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use marathon_proto::net::Listener;
use tokio_rustls::rustls;
use tokio_util::sync::CancellationToken;

/// Time for the head of a request.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);
/// Largest head of a request.
const MAX_HEAD: usize = 64 << 10;

/// Serves until `closing` is cancelled, then takes no new connection and waits for the open ones.
pub(super) async fn serve(
    listener: Listener,
    tls: Option<Arc<rustls::ServerConfig>>,
    routes: Router,
    closing: CancellationToken,
) {
    let server = server();
    let graceful = GracefulShutdown::new();
    let mut incoming = pin!(listener.incoming(tls));
    loop {
        let accepted = tokio::select! {
            accepted = incoming.next() => accepted,
            () = closing.cancelled() => break,
        };
        let Some(Ok(connection)) = accepted else {
            break;
        };
        let service = TowerToHyperService::new(routes.clone());
        let serving = server.serve_connection(TokioIo::new(connection), service);
        let serving = graceful.watch(serving.into_owned());
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%error, "a connection ended early");
            }
        });
    }
    graceful.shutdown().await;
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
