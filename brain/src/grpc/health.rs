//! grpc.health.v1: serving as long as the engine gets on.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::engine::{Engine, Health};

/// The contract's service, next to the server as a whole ("").
const SERVICES: [&str; 2] = ["", "marathon.brain.v1.Brain"];
const INTERVAL: Duration = Duration::from_millis(500);

/// Reports the engine's health until `ending` is cancelled or the engine has stopped for good,
/// then that nothing is served. `alive` is called after every good look: a supervisor's watchdog
/// hangs on it.
pub async fn report(
    engine: Engine,
    reporter: HealthReporter,
    ending: CancellationToken,
    mut alive: impl FnMut() + Send,
) {
    let mut last = None;
    let mut tick = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            () = ending.cancelled() => break,
            _ = tick.tick() => {}
        }
        let health = engine.health();
        if health == Health::Well {
            alive();
        }
        if last.as_ref() != Some(&health) {
            match &health {
                Health::Well => tracing::info!("serving"),
                Health::Stuck(time) => tracing::error!(?time, "a step takes too long"),
                Health::Stopped(reason) => tracing::error!(%reason, "the engine has stopped"),
            }
            set(&reporter, health == Health::Well).await;
        }
        if matches!(health, Health::Stopped(_)) {
            break;
        }
        last = Some(health);
    }
    set(&reporter, false).await;
}

/// Says of every service whether it is served.
pub async fn set(reporter: &HealthReporter, serving: bool) {
    let status = if serving {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    for service in SERVICES {
        reporter.set_service_status(service, status).await;
    }
}
