//! A request for a message, checked, and what it asks of the engine.

use axum::http::HeaderMap;
use marathon_proto::brain as pb;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    super::{
        body::Body,
        chat::tools::{self, Function},
        deliver::Deliver,
        error::ApiError,
        fields::{SamplingFields, check_refusals},
        form,
        generation::Ask,
        identity::RequestId,
        turn::{Calls, Turn},
    },
    blocks::{self, Content, Message},
};
use crate::serving::Serving;

#[derive(Debug, Deserialize)]
pub(in super::super) struct Fields {
    model: Option<String>,
    messages: Vec<Message>,
    system: Option<Content>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Choice>,
    stop_sequences: Option<Vec<String>>,
    thinking: Option<Thinking>,
}

#[derive(Debug, Deserialize)]
struct Tool {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Map<String, Value>>,
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

/// A request that can be served.
pub(in super::super) struct MessagesRequest {
    pub(super) model: Option<String>,
    pub(super) deliver: Deliver,
    turn: Turn,
}

impl MessagesRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// The path of what is wrong or not offered.
    pub(in super::super) fn parse(
        body: &Body,
        headers: &HeaderMap,
        id: RequestId,
    ) -> Result<Self, ApiError> {
        if body.get("max_tokens").is_none() {
            let what = "`max_tokens` is missing: give the most tokens that the answer may have";
            return Err(ApiError::invalid("max_tokens", what));
        }
        Self::parse_to_count(body, headers, id)
    }

    /// The same without what only an answer needs.
    ///
    /// # Errors
    /// The path of what is wrong or not offered.
    pub(in super::super) fn parse_to_count(
        body: &Body,
        headers: &HeaderMap,
        id: RequestId,
    ) -> Result<Self, ApiError> {
        check_refusals(body)?;
        let fields: Fields = body.view()?;
        let deliver = Deliver::parse(body, headers, id, 1)?;
        if deliver.from > 0 {
            let why = "a message is read again from its beginning";
            return Err(ApiError::unsupported("Last-Event-ID", why));
        }
        let mut sampling = body.view::<SamplingFields>()?.into_contract()?;
        sampling
            .stop
            .extend(fields.stop_sequences.unwrap_or_default());
        let tools = fields.tools.unwrap_or_default().into_iter().enumerate();
        Ok(Self {
            model: fields.model,
            deliver,
            turn: Turn {
                form: form::asked(body)?,
                conversation: pb::Conversation {
                    messages: blocks::lower(fields.system, fields.messages)?,
                    tools: tools
                        .map(|(index, tool)| self::tool(&format!("tools[{index}]"), tool))
                        .collect::<Result<_, _>>()?,
                    enable_thinking: thinking(fields.thinking)?,
                },
                sampling,
                calls: calls(fields.tool_choice)?,
                logprobs: 0,
            }
            .checked()?,
        })
    }

    /// What the model is shown.
    pub(super) fn shown(self) -> pb::Conversation {
        let mut conversation = self.turn.conversation;
        if self.turn.calls == Calls::None {
            conversation.tools.clear();
        }
        conversation
    }

    /// What the engine is asked.
    pub(super) fn ask(&self, serving: &Serving) -> Ask {
        Ask {
            shown_id: format!("msg_{}", self.deliver.id.text()),
            specs: vec![self.turn.spec(serving, &self.deliver)],
            n: 1,
            from: self.deliver.from,
            resumable: self.deliver.resumable,
            form_path: self.turn.form_path(),
            streams: self.deliver.stream,
            span: self.deliver.span.clone(),
        }
    }
}

fn tool(at: &str, tool: Tool) -> Result<pb::Tool, ApiError> {
    if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
        let why = format!("{kind:.60?} tools are not run here: give a tool with an `input_schema`");
        return Err(ApiError::unsupported(format!("{at}.type"), &why));
    }
    let function = Function {
        name: tool.name,
        description: tool.description,
        parameters: tool.input_schema,
        strict: tool.strict,
    };
    tools::function(at, function)
}

fn calls(choice: Option<Choice>) -> Result<Calls, ApiError> {
    let Some(choice) = choice else {
        return Ok(Calls::Any);
    };
    match (choice.kind.as_str(), choice.disable_parallel_tool_use) {
        ("none", _) => Ok(Calls::None),
        ("auto", Some(true)) => Ok(Calls::One),
        ("auto", _) => Ok(Calls::Any),
        ("any", single) => Ok(Calls::Required {
            single: single == Some(true),
        }),
        ("tool", _) => choice
            .name
            .map(Calls::Named)
            .ok_or_else(|| ApiError::invalid("tool_choice.name", "`tool_choice.name` is missing")),
        (other, _) => {
            let what = format!("`tool_choice.type` is {other:.60?}: give auto, any, tool or none");
            Err(ApiError::invalid("tool_choice.type", what))
        }
    }
}

/// A budget is a wish there, and not bounded here: `max_tokens` bounds thought and answer.
fn thinking(thinking: Option<Thinking>) -> Result<bool, ApiError> {
    match thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
        None | Some("disabled") => Ok(false),
        Some("enabled" | "adaptive") => Ok(true),
        Some(other) => {
            let what = format!("`thinking.type` is {other:.60?}: give enabled or disabled");
            Err(ApiError::invalid("thinking.type", what))
        }
    }
}
