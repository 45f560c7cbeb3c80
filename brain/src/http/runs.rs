//! `GET /v1/runs` and `GET /v1/runs/{id}`: what the caller's runs took.

use axum::{
    Extension, Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde_json::{Value, json};

use super::{app::App, error::ApiError};
use crate::{callers::Owner, engine::RunUsage};

/// `GET /v1/runs`
pub(super) async fn list(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
) -> Result<Json<Value>, ApiError> {
    let engine = app.serving().await?.owned_by(&owner).engine;
    let runs = engine.usage();
    let runs: Vec<_> = runs.iter().map(|(run, usage)| shown(run, usage)).collect();
    Ok(Json(json!({ "object": "list", "data": runs })))
}

/// `GET /v1/runs/{id}`
pub(super) async fn one(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    run: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(run) = run?;
    let engine = app.serving().await?.owned_by(&owner).engine;
    let usage = engine
        .usage_of(&run)
        .ok_or_else(|| ApiError::not_found(format!("there is no run `{run:.100}`")))?;
    Ok(Json(shown(&run, &usage)))
}

fn shown(run: &str, usage: &RunUsage) -> Value {
    json!({
        "object": "run",
        "id": run,
        "generations": usage.generations,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated_tokens": usage.generated_tokens,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "device_seconds": usage.device_micros as f64 / 1e6,
    })
}
