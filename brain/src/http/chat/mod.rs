//! `POST /v1/chat/completions`.

mod answer;
pub(super) mod messages;
pub(super) mod request;
mod stream;
pub(super) mod tools;

use axum::{
    Extension, Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};

use super::{app::App, body::Body, error::ApiError, generation, identity::RequestId, sse};
use crate::callers::Owner;
use request::ChatRequest;

/// Answers a conversation.
pub(super) async fn create(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let request = body
        .read(move |body| ChatRequest::parse(body, &headers, request_id))
        .await?;
    app.check_model(request.model.as_deref())?;
    if request.deliver.stream {
        let start = move |serving| stream::start(serving, owner, request);
        return sse::respond(&app, start, sse::error).await;
    }
    let serving = app.serving().await?;
    let ask = request.ask(&serving);
    let choices = generation::start(&serving, &owner, &ask).await?;
    let answer = answer::collect(&serving, &request, &ask, choices).await?;
    Ok(Json(answer).into_response())
}
