//! Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.

pub(super) mod blocks;
mod errors;
pub(super) mod request;
mod stream;

use axum::{
    Extension, Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};
use serde_json::{Map, Value, json};

use super::{
    app::App,
    body::Body,
    error::ApiError,
    finish::call_id,
    generation::{self, Ask},
    identity::RequestId,
    sse,
};
use crate::{
    callers::Owner,
    sched::request::FinishReason,
    serving::{Ending, Serving, conversation, problem},
};
pub(super) use errors::translate;
use request::MessagesRequest;

/// Answers a conversation.
pub(super) async fn create(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let request = body
        .read(move |body| MessagesRequest::parse(body, &headers, request_id))
        .await?;
    app.check_model(request.model.as_deref())?;
    if request.deliver.stream {
        let start = move |serving| stream::start(serving, owner, request);
        return sse::respond(&app, start, errors::event).await;
    }
    let serving = app.serving().await?;
    let ask = request.ask(&serving);
    let mut choices = generation::start(&serving, &owner, &ask).await?;
    let mut answer = head(&serving, &ask);
    for choice in &mut choices {
        let (_, ending) = choice.collect().await?;
        if let Some(error) = failure(&ending) {
            return Err(error);
        }
        let (stop_reason, stop_sequence) = stop(&ending);
        answer["content"] = json!(content(&ask.shown_id, &ending));
        answer["stop_reason"] = json!(stop_reason);
        answer["stop_sequence"] = stop_sequence;
        answer["usage"] = usage(&ending);
    }
    Ok(Json(answer).into_response())
}

/// Counts the tokens of a conversation without answering it.
pub(super) async fn count_tokens(
    State(app): State<App>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let request = body
        .read(move |body| MessagesRequest::parse_to_count(body, &headers, request_id))
        .await?;
    app.check_model(request.model.as_deref())?;
    let serving = app.serving().await?;
    let max_len = serving.engine.max_len();
    let given = request.shown();
    let count = serving
        .blocking(move |serving| {
            serving.check_conversation("conversation", &given)?;
            let conversation = conversation::conversation(given, "conversation")?;
            serving
                .text
                .render(&conversation, true)
                .map(|tokens| tokens.len())
                .map_err(|error| problem::template("conversation", &error))
        })
        .await
        .map_err(|problem| ApiError::from_problem(problem, max_len))?;
    Ok(Json(json!({ "input_tokens": count })))
}

/// A message without content.
fn head(serving: &Serving, ask: &Ask) -> Value {
    json!({
        "id": ask.shown_id,
        "type": "message",
        "role": "assistant",
        "model": serving.facts.name,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
    })
}

/// Thought, text and calls, in the order in which a turn has them.
fn content(shown_id: &str, ending: &Ending) -> Vec<Value> {
    let turn = &ending.turn;
    let mut blocks = Vec::new();
    if !turn.reasoning.is_empty() {
        blocks.push(json!({ "type": "thinking", "thinking": turn.reasoning, "signature": "" }));
    }
    if !turn.content.is_empty() {
        blocks.push(json!({ "type": "text", "text": turn.content }));
    }
    for (index, call) in turn.calls.iter().enumerate() {
        let input: Map<String, Value> = serde_json::from_str(&call.arguments).unwrap_or_default();
        blocks.push(json!({
            "type": "tool_use",
            "id": call_id(shown_id, index),
            "name": call.name,
            "input": input,
        }));
    }
    blocks
}

/// Why a message did not end well. There is no `stop_reason` for one that was cancelled, and what
/// it has so far must not be taken for the whole.
fn failure(ending: &Ending) -> Option<ApiError> {
    match ending.outcome.reason {
        FinishReason::Cancelled => Some(ApiError::cancelled()),
        _ => generation::failure(ending),
    }
}

/// `stop_reason` and `stop_sequence`.
fn stop(ending: &Ending) -> (&'static str, Value) {
    match &ending.outcome.reason {
        FinishReason::StopString => ("stop_sequence", json!(ending.stop_string)),
        FinishReason::Length => ("max_tokens", Value::Null),
        _ if !ending.turn.calls.is_empty() => ("tool_use", Value::Null),
        _ => ("end_turn", Value::Null),
    }
}

/// Anthropic counts cached tokens apart from the input.
fn usage(ending: &Ending) -> Value {
    let usage = &ending.outcome.usage;
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.generated,
    })
}
