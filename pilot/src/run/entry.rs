//! The facts a run's journal is made of.
//!
//! Entries are encoded with postcard, variant by number: **append new variants and new versions,
//! never reorder or change one**. A golden test holds the bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tools::{Class, Facts, ToolCall, ToolOutput};

/// Newest version of the encoding of [`Entry`]; each kind says which it came with.
pub const ENTRY_VERSION: u8 = 3;

/// Name of a run: 1 to 64 characters of `a-z`, `0-9` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunId(String);

impl RunId {
    /// Checks the form.
    pub fn new(text: impl Into<String>) -> Result<Self, String> {
        let text = text.into();
        let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        if text.is_empty() || text.len() > 64 || !text.bytes().all(allowed) {
            return Err(format!(
                "`{text}` is no run id: 1 to 64 characters of a-z, 0-9 and - are allowed"
            ));
        }
        Ok(Self(text))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for RunId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::new(text)
    }
}

impl From<RunId> for String {
    fn from(id: RunId) -> Self {
        id.0
    }
}

/// The model a run is bound to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPin {
    /// What the brain calls it.
    pub name: String,
    /// Fingerprint: equal fingerprints give equal tokens.
    pub fingerprint: String,
    /// Hash of the chat template.
    pub template_hash: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: u32,
}

/// Where a run stops and asks for more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Answers and tool calls together; 0 = no limit.
    pub steps: u64,
    /// Generated tokens; 0 = no limit.
    pub tokens: u64,
    /// Milliseconds spent answering and in tools; 0 = no limit.
    pub active_ms: u64,
}

/// Sampling as asked for; what is unset is the model's default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplingChoice {
    /// 0 = greedy.
    pub temperature: Option<f32>,
    /// Keep the k likeliest; 0 = all.
    pub top_k: Option<u32>,
    /// Keep the smallest set that reaches this share.
    pub top_p: Option<f32>,
}

/// First entry of every run: everything that must not change under it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Created {
    /// This run.
    pub run: RunId,
    /// What to do.
    pub goal: String,
    /// The system prompt.
    pub system: String,
    /// Absolute path of the workspace.
    pub workspace: String,
    /// Seed of every answer's seed.
    pub seed: u64,
    /// Prompt and answer together, in tokens, at most; a larger prompt is compacted.
    pub context_limit: u32,
    /// Room kept for an answer, in tokens.
    pub answer_reserve: u32,
    /// Budgets.
    pub limits: Limits,
    /// Sampling.
    pub sampling: SamplingChoice,
    /// Shell commands are allowed.
    pub allow_bash: bool,
    /// BLAKE3 of the tool declarations.
    pub tools_hash: [u8; 32],
    /// The model.
    pub model: ModelPin,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AnswerEnd {
    /// A stop token.
    Stop,
    /// The token limit. Such an answer is dropped and asked for again with another seed.
    Length,
    /// A stop token, but what was said is no turn that results could follow. Dropped likewise.
    Malformed,
}

/// A model turn, parsed by the brain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Plain text.
    pub content: String,
    /// Thoughts.
    pub reasoning: String,
    /// Calls in order.
    pub calls: Vec<ToolCall>,
}

/// What an answer cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Of these, taken from the brain's cache.
    pub cached: u32,
    /// Tokens of the answer.
    pub generated: u32,
    /// Drafts checked.
    pub drafted: u32,
    /// Drafts that were right.
    pub accepted: u32,
    /// Verify-and-draft rounds.
    pub rounds: u32,
}

/// An answer is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerEnded {
    /// Index of the first of `ids` in the answer.
    pub index: u32,
    /// The tokens that no earlier entry holds.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub end: AnswerEnd,
    /// The answer, parsed.
    pub turn: Turn,
    /// What it cost.
    pub usage: Usage,
    /// Time for which this pilot had its stream open.
    pub elapsed_ms: u64,
}

/// A call is about to be executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolIntended {
    /// Number of the call in the run, from 0.
    pub call: u64,
    /// The call.
    pub request: ToolCall,
    /// What may be done should its result be missing.
    pub class: Class,
    /// What is known before and after.
    pub facts: Facts,
}

/// How a call's result came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResultOrigin {
    /// Executed once, in order.
    Executed,
    /// Refused before any effect: unknown tool, bad arguments, nothing to act on.
    Refused,
    /// Found in doubt after a restart and executed again, which its class allows.
    Reran,
    /// Found in doubt; the workspace showed that it had not happened, so it was executed.
    VerifiedMissing,
    /// Found in doubt; the workspace or the spool showed that it had happened.
    VerifiedDone,
    /// Found in doubt and half done; undone and executed.
    Repaired,
    /// Found in doubt; whether it happened cannot be known, and the model was told so.
    Unknown,
}

/// A call has its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolEnded {
    /// Number of the call.
    pub call: u64,
    /// What the model reads.
    pub output: ToolOutput,
    /// How it came about.
    pub origin: ResultOrigin,
    /// Time it took.
    pub elapsed_ms: u64,
}

/// Why a run stands still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PauseReason {
    /// Asked to stop (signal).
    Stopped,
    /// The step budget is used up.
    StepBudget,
    /// The token budget is used up.
    TokenBudget,
    /// The time budget is used up.
    TimeBudget,
    /// The model answered without a tool call too often; its last words.
    NoToolCall(String),
    /// Answers ran into the token limit too often.
    AnswersTooLong,
    /// The same calls with the same results again and again; the call.
    Repetition(String),
    /// Head and newest exchange alone do not fit the context limit.
    ContextTooSmall {
        /// Tokens needed.
        needed: u32,
        /// Tokens allowed.
        limit: u32,
    },
    /// The brain serves another model than the run is bound to.
    OtherModel {
        /// Bound to.
        expected: String,
        /// Served.
        found: String,
    },
    /// The brain refused a request for good; its words.
    Refused(String),
    /// The tools of this pilot are not those the run began with.
    OtherTools,
    /// Answers were no proper turns too often.
    AnswersMalformed,
}

