//! A stand-in for a brain: a real gRPC server that plays a script instead of a model.
//!
//! It keeps the contract that matters to pilot. Tokens are a pure function of prompt and seed; a
//! generation is a log that outlives its streams; a stream is a cursor. What it renders is one token
//! a byte. The agent it plays works through the turns of a [`Script`]: it finds the number of its
//! last turn in the prompt (`#17 `) and takes the next, so that a compacted prompt does not confuse
//! it; remarks before a call depend on the seed, so that a wrong seed shows in the tokens.
#![allow(
    unreachable_pub,
    dead_code,
    reason = "each program that includes it uses its own part"
)]

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::Stream;
use marathon_proto::{
    brain::{
        self as wire,
        brain_server::{Brain, BrainServer},
    },
    net,
    status::{Problem, Reason},
};
use tokio::{net::TcpListener, runtime::Runtime, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

/// Ends an answer with tool calls.
pub const STOP_CALL: u32 = 50;

/// Ends an answer without.
pub const STOP_TURN: u32 = 106;

/// Token of byte 0; byte b is this and b more.
const BYTE_BASE: u32 = 1000;

/// What the agent does in one turn.
#[derive(Clone, Debug, Default)]
pub struct ScriptedTurn {
    /// Plain text.
    pub content: String,
    /// Tool name and JSON arguments of each call.
    pub calls: Vec<(String, String)>,
    /// What it says is no proper turn (unless the seed says otherwise): nothing can follow it.
    pub garbled: bool,
    /// The model would go on for ever: the answer runs into its token limit (unless the seed says
    /// otherwise, which it does at the next attempt).
    pub rambles: bool,
}

impl ScriptedTurn {
    /// A turn with one call.
    pub fn call(name: &str, arguments: serde_json::Value) -> Self {
        Self {
            calls: vec![(name.to_owned(), arguments.to_string())],
            ..Self::default()
        }
    }
}

/// The turns of a run, in order. Past the end the agent calls `finish`.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Turns.
    pub turns: Vec<ScriptedTurn>,
}

/// How the stand-in behaves.
#[derive(Clone, Debug)]
pub struct ScriptedOptions {
    /// What it calls its model; part of nothing but the fingerprint check.
    pub fingerprint: String,
    /// Hash of the "template".
    pub template_hash: String,
    /// Time between rounds of up to four tokens.
    pub pace: Duration,
    /// Every stream breaks after this many rounds; 0: none does.
    pub break_after: u32,
    /// Context length.
    pub max_model_len: u32,
}

impl Default for ScriptedOptions {
    fn default() -> Self {
        Self {
            fingerprint: "scripted-1".into(),
            template_hash: "scripted-template".into(),
            pace: Duration::ZERO,
            break_after: 0,
            max_model_len: 65_536,
        }
    }
}

/// A running stand-in, on threads of its own. Dropping it is killing it: connections break at once,
/// generations are lost.
pub struct ScriptedBrain {
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Option<Runtime>,
}

struct Shared {
    script: Script,
    options: ScriptedOptions,
    generations: Mutex<BTreeMap<String, Generation>>,
    /// Generations begun, streams opened.
    begun: AtomicU64,
    opened: AtomicU64,
    /// Names of the tools that the calls of generations were kept to.
    kept_to: Mutex<Vec<Vec<String>>>,
}

#[derive(Clone)]
struct Generation {
    identity: [u8; 32],
    answer: Answer,
}

/// A whole answer: what the "model" would say, whoever asks and however often.
#[derive(Clone)]
struct Answer {
    ids: Vec<u32>,
    turn: wire::AssistantTurn,
    stopped: bool,
    prompt_tokens: u32,
}

impl ScriptedBrain {
    /// Listens on a free loopback port.
    pub fn start(script: Script, options: ScriptedOptions) -> std::io::Result<Self> {
        Self::start_on("127.0.0.1:0", script, options)
    }

