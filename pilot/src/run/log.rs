//! A run's journal as people and comparisons want to read it.

use super::entry::{AnswerEnd, Entry, ToolEnded, ToolIntended, Turn};

/// One answer with every token of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerLog {
    /// Number of the answer.
    pub step: u64,
    /// Its attempt.
    pub attempt: u32,
    /// Seed of its sampling.
    pub seed: u64,
    /// Length of the prompt it answers.
    pub prompt_tokens: u32,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// How it ended; `None` while it is being made, or when it was given up with its model.
    pub end: Option<AnswerEnd>,
    /// The answer, parsed, when it ended.
    pub turn: Turn,
}

/// One tool call with its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallLog {
    /// The journaled intent; `None` for a call that was refused.
    pub intent: Option<ToolIntended>,
    /// The result; `None` while it is missing.
    pub ended: Option<ToolEnded>,
}

/// Every answer in order.
pub fn answers<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Vec<AnswerLog> {
    let mut log: Vec<AnswerLog> = Vec::new();
    for entry in entries {
        match entry {
            Entry::AnswerAsked {
                step,
                attempt,
                seed,
                prompt_tokens,
                ..
            } => log.push(AnswerLog {
                step: *step,
                attempt: *attempt,
                seed: *seed,
                prompt_tokens: *prompt_tokens,
                ids: Vec::new(),
                end: None,
                turn: Turn::default(),
            }),
            Entry::TokensReceived { ids, .. } => {
                if let Some(answer) = log.last_mut() {
                    answer.ids.extend_from_slice(ids);
                }
            }
            Entry::AnswerEnded(ended) => {
                if let Some(answer) = log.last_mut() {
                    answer.ids.extend_from_slice(&ended.ids);
                    answer.end = Some(ended.end);
                    answer.turn = ended.turn.clone();
                }
            }
            _ => {}
        }
    }
    log
}

/// Every tool call in order.
pub fn calls<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Vec<CallLog> {
    let mut log: Vec<CallLog> = Vec::new();
    for entry in entries {
        match entry {
            Entry::ToolIntended(intended) => {
                log.push(CallLog {
                    intent: Some((**intended).clone()),
                    ended: None,
                });
            }
            Entry::ToolEnded(ended) => {
                let ended = Some((**ended).clone());
                match log.last_mut() {
                    Some(call) if call.ended.is_none() => call.ended = ended,
                    _ => log.push(CallLog {
                        intent: None,
                        ended,
                    }),
                }
            }
            _ => {}
        }
    }
    log
}
