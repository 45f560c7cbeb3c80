//! `POST /v1/completions`: raw prompts, continued.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};
use futures::future::try_join_all;
use marathon_proto::{
    brain as pb,
    brain::{TokenIds, generation_spec::Prompt},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    app::App,
    body::Body,
    deliver::Deliver,
    error::ApiError,
    fields::{SamplingFields, check_refusals},
    finish::{Finish, fingerprint},
    form::{self, Asked},
    generation::{self, Ask, Choice, MAX_CHOICES},
    identity::RequestId,
    logprobs,
    models::unix_time,
    pump::{self, Script},
    sse::{self, Events, Outgoing},
    tokenize::raw_prompt,
    usage::Tally,
};
use crate::{
    callers::Owner,
    sched::types::TokenId,
    serving::{Ending, Round, Serving},
};

/// OpenAI's default of this endpoint.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Candidates besides a token's own log-probability, at most.
const MAX_TOP_LOGPROBS: u32 = 20;
/// Answers of one request, over all prompts, at most.
const MAX_ANSWERS: usize = 128;

#[derive(Debug, Deserialize)]
pub(super) struct Fields {
    model: Option<String>,
    prompt: Prompts,
    suffix: Option<String>,
    echo: Option<bool>,
    logprobs: Option<u32>,
    n: Option<usize>,
    add_special_tokens: Option<bool>,
}

/// Prompts in every form that OpenAI's clients send.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "a text, a list of token ids, or a list of several of either"
)]
enum Prompts {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

#[derive(Clone, Debug)]
enum RawPrompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

impl Prompts {
    fn into_vec(self) -> Vec<RawPrompt> {
        match self {
            Self::Text(text) => vec![RawPrompt::Text(text)],
            // Nothing tells a prompt without tokens from a list without prompts.
            Self::Tokens(ids) if ids.is_empty() => Vec::new(),
            Self::Tokens(ids) => vec![RawPrompt::Tokens(ids)],
            Self::Texts(texts) => texts.into_iter().map(RawPrompt::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(RawPrompt::Tokens).collect(),
        }
    }
}

/// A request that can be served.
pub(super) struct CompletionRequest {
    model: Option<String>,
    deliver: Deliver,
    prompts: Vec<RawPrompt>,
    begin: bool,
    echo: bool,
    logprobs: Option<u32>,
    sampling: pb::Sampling,
    form: Option<Asked>,
    n: usize,
}

impl CompletionRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// The path of what is wrong or not offered.
    pub(super) fn parse(body: &Body, headers: &HeaderMap, id: RequestId) -> Result<Self, ApiError> {
        check_refusals(body)?;
        let fields: Fields = body.view()?;
        if fields.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            let why = "the model continues a text, it does not fill gaps";
            return Err(ApiError::unsupported("suffix", why));
        }
        let echo = fields.echo.unwrap_or(false);
        if echo && fields.logprobs.is_some() {
            let why = "log-probabilities of prompt tokens are not computed";
            return Err(ApiError::unsupported("echo", why));
        }
        if let Some(top) = fields.logprobs.filter(|top| *top > MAX_TOP_LOGPROBS) {
            let what = format!("`logprobs` must be at most {MAX_TOP_LOGPROBS}, it is {top}");
            return Err(ApiError::invalid("logprobs", what));
        }
        let n = fields.n.unwrap_or(1);
        if !(1..=MAX_CHOICES).contains(&n) {
            let what = format!("`n` must be from 1 to {MAX_CHOICES}, it is {n}");
            return Err(ApiError::invalid("n", what));
        }
        let prompts = fields.prompt.into_vec();
        if prompts.is_empty() || prompts.len() * n > MAX_ANSWERS {
            let what = format!(
                "{} prompts with `n` of {n}: from 1 to {MAX_ANSWERS} answers are given at a time",
                prompts.len()
            );
            return Err(ApiError::invalid("prompt", what));
        }
        let mut sampling = body.view::<SamplingFields>()?.into_contract()?;
        sampling.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        Ok(Self {
            model: fields.model,
            deliver: Deliver::parse(body, headers, id, prompts.len() * n)?,
            prompts,
            begin: fields.add_special_tokens.unwrap_or(true),
            echo,
            logprobs: fields.logprobs,
            sampling,
            form: form::asked(body)?,
            n,
        })
    }