    /// Listens on `address`; for a brain that comes back where it was.
    pub fn start_on(
        address: &str,
        script: Script,
        options: ScriptedOptions,
    ) -> std::io::Result<Self> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("scripted-brain")
            .enable_all()
            .build()?;
        let shared = Arc::new(Shared {
            script,
            options,
            generations: Mutex::default(),
            begun: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            kept_to: Mutex::default(),
        });
        let service = BrainServer::new(Service(Arc::clone(&shared)))
            .max_decoding_message_size(net::MAX_MESSAGE_BYTES);
        let guard = runtime.enter();
        let incoming = TcpIncoming::from(TcpListener::from_std(listener)?).with_nodelay(Some(true));
        let router = net::server().add_service(service);
        // It ends with its runtime; an error before that is a refusal to its clients.
        runtime.spawn(router.serve_with_incoming(incoming));
        drop(guard);
        Ok(Self {
            address,
            shared,
            runtime: Some(runtime),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Forgets every generation, as a restarted brain does.
    pub fn forget(&self) {
        self.shared.generations().clear();
    }

    /// Generations begun so far.
    pub fn begun(&self) -> u64 {
        self.shared.begun.load(Ordering::SeqCst)
    }

    /// Of the generations begun so far whose calls were to be kept to tools: the names of these.
    pub fn kept_to(&self) -> Vec<Vec<String>> {
        self.shared.kept_to().clone()
    }

    /// Streams opened so far.
    pub fn opened(&self) -> u64 {
        self.shared.opened.load(Ordering::SeqCst)
    }
}

impl Drop for ScriptedBrain {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The plain drop would wait, which is not allowed on an async thread.
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    fn kept_to(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.kept_to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn generations(&self) -> MutexGuard<'_, BTreeMap<String, Generation>> {
        self.generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn attach(&self, request: wire::GenerateRequest) -> Result<(Answer, bool), Status> {
        let unknown = || {
            Status::from(Problem::new(
                Reason::UnknownGeneration,
                "no such generation",
            ))
        };
        let Some(spec) = request.spec else {
            let known = self.generations().get(&request.generation_id).cloned();
            return known.map(|known| (known.answer, true)).ok_or_else(unknown);
        };
        if !spec.expected_fingerprint.is_empty()
            && spec.expected_fingerprint != self.options.fingerprint
        {
            let text = format!("this is {}", self.options.fingerprint);
            return Err(Problem::new(Reason::FingerprintMismatch, text).into());
        }
        let Some(wire::generation_spec::Prompt::PromptTokens(prompt)) = spec.prompt else {
            return Err(Problem::invalid("spec.prompt", "only token prompts here").into());
        };
        let sampling = spec.sampling.unwrap_or_default();
        let (seed, max) = (
            sampling.seed.unwrap_or(0),
            sampling.max_tokens.unwrap_or(256),
        );
        if prompt.ids.len() as u64 + u64::from(max) > u64::from(self.options.max_model_len) {
            return Err(Problem::new(Reason::PromptTooLong, "too long").into());
        }
        let mut hasher = blake3::Hasher::new();
        prompt.ids.iter().for_each(|id| {
            hasher.update(&id.to_le_bytes());
        });
        hasher
            .update(&seed.to_le_bytes())
            .update(&max.to_le_bytes())
            .update(format!("{:?}", spec.form).as_bytes());
        let identity = *hasher.finalize().as_bytes();
        let mut generations = self.generations();
        if let Some(known) = generations.get(&request.generation_id) {
            if known.identity != identity {
                let text = "this id has another specification";
                return Err(Problem::new(Reason::GenerationConflict, text).into());
            }
            return Ok((known.answer.clone(), true));
        }
        let answer = self.script.answer(&prompt.ids, seed, max as usize);
        if !answer.ids.starts_with(&spec.received_tokens) {
            let text = "these tokens are not the beginning of this answer";
            return Err(Problem::invalid("spec.received_tokens", text).into());
        }
        self.begun.fetch_add(1, Ordering::SeqCst);
        let forms = spec.form.into_iter().filter_map(|form| form.tool_calls);
        for calls in forms {
            let names = calls.tools.into_iter().map(|tool| tool.name);
            self.kept_to().push(names.collect());
        }
        let generation = Generation {
            identity,
            answer: answer.clone(),
        };
        generations.insert(request.generation_id, generation);
        Ok((answer, false))
    }
}

impl Script {
    fn answer(&self, prompt: &[u32], seed: u64, max: usize) -> Answer {
        let number = last_turn(&text_of(prompt)).map_or(0, |last| last + 1);
        let done = ScriptedTurn::call("finish", serde_json::json!({"summary": "all done"}));
        let scripted = self.turns.get(number).unwrap_or(&done);
        let mut content = format!("#{number} {}", scripted.content);
        // A remark that a wrong seed would change.
        let words = ["well", "now", "next", "so", "then", "good"];
        for at in 0..seed % 4 {
            content.push_str(words[(seed >> (8 * at + 3)) as usize % words.len()]);
            content.push(' ');
        }
        let rambling = scripted.rambles && seed.is_multiple_of(2);
        let mut text = content.clone();
        let mut tool_calls = Vec::new();
        for (at, (name, arguments)) in scripted.calls.iter().enumerate() {
            text.push_str(&format!("<{name} {arguments}>"));
            tool_calls.push(wire::ToolCall {
                id: format!("call_{at}"),
                name: name.clone(),
                arguments_json: arguments.clone(),
            });
        }
        if rambling {
            text.push_str(&"and so on ".repeat(max / 8 + 1));
        }
        let mut ids: Vec<u32> = tokens_of(&text);
        let garbled = scripted.garbled && seed.is_multiple_of(2);
        // A garbled turn has calls, but ends as one without.
        ids.push(if tool_calls.is_empty() || garbled {
            STOP_TURN
        } else {
            STOP_CALL
        });
        let stopped = ids.len() <= max;
        ids.truncate(max);
        let tool_calls = if stopped { tool_calls } else { Vec::new() };
        let turn = wire::AssistantTurn {
            content,
            reasoning: String::new(),
            tool_calls,
        };
        Answer {
            ids,
            turn,
            stopped,
            prompt_tokens: prompt.len() as u32,
        }
    }
}

/// Number after the last `#` that is followed by digits and a space.
fn last_turn(text: &str) -> Option<usize> {
    text.rmatch_indices('#').find_map(|(at, _)| {
        let digits = text[at + 1..].split(' ').next()?;
        digits.parse().ok()
    })
}

fn tokens_of(text: &str) -> Vec<u32> {
    text.bytes()
        .map(|byte| BYTE_BASE + u32::from(byte))
        .collect()
}

fn text_of(ids: &[u32]) -> String {
    let byte = |id: &u32| {
        id.checked_sub(BYTE_BASE)
            .and_then(|byte| u8::try_from(byte).ok())
    };
    let bytes: Vec<u8> = ids.iter().filter_map(byte).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Service(Arc<Shared>);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Brain for Service {
    type GenerateStream = Events<wire::GenerateEvent>;
    type StatsStream = Events<wire::StatsResponse>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let from = request.from_index as usize;
        let (answer, attached) = self.0.attach(request)?;
        if from > answer.ids.len() {
            return Err(Problem::new(Reason::IndexOutOfRange, "past the end").into());
        }
        self.0.opened.fetch_add(1, Ordering::SeqCst);
        let (send, receive) = mpsc::channel(16);
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            // The reader may go at any time; its cursor goes with it.
            let _ = play(&shared, answer, attached, from, &send).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }

    async fn cancel(
        &self,
        request: Request<wire::CancelRequest>,
    ) -> Result<Response<wire::CancelResponse>, Status> {
        let id = request.into_inner().generation_id;
        let cancelled = self.0.generations().remove(&id).is_some();
        Ok(Response::new(wire::CancelResponse { cancelled }))
    }

    async fn tokenize(
        &self,
        request: Request<wire::TokenizeRequest>,
    ) -> Result<Response<wire::TokenizeResponse>, Status> {
        let ids = tokens_of(&request.into_inner().text);
        Ok(Response::new(wire::TokenizeResponse { ids }))
    }

    async fn detokenize(
        &self,
        request: Request<wire::DetokenizeRequest>,
    ) -> Result<Response<wire::DetokenizeResponse>, Status> {
        let text = text_of(&request.into_inner().ids);
        Ok(Response::new(wire::DetokenizeResponse { text }))
    }

    async fn render(
        &self,
        request: Request<wire::RenderRequest>,
    ) -> Result<Response<wire::RenderResponse>, Status> {
        let request = request.into_inner();
        let conversation = request.conversation.unwrap_or_default();
        let results = conversation
            .messages
            .iter()
            .any(|message| message.role == "tool");
        if request
            .append_to
            .last()
            .is_some_and(|last| (*last == STOP_CALL) != results)
        {
            let text = "these messages cannot follow these tokens";
            return Err(Problem::invalid("append_to", text).into());
        }
        let mut text = String::new();
        for tool in &conversation.tools {
            text.push_str(&format!("[tool {}]", tool.name));
        }
        for message in &conversation.messages {
            // A `#` in a message would look like a turn of the agent.
            let content = message.content.replace('#', "=");
            text.push_str(&format!("[{} {content}]", message.role));
        }
        Ok(Response::new(wire::RenderResponse {
            ids: tokens_of(&text),
        }))
    }

    async fn get_model(
        &self,
        _request: Request<wire::GetModelRequest>,
    ) -> Result<Response<wire::GetModelResponse>, Status> {
        let options = &self.0.options;
        Ok(Response::new(wire::GetModelResponse {
            name: "scripted".into(),
            fingerprint: options.fingerprint.clone(),
            max_model_len: options.max_model_len,
            vocab_size: BYTE_BASE + 256,
            default_sampling: Some(wire::Sampling::default()),
            stop_token_ids: vec![STOP_CALL, STOP_TURN],
            template_hash: options.template_hash.clone(),
            drafter: String::new(),
            max_draft_tokens: 0,
            device: "fake".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            lease_seconds: 900,
        }))
    }

    async fn stats(
        &self,
        _request: Request<wire::StatsRequest>,
    ) -> Result<Response<Self::StatsStream>, Status> {
        let generations = self.0.generations().len() as u32;
        let stats = wire::StatsResponse {
            generations,
            ..Default::default()
        };
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(stats)]))))
    }

    async fn get_usage(
        &self,
        _request: Request<wire::GetUsageRequest>,
    ) -> Result<Response<wire::GetUsageResponse>, Status> {
        Ok(Response::new(wire::GetUsageResponse::default()))
    }
}

