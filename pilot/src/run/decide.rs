//! What comes next, as a function of the state alone.

use super::{
    budget,
    entry::{AnswerEnd, PauseReason, ToolIntended},
    prompt::hash_ids,
    room::Room,
    seed::answer_seed,
    state::{Answered, Answering, Phase, State, Status},
};
use crate::tools::{ToolCall, ToolOutput};

/// Nudges in a row before the run is paused.
pub const MAX_NUDGES: u32 = 3;

/// Answers in a row that may run into the token limit or be no proper turns.
pub const MAX_DROPPED: u32 = 3;

/// What the driver is to do. Each outcome is journaled before the next decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Render a head and begin a prompt with it.
    StartPrompt {
        /// Oldest exchange that stays.
        first_exchange: u64,
        /// Add the note that steps were left out.
        note: bool,
    },
    /// Journal that an answer is asked for.
    Ask {
        /// Number of the answer.
        step: u64,
        /// Its attempt.
        attempt: u32,
        /// Its seed.
        seed: u64,
        /// Prompt length.
        prompt_tokens: u32,
        /// Prompt hash.
        prompt_hash: [u8; 32],
    },
    /// Read the answer's tokens, from those that are journaled on.
    Stream,
    /// Have the tool look at the next call and journal its intent.
    Prepare {
        /// Number of the call.
        call: u64,
        /// The call.
        request: ToolCall,
    },
    /// Have the tool act; or, when the intent is older than this process, find out what became of it.
    Settle(ToolIntended),
    /// Render the results and put them after the answer.
    AppendResults(Vec<(ToolCall, ToolOutput)>),
    /// Render a request to call a tool and put it after the answer.
    Nudge,
    /// Journal the end.
    Finish {
        /// The model's words.
        summary: String,
    },
    /// Journal a pause.
    Pause(PauseReason),
    /// Nothing: paused or over.
    Rest,
}

/// Decides.
pub fn decide(state: &State) -> Effect {
    if state.status != Status::Running {
        return Effect::Rest;
    }
    match &state.phase {
        Phase::Empty => Effect::StartPrompt {
            first_exchange: 0,
            note: false,
        },
        Phase::Ready => next_answer(state),
        Phase::Answering(_) => Effect::Stream,
        Phase::Answered(answered) => after_answer(state, answered),
    }
}

fn next_answer(state: &State) -> Effect {
    if let Some(reason) = budget::exhausted(&state.created.limits, &state.totals) {
        return Effect::Pause(reason);
    }
    if state.dropped >= MAX_DROPPED {
        return Effect::Pause(match state.last_drop {
            Some(AnswerEnd::Malformed) => PauseReason::AnswersMalformed,
            _ => PauseReason::AnswersTooLong,
        });
    }
    let (limit, reserve) = (state.context_limit(), state.created.answer_reserve);
    if state.prompt.is_full(limit, reserve) {
        let first_exchange = state.prompt.keep_from(Room::of(state).kept());
        if first_exchange == state.prompt.first {
            // Nothing can be left out: a new prompt would be no shorter.
            let needed = saturate(state.prompt.len() + reserve as usize);
            return Effect::Pause(PauseReason::ContextTooSmall { needed, limit });
        }
        return Effect::StartPrompt {
            first_exchange,
            note: true,
        };
    }
    Effect::Ask {
        step: state.step,
        attempt: state.attempt,
        seed: answer_seed(state.created.seed, state.step, state.attempt),
        prompt_tokens: saturate(state.prompt.len()),
        prompt_hash: hash_ids(&state.prompt.tokens()),
    }
}

fn after_answer(state: &State, answered: &Answered) -> Effect {
    if let Some(intent) = &answered.intent {
        return Effect::Settle(intent.clone());
    }
    if let Some(summary) = answered
        .results
        .last()
        .and_then(|output| output.finish.clone())
    {
        return Effect::Finish { summary };
    }
    if state.recent.is_circle() {
        let last = answered
            .turn
            .calls
            .get(answered.results.len().saturating_sub(1));
        let words = last.map(|call| format!("{} {}", call.name, call.arguments));
        return Effect::Pause(PauseReason::Repetition(words.unwrap_or_default()));
    }
    if let Some(request) = answered.next_call() {
        return match budget::exhausted(&state.created.limits, &state.totals) {
            Some(reason) => Effect::Pause(reason),
            None => Effect::Prepare {
                call: state.totals.calls,
                request: request.clone(),
            },
        };
    }
    if !answered.turn.calls.is_empty() {
        let calls = answered.turn.calls.iter().cloned();
        return Effect::AppendResults(calls.zip(answered.results.iter().cloned()).collect());
    }
    if state.nudges >= MAX_NUDGES {
        return Effect::Pause(PauseReason::NoToolCall(answered.turn.content.clone()));
    }
    Effect::Nudge
}

/// Tokens an answer may have after the prompt in use.
pub fn answer_limit(state: &State) -> u32 {
    saturate(Room::of(state).answer(state.prompt.len()))
}

/// Tokens that the results of an answer's calls may have.
pub fn results_limit(state: &State) -> usize {
    let answer = match &state.phase {
        Phase::Answered(answered) => answered.tokens.len(),
        _ => 0,
    };
    Room::of(state).results(answer)
}

/// The answer in the making, if there is one.
pub fn answering(state: &State) -> Option<&Answering> {
    match &state.phase {
        Phase::Answering(answering) => Some(answering),
        _ => None,
    }
}

fn saturate(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
