//! A response and its output items as they grow, and the events of that.

use serde_json::{Map, Value, json};

use super::super::{error::ApiError, finish::call_id, models::unix_time};
use crate::{sched::request::FinishReason, serving::Ending, text::turn::TurnEvent};

/// An event: its name and its body without a number.
pub(super) type Named = (&'static str, Value);

/// A response that is being made.
pub(super) struct Growing {
    id: String,
    response: Value,
    done: Vec<Value>,
    open: Option<Item>,
    items: usize,
}

struct Item {
    kind: Kind,
    id: String,
    text: String,
    /// Of a call.
    call_id: String,
    name: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
}

impl Growing {
    /// Nothing is said yet. `sent` is the request, whose settings a response repeats.
    pub(super) fn new(id: &str, model: &str, sent: &Map<String, Value>, stored: bool) -> Self {
        let given = |field: &str| sent.get(field).cloned().unwrap_or(Value::Null);
        let or = |field: &str, default: Value| match given(field) {
            Value::Null => default,
            value => value,
        };
        let response = json!({
            "id": id,
            "object": "response",
            "created_at": unix_time(),
            "status": "in_progress",
            "error": null,
            "incomplete_details": null,
            "instructions": given("instructions"),
            "max_output_tokens": given("max_output_tokens"),
            "metadata": or("metadata", json!({})),
            "model": model,
            "output": [],
            "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
            "previous_response_id": given("previous_response_id"),
            "reasoning": or("reasoning", json!({ "effort": null, "summary": null })),
            "store": stored,
            "temperature": given("temperature"),
            "text": { "format": { "type": "text" } },
            "tool_choice": or("tool_choice", json!("auto")),
            "tools": or("tools", json!([])),
            "top_p": given("top_p"),
            "truncation": "disabled",
            "usage": null,
            "user": given("user"),
        });
        Self {
            id: id.to_owned(),
            response,
            done: Vec::new(),
            open: None,
            items: 0,
        }
    }

    /// It was asked for then.
    pub(super) fn created_at(&mut self, time: u64) {
        self.response["created_at"] = json!(time);
    }

    /// The first events.
    pub(super) fn begin(&self) -> Vec<Named> {
        ["response.created", "response.in_progress"]
            .map(|name| (name, json!({ "response": self.response })))
            .into()
    }

    /// The response so far.
    pub(super) fn response(&self) -> &Value {
        &self.response
    }

    /// Takes a piece of the turn in.
    pub(super) fn take(&mut self, event: &TurnEvent, out: &mut Vec<Named>) {
        match event {
            TurnEvent::Reasoning(text) => self.text(Kind::Reasoning, text, out),
            TurnEvent::Content(text) => self.text(Kind::Message, text, out),
            TurnEvent::CallStart { index, name } => {
                self.close("completed", out);
                let call_id = call_id(&self.id, *index);
                self.start(Kind::Call, call_id, name.clone(), out);
            }
            TurnEvent::CallArguments { json, .. } => self.text(Kind::Call, json, out),
        }
    }

    /// The end: the last events, and the response is whole.
    pub(super) fn finish(&mut self, ending: &Ending, out: &mut Vec<Named>) {
        let (status, details) = match &ending.outcome.reason {
            FinishReason::Length => ("incomplete", json!({ "reason": "max_output_tokens" })),
            FinishReason::Cancelled => ("cancelled", Value::Null),
            _ => ("completed", Value::Null),
        };
        self.close(
            if status == "completed" {
                status
            } else {
                "incomplete"
            },
            out,
        );
        let usage = &ending.outcome.usage;
        self.response["status"] = json!(status);
        self.response["incomplete_details"] = details;
        self.response["output"] = json!(self.done);
        self.response["usage"] = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": { "cached_tokens": usage.cached },
            "output_tokens": usage.generated,
            "output_tokens_details": { "reasoning_tokens": ending.reasoning_tokens },
            "total_tokens": usage.prompt + usage.generated,
        });
        let name = match status {
            "completed" => "response.completed",
            _ => "response.incomplete",
        };
        out.push((name, json!({ "response": self.response })));
    }

    /// The generation broke off.
    pub(super) fn fail(&mut self, error: &ApiError, out: &mut Vec<Named>) {
        self.response["status"] = json!("failed");
        self.response["output"] = json!(self.done);
        self.response["error"] = json!({ "code": "server_error", "message": error.message });
        out.push(("response.failed", json!({ "response": self.response })));
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut Vec<Named>) {
        if self.open.as_ref().is_none_or(|item| item.kind != kind) {
            self.close("completed", out);
            self.start(kind, String::new(), String::new(), out);
        }
        let at = self.items.saturating_sub(1);
        if let Some(item) = &mut self.open {
            item.text.push_str(text);
            out.push((kind.delta(), item.place(at, json!({ "delta": text }))));
        }
    }

    fn start(&mut self, kind: Kind, call_id: String, name: String, out: &mut Vec<Named>) {
        let at = self.items;
        self.items += 1;
        let suffix = self.id.strip_prefix("resp_").unwrap_or(&self.id);
        let item = Item {
            kind,
            id: format!("{}_{suffix}_{at}", kind.prefix()),
            text: String::new(),
            call_id,
            name,
        };
        let shown = item.shown("in_progress");
        let added = json!({ "output_index": at, "item": shown });
        out.push(("response.output_item.added", added));
        if let Some(part) = item.part() {
            let body = item.place(at, json!({ "part": part }));
            out.push(("response.content_part.added", body));
        }
        self.open = Some(item);
    }

    fn close(&mut self, status: &str, out: &mut Vec<Named>) {
        let Some(item) = self.open.take() else {
            return;
        };
        let at = self.items.saturating_sub(1);
        let whole = match item.kind {
            Kind::Call => json!({ "arguments": item.text, "name": item.name }),
            _ => json!({ "text": item.text }),
        };
        out.push((item.kind.done(), item.place(at, whole)));
        if let Some(part) = item.part() {
            let body = item.place(at, json!({ "part": part }));
            out.push(("response.content_part.done", body));
        }
        let shown = item.shown(status);
        let done = json!({ "output_index": at, "item": shown });
        out.push(("response.output_item.done", done));
        self.done.push(shown);
    }
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Call => "fc",
        }
    }

    fn delta(self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.delta",
            Self::Message => "response.output_text.delta",
            Self::Call => "response.function_call_arguments.delta",
        }
    }

    fn done(self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.done",
            Self::Message => "response.output_text.done",
            Self::Call => "response.function_call_arguments.done",
        }
    }
}

