//! How a choice ended, and names that every answer has.

use serde_json::{Value, json};

use crate::{
    sched::request::FinishReason,
    serving::{Ending, Serving},
};

/// The model's fingerprint in OpenAI's field.
pub(super) fn fingerprint(serving: &Serving) -> String {
    let whole = &serving.facts.fingerprint;
    format!("fp_{}", whole.get(..16).unwrap_or(whole))
}

/// A call's id: unique in a conversation, and the same whoever reads it again.
pub(super) fn call_id(shown_id: &str, index: usize) -> String {
    let hash = blake3::hash(shown_id.as_bytes()).to_hex();
    format!("call_{}_{index}", &hash[..16])
}

/// Why a choice ended, in OpenAI's words.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Finish {
    pub(super) reason: &'static str,
    /// The request's own stop token or string that ended it.
    pub(super) stop: Value,
}

impl Finish {
    /// Reads it off the end of a generation.
    pub(super) fn of(serving: &Serving, ending: &Ending) -> Self {
        let (reason, stop) = match &ending.outcome.reason {
            FinishReason::StopToken(token) => {
                let own = serving.facts.stop_tokens.contains(token);
                ("stop", if own { Value::Null } else { json!(token) })
            }
            FinishReason::StopString => ("stop", json!(ending.stop_string)),
            FinishReason::Length => ("length", Value::Null),
            FinishReason::Cancelled => ("abort", Value::Null),
            FinishReason::Failed(_) => ("error", Value::Null),
        };
        let called = reason == "stop" && !ending.turn.calls.is_empty();
        Self {
            reason: if called { "tool_calls" } else { reason },
            stop,
        }
    }
}