/// A fact in a run's life.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Entry {
    /// The run exists.
    Created(Box<Created>),
    /// A new prompt: this head, then the tokens of the exchanges from `first_exchange` on.
    PromptStarted {
        /// Head (system, goal), rendered.
        head: Vec<u32>,
        /// Number of the oldest exchange kept.
        first_exchange: u64,
    },
    /// An answer is asked for.
    AnswerAsked {
        /// Number of the answer in the run, from 0.
        step: u64,
        /// From 0; grows when an answer was dropped.
        attempt: u32,
        /// Seed of the sampling.
        seed: u64,
        /// Length of the prompt.
        prompt_tokens: u32,
        /// BLAKE3 of the prompt's ids (little-endian u32).
        prompt_hash: [u8; 32],
    },
    /// Tokens of a running answer, from `index` on.
    TokensReceived {
        /// Index of the first in the answer.
        index: u32,
        /// The tokens.
        ids: Vec<u32>,
    },
    /// The answer is complete.
    AnswerEnded(Box<AnswerEnded>),
    /// A tool is about to act.
    ToolIntended(Box<ToolIntended>),
    /// It has acted, or will not.
    ToolEnded(Box<ToolEnded>),
    /// Tokens put after the answer: the results, or a nudge to call a tool.
    MessagesAppended {
        /// The tokens.
        ids: Vec<u32>,
        /// They ask for a tool call.
        nudge: bool,
    },
    /// The run stands still until it is resumed.
    Paused(PauseReason),
    /// A pilot took the run up (again).
    Resumed {
        /// Limits from now on.
        limits: Limits,
        /// The model from now on, when the user accepted another one.
        model: Option<ModelPin>,
    },
    /// The run is over.
    Finished {
        /// The model's words.
        summary: String,
    },
    /// Answers are kept to calls of the run's tools, with arguments that these take. Right after
    /// `Created` or not at all: what is asked for does not change under a run.
    CallsConstrained,
    /// Whoever took the run up gave it another context limit.
    ContextChanged {
        /// Prompt and answer together, in tokens, at most, from now on.
        limit: u32,
    },
}

impl Entry {
    /// Version of the encoding that first had this kind of entry: who knows an older one only is
    /// told so.
    pub fn version(&self) -> u8 {
        match self {
            Self::ContextChanged { .. } => 3,
            Self::CallsConstrained => 2,
            _ => 1,
        }
    }

    /// A stable name, for tools that print journals.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Created(_) => "created",
            Self::PromptStarted { .. } => "prompt-started",
            Self::AnswerAsked { .. } => "answer-asked",
            Self::TokensReceived { .. } => "tokens-received",
            Self::AnswerEnded(_) => "answer-ended",
            Self::ToolIntended(_) => "tool-intended",
            Self::ToolEnded(_) => "tool-ended",
            Self::MessagesAppended { .. } => "messages-appended",
            Self::Paused(_) => "paused",
            Self::Resumed { .. } => "resumed",
            Self::Finished { .. } => "finished",
            Self::CallsConstrained => "calls-constrained",
            Self::ContextChanged { .. } => "context-changed",
        }
    }
}

impl fmt::Display for PauseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => write!(f, "stopped"),
            Self::StepBudget => write!(
                f,
                "the step budget is used up; resume with more --max-steps"
            ),
            Self::TokenBudget => {
                write!(
                    f,
                    "the token budget is used up; resume with more --max-tokens"
                )
            }
            Self::TimeBudget => {
                write!(f, "the time budget is used up; resume with more --max-time")
            }
            Self::NoToolCall(words) => {
                write!(
                    f,
                    "the model keeps answering without a tool call; it last said: {words:?}"
                )
            }
            Self::AnswersTooLong => {
                write!(
                    f,
                    "several answers in a row ran into the token limit; resume with more --max-context"
                )
            }
            Self::Repetition(call) => {
                write!(f, "the model repeats itself with the same results: {call}")
            }
            Self::ContextTooSmall { needed, limit } => write!(
                f,
                "the prompt needs {needed} tokens and {limit} are allowed; resume with more --max-context"
            ),
            Self::OtherModel { expected, found } => write!(
                f,
                "the run is bound to model {expected}, the brain serves {found}; start the right \
                 brain, or resume with --accept-new-fingerprint and accept a visible break"
            ),
            Self::Refused(words) => write!(f, "the brain refused the request: {words}"),
            Self::AnswersMalformed => write!(
                f,
                "several answers in a row were no proper turns: calls that are cut off or misspelt; \
                 does this model know the tool-call format?"
            ),
            Self::OtherTools => write!(
                f,
                "this pilot's tools differ from those the run began with; use the version it began \
                 with"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_ids_are_checked_on_the_way_in() {
        assert!(RunId::new("20260101-abc").is_ok());
        for bad in ["", "A", "a/b", "a b", &"x".repeat(65)] {
            assert!(RunId::new(bad).is_err(), "{bad}");
        }
        assert!(serde_json::from_str::<RunId>("\"../x\"").is_err());
    }
}
