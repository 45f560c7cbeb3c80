//! A brain as the driver uses it. Each call is one attempt: waiting and asking again is the driver's.

use std::{path::PathBuf, time::Duration};

use marathon_proto::{
    auth::Token,
    brain::{self as wire, brain_client::BrainClient as GrpcClient},
    net::{self, BrainChannel, ConnectOptions, MAX_MESSAGE_BYTES, RemoteAddr},
    status::{self, Problem, Reason, Retry},
    tls,
};
use tokio::time::timeout;
use tonic::{Code, Request, Status, Streaming};

use super::BrainError;
use crate::{
    run::entry::{AnswerEnd, SamplingChoice, Turn, Usage},
    tools::ToolCall,
};

/// Longest wait for the answer to a call that is no stream.
const CALL_DEADLINE: Duration = Duration::from_secs(30);

/// How to reach a brain.
#[derive(Clone, Debug)]
pub struct BrainOptions {
    /// `HOST:PORT`, `http://…`, `https://…` or `unix:/path`.
    pub address: String,
    /// File with the bearer token.
    pub token_file: Option<PathBuf>,
    /// PEM file with the authority of an `https` brain.
    pub ca_file: Option<PathBuf>,
    /// A link without a sign of life for this long is given up and made anew. A stream may be silent
    /// for longer, while its brain works on a long prompt: it is the link that is asked.
    pub silence: Duration,
}

/// What a brain serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Name.
    pub name: String,
    /// Fingerprint.
    pub fingerprint: String,
    /// Hash of the chat template.
    pub template_hash: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: u32,
    /// "cpu", "cuda" or "fake".
    pub device: String,
    /// Empty when nothing drafts.
    pub drafter: String,
}

/// An answer as it is asked for.
#[derive(Clone, Debug)]
pub struct AnswerSpec {
    /// Id of the generation.
    pub generation: String,
    /// The run, for scheduling and cache.
    pub run: String,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens of this answer that are here already; the stream begins after them.
    pub received: Vec<u32>,
    /// Seed.
    pub seed: u64,
    /// Tokens at most.
    pub max_tokens: u32,
    /// Sampling.
    pub sampling: SamplingChoice,
    /// Calls in the answer are of these tools, with arguments that they take; `None`: as the model
    /// makes them. There may be text beside calls, or alone, and thoughts before it.
    pub call_tools: Option<Vec<wire::Tool>>,
    /// Refuse any other model.
    pub fingerprint: String,
}

/// What comes out of an answer's stream.
#[derive(Clone, Debug)]
pub enum AnswerEvent {
    /// It is being computed.
    Started,
    /// Tokens.
    Tokens(NewTokens),
    /// It is complete.
    Ended(Box<Complete>),
    /// The brain gave it up (an internal failure, or another client's cancel).
    Failed(String),
}

/// Tokens of an answer, as they come.
#[derive(Clone, Debug)]
pub struct NewTokens {
    /// Index of the first.
    pub index: u32,
    /// The ids.
    pub ids: Vec<u32>,
    /// The text they complete.
    pub text: String,
    /// Drafts checked.
    pub drafted: u32,
    /// Drafts that were right.
    pub accepted: u32,
}

/// What is known of an answer once it is complete.
#[derive(Clone, Debug)]
pub struct Complete {
    /// How it ended.
    pub end: AnswerEnd,
    /// Parsed.
    pub turn: Turn,
    /// Cost.
    pub usage: Usage,
    /// Fingerprint of the model that made it.
    pub fingerprint: String,
    /// The stop token that ended it.
    pub stop_token: Option<u32>,
}

/// A brain, near or far.
#[derive(Clone, Debug)]
pub struct BrainClient {
    address: String,
    grpc: GrpcClient<BrainChannel>,
}

