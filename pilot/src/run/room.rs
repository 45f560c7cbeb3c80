//! How the tokens of a context are shared out: a head, exchanges, and room for the next answer.
//!
//! Whatever a run says and reads, a new prompt must be able to hold its newest exchange: an answer
//! and what follows it may take what a context has beside the head and the room for one more answer,
//! and no more. So a run never stands still because its last step was too long.

use super::{prompt::COMPACTION_NOTE, state::State};

/// The shares of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Prompt and answer together, at most.
    limit: usize,
    /// Kept for an answer.
    reserve: usize,
    /// What exchanges may take in a new prompt.
    spare: usize,
}

impl Room {
    /// The shares of a run in this state.
    pub fn of(state: &State) -> Self {
        let (limit, reserve) = (state.context_limit(), state.created.answer_reserve);
        // The first prompt's head has no note yet. A token has at least one byte.
        let note = match state.totals.prompts {
            0 | 1 => COMPACTION_NOTE.len(),
            _ => 0,
        };
        let taken = state.prompt.head.len() + note + reserve as usize;
        Self {
            limit: limit as usize,
            reserve: reserve as usize,
            spare: (limit as usize).saturating_sub(taken),
        }
    }

    /// Tokens that the exchanges of a compacted prompt may have: a quarter of the context, so that
    /// there is room to work in; half of what is spare where the head is large.
    pub fn kept(&self) -> usize {
        (self.limit / 4).min(self.spare / 2)
    }

    /// Tokens that an answer may have after a prompt of `prompt` tokens: what the context still
    /// holds, less a quarter of what is spare, for the results of its calls.
    pub fn answer(&self, prompt: usize) -> usize {
        let most = self.reserve.max(self.spare - self.spare / 4);
        self.limit.saturating_sub(prompt).min(most).max(1)
    }

    /// Tokens that may be put after an answer of `answer` tokens.
    pub fn results(&self, answer: usize) -> usize {
        (self.limit / 2).min(self.spare.saturating_sub(answer))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn room(limit: usize, reserve: usize, head: usize) -> Room {
        Room {
            limit,
            reserve,
            spare: limit.saturating_sub(head + reserve),
        }
    }

    #[test]
    fn a_small_head_leaves_a_quarter_and_a_large_one_half_of_the_rest() {
        assert_eq!(room(65_536, 4096, 1000).kept(), 16_384);
        assert_eq!(room(65_536, 4096, 46_000).kept(), 7720);
        assert_eq!(room(100, 60, 60).kept(), 0);
    }

    proptest! {
        #[test]
        fn a_new_prompt_holds_the_longest_exchange_and_the_next_answer(
            limit in 1_usize..100_000,
            reserve in 1_usize..10_000,
            head in 0_usize..100_000,
            prompt in 0_usize..100_000,
        ) {
            let room = room(limit, reserve, head);
            let answer = room.answer(prompt);
            prop_assert!(answer >= 1 && answer <= limit.saturating_sub(prompt).max(1));
            let exchange = answer + room.results(answer);
            if head + 2 * reserve <= limit {
                prop_assert!(head + exchange + reserve <= limit);
            }
            prop_assert!(head + room.kept() + reserve <= limit || room.kept() == 0);
        }
    }
}
