//! A message as it grows: blocks that are started, continued and stopped.

use std::collections::VecDeque;

use axum::response::sse::Event;
use serde_json::{Value, json};

use super::{
    super::{
        error::ApiError,
        finish::call_id,
        generation,
        pump::{self, Script},
        sse::{self, Events},
    },
    errors, head,
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

impl Script for Writer {
    fn tokens(&mut self, _choice: usize, round: &Round, out: &mut VecDeque<Event>) {
        self.begin(out);
        for event in &round.delta.turn {
            match event {
                TurnEvent::Reasoning(text) => {
                    let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                    self.open(Open::Thinking, &block, out);
                    self.delta(&json!({ "type": "thinking_delta", "thinking": text }), out);
                }
                TurnEvent::Content(text) => {
                    self.open(Open::Text, &json!({ "type": "text", "text": "" }), out);
                    self.delta(&json!({ "type": "text_delta", "text": text }), out);
                }
                TurnEvent::CallStart { index, name } => {
                    self.close(out);
                    let id = call_id(&self.id, *index);
                    let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                    self.open(Open::Call, &block, out);
                }
                TurnEvent::CallArguments { json, .. } => {
                    let delta = json!({ "type": "input_json_delta", "partial_json": json });
                    self.delta(&delta, out);
                }
            }
        }
    }

    fn finished(&mut self, _choice: usize, ending: &Ending, out: &mut VecDeque<Event>) {
        self.begin(out);
        self.close(out);
        let (stop_reason, stop_sequence) = stop(ending);
        let delta = json!({
            "type": "message_delta",
            "delta": { "stop_reason": stop_reason, "stop_sequence": stop_sequence },
            "usage": usage(ending),
        });
        out.push_back(named("message_delta", &delta));
    }

    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Event>) {
        out.push_back(errors::event(error));
    }

    fn end(&mut self, out: &mut VecDeque<Event>) {
        out.push_back(named("message_stop", &json!({ "type": "message_stop" })));
    }
}

impl Writer {
    fn begin(&mut self, out: &mut VecDeque<Event>) {
        if let Some(message) = self.message.take() {
            let start = json!({ "type": "message_start", "message": message });
            out.push_back(named("message_start", &start));
        }
    }

    /// Starts a block of this kind unless one is open.
    fn open(&mut self, kind: Open, block: &Value, out: &mut VecDeque<Event>) {
        if self.open == Some(kind) {
            return;
        }
        self.close(out);
        self.open = Some(kind);
        let start = json!({
            "type": "content_block_start", "index": self.blocks, "content_block": block,
        });
        self.blocks += 1;
        out.push_back(named("content_block_start", &start));
    }

    fn delta(&self, delta: &Value, out: &mut VecDeque<Event>) {
        let index = self.blocks.saturating_sub(1);
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        out.push_back(named("content_block_delta", &event));
    }

    fn close(&mut self, out: &mut VecDeque<Event>) {
        if self.open.take().is_some() {
            let index = self.blocks.saturating_sub(1);
            let stop = json!({ "type": "content_block_stop", "index": index });
            out.push_back(named("content_block_stop", &stop));
        }
    }
}

fn named(name: &str, value: &Value) -> Event {
    sse::data(value).event(name)
}
