//! A message as it grows: blocks that are started, continued and stopped.

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    super::{
        error::ApiError,
        finish::call_id,
        generation,
        pump::{self, Script},
        sse::{Events, Outgoing},
    },
    errors, failure, head,
    request::MessagesRequest,
    stop, usage,
};
use crate::{
    callers::Owner,
    serving::{Ending, Round, Serving},
    text::turn::TurnEvent,
};

/// Starts the generation; the events come as they do.
pub(super) async fn start(
    serving: Serving,
    owner: Owner,
    request: MessagesRequest,
) -> Result<Events, ApiError> {
    let ask = request.ask(&serving);
    let choices = generation::start(&serving, &owner, &ask).await?;
    let prompt: usize = choices.iter().map(|choice| choice.prompt.len()).sum();
    let mut message = head(&serving, &ask);
    message["usage"] = json!({ "input_tokens": prompt, "output_tokens": 0 });
    let writer = Writer {
        message: Some(message),
        id: ask.shown_id,
        blocks: 0,
        open: None,
    };
    Ok(pump::events(choices, writer))
}

struct Writer {
    /// Taken by the first event.
    message: Option<Value>,
    id: String,
    /// Blocks started.
    blocks: usize,
    open: Option<Open>,
}

/// The block that is growing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    Call,
}

/// `content_block_delta`, the event of which there are as many as tokens.
#[derive(Serialize)]
struct Grown<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: usize,
    delta: Delta<'a>,
}

/// More of a block.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: &'a str },
}

impl Script for Writer {
    fn tokens(&mut self, _choice: usize, round: &Round, out: &mut Outgoing) {
        self.begin(out);
        for event in &round.delta.turn {
            match event {
                TurnEvent::Reasoning(text) => {
                    let block = || json!({ "type": "thinking", "thinking": "", "signature": "" });
                    self.open(Open::Thinking, block, out);
                    self.delta(Delta::Thinking { thinking: text }, out);
                }
                TurnEvent::Content(text) => {
                    self.open(Open::Text, || json!({ "type": "text", "text": "" }), out);
                    self.delta(Delta::Text { text }, out);
                }
                TurnEvent::CallStart { index, name } => {
                    self.close(out);
                    let id = call_id(&self.id, *index);
                    let block =
                        || json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                    self.open(Open::Call, block, out);
                }
                TurnEvent::CallArguments { json, .. } => {
                    self.delta(Delta::Input { partial_json: json }, out);
                }
            }
        }
    }

    fn failure(&self, ending: &Ending) -> Option<ApiError> {
        failure(ending)
    }

    fn finished(&mut self, _choice: usize, ending: &Ending, out: &mut Outgoing) {
        self.begin(out);
        self.close(out);
        let (stop_reason, stop_sequence) = stop(ending);
        let delta = json!({
            "type": "message_delta",
            "delta": { "stop_reason": stop_reason, "stop_sequence": stop_sequence },
            "usage": usage(ending),
        });
        named("message_delta", &delta, out);
    }

    fn broken(&mut self, error: &ApiError, out: &mut Outgoing) {
        errors::event(error, out);
    }

    fn end(&mut self, out: &mut Outgoing) {
        named("message_stop", &json!({ "type": "message_stop" }), out);
    }
}

impl Writer {
    fn begin(&mut self, out: &mut Outgoing) {
        if let Some(message) = self.message.take() {
            let start = json!({ "type": "message_start", "message": message });
            named("message_start", &start, out);
        }
    }

    /// Starts a block of this kind unless one is open.
    fn open(&mut self, kind: Open, block: impl FnOnce() -> Value, out: &mut Outgoing) {
        if self.open == Some(kind) {
            return;
        }
        self.close(out);
        self.open = Some(kind);
        let start = json!({
            "type": "content_block_start", "index": self.blocks, "content_block": block(),
        });
        self.blocks += 1;
        named("content_block_start", &start, out);
    }

    fn delta(&self, delta: Delta<'_>, out: &mut Outgoing) {
        let event = Grown {
            kind: "content_block_delta",
            index: self.blocks.saturating_sub(1),
            delta,
        };
        named("content_block_delta", &event, out);
    }

    fn close(&mut self, out: &mut Outgoing) {
        if self.open.take().is_some() {
            let index = self.blocks.saturating_sub(1);
            let stop = json!({ "type": "content_block_stop", "index": index });
            named("content_block_stop", &stop, out);
        }
    }
}

fn named(name: &str, value: &impl Serialize, out: &mut Outgoing) {
    out.event(Some(name), None, value);
}