impl BrainClient {
    /// Reads the files that `options` name; connects at the first call.
    pub fn new(options: &BrainOptions) -> Result<Self, BrainError> {
        let config = |error: &dyn std::fmt::Display| BrainError::Config(error.to_string());
        let address: RemoteAddr = options.address.parse().map_err(|error| config(&error))?;
        let token = options
            .token_file
            .as_deref()
            .map(Token::from_file)
            .transpose();
        let tls = options.ca_file.as_deref().map(tls::client).transpose();
        let connect = ConnectOptions {
            token: token.map_err(|error| config(&error))?,
            tls: tls.map_err(|error| config(&error))?,
            silence: Some(options.silence),
        };
        let channel = net::channel(&address, connect).map_err(|error| config(&error))?;
        let grpc = GrpcClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Self {
            address: address.to_string(),
            grpc,
        })
    }

    /// Where it is.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What it serves.
    pub async fn model(&self) -> Result<Model, BrainError> {
        let mut grpc = self.grpc.clone();
        let call = grpc.get_model(deadlined(wire::GetModelRequest {}));
        let model = self.in_time(call).await?;
        if model.fingerprint.is_empty() || model.max_model_len == 0 {
            return Err(self.protocol("a model without fingerprint or length"));
        }
        Ok(Model {
            name: model.name,
            fingerprint: model.fingerprint,
            template_hash: model.template_hash,
            max_model_len: model.max_model_len,
            device: model.device,
            drafter: model.drafter,
        })
    }

    /// Messages to tokens: a whole prompt, or what to append to `append_to`.
    pub async fn render(
        &self,
        conversation: wire::Conversation,
        append_to: Vec<u32>,
    ) -> Result<Vec<u32>, BrainError> {
        let request = wire::RenderRequest {
            conversation: Some(conversation),
            append_to,
            add_generation_prompt: true,
        };
        let mut grpc = self.grpc.clone();
        let ids = self.in_time(grpc.render(deadlined(request))).await?.ids;
        if ids.is_empty() {
            return Err(self.protocol("an empty rendering"));
        }
        Ok(ids)
    }

    /// Asks for an answer, or attaches to it if the brain has it.
    pub async fn answer(&self, spec: &AnswerSpec) -> Result<AnswerStream, BrainError> {
        let sampling = wire::Sampling {
            temperature: spec.sampling.temperature,
            top_k: spec.sampling.top_k,
            top_p: spec.sampling.top_p,
            seed: Some(spec.seed),
            max_tokens: Some(spec.max_tokens),
            ..Default::default()
        };
        let prompt = wire::TokenIds {
            ids: spec.prompt.clone(),
        };
        let from_index = u32::try_from(spec.received.len())
            .map_err(|_| self.protocol("an answer of more tokens than can be counted"))?;
        let request = wire::GenerateRequest {
            generation_id: spec.generation.clone(),
            spec: Some(wire::GenerationSpec {
                form: spec.call_tools.clone().map(form),
                prompt: Some(wire::generation_spec::Prompt::PromptTokens(prompt)),
                sampling: Some(sampling),
                run_id: spec.run.clone(),
                received_tokens: spec.received.clone(),
                expected_fingerprint: spec.fingerprint.clone(),
                ..wire::GenerationSpec::default()
            }),
            from_index,
        };
        let mut grpc = self.grpc.clone();
        let stream = self.in_time(grpc.generate(request)).await?;
        Ok(AnswerStream {
            client: self.clone(),
            stream,
            next: from_index,
        })
    }

    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, BrainError> {
        match timeout(CALL_DEADLINE, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.failure(&status)),
            Err(_) => Err(self.away(format!("no answer in {} s", CALL_DEADLINE.as_secs()))),
        }
    }

    fn failure(&self, status: &Status) -> BrainError {
        let address = self.address.clone();
        let reason = words(status);
        let known = Problem::from_status(status).map(|problem| problem.reason);
        if known == Some(Reason::FingerprintMismatch) || status.code() == Code::FailedPrecondition {
            return BrainError::OtherModel { address, reason };
        }
        match status::retry(status) {
            Retry::Later => BrainError::Away { address, reason },
            Retry::Never => BrainError::Refused { address, reason },
        }
    }

    fn away(&self, reason: impl Into<String>) -> BrainError {
        BrainError::Away {
            address: self.address.clone(),
            reason: reason.into(),
        }
    }

    fn protocol(&self, reason: impl Into<String>) -> BrainError {
        BrainError::Protocol {
            address: self.address.clone(),
            reason: reason.into(),
        }
    }
}

