//! Notices a model that goes round in circles.

use std::collections::VecDeque;

use crate::tools::{ToolCall, ToolOutput};

/// A circle counts when it was run through this often in a row.
pub const ROUNDS: usize = 10;

/// Longest circle noticed, in calls.
pub const LONGEST: usize = 4;

/// The newest calls with their results, as hashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    seen: VecDeque<[u8; 16]>,
}

impl Recent {
    /// Notes a call and what came of it. The same call with another result is progress.
    pub fn note(&mut self, call: &ToolCall, output: &ToolOutput) {
        let mut hasher = blake3::Hasher::new();
        for part in [&call.name, &call.arguments, &output.text] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let mut short = [0; 16];
        short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        if self.seen.len() == ROUNDS * LONGEST {
            self.seen.pop_front();
        }
        self.seen.push_back(short);
    }

    /// Forgets everything: somebody looked and let the run go on.
    pub fn clear(&mut self) {
        self.seen.clear();
    }

    /// The newest calls are a circle of up to [`LONGEST`] calls, [`ROUNDS`] times over.
    pub fn is_circle(&self) -> bool {
        (1..=LONGEST).any(|period| {
            let span = period * ROUNDS;
            let len = self.seen.len();
            len >= span
                && (len - span + period..len).all(|at| self.seen[at] == self.seen[at - period])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(recent: &mut Recent, name: &str, text: &str) {
        let call = ToolCall {
            id: "call_0".into(),
            name: name.into(),
            arguments: "{}".into(),
        };
        recent.note(&call, &ToolOutput::ok(text));
    }

    #[test]
    fn circles_of_one_to_four_calls_are_noticed_at_the_tenth_round() {
        for period in 1..=LONGEST {
            let mut recent = Recent::default();
            for at in 0..period * ROUNDS {
                assert!(!recent.is_circle(), "period {period}, call {at}");
                note(&mut recent, &format!("tool{}", at % period), "same");
            }
            assert!(recent.is_circle(), "period {period}");
        }
    }

    #[test]
    fn another_result_is_progress() {
        let mut recent = Recent::default();
        for at in 0..100 {
            note(&mut recent, "bash", &format!("line {at}"));
            assert!(!recent.is_circle());
        }
    }

    #[test]
    fn a_cleared_memory_starts_again() {
        let mut recent = Recent::default();
        (0..ROUNDS).for_each(|_| note(&mut recent, "ls", "a"));
        recent.clear();
        (0..ROUNDS - 1).for_each(|_| note(&mut recent, "ls", "a"));
        assert!(!recent.is_circle());
    }
}
