//! Whether the server is alive, whether it takes requests, and what it is.

use axum::{
    Json,
    extract::State as FromState,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::app::{App, State};
use crate::engine::Health;

/// `GET /health`: 200 while the engine gets on, else 503 and why. A drain is no illness.
pub(super) async fn health(FromState(app): FromState<App>) -> Response {
    match app.state() {
        State::Ending => answer(StatusCode::OK, "ending", None),
        State::Loading => answer(StatusCode::SERVICE_UNAVAILABLE, "loading", None),
        State::Loaded(health) => engine(health),
    }
}

/// `GET /ready`: 200 while new requests are taken, else 503 and why.
pub(super) async fn ready(FromState(app): FromState<App>) -> Response {
    match app.state() {
        State::Ending => answer(StatusCode::SERVICE_UNAVAILABLE, "ending", None),
        State::Loading => answer(StatusCode::SERVICE_UNAVAILABLE, "loading", None),
        State::Loaded(health) => engine(health),
    }
}

/// `GET /version`
pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

fn engine(health: Health) -> Response {
    match health {
        Health::Well => answer(StatusCode::OK, "ok", None),
        Health::Stuck(time) => answer(
            StatusCode::SERVICE_UNAVAILABLE,
            "stuck",
            Some(format!(
                "a step has taken {:.0} seconds",
                time.as_secs_f64()
            )),
        ),
        Health::Stopped(why) => answer(StatusCode::SERVICE_UNAVAILABLE, "stopped", Some(why)),
    }
}

fn answer(code: StatusCode, status: &str, why: Option<String>) -> Response {
    let mut body = json!({ "status": status });
    if let Some(why) = why {
        body["reason"] = json!(why);
    }
    (code, Json(body)).into_response()
}