    /// What the engine is asked. Tokenises the prompts.
    async fn ask(&self, serving: &Serving) -> Result<Ask, ApiError> {
        let (prompts, begin) = (self.prompts.clone(), self.begin);
        let prompts = serving
            .blocking(move |serving| {
                let ids = |prompt| match prompt {
                    RawPrompt::Tokens(ids) => Ok(ids),
                    RawPrompt::Text(text) => {
                        serving.check_text(text.len())?;
                        raw_prompt(serving, &text, begin)
                    }
                };
                prompts.into_iter().map(ids).collect::<Result<Vec<_>, _>>()
            })
            .await
            .map_err(|problem| ApiError::from_problem(problem, serving.engine.max_len()))?;
        let spec = |ids| pb::GenerationSpec {
            prompt: Some(Prompt::PromptTokens(TokenIds { ids })),
            sampling: Some(self.sampling.clone()),
            run_id: self.deliver.run_id(),
            cache_salt: self.deliver.cache_salt(),
            priority: self.deliver.priority,
            logprobs: self.logprobs.map_or(0, |top| 1 + top),
            form: self.form.as_ref().map(|asked| pb::Form {
                answer: Some(asked.answer.clone()),
                tool_calls: None,
            }),
            ..pb::GenerationSpec::default()
        };
        Ok(Ask {
            shown_id: format!("cmpl-{}", self.deliver.id.text()),
            specs: prompts.into_iter().map(spec).collect(),
            n: self.n,
            from: self.deliver.from,
            resumable: self.deliver.resumable,
            form_path: self
                .form
                .as_ref()
                .map_or_else(String::new, |asked| asked.path.clone()),
            streams: self.deliver.stream,
            span: self.deliver.span.clone(),
        })
    }

    /// The prompt as it stands before an answer, when that is wanted.
    fn echoed(&self, serving: &Serving, choice: &Choice) -> String {
        if !self.echo {
            return String::new();
        }
        match self.prompts.get(choice.index / self.n) {
            Some(RawPrompt::Text(text)) => text.clone(),
            _ => serving.text.tokenizer().decode(&choice.prompt, false),
        }
    }
}

/// Continues prompts.
pub(super) async fn create(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let request = body
        .read(move |body| CompletionRequest::parse(body, &headers, request_id))
        .await?;
    app.check_model(request.model.as_deref())?;
    if request.deliver.stream {
        let start = move |serving| stream(serving, owner, request);
        return sse::respond(&app, start, sse::error).await;
    }
    let serving = app.serving().await?;
    let ask = request.ask(&serving).await?;
    let choices = generation::start(&serving, &owner, &ask).await?;
    let answer = collect(&serving, &request, &ask, choices).await?;
    Ok(Json(answer).into_response())
}

async fn collect(
    serving: &Serving,
    request: &CompletionRequest,
    ask: &Ask,
    mut choices: Vec<Choice>,
) -> Result<Value, ApiError> {
    let ended = try_join_all(choices.iter_mut().map(Choice::collect)).await?;
    let mut tally = Tally::default();
    let mut shown = Vec::with_capacity(choices.len());
    for (choice, (rounds, ending)) in choices.iter().zip(&ended) {
        tally.add(ending, choice.index.is_multiple_of(ask.n));
        let mut text = request.echoed(serving, choice);
        text.extend(rounds.iter().map(|round| round.delta.text.as_str()));
        let finish = Finish::of(serving, ending);
        let mut entry = json!({
            "index": choice.index,
            "text": text,
            "logprobs": null,
            "finish_reason": finish.reason,
            "stop_reason": finish.stop,
        });
        let tokens = || rounds.iter().flat_map(|round| &round.tokens);
        if request.logprobs.is_some() {
            entry["logprobs"] = logprobs::completion(serving.text.tokenizer(), tokens(), &mut 0);
        }
        if request.deliver.token_ids {
            entry["token_ids"] = tokens().map(|token| token.id).collect();
            entry["prompt_token_ids"] = json!(&choice.prompt[..]);
        }
        shown.push(entry);
    }
    Ok(json!({
        "id": ask.shown_id,
        "object": "text_completion",
        "created": unix_time(),
        "model": serving.facts.name,
        "choices": shown,
        "usage": tally.openai(),
        "system_fingerprint": fingerprint(serving),
    }))
}

