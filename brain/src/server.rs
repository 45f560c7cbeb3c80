//! `brain serve`: bring-up, readiness, drain. The only file that knows everything.
//!
//! The ports are bound before anything is loaded, so that a taken one is an error at once; HTTP answers while
//! the model loads. Signals
//! are heard from the beginning. At the end running generations get the drain time; what is left
//! then is ended with a reason that tells clients to ask again.

use std::{io::Write as _, sync::Arc, time::Duration};

use marathon_proto::{
    DESCRIPTORS,
    auth::{Guard, Token},
    brain::brain_server::BrainServer,
    net::{self, Listener, MAX_MESSAGE_BYTES},
    shutdown::{Kind, Shutdown, Tasks},
    telemetry::Telemetry,
    tls,
};
use sd_notify::NotifyState;
use tokio::sync::watch;
use tokio_rustls::rustls;
use tokio_util::sync::CancellationToken;
use tonic::{service::interceptor::InterceptedService, transport::server::Router};

use crate::{
    bringup,
    callers::{Keys, Owner},
    config::Config,
    engine::Health,
    error::Error,
    grpc::{BrainService, health},
    http::{self, HttpError, HttpServer},
    metrics,
    serving::Serving,
};

/// Time that open streams get to deliver their last events.
const CLOSING: Duration = Duration::from_secs(5);

/// Serves until a signal, or until serving fails.
pub fn serve(config: Config) -> Result<(), Error> {
    bringup::check(&config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::Serving(format!("no runtime: {error}")))?;
    let result = runtime.block_on(run(config));
    // Loading may still be busy on its thread; the end does not wait for it.
    runtime.shutdown_background();
    result
}

async fn run(config: Config) -> Result<(), Error> {
    let shutdown = Shutdown::on_signals()
        .map_err(|error| Error::Serving(format!("signals cannot be received: {error}")))?;
    let telemetry = Telemetry {
        service: "brain",
        version: env!("CARGO_PKG_VERSION"),
        format: config.log_format,
        filter: config.log.clone(),
        otlp_endpoint: config.otlp_endpoint.clone(),
    };
    let _telemetry = telemetry
        .start()
        .map_err(|error| Error::Usage(error.to_string()))?;
    let token = config
        .token_file
        .as_deref()
        .map(Token::from_file)
        .transpose()
        .map_err(|error| Error::Usage(error.to_string()))?;
    let keys = Keys::gather(
        token.as_ref(),
        config.api_key_file.as_deref(),
        std::env::var("BRAIN_API_KEYS").ok().as_deref(),
    )
    .map_err(|error| Error::Usage(error.to_string()))?;
    let tls = config
        .identity
        .as_ref()
        .map(|identity| tls::server(identity, config.client_ca.as_deref()))
        .transpose()
        .map_err(|error| Error::Usage(error.to_string()))?;
    let address = |error: net::ListenError| Error::Address(error.to_string());
    config
        .grpc_addr
        .check_exposure(!keys.is_empty())
        .map_err(address)?;
    let listener = config.grpc_addr.bind().await.map_err(address)?;
    let tasks = Tasks::new(shutdown.clone());
    let closing = CancellationToken::new();
    let http = start_http(
        &config,
        keys.clone(),
        tls.clone(),
        &shutdown,
        &tasks,
        &closing,
    )
    .await?;

    let Some(serving) = load(&config, &shutdown).await? else {
        // After a signal, or because HTTP ended by itself, which is a failure.
        closing.cancel();
        return end(&tasks, &shutdown, None).await;
    };
    if let Some(http) = &http {
        http.model.send_replace(Some(serving.clone()));
    }
    let router = router(net::server(), &serving, keys, &shutdown, &tasks).await?;
    let front = Front {
        router,
        listener,
        tls,
        http_addr: http.map(|http| http.addr),
        closing,
    };
    start(front, &serving, &tasks, &shutdown, config.drain).await
}

/// The HTTP server while the model loads.
struct Http {
    addr: String,
    model: watch::Sender<Option<Serving>>,
}

/// Serves HTTP from now on; requests wait for the model.
async fn start_http(
    config: &Config,
    keys: Keys,
    tls: Option<Arc<rustls::ServerConfig>>,
    shutdown: &Shutdown,
    tasks: &Tasks,
    closing: &CancellationToken,
) -> Result<Option<Http>, Error> {
    let setup = http::Setup {
        keys,
        tls,
        model_name: config.name.clone(),
        ending: shutdown.graceful().clone(),
    };
    let server = HttpServer::bind(&config.http, setup)
        .await
        .map_err(|error| match error {
            error @ HttpError::Store { .. } => Error::Usage(error.to_string()),
            HttpError::Listen(error) => Error::Address(error.to_string()),
        })?;
    let Some(server) = server else {
        return Ok(None);
    };
    let addr = server
        .local_addr()
        .map_or_else(String::new, |addr| addr.to_string());
    let model = server.model();
    tasks.spawn("http", Kind::Essential, server.serve(closing.clone()));
    tracing::info!(%addr, "HTTP is served");
    Ok(Some(Http { addr, model }))
}

/// What is served where.
struct Front {
    router: Router,
    listener: Listener,
    tls: Option<Arc<rustls::ServerConfig>>,
    http_addr: Option<String>,
    closing: CancellationToken,
}