/// Any number of calls, of these tools.
fn form(tools: Vec<wire::Tool>) -> wire::Form {
    wire::Form {
        answer: None,
        tool_calls: Some(wire::ToolCalls {
            tools,
            ..wire::ToolCalls::default()
        }),
    }
}

/// The rest of an answer, from the first token that was not here yet.
pub struct AnswerStream {
    client: BrainClient,
    stream: Streaming<wire::GenerateEvent>,
    next: u32,
}

impl AnswerStream {
    /// The next event. Tokens come in index order without gap or repetition; anything else is an
    /// error. A stream that ends before the answer does is an error too: attach again.
    pub async fn next(&mut self) -> Result<AnswerEvent, BrainError> {
        let event = match self.stream.message().await {
            Err(status) => return Err(self.client.failure(&status)),
            Ok(None) => return Err(self.client.away("the stream ended early")),
            Ok(Some(event)) => event.event,
        };
        match event {
            Some(wire::generate_event::Event::Started(_)) => Ok(AnswerEvent::Started),
            Some(wire::generate_event::Event::Tokens(tokens)) => self.take(tokens),
            Some(wire::generate_event::Event::Finished(finished)) => self.end(finished),
            None => Err(self.client.protocol("an event of an unknown kind")),
        }
    }

    fn take(&mut self, tokens: wire::Tokens) -> Result<AnswerEvent, BrainError> {
        if tokens.index != self.next {
            let (came, next) = (tokens.index, self.next);
            return Err(self
                .client
                .protocol(format!("token {came} where {next} was due")));
        }
        let count = u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
        self.next = self.next.saturating_add(count);
        Ok(AnswerEvent::Tokens(NewTokens {
            index: tokens.index,
            ids: tokens.ids,
            text: tokens.text,
            drafted: tokens.drafted,
            accepted: tokens.accepted,
        }))
    }

    fn end(&self, finished: wire::Finished) -> Result<AnswerEvent, BrainError> {
        let end = match finished.reason() {
            wire::FinishReason::Stop => AnswerEnd::Stop,
            wire::FinishReason::Length => AnswerEnd::Length,
            wire::FinishReason::Cancelled => {
                return Ok(AnswerEvent::Failed("cancelled by another client".into()));
            }
            wire::FinishReason::Error => return Ok(AnswerEvent::Failed(finished.error)),
            wire::FinishReason::Unspecified => {
                return Err(self.client.protocol("an end without a reason"));
            }
        };
        let usage = finished.usage.unwrap_or_default();
        if usage.generated_tokens != self.next {
            let (says, has) = (usage.generated_tokens, self.next);
            return Err(self
                .client
                .protocol(format!("{says} tokens at the end of {has}")));
        }
        let turn = finished.turn.unwrap_or_default();
        Ok(AnswerEvent::Ended(Box::new(Complete {
            end,
            turn: Turn {
                content: turn.content,
                reasoning: turn.reasoning,
                calls: turn.tool_calls.into_iter().map(call).collect(),
            },
            usage: Usage {
                prompt: usage.prompt_tokens,
                cached: usage.cached_tokens,
                generated: usage.generated_tokens,
                drafted: usage.drafted_tokens,
                accepted: usage.accepted_tokens,
                rounds: usage.rounds,
            },
            fingerprint: finished.fingerprint,
            stop_token: finished.stop_token,
        })))
    }
}

fn call(call: wire::ToolCall) -> ToolCall {
    ToolCall {
        id: call.id,
        name: call.name,
        arguments: call.arguments_json,
    }
}

fn deadlined<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_DEADLINE);
    request
}

/// What a status says, in one line.
fn words(status: &Status) -> String {
    let message = status.message().lines().next().unwrap_or_default();
    let mut deepest = std::error::Error::source(status);
    while let Some(next) = deepest.and_then(std::error::Error::source) {
        deepest = Some(next);
    }
    match deepest {
        Some(cause) => format!("{message} ({cause})"),
        None if message.is_empty() => format!("{:?}", status.code()),
        None => message.to_owned(),
    }
}
