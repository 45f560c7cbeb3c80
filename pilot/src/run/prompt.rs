//! The prompt: a head and exchanges, an append-only list of tokens until it is compacted.
//!
//! Append-only means that the brain's prefix cache hits at every step. When the next answer would
//! not fit, a new prompt begins: the head again, with a note, then the newest exchanges *token by
//! token*, so that nothing is rendered twice and possibly otherwise.

use std::collections::VecDeque;

/// Follows the goal in the head of every prompt but the first.
pub const COMPACTION_NOTE: &str = "\n\nEarlier steps were left out here; the latest ones follow.";

/// What the model is told when it answers without a tool call.
pub const NUDGE: &str =
    "Go on: call one of the tools. When everything is done, call finish with a summary.";

/// An answer and what was put after it (tool results, or a nudge).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// Tokens the model emitted, its stop token included.
    pub answer: Vec<u32>,
    /// Tokens put after them.
    pub appended: Vec<u32>,
}

impl Exchange {
    /// Tokens.
    pub fn len(&self) -> usize {
        self.answer.len() + self.appended.len()
    }

    /// Without any token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The prompt in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// System prompt, tools and goal, rendered, up to where the model begins.
    pub head: Vec<u32>,
    /// Number (in the run) of the oldest exchange in it.
    pub first: u64,
    /// Exchanges in order.
    pub exchanges: VecDeque<Exchange>,
}

impl Prompt {
    /// Tokens in all.
    pub fn len(&self) -> usize {
        self.head.len() + self.exchanges.iter().map(Exchange::len).sum::<usize>()
    }

    /// Without any token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The token ids, as the model reads them.
    pub fn tokens(&self) -> Vec<u32> {
        let mut ids = Vec::with_capacity(self.len());
        ids.extend_from_slice(&self.head);
        for exchange in &self.exchanges {
            ids.extend_from_slice(&exchange.answer);
            ids.extend_from_slice(&exchange.appended);
        }
        ids
    }

    /// Number of the exchange that comes next.
    pub fn next_exchange(&self) -> u64 {
        self.first + self.exchanges.len() as u64
    }

    /// An answer of `reserve` tokens does not fit any more.
    pub fn is_full(&self, limit: u32, reserve: u32) -> bool {
        self.len() + reserve as usize > limit as usize
    }

    /// The oldest exchange that a compacted prompt keeps: the newest ones that fit into `room` tokens
    /// together, at least one.
    pub fn keep_from(&self, room: usize) -> u64 {
        let mut used = 0;
        let mut kept = 0;
        for exchange in self.exchanges.iter().rev() {
            used += exchange.len();
            if kept > 0 && used > room {
                break;
            }
            kept += 1;
        }
        self.next_exchange() - kept
    }

    /// Begins a new prompt that keeps the exchanges from `first` on. `None` if `first` is not in the
    /// present one (or just past its end).
    pub fn restart(&self, head: Vec<u32>, first: u64) -> Option<Self> {
        let skip = usize::try_from(first.checked_sub(self.first)?).ok()?;
        if skip > self.exchanges.len() {
            return None;
        }
        Some(Self {
            head,
            first,
            exchanges: self.exchanges.iter().skip(skip).cloned().collect(),
        })
    }
}

/// BLAKE3 of token ids (little-endian u32).
pub fn hash_ids(ids: &[u32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for id in ids {
        hasher.update(&id.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Shortens a tool's result to about `bytes` bytes for the prompt: head and tail stay, a note says
/// what is missing.
pub fn shorten(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let head = floor_boundary(text, bytes * 2 / 3);
    let tail = ceil_boundary(text, text.len() - bytes / 3);
    let missing = tail - head;
    format!(
        "{}\n[{missing} bytes left out here]\n{}",
        &text[..head],
        &text[tail..]
    )
}

fn floor_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn ceil_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prompt(head: usize, exchanges: &[usize]) -> Prompt {
        let exchange = |len: &usize| Exchange {
            answer: vec![1; *len],
            appended: vec![],
        };
        Prompt {
            head: vec![0; head],
            first: 5,
            exchanges: exchanges.iter().map(exchange).collect(),
        }
    }

    #[test]
    fn what_fits_is_kept_and_at_least_one_exchange() {
        // 60 + 40 fit exactly, one more token does not.
        assert_eq!(prompt(10, &[50, 60, 40]).keep_from(100), 6);
        assert_eq!(prompt(10, &[50, 61, 40]).keep_from(100), 7);
        assert_eq!(prompt(10, &[50, 60, 300]).keep_from(100), 7);
        assert_eq!(prompt(10, &[]).keep_from(100), 5);
    }

    #[test]
    fn full_is_one_token_past_the_limit() {
        assert!(!prompt(44, &[100]).is_full(400, 256));
        assert!(prompt(45, &[100]).is_full(400, 256));
    }

    #[test]
    fn a_restart_outside_the_prompt_is_refused() {
        let old = prompt(3, &[1, 1]);
        assert!(old.restart(vec![9], 4).is_none());
        assert!(old.restart(vec![9], 8).is_none());
        assert_eq!(old.restart(vec![9], 7).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn a_restart_keeps_tokens_verbatim(
            lens in proptest::collection::vec((0_usize..20, 0_usize..20), 1..30),
            room in 0_usize..100,
        ) {
            let exchanges: VecDeque<Exchange> = lens
                .iter()
                .enumerate()
                .map(|(at, (a, b))| Exchange {
                    answer: vec![at as u32; *a],
                    appended: vec![1000 + at as u32; *b],
                })
                .collect();
            let old = Prompt { head: vec![7, 7], first: 3, exchanges };
            let first = old.keep_from(room);
            prop_assert!(first < old.next_exchange());
            let new = old.restart(vec![8], first).unwrap();
            prop_assert!(old.tokens().ends_with(&new.tokens()[1..]));
            prop_assert_eq!(new.next_exchange(), old.next_exchange());
            let kept = new.len() - 1;
            prop_assert!(kept <= room || new.exchanges.len() == 1);
        }

        #[test]
        fn shortened_text_is_short_and_whole_characters(text in "\\PC{0,400}", bytes in 0_usize..300) {
            let short = shorten(&text, bytes);
            if text.len() > bytes {
                prop_assert!(short.len() <= bytes + 40);
                prop_assert!(short.contains("left out"));
            } else {
                prop_assert_eq!(short, text);
            }
        }
    }
}