/// Loads in the background so that a signal ends it; `None` after a signal.
async fn load(config: &Config, shutdown: &Shutdown) -> Result<Option<Serving>, Error> {
    let started = std::time::Instant::now();
    tracing::info!(model = config.name, device = ?config.device, "loading");
    let settings = config.clone();
    let loading = tokio::task::spawn_blocking(move || bringup::bring_up(&settings));
    let serving = tokio::select! {
        loaded = loading => loaded.map_err(|error| Error::Serving(format!("loading failed: {error}")))??,
        () = shutdown.graceful().cancelled() => return Ok(None),
    };
    metrics::export(serving.engine.clone());
    tracing::info!(
        fingerprint = serving.facts.fingerprint,
        drafter = serving.facts.drafter,
        max_model_len = serving.engine.max_len(),
        seconds = started.elapsed().as_secs_f64(),
        "loaded"
    );
    Ok(Some(serving))
}

async fn router(
    mut server: tonic::transport::Server,
    serving: &Serving,
    keys: Keys,
    shutdown: &Shutdown,
    tasks: &Tasks,
) -> Result<Router, Error> {
    let guard: Guard<Owner> = Guard::new(move |key| keys.caller(key));
    let brain = BrainServer::new(BrainService::new(
        serving.clone(),
        shutdown.graceful().clone(),
    ))
    .max_decoding_message_size(MAX_MESSAGE_BYTES)
    .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(|error| Error::Serving(format!("reflection cannot be set up: {error}")))?;
    let (reporter, health) = tonic_health::server::health_reporter();
    // Before anybody can ask, so that nobody is told that there is no such service.
    health::set(&reporter, serving.engine.health() == Health::Well).await;
    let watchdog = sd_notify::watchdog_enabled().is_some();
    // It ends by itself only when the engine has stopped: then serving is over.
    tasks.spawn(
        "health",
        Kind::Essential,
        health::report(
            serving.engine.clone(),
            reporter,
            shutdown.graceful().clone(),
            move || {
                if watchdog {
                    notify(&[NotifyState::Watchdog]);
                }
            },
        ),
    );
    Ok(server
        .add_service(health)
        .add_service(InterceptedService::new(reflection, guard.clone()))
        .add_service(InterceptedService::new(brain, guard)))
}

async fn start(
    front: Front,
    serving: &Serving,
    tasks: &Tasks,
    shutdown: &Shutdown,
    drain: Duration,
) -> Result<(), Error> {
    let Front {
        router,
        listener,
        tls,
        http_addr,
        closing,
    } = front;
    let addr = listener
        .local_addr()
        .map_err(|error| Error::Address(format!("the address is not known: {error}")))?;
    let until = closing.clone().cancelled_owned();
    tasks.spawn("grpc", Kind::Essential, async move {
        if let Err(error) = router
            .serve_with_incoming_shutdown(listener.incoming(tls), until)
            .await
        {
            tracing::error!(%error, "the gRPC server failed");
        }
    });
    let http = http_addr.map_or_else(String::new, |addr| format!(" http={addr}"));
    announce(&format!(
        "ready addr={addr} model={} fingerprint={}{http}",
        serving.facts.name, serving.facts.fingerprint
    ));
    notify(&[NotifyState::Ready]);
    tracing::info!(%addr, model = serving.facts.name, "ready");

    shutdown.graceful().cancelled().await;
    notify(&[NotifyState::Stopping]);
    tracing::info!(?drain, "ending; running generations may finish");
    tokio::select! {
        cut = serving.engine.drain(drain) => {
            if cut > 0 {
                tracing::warn!(cut, "generations were cut short; clients can continue them");
            }
        }
        () = shutdown.forced().cancelled() => return Err(Error::Forced),
    }
    closing.cancel();
    end(tasks, shutdown, Some(serving)).await?;
    tracing::info!("ended");
    Ok(())
}

/// Waits for the tasks; says what failed, if anything did.
async fn end(tasks: &Tasks, shutdown: &Shutdown, serving: Option<&Serving>) -> Result<(), Error> {
    let finished = tasks.finish(CLOSING).await.map_err(|failure| {
        Error::Serving(match serving.map(|serving| serving.engine.health()) {
            Some(Health::Stopped(reason)) => format!("the engine has stopped: {reason}"),
            _ => failure.to_string(),
        })
    })?;
    match finished || !shutdown.forced().is_cancelled() {
        true => Ok(()),
        false => Err(Error::Forced),
    }
}

/// A line for scripts. A closed standard output is no reason not to serve.
fn announce(line: &str) {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{line}").and_then(|()| out.flush());
    if let Err(error) = written {
        tracing::warn!(%error, "the ready line could not be written");
    }
}

/// Tells systemd, if it is there.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager could not be told");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_ends_by_itself_before_brain_is_ready_is_a_failure_and_a_signal_is_none() {
        for (by_itself, code) in [(true, 6), (false, 0)] {
            let shutdown = Shutdown::default();
            let tasks = Tasks::new(shutdown.clone());
            if !by_itself {
                shutdown.begin();
            }
            tasks.spawn("http", Kind::Essential, async {});
            shutdown.graceful().cancelled().await;
            let ended = end(&tasks, &shutdown, None).await;
            assert_eq!(ended.map_or_else(|error| error.code(), |()| 0), code);
        }
    }
}
