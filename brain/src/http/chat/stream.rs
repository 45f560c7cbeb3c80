//! A chat completion as it grows.
//!
//! One chunk a round: the role with the first token, then what each round completes, then the
//! reason of the end, then usage when asked. An event's id is the index of its last token.

use std::collections::VecDeque;

use axum::response::sse::Event;
use serde_json::{Map, Value, json};

use super::{
    super::{
        error::ApiError,
        finish::{Finish, call_id, fingerprint},
        generation::{self, Ask, Choice},
        logprobs,
        models::unix_time,
        pump::{self, Script},
        sse::{self, Events},
        usage::Tally,
    },
    request::ChatRequest,
};
use crate::{
    callers::Owner,
    serving::{Ending, Round, Serving},
    text::turn::TurnEvent,
};

/// Starts the generations; the events come as they do.
pub(super) async fn start(
    serving: Serving,
    owner: Owner,
    request: ChatRequest,
) -> Result<Events, ApiError> {
    let ask = request.ask(&serving);
    let choices = generation::start(&serving, &owner, &ask).await?;
    let writer = Writer::new(serving, request, &ask, &choices);
    Ok(pump::events(choices, writer))
}

/// Makes events of what is read.
struct Writer {
    serving: Serving,
    request: ChatRequest,
    id: String,
    /// One choice: its times mean something.
    single: bool,
    created: u64,
    prompt: Value,
    prompt_len: usize,
    progress: Vec<Progress>,
    tally: Tally,
    metrics: Value,
}

/// How far a choice is.
#[derive(Clone, Copy, Default)]
struct Progress {
    begun: bool,
    /// Tokens in all, those before the reader's first index included.
    tokens: usize,
}

impl Script for Writer {
    fn tokens(&mut self, choice: usize, round: &Round, out: &mut VecDeque<Event>) {
        let begins = !std::mem::replace(&mut self.progress[choice].begun, true);
        let progress = &mut self.progress[choice];
        progress.tokens = progress.tokens.max(round.index + round.tokens.len());
        let mut delta = self.delta(&round.delta.turn);
        if begins {
            delta.insert("role".into(), json!("assistant"));
            if delta.len() == 1 {
                delta.insert("content".into(), json!(""));
            }
        }
        let wants_every = self.request.deliver.token_ids || self.request.logprobs;
        if delta.is_empty() && (!wants_every || round.tokens.is_empty()) {
            return;
        }
        let mut entry = json!({ "index": choice, "delta": delta, "finish_reason": null });
        if self.request.logprobs {
            entry["logprobs"] = logprobs::chat(self.serving.text.tokenizer(), round.tokens.iter());
        }
        if self.request.deliver.token_ids {
            entry["token_ids"] = round.tokens.iter().map(|token| token.id).collect();
        }
        let mut chunk = self.chunk(vec![entry]);
        if begins && self.request.deliver.token_ids {
            chunk["prompt_token_ids"] = self.prompt.clone();
        }
        out.push_back(self.event(choice, &chunk));
    }

    fn finished(&mut self, choice: usize, ending: &Ending, out: &mut VecDeque<Event>) {
        self.tally.add(ending, choice == 0);
        self.metrics = self.tally.metrics(&ending.outcome.timings);
        self.progress[choice].tokens = ending.outcome.usage.generated;
        let finish = Finish::of(&self.serving, ending);
        let begun = std::mem::replace(&mut self.progress[choice].begun, true);
        let delta = if begun {
            json!({})
        } else {
            json!({ "role": "assistant", "content": "" })
        };
        let chunk = self.chunk(vec![json!({
            "index": choice,
            "delta": delta,
            "finish_reason": finish.reason,
            "stop_reason": finish.stop,
        })]);
        out.push_back(self.event(choice, &chunk));
    }

    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Event>) {
        out.push_back(sse::error(error));
    }

    fn end(&mut self, out: &mut VecDeque<Event>) {
        if self.request.deliver.include_usage {
            let mut chunk = self.chunk(Vec::new());
            chunk["usage"] = self.tally.openai();
            if self.single {
                chunk["metrics"] = self.metrics.clone();
            }
            out.push_back(sse::data(&chunk));
        }
        out.push_back(sse::done());
    }
}

impl Writer {
    fn new(serving: Serving, request: ChatRequest, ask: &Ask, choices: &[Choice]) -> Self {
        let prompt = choices.first().map(|choice| &choice.prompt[..]);
        Self {
            prompt: json!(prompt),
            prompt_len: prompt.map_or(0, <[_]>::len),
            serving,
            request,
            id: ask.shown_id.clone(),
            single: ask.n == 1,
            created: unix_time(),
            progress: vec![
                Progress {
                    begun: ask.from > 0,
                    tokens: ask.from,
                };
                choices.len()
            ],
            tally: Tally::default(),
            metrics: Value::Null,
        }
    }

    /// What the round completes, by field.
    fn delta(&self, turn: &[TurnEvent]) -> Map<String, Value> {
        let (mut content, mut reasoning) = (String::new(), String::new());
        let mut calls: Vec<Value> = Vec::new();
        for event in turn {
            match event {
                TurnEvent::Content(text) => content.push_str(text),
                TurnEvent::Reasoning(text) => reasoning.push_str(text),
                TurnEvent::CallStart { index, name } => calls.push(json!({
                    "index": index,
                    "id": call_id(&self.id, *index),
                    "type": "function",
                    "function": { "name": name, "arguments": "" },
                })),
                TurnEvent::CallArguments { index, json } => {
                    push_arguments(&mut calls, *index, json);
                }
            }
        }
        let mut delta = Map::new();
        if !content.is_empty() {
            delta.insert("content".into(), json!(content));
        }
        if !reasoning.is_empty() && self.request.reasoning {
            delta.insert("reasoning".into(), json!(reasoning));
            delta.insert("reasoning_content".into(), json!(reasoning));
        }
        if !calls.is_empty() {
            delta.insert("tool_calls".into(), json!(calls));
        }
        delta
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.serving.facts.name,
            "system_fingerprint": fingerprint(&self.serving),
            "choices": choices,
        });
        if self.request.deliver.running_usage {
            let generated: usize = self.progress.iter().map(|choice| choice.tokens).sum();
            chunk["usage"] = json!({
                "prompt_tokens": self.prompt_len,
                "completion_tokens": generated,
                "total_tokens": self.prompt_len + generated,
            });
        }
        chunk
    }

    /// An event, with the index of its last token where that helps. Clients that read nothing but
    /// data, vLLM's benchmark among them, take an `id:` for a part of it.
    fn event(&self, choice: usize, chunk: &Value) -> Event {
        let event = sse::data(chunk);
        let last = self.progress[choice].tokens.checked_sub(1);
        match last {
            Some(last) if self.request.deliver.resumable => event.id(last.to_string()),
            _ => event,
        }
    }
}

/// Appends arguments to the call's entry in this chunk.
fn push_arguments(calls: &mut Vec<Value>, index: usize, json: &str) {
    if let Some(call) = calls.iter_mut().find(|call| call["index"] == index)
        && let Value::String(arguments) = &mut call["function"]["arguments"]
    {
        arguments.push_str(json);
        return;
    }
    calls.push(json!({ "index": index, "function": { "arguments": json } }));
}
