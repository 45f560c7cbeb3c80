//! A chat completion as it grows.
//!
//! One chunk a round: the role with the first token, then what each round completes, then the
//! reason of the end, then usage when asked. An event's id is the index of its last token.

use std::{borrow::Cow, sync::Arc};

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    super::{
        error::ApiError,
        finish::{Finish, call_id, fingerprint},
        generation::{self, Ask, Choice},
        logprobs,
        models::unix_time,
        pump::{self, Script},
        sse::{self, Events, Outgoing},
        usage::Tally,
    },
    request::ChatRequest,
};
use crate::{
    callers::Owner,
    sched::types::TokenId,
    serving::{Ending, Round, Serving},
    text::turn::TurnEvent,
};

const ROLE: &str = "assistant";

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
    fingerprint: String,
    /// One choice: its times mean something.
    single: bool,
    created: u64,
    prompt: Arc<[TokenId]>,
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

/// `chat.completion.chunk`.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [Entry<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<&'a Value>,
}

/// What a chunk says of a choice.
#[derive(Serialize)]
struct Entry<'a> {
    index: usize,
    delta: Delta<'a>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

/// What a round completes, by field.
#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta<'a>>,
}

/// A call's beginning, or more of its arguments.
#[derive(Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: Cow<'a, str>,
}

impl Delta<'_> {
    fn is_empty(&self) -> bool {
        self.content.is_none() && self.reasoning.is_none() && self.tool_calls.is_empty()
    }
}

impl Script for Writer {
    fn tokens(&mut self, choice: usize, round: &Round, out: &mut Outgoing) {
        let progress = &mut self.progress[choice];
        let begins = !std::mem::replace(&mut progress.begun, true);
        progress.tokens = progress.tokens.max(round.index + round.tokens.len());
        let mut delta = self.delta(&round.delta.turn);
        if begins {
            delta.role = Some(ROLE);
            if delta.is_empty() {
                delta.content = Some("".into());
            }
        }
        let token_ids = self.request.deliver.token_ids;
        let wants_every = token_ids || self.request.logprobs;
        if delta.is_empty() && (!wants_every || round.tokens.is_empty()) {
            return;
        }
        let tokenizer = self.serving.text.tokenizer();
        let logprobs = || logprobs::chat(tokenizer, round.tokens.iter());
        let entry = Entry {
            index: choice,
            delta,
            finish_reason: None,
            stop_reason: None,
            logprobs: self.request.logprobs.then(logprobs),
            token_ids: token_ids.then(|| round.tokens.iter().map(|token| token.id).collect()),
        };
        let chunk = Chunk {
            prompt_token_ids: (begins && token_ids).then_some(&*self.prompt),
            ..self.chunk(std::slice::from_ref(&entry))
        };
        out.event(None, self.event_id(choice), &chunk);
    }

    fn finished(&mut self, choice: usize, ending: &Ending, out: &mut Outgoing) {
        self.tally.add(ending, choice == 0);
        self.metrics = self.tally.metrics(&ending.outcome.timings);
        self.progress[choice].tokens = ending.outcome.usage.generated;
        let finish = Finish::of(&self.serving, ending);
        let begun = std::mem::replace(&mut self.progress[choice].begun, true);
        let delta = Delta {
            role: (!begun).then_some(ROLE),
            content: (!begun).then(|| "".into()),
            ..Delta::default()
        };
        let entry = Entry {
            index: choice,
            delta,
            finish_reason: Some(finish.reason),
            stop_reason: Some(finish.stop),
            logprobs: None,
            token_ids: None,
        };
        let chunk = self.chunk(std::slice::from_ref(&entry));
        out.event(None, self.event_id(choice), &chunk);
    }

    fn broken(&mut self, error: &ApiError, out: &mut Outgoing) {
        sse::error(error, out);
    }

    fn end(&mut self, out: &mut Outgoing) {
        if self.request.deliver.include_usage {
            out.data(&Chunk {
                usage: Some(self.tally.openai()),
                metrics: self.single.then_some(&self.metrics),
                ..self.chunk(&[])
            });
        }
        out.done();
    }
}

impl Writer {
    fn new(serving: Serving, request: ChatRequest, ask: &Ask, choices: &[Choice]) -> Self {
        let prompt = choices.first().map(|choice| choice.prompt.clone());
        Self {
            prompt: prompt.unwrap_or_default(),
            fingerprint: fingerprint(&serving),
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

    fn delta<'a>(&self, turn: &'a [TurnEvent]) -> Delta<'a> {
        let mut delta = Delta::default();
        for event in turn {
            match event {
                TurnEvent::Content(text) => append(&mut delta.content, text),
                TurnEvent::Reasoning(text) => append(&mut delta.reasoning, text),
                TurnEvent::CallStart { index, name } => delta.tool_calls.push(CallDelta {
                    index: *index,
                    id: Some(call_id(&self.id, *index)),
                    kind: Some("function"),
                    function: FunctionDelta {
                        name: Some(name),
                        arguments: "".into(),
                    },
                }),
                TurnEvent::CallArguments { index, json } => {
                    let calls = &mut delta.tool_calls;
                    match calls.iter_mut().find(|call| call.index == *index) {
                        Some(call) => call.function.arguments += json.as_str(),
                        None => calls.push(CallDelta {
                            index: *index,
                            id: None,
                            kind: None,
                            function: FunctionDelta {
                                name: None,
                                arguments: json.into(),
                            },
                        }),
                    }
                }
            }
        }
        match self.request.reasoning {
            true => delta.reasoning_content.clone_from(&delta.reasoning),
            false => delta.reasoning = None,
        }
        delta
    }

    fn chunk<'a>(&'a self, choices: &'a [Entry<'a>]) -> Chunk<'a> {
        let usage = self.request.deliver.running_usage.then(|| {
            let generated: usize = self.progress.iter().map(|choice| choice.tokens).sum();
            json!({
                "prompt_tokens": self.prompt.len(),
                "completion_tokens": generated,
                "total_tokens": self.prompt.len() + generated,
            })
        });
        Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.serving.facts.name,
            system_fingerprint: &self.fingerprint,
            choices,
            prompt_token_ids: None,
            usage,
            metrics: None,
        }
    }

    /// Index of the choice's last token where that helps. Clients that read nothing but data,
    /// vLLM's benchmark among them, take an `id:` for a part of it.
    fn event_id(&self, choice: usize) -> Option<u64> {
        let last = self.progress[choice].tokens.checked_sub(1)?;
        self.request.deliver.resumable.then_some(last as u64)
    }
}

/// Adds text to a field; the only piece of a round, as it is most of the time, is not copied.
fn append<'a>(field: &mut Option<Cow<'a, str>>, text: &'a str) {
    if text.is_empty() {
        return;
    }
    match field {
        Some(there) => *there += text,
        None => *field = Some(text.into()),
    }
}
