//! The state of a run: a fold over its entries.

use super::{
    entry::{
        AnswerEnd, AnswerEnded, Created, Entry, PauseReason, ResultOrigin, ToolEnded, ToolIntended,
        Turn,
    },
    event::Totals,
    prompt::{Exchange, Prompt},
    repetition::Recent,
};
use crate::tools::{ToolCall, ToolOutput};

/// Running, or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Goes on whenever a pilot takes it up.
    Running,
    /// Stands still until resumed.
    Paused(PauseReason),
    /// Over, with the model's summary.
    Finished(String),
}

/// Where in a step the run is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No prompt yet.
    Empty,
    /// The prompt is complete; an answer can be asked for.
    Ready,
    /// An answer is being computed.
    Answering(Answering),
    /// The answer is there; its calls are being worked through.
    Answered(Box<Answered>),
}

/// An answer in the making.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answering {
    /// Seed of the sampling.
    pub seed: u64,
    /// Hash of the prompt it answers.
    pub prompt_hash: [u8; 32],
    /// Tokens journaled so far.
    pub received: Vec<u32>,
}

/// An answer whose calls are not all done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its calls and text.
    pub turn: Turn,
    /// Results of the first calls.
    pub results: Vec<ToolOutput>,
    /// The next call's intent is journaled, its result is not.
    pub intent: Option<ToolIntended>,
}

impl Answered {
    /// The first call without a result.
    pub fn next_call(&self) -> Option<&ToolCall> {
        self.turn.calls.get(self.results.len())
    }
}

/// Everything that [`super::decide::decide`] looks at.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// What the run was created with; limits, context limit and model as last resumed.
    pub created: Created,
    /// Answers are kept to calls that the tools take.
    pub calls_constrained: bool,
    /// Running, or not.
    pub status: Status,
    /// Where in a step.
    pub phase: Phase,
    /// The prompt in use.
    pub prompt: Prompt,
    /// Number of the answer that is being made or comes next.
    pub step: u64,
    /// Its attempt.
    pub attempt: u32,
    /// Answers dropped in a row.
    pub dropped: u32,
    /// Why the newest of them was dropped.
    pub last_drop: Option<AnswerEnd>,
    /// Nudges in a row.
    pub nudges: u32,
    /// Newest calls.
    pub recent: Recent,
    /// Sums.
    pub totals: Totals,
    /// Chained BLAKE3 over every answer's tokens, dropped ones included: equal chains, equal tokens.
    pub token_chain: [u8; 32],
}

/// An entry that does not follow from those before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{entry} in phase {phase}: {reason}")]
pub struct FoldError {
    /// Name of the entry.
    pub entry: &'static str,
    /// Name of the phase it met.
    pub phase: &'static str,
    /// What does not fit.
    pub reason: String,
}

impl State {
    /// The state right after `created`.
    pub fn new(created: Created) -> Self {
        Self {
            created,
            calls_constrained: false,
            status: Status::Running,
            phase: Phase::Empty,
            prompt: Prompt::default(),
            step: 0,
            attempt: 0,
            dropped: 0,
            last_drop: None,
            nudges: 0,
            recent: Recent::default(),
            totals: Totals::default(),
            token_chain: [0; 32],
        }
    }