async fn stream(
    serving: Serving,
    owner: Owner,
    request: CompletionRequest,
) -> Result<Events, ApiError> {
    let ask = request.ask(&serving).await?;
    let choices = generation::start(&serving, &owner, &ask).await?;
    let progress = choices
        .iter()
        .map(|choice| Progress {
            before: match ask.from {
                0 => request.echoed(&serving, choice),
                _ => String::new(),
            },
            prompt: request.deliver.token_ids.then(|| choice.prompt.clone()),
            tokens: ask.from,
            offset: 0,
        })
        .collect();
    let writer = Writer {
        n: ask.n,
        id: ask.shown_id,
        fingerprint: fingerprint(&serving),
        prompt_tokens: choices
            .iter()
            .step_by(ask.n)
            .map(|choice| choice.prompt.len())
            .sum(),
        created: unix_time(),
        serving,
        request,
        progress,
        tally: Tally::default(),
    };
    Ok(pump::events(choices, writer))
}

/// Makes events of what is read.
struct Writer {
    serving: Serving,
    request: CompletionRequest,
    id: String,
    fingerprint: String,
    n: usize,
    created: u64,
    progress: Vec<Progress>,
    /// Of all prompts.
    prompt_tokens: usize,
    tally: Tally,
}

/// How far a choice is.
struct Progress {
    /// Text to show before the first token's.
    before: String,
    /// Where it is to be shown; taken by the first chunk.
    prompt: Option<Arc<[TokenId]>>,
    tokens: usize,
    /// Characters of the tokens so far.
    offset: usize,
}

/// A piece of `text_completion`.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [Entry<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

/// What a chunk says of a choice.
#[derive(Serialize)]
struct Entry<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

impl Script for Writer {
    fn tokens(&mut self, choice: usize, round: &Round, out: &mut Outgoing) {
        let progress = &mut self.progress[choice];
        progress.tokens = progress.tokens.max(round.index + round.tokens.len());
        let mut before = std::mem::take(&mut progress.before);
        let text = match before.is_empty() {
            true => &round.delta.text,
            false => {
                before.push_str(&round.delta.text);
                &before
            }
        };
        let token_ids = self.request.deliver.token_ids;
        let wants_every = token_ids || self.request.logprobs.is_some();
        if text.is_empty() && (!wants_every || round.tokens.is_empty()) {
            return;
        }
        let logprobs = self.request.logprobs.map(|_| {
            let tokenizer = self.serving.text.tokenizer();
            logprobs::completion(tokenizer, round.tokens.iter(), &mut progress.offset)
        });
        let prompt = progress.prompt.take();
        let entry = Entry {
            index: choice,
            text,
            logprobs,
            finish_reason: None,
            stop_reason: None,
            token_ids: token_ids.then(|| round.tokens.iter().map(|token| token.id).collect()),
            prompt_token_ids: prompt.as_deref(),
        };
        self.push(entry, out);
    }

    fn finished(&mut self, choice: usize, ending: &Ending, out: &mut Outgoing) {
        self.tally.add(ending, choice.is_multiple_of(self.n));
        self.progress[choice].tokens = ending.outcome.usage.generated;
        let finish = Finish::of(&self.serving, ending);
        let before = std::mem::take(&mut self.progress[choice].before);
        let entry = Entry {
            index: choice,
            text: &before,
            logprobs: None,
            finish_reason: Some(finish.reason),
            stop_reason: Some(finish.stop),
            token_ids: None,
            prompt_token_ids: None,
        };
        self.push(entry, out);
    }

    fn broken(&mut self, error: &ApiError, out: &mut Outgoing) {
        sse::error(error, out);
    }

    fn end(&mut self, out: &mut Outgoing) {
        if self.request.deliver.include_usage {
            out.data(&Chunk {
                usage: Some(self.tally.openai()),
                ..self.chunk(&[])
            });
        }
        out.done();
    }
}

impl Writer {
    fn chunk<'a>(&'a self, choices: &'a [Entry<'a>]) -> Chunk<'a> {
        Chunk {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.serving.facts.name,
            system_fingerprint: &self.fingerprint,
            choices,
            usage: None,
        }
    }

    fn push(&self, entry: Entry<'_>, out: &mut Outgoing) {
        // As in chat: an id only for those who asked to be able to resume.
        let last = self.progress[entry.index].tokens.checked_sub(1);
        let id = last.filter(|_| self.request.deliver.resumable);
        let usage = self.request.deliver.running_usage.then(|| {
            let prompt = self.prompt_tokens;
            let generated: usize = self.progress.iter().map(|choice| choice.tokens).sum();
            json!({
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            })
        });
        let chunk = Chunk {
            usage,
            ..self.chunk(std::slice::from_ref(&entry))
        };
        out.event(None, id.map(|id| id as u64), &chunk);
    }
}