impl Item {
    /// `more` with the item's place in the response.
    fn place(&self, at: usize, mut more: Value) -> Value {
        more["item_id"] = json!(self.id);
        more["output_index"] = json!(at);
        if self.kind != Kind::Call {
            more["content_index"] = json!(0);
        }
        if self.kind == Kind::Message && more.get("part").is_none() {
            more["logprobs"] = json!([]);
        }
        more
    }

    /// Its only part so far; a call has none.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Reasoning => Some(json!({ "type": "reasoning_text", "text": self.text })),
            Kind::Message => Some(json!({
                "type": "output_text", "text": self.text, "annotations": [], "logprobs": [],
            })),
            Kind::Call => None,
        }
    }

    fn shown(&self, status: &str) -> Value {
        let content: Vec<Value> = if status == "in_progress" {
            Vec::new()
        } else {
            self.part().into_iter().collect()
        };
        match self.kind {
            Kind::Reasoning => json!({
                "type": "reasoning", "id": self.id, "summary": [], "content": content,
                "encrypted_content": null, "status": status,
            }),
            Kind::Message => json!({
                "type": "message", "id": self.id, "role": "assistant", "status": status,
                "content": content,
            }),
            Kind::Call => json!({
                "type": "function_call", "id": self.id, "call_id": self.call_id,
                "name": self.name, "arguments": self.text, "status": status,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::sequence::{Outcome, Timings, Usage};

    #[test]
    fn items_open_grow_and_close_in_order_and_the_deltas_make_the_whole() {
        let mut growing = Growing::new("resp_x", "demo", &Map::new(), false);
        let mut events = growing.begin();
        for event in [
            TurnEvent::Reasoning("hm".into()),
            TurnEvent::Content("Look".into()),
            TurnEvent::Content("ing".into()),
            TurnEvent::CallStart {
                index: 0,
                name: "ls".into(),
            },
            TurnEvent::CallArguments {
                index: 0,
                json: "{\"a\":".into(),
            },
            TurnEvent::CallArguments {
                index: 0,
                json: "1}".into(),
            },
            TurnEvent::CallStart {
                index: 1,
                name: "now".into(),
            },
            TurnEvent::CallArguments {
                index: 1,
                json: "{}".into(),
            },
        ] {
            growing.take(&event, &mut events);
        }
        let outcome = Outcome {
            reason: FinishReason::StopToken(1),
            usage: Usage::default(),
            timings: Timings::default(),
        };
        let ending = Ending {
            outcome,
            turn: Default::default(),
            reasoning_tokens: 0,
            stop_string: None,
        };
        growing.finish(&ending, &mut events);
        let output = growing.response()["output"].as_array().unwrap().clone();
        let kinds: Vec<&str> = output
            .iter()
            .map(|item| item["type"].as_str().unwrap())
            .collect();
        assert_eq!(
            kinds,
            ["reasoning", "message", "function_call", "function_call"]
        );
        assert_eq!(output[1]["content"][0]["text"], "Looking");
        assert_eq!(output[2]["arguments"], "{\"a\":1}");
        assert_ne!(output[2]["call_id"], output[3]["call_id"]);
        assert_eq!(growing.response()["status"], "completed");
        // Every item is added, then done, at its place.
        for (index, item) in output.iter().enumerate() {
            let of = |name: &str| {
                events
                    .iter()
                    .position(|(found, body)| *found == name && body["output_index"] == index)
                    .unwrap()
            };
            assert!(of("response.output_item.added") < of("response.output_item.done"));
            let done = &events[of("response.output_item.done")].1["item"];
            assert_eq!(done, item);
        }
        assert_eq!(events.last().unwrap().0, "response.completed");
    }
}
