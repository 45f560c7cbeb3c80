//! `GET /v1/models`: what is served.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde_json::{Value, json};

use super::{app::App, error::ApiError};
use crate::serving::Serving;

/// All models: one.
pub(super) async fn list(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let serving = app.serving().await?;
    Ok(Json(json!({ "object": "list", "data": [card(&serving)] })))
}

/// One model.
pub(super) async fn one(
    State(app): State<App>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name?;
    app.check_model(Some(&name))?;
    Ok(Json(card(&app.serving().await?)))
}

fn card(serving: &Serving) -> Value {
    let facts = &serving.facts;
    json!({
        "id": facts.name,
        "object": "model",
        "created": unix_time(),
        "owned_by": "marathon",
        "root": facts.name,
        "parent": null,
        "max_model_len": serving.engine.max_len(),
        "fingerprint": facts.fingerprint,
        "drafter": facts.drafter,
        "device": facts.device,
    })
}

/// Seconds since 1970.
pub(super) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
