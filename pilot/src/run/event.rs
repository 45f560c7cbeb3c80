//! What a view is told while a run goes on. Events follow the journal: an event about a fact is sent
//! after the fact is committed, except tokens, which are shown as they come.

use serde::{Deserialize, Serialize};

use super::entry::{ResultOrigin, RunId, Usage};
use crate::tools::Class;

/// One thing that happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// A pilot took the run up: first event of every process.
    Opened {
        /// The run.
        run: RunId,
        /// Its goal.
        goal: String,
        /// It existed before.
        resumed: bool,
        /// What was done so far.
        totals: Totals,
        /// Context limit in tokens.
        context_limit: u32,
    },
    /// The brain answers.
    BrainReached {
        /// Model name.
        model: String,
        /// Fingerprint.
        fingerprint: String,
        /// "cpu", "cuda" or "fake".
        device: String,
        /// Empty when nothing drafts.
        drafter: String,
    },
    /// The brain does not answer; pilot tries again, for as long as it takes.
    BrainAway {
        /// Attempts so far in a row.
        attempt: u32,
        /// Milliseconds until the next.
        wait_ms: u64,
        /// Why.
        reason: String,
    },
    /// A new prompt began because the old one was full.
    Compacted {
        /// Tokens before.
        from_tokens: u32,
        /// Tokens after.
        to_tokens: u32,
        /// Exchanges kept.
        kept: u64,
    },
    /// An answer is computed from here on.
    AnswerStarted {
        /// Number of the answer.
        step: u64,
        /// Prompt length.
        prompt_tokens: u32,
        /// Tokens of it that were there before (a restart of either side).
        continued_from: u32,
    },
    /// Tokens came.
    Tokens {
        /// Number of the answer.
        step: u64,
        /// Index of the first.
        index: u32,
        /// The ids.
        ids: Vec<u32>,
        /// The text they complete.
        text: String,
        /// Drafts checked in this round.
        drafted: u32,
        /// Drafts that were right.
        accepted: u32,
    },
    /// The answer is committed.
    AnswerEnded {
        /// Number of the answer.
        step: u64,
        /// What it cost.
        usage: Usage,
        /// Plain text of the answer.
        content: String,
        /// Calls in it.
        calls: u32,
        /// Time for which this pilot had its stream open.
        elapsed_ms: u64,
    },
    /// A call's intent is committed; it runs now.
    ToolStarted {
        /// Number of the call.
        call: u64,
        /// Tool.
        name: String,
        /// JSON.
        arguments: String,
        /// Class.
        class: Class,
        /// It was in doubt after a restart.
        in_doubt: bool,
    },
    /// A call's result is committed.
    ToolEnded {
        /// Number of the call.
        call: u64,
        /// Tool.
        name: String,
        /// What the model reads.
        text: String,
        /// It failed.
        error: bool,
        /// How the result came about.
        origin: ResultOrigin,
        /// Time it took.
        elapsed_ms: u64,
    },
    /// The model was asked to call a tool.
    Nudged {
        /// Times in a row.
        count: u32,
    },
    /// The run stands still.
    Paused {
        /// Why, for people.
        reason: String,
        /// What was done.
        totals: Totals,
    },
    /// The run is over.
    Finished {
        /// The model's words.
        summary: String,
        /// What was done.
        totals: Totals,
    },
}

/// Sums over a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Answers accepted.
    pub answers: u64,
    /// Tool calls with a result.
    pub calls: u64,
    /// Of these, errors.
    pub errors: u64,
    /// Results whose call was in doubt after a restart.
    pub recovered: u64,
    /// Of these, unknown.
    pub unknown: u64,
    /// Prompts begun.
    pub prompts: u64,
    /// Times a pilot took the run up again.
    pub resumes: u64,
    /// Generated tokens, dropped answers included.
    pub generated: u64,
    /// Drafts checked.
    pub drafted: u64,
    /// Drafts that were right.
    pub accepted: u64,
    /// Rounds.
    pub rounds: u64,
    /// Milliseconds answering and in tools.
    pub active_ms: u64,
}

/// Receives events. Called on the driver's task: must return at once.
pub trait Observer: Send + Sync {
    /// One event.
    fn observe(&self, event: &RunEvent);
}

/// Ignores everything.
pub struct NoObserver;

impl Observer for NoObserver {
    fn observe(&self, _event: &RunEvent) {}
}