    /// Folds a whole journal. The error names the place (from 0) of the entry that does not follow.
    pub fn fold<'a>(
        entries: impl IntoIterator<Item = &'a Entry>,
    ) -> Result<Self, (usize, FoldError)> {
        let misfit = |reason: &str| FoldError {
            entry: "first entry",
            phase: "none",
            reason: reason.to_owned(),
        };
        let mut entries = entries.into_iter().enumerate();
        let mut state = match entries.next() {
            Some((_, Entry::Created(created))) => Self::new((**created).clone()),
            Some((at, _)) => return Err((at, misfit("a journal begins with `created`"))),
            None => return Err((0, misfit("the journal is empty"))),
        };
        for (at, entry) in entries {
            state.apply(entry).map_err(|error| (at, error))?;
        }
        Ok(state)
    }

    /// Takes one entry in. On error the state must not be used any more.
    pub fn apply(&mut self, entry: &Entry) -> Result<(), FoldError> {
        let phase = self.phase_name();
        self.try_apply(entry).map_err(|reason| FoldError {
            entry: entry.name(),
            phase,
            reason,
        })
    }

    /// Prompt and answer together, in tokens, at most: as asked for, and as the model takes it.
    pub fn context_limit(&self) -> u32 {
        let model = self.created.model.max_model_len;
        self.created.context_limit.min(model)
    }

    /// Name of the phase, or of the status if that matters more.
    pub fn phase_name(&self) -> &'static str {
        match (&self.status, &self.phase) {
            (Status::Paused(_), _) => "paused",
            (Status::Finished(_), _) => "finished",
            (_, Phase::Empty) => "empty",
            (_, Phase::Ready) => "ready",
            (_, Phase::Answering(_)) => "answering",
            (_, Phase::Answered(answered)) if answered.intent.is_some() => "in a tool",
            (_, Phase::Answered(_)) => "between tools",
        }
    }

    fn try_apply(&mut self, entry: &Entry) -> Result<(), String> {
        match (&self.status, entry) {
            (Status::Finished(_), _) => return Err("the run is over".into()),
            (Status::Paused(_), Entry::Resumed { .. }) | (Status::Running, _) => {}
            (Status::Paused(_), _) => return Err("the run must be resumed first".into()),
        }
        match entry {
            Entry::Created(_) => return Err("a run is created once".into()),
            Entry::PromptStarted {
                head,
                first_exchange,
            } => {
                self.start_prompt(head, *first_exchange)?;
            }
            Entry::AnswerAsked {
                step,
                attempt,
                seed,
                prompt_tokens,
                prompt_hash,
            } => {
                self.expect_ready()?;
                if (*step, *attempt) != (self.step, self.attempt) {
                    return Err(format!("expected answer {}.{}", self.step, self.attempt));
                }
                if *prompt_tokens as usize != self.prompt.len() {
                    return Err(format!("the prompt has {} tokens", self.prompt.len()));
                }
                self.phase = Phase::Answering(Answering {
                    seed: *seed,
                    prompt_hash: *prompt_hash,
                    received: Vec::new(),
                });
            }
            Entry::TokensReceived { index, ids } => {
                let Phase::Answering(answering) = &mut self.phase else {
                    return Err("no answer is being made".into());
                };
                extend_at(&mut answering.received, *index, ids)?;
            }
            Entry::AnswerEnded(ended) => self.end_answer(ended)?,
            Entry::ToolIntended(intended) => self.intend(intended)?,
            Entry::ToolEnded(ended) => self.end_tool(ended)?,
            Entry::MessagesAppended { ids, nudge } => self.append(ids, *nudge)?,
            Entry::Paused(reason) => self.status = Status::Paused(reason.clone()),
            Entry::Resumed { limits, model } => self.resume(limits, model.as_ref()),
            Entry::Finished { summary } => self.status = Status::Finished(summary.clone()),
            Entry::CallsConstrained => self.constrain_calls()?,
            Entry::ContextChanged { limit } => self.created.context_limit = *limit,
        }
        Ok(())
    }

    fn expect_ready(&self) -> Result<(), String> {
        if self.phase == Phase::Ready {
            Ok(())
        } else {
            Err("the prompt is not complete".into())
        }
    }

    fn constrain_calls(&mut self) -> Result<(), String> {
        if self.phase != Phase::Empty || self.calls_constrained {
            return Err("how answers are asked for is said once, before the first prompt".into());
        }
        self.calls_constrained = true;
        Ok(())
    }

    fn start_prompt(&mut self, head: &[u32], first: u64) -> Result<(), String> {
        if self.phase != Phase::Empty {
            self.expect_ready()?;
        }
        self.prompt = self
            .prompt
            .restart(head.to_vec(), first)
            .ok_or_else(|| format!("exchange {first} is not in the prompt"))?;
        self.totals.prompts += 1;
        self.phase = Phase::Ready;
        Ok(())
    }

    fn end_answer(&mut self, ended: &AnswerEnded) -> Result<(), String> {
        let Phase::Answering(answering) = &mut self.phase else {
            return Err("no answer is being made".into());
        };
        let mut tokens = std::mem::take(&mut answering.received);
        extend_at(&mut tokens, ended.index, &ended.ids)?;
        self.note_tokens(&tokens);
        self.totals.generated += tokens.len() as u64;
        self.totals.drafted += u64::from(ended.usage.drafted);
        self.totals.accepted += u64::from(ended.usage.accepted);
        self.totals.rounds += u64::from(ended.usage.rounds);
        self.totals.active_ms += ended.elapsed_ms;
        if ended.end != AnswerEnd::Stop {
            self.drop_answer();
            self.dropped += 1;
            self.last_drop = Some(ended.end);
            return Ok(());
        }
        self.totals.answers += 1;
        self.step += 1;
        self.attempt = 0;
        self.dropped = 0;
        self.last_drop = None;
        if !ended.turn.calls.is_empty() {
            self.nudges = 0;
        }
        self.phase = Phase::Answered(Box::new(Answered {
            tokens,
            turn: ended.turn.clone(),
            results: Vec::new(),
            intent: None,
        }));
        Ok(())
    }

    fn note_tokens(&mut self, tokens: &[u32]) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.token_chain);
        for id in tokens {
            hasher.update(&id.to_le_bytes());
        }
        self.token_chain = *hasher.finalize().as_bytes();
    }

    fn drop_answer(&mut self) {
        self.attempt += 1;
        self.phase = Phase::Ready;
    }

    fn intend(&mut self, intended: &ToolIntended) -> Result<(), String> {
        let calls = self.totals.calls;
        let answered = self.answered()?;
        if answered.intent.is_some() {
            return Err("a tool is at work already".into());
        }
        if answered.next_call() != Some(&intended.request) || intended.call != calls {
            return Err(format!("not the next call (number {calls})"));
        }
        answered.intent = Some(intended.clone());
        Ok(())
    }

    fn end_tool(&mut self, ended: &ToolEnded) -> Result<(), String> {
        let calls = self.totals.calls;
        let answered = self.answered()?;
        let request = answered
            .next_call()
            .cloned()
            .ok_or("every call has its result")?;
        if ended.call != calls {
            return Err(format!("expected the result of call {calls}"));
        }
        if answered.intent.is_none() && ended.origin != ResultOrigin::Refused {
            return Err("the call has no intent".into());
        }
        answered.intent = None;
        answered.results.push(ended.output.clone());
        self.recent.note(&request, &ended.output);
        self.totals.calls += 1;
        self.totals.errors += u64::from(ended.output.error);
        self.totals.active_ms += ended.elapsed_ms;
        match ended.origin {
            ResultOrigin::Executed | ResultOrigin::Refused => {}
            ResultOrigin::Unknown => {
                self.totals.recovered += 1;
                self.totals.unknown += 1;
            }
            _ => self.totals.recovered += 1,
        }
        Ok(())
    }

    fn append(&mut self, ids: &[u32], nudge: bool) -> Result<(), String> {
        let answered = self.answered()?;
        if answered.intent.is_some() || answered.next_call().is_some() {
            return Err("a call has no result yet".into());
        }
        if nudge != answered.turn.calls.is_empty() {
            return Err("a nudge follows an answer without calls, results follow calls".into());
        }
        let answer = std::mem::take(&mut answered.tokens);
        self.prompt.exchanges.push_back(Exchange {
            answer,
            appended: ids.to_vec(),
        });
        self.nudges += u32::from(nudge);
        self.phase = Phase::Ready;
        Ok(())
    }

    fn answered(&mut self) -> Result<&mut Answered, String> {
        match &mut self.phase {
            Phase::Answered(answered) => Ok(answered),
            _ => Err("there is no answer to work on".into()),
        }
    }

    /// What a person let go on is not held against the run again. A plain restart changes nothing.
    fn resume(&mut self, limits: &super::entry::Limits, model: Option<&super::entry::ModelPin>) {
        match &self.status {
            Status::Paused(PauseReason::NoToolCall(_)) => self.nudges = 0,
            Status::Paused(PauseReason::AnswersTooLong | PauseReason::AnswersMalformed) => {
                self.dropped = 0;
            }
            Status::Paused(PauseReason::Repetition(_)) => self.recent.clear(),
            _ => {}
        }
        self.status = Status::Running;
        self.created.limits = limits.clone();
        self.totals.resumes += 1;
        if let Some(model) = model {
            self.created.model = model.clone();
            // Half an answer of one model is no beginning for another.
            if matches!(self.phase, Phase::Answering(_)) {
                self.drop_answer();
            }
        }
    }
}

fn extend_at(tokens: &mut Vec<u32>, index: u32, ids: &[u32]) -> Result<(), String> {
    if index as usize != tokens.len() {
        return Err(format!(
            "tokens from index {index}, expected {}",
            tokens.len()
        ));
    }
    tokens.extend_from_slice(ids);
    Ok(())
}
