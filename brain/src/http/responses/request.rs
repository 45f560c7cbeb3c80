//! A request for a response, checked, and what it asks of the engine.

use axum::http::HeaderMap;
use marathon_proto::brain as pb;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    super::{
        body::Body,
        chat::{
            request::thinking,
            tools::{self, Function, ToolChoice},
        },
        deliver::Deliver,
        error::ApiError,
        fields::{SamplingFields, check_refusals},
        form,
        generation::Ask,
        identity::RequestId,
        turn::Turn,
    },
    items,
};
use crate::serving::Serving;

#[derive(Debug, Deserialize)]
pub(in super::super) struct Fields {
    model: Option<String>,
    instructions: Option<String>,
    tools: Option<Vec<Tool>>,
    parallel_tool_calls: Option<bool>,
    max_output_tokens: Option<u32>,
    reasoning: Option<Reasoning>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    background: Option<bool>,
    truncation: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Tool {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

/// What comes before a request's own input: its response's id and items.
pub(in super::super) type Previous = Vec<Value>;

/// A request that can be served.
pub(in super::super) struct ResponseRequest {
    pub(super) model: Option<String>,
    pub(super) deliver: Deliver,
    /// Whether the client lets it be stored.
    pub(super) store: bool,
    /// Every input item, those of the responses before it included.
    pub(super) items: Vec<Value>,
    /// The request as it was sent, to be shown again.
    pub(super) sent: Map<String, Value>,
    turn: Turn,
}

/// The response that a request builds on, if it names one.
///
/// # Errors
/// The field is no text.
pub(in super::super) fn previous_id(body: &Body) -> Result<Option<String>, ApiError> {
    Ok(body.view::<Fields>()?.previous_response_id)
}

impl ResponseRequest {
    /// Reads and checks the body; `previous` are the items before its own.
    ///
    /// # Errors
    /// The path of what is wrong or not offered.
    pub(in super::super) fn parse(
        body: &Body,
        headers: &HeaderMap,
        id: RequestId,
        previous: Previous,
    ) -> Result<Self, ApiError> {
        check_refusals(body)?;
        let fields: Fields = body.view()?;
        refuse(body, &fields)?;
        let mut deliver = Deliver::parse(body, headers, id, 1)?;
        if deliver.from > 0 {
            let why = "read a response again with GET and `starting_after`";
            return Err(ApiError::unsupported("Last-Event-ID", why));
        }
        let before = previous.len();
        let mut items = previous;
        items.extend(items::list(body.get("input"))?);
        let effort = fields.reasoning.and_then(|reasoning| reasoning.effort);
        let mut sampling = body.view::<SamplingFields>()?.into_contract()?;
        sampling.max_tokens = fields.max_output_tokens.or(sampling.max_tokens);
        let choice = ToolChoice::parse(body.get("tool_choice"))?;
        let calls = choice.calls(fields.parallel_tool_calls != Some(false));
        let store = fields.store.unwrap_or(true);
        if !deliver.resumable {
            // An id that a client happens to use twice names two responses.
            deliver.id = RequestId::random();
        }
        Ok(Self {
            model: fields.model,
            deliver,
            store,
            turn: Turn {
                form: form::asked(body)?,
                conversation: pb::Conversation {
                    messages: items::lower(fields.instructions, &items, before)?,
                    tools: functions(fields.tools.unwrap_or_default())?,
                    enable_thinking: thinking(effort.as_deref(), None)?,
                },
                sampling,
                calls,
                logprobs: 0,
            }
            .checked()?,
            items,
            sent: body.fields.clone(),
        })
    }

    /// What the engine is asked; `kept`: it goes on when the client goes away.
    pub(super) fn ask(&self, serving: &Serving, id: &str, kept: bool) -> Ask {
        let mut spec = self.turn.spec(serving, &self.deliver);
        spec.expected_fingerprint = serving.facts.fingerprint.clone();
        Ask {
            shown_id: id.to_owned(),
            specs: vec![spec],
            n: 1,
            from: 0,
            resumable: kept,
            form_path: self.turn.form_path(),
            streams: self.deliver.stream,
            span: self.deliver.span.clone(),
        }
    }
}

fn refuse(body: &Body, fields: &Fields) -> Result<(), ApiError> {
    const LOGPROBS: &str = "message.output_text.logprobs";
    let include = body.get("include").and_then(Value::as_array);
    if include.is_some_and(|include| include.iter().any(|what| what == LOGPROBS)) {
        let why = "log-probabilities come with chat completions";
        return Err(ApiError::unsupported("include", why));
    }
    for (field, why) in [
        ("prompt", "prompts are not stored: send the text"),
        (
            "conversation",
            "build on a response with `previous_response_id`",
        ),
        (
            "top_logprobs",
            "log-probabilities come with chat completions",
        ),
    ] {
        if body.get(field).is_some_and(|value| value != 0) {
            return Err(ApiError::unsupported(field, why));
        }
    }
    if fields.background == Some(true) {
        let why = "stream the response; a stored one can be read again with GET";
        return Err(ApiError::unsupported("background", why));
    }
    if fields
        .truncation
        .as_deref()
        .is_some_and(|kind| kind != "disabled")
    {
        return Err(ApiError::unsupported("truncation", "shorten the input"));
    }
    Ok(())
}

/// The functions among the tools. Tools of other kinds are run by the service that they name,
/// never by a client, and agents send them to every server: they are passed over.
fn functions(tools: Vec<Tool>) -> Result<Vec<pb::Tool>, ApiError> {
    let mut functions = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let at = format!("tools[{index}]");
        if tool.kind != "function" {
            tracing::debug!(
                kind = tool.kind,
                "a tool that is no function is passed over"
            );
            continue;
        }
        let Some(name) = tool.name else {
            let path = format!("{at}.name");
            let what = format!("`{path}` is missing");
            return Err(ApiError::invalid(path, what));
        };
        let function = Function {
            name,
            description: tool.description,
            parameters: tool.parameters,
            strict: tool.strict,
        };
        functions.push(tools::function(&at, function)?);
    }
    Ok(functions)
}