type Sent = Result<(), mpsc::error::SendError<Result<wire::GenerateEvent, Status>>>;

async fn play(
    shared: &Shared,
    answer: Answer,
    attached: bool,
    from: usize,
    send: &mpsc::Sender<Result<wire::GenerateEvent, Status>>,
) -> Sent {
    let event = |event| Ok(wire::GenerateEvent { event: Some(event) });
    let fingerprint = shared.options.fingerprint.clone();
    let started = wire::Started {
        fingerprint: fingerprint.clone(),
        prompt_tokens: answer.prompt_tokens,
        attached,
        ..Default::default()
    };
    send.send(event(wire::generate_event::Event::Started(started)))
        .await?;
    let mut at = from;
    let mut rounds = 0;
    while at < answer.ids.len() {
        let count = (1 + at % 4).min(answer.ids.len() - at);
        let ids = answer.ids[at..at + count].to_vec();
        let tokens = wire::Tokens {
            index: at as u32,
            text: text_of(&ids),
            ids,
            drafted: 3,
            accepted: count as u32 - 1,
            ..Default::default()
        };
        send.send(event(wire::generate_event::Event::Tokens(tokens)))
            .await?;
        at += count;
        rounds += 1;
        if rounds == shared.options.break_after {
            return send.send(Err(Status::unavailable("scripted break"))).await;
        }
        if !shared.options.pace.is_zero() {
            tokio::time::sleep(shared.options.pace).await;
        }
    }
    let generated = answer.ids.len() as u32;
    let reason = if answer.stopped {
        wire::FinishReason::Stop
    } else {
        wire::FinishReason::Length
    };
    let finished = wire::Finished {
        reason: reason.into(),
        stop_token: answer.ids.last().copied().filter(|_| answer.stopped),
        usage: Some(wire::Usage {
            prompt_tokens: answer.prompt_tokens,
            generated_tokens: generated,
            drafted_tokens: generated / 2,
            accepted_tokens: generated / 3,
            rounds: generated / 2 + 1,
            ..Default::default()
        }),
        fingerprint,
        turn: Some(answer.turn),
        ..Default::default()
    };
    send.send(event(wire::generate_event::Event::Finished(finished)))
        .await
}
