//! A chat request, checked, and what it asks of the engine.

use axum::http::HeaderMap;
use marathon_proto::brain as pb;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    super::{
        body::Body,
        deliver::Deliver,
        error::ApiError,
        fields::{SamplingFields, check_refusals},
        form,
        generation::{Ask, MAX_CHOICES},
        identity::RequestId,
        turn::Turn,
    },
    messages::{self, ChatMessage},
    tools::{self, ChatTool, ToolChoice},
};
use crate::serving::Serving;

/// Candidates besides a token's own log-probability, at most.
const MAX_TOP_LOGPROBS: u32 = 20;

#[derive(Debug, Deserialize)]
pub(in super::super) struct Fields {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    tools: Option<Vec<ChatTool>>,
    parallel_tool_calls: Option<bool>,
    n: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    reasoning_effort: Option<String>,
    reasoning: Option<ReasoningFields>,
    include_reasoning: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct ReasoningFields {
    effort: Option<String>,
}

/// A chat request that can be served.
pub(in super::super) struct ChatRequest {
    pub(super) model: Option<String>,
    pub(super) deliver: Deliver,
    pub(super) reasoning: bool,
    pub(super) logprobs: bool,
    turn: Turn,
    n: usize,
}

impl ChatRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// The path of what is wrong or not offered.
    pub(in super::super) fn parse(
        body: &Body,
        headers: &HeaderMap,
        id: RequestId,
    ) -> Result<Self, ApiError> {
        check_refusals(body)?;
        let fields: Fields = body.view()?;
        let n = fields.n.unwrap_or(1);
        if !(1..=MAX_CHOICES).contains(&n) {
            let what = format!("`n` must be from 1 to {MAX_CHOICES}, it is {n}");
            return Err(ApiError::invalid("n", what));
        }
        let deliver = Deliver::parse(body, headers, id, n)?;
        let choice = ToolChoice::parse(body.get("tool_choice"))?;
        let tools = tools::lower(fields.tools.unwrap_or_default())?;
        let calls = choice.calls(fields.parallel_tool_calls != Some(false));
        let effort = fields
            .reasoning_effort
            .or(fields.reasoning.and_then(|reasoning| reasoning.effort));
        let thinking = thinking(effort.as_deref(), fields.chat_template_kwargs.as_ref())?;
        let logprobs = fields.logprobs.unwrap_or(false);
        let top = top_logprobs(logprobs, fields.top_logprobs)?;
        Ok(Self {
            model: fields.model,
            reasoning: fields.include_reasoning.unwrap_or(true),
            logprobs,
            turn: Turn {
                form: form::asked(body)?,
                conversation: pb::Conversation {
                    messages: messages::lower(fields.messages)?,
                    tools,
                    enable_thinking: thinking,
                },
                sampling: body.view::<SamplingFields>()?.into_contract()?,
                calls,
                logprobs: if logprobs { 1 + top } else { 0 },
            }
            .checked()?,
            n,
            deliver,
        })
    }

    /// What the engine is asked.
    pub(super) fn ask(&self, serving: &Serving) -> Ask {
        Ask {
            shown_id: format!("chatcmpl-{}", self.deliver.id.text()),
            specs: vec![self.turn.spec(serving, &self.deliver)],
            n: self.n,
            from: self.deliver.from,
            resumable: self.deliver.resumable,
            form_path: self.turn.form_path(),
            streams: self.deliver.stream,
            span: self.deliver.span.clone(),
        }
    }
}

/// Whether the model thinks first. The template's own switch wins over the effort.
pub(in super::super) fn thinking(
    effort: Option<&str>,
    kwargs: Option<&Map<String, Value>>,
) -> Result<bool, ApiError> {
    let mut thinking = match effort {
        None | Some("none") => false,
        Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => true,
        Some(other) => {
            let what =
                format!("`reasoning_effort` is {other:.60?}: give none, low, medium or high");
            return Err(ApiError::invalid("reasoning_effort", what));
        }
    };
    for (name, value) in kwargs.into_iter().flatten() {
        let path = format!("chat_template_kwargs.{name:.60}");
        match (name.as_str(), value) {
            ("enable_thinking" | "thinking", Value::Bool(on)) => thinking = *on,
            ("enable_thinking" | "thinking", _) => {
                return Err(ApiError::invalid(path, "it is true or false"));
            }
            _ => {
                let why = "the template's only switch is `enable_thinking`";
                return Err(ApiError::unsupported(path, why));
            }
        }
    }
    Ok(thinking)
}

fn top_logprobs(logprobs: bool, top: Option<u32>) -> Result<u32, ApiError> {
    let top = top.unwrap_or(0);
    if top > 0 && !logprobs {
        let what = "`top_logprobs` needs `logprobs: true`";
        return Err(ApiError::invalid("top_logprobs", what));
    }
    if top > MAX_TOP_LOGPROBS {
        let what = format!("`top_logprobs` must be at most {MAX_TOP_LOGPROBS}, it is {top}");
        return Err(ApiError::invalid("top_logprobs", what));
    }
    Ok(top)
}
