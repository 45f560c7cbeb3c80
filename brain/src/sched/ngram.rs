//! Drafts from the run's own text: what followed the last time the same tokens were there.
//!
//! Agents repeat themselves: a file that was read is written back, a call is made again. Looking
//! that up costs nothing on the device but the rows that check it, and where it is right it is
//! right for long. The scheduler mixes it with the model's own drafter, by which of the two has
//! been right more often; neither can change a token.

use std::collections::HashMap;

use super::{
    cost::{Batch, StepCost},
    depth::{Acceptance, Depth},
    types::TokenId,
};

/// Tokens that have to repeat before a continuation is looked up.
const GRAM: usize = 3;
/// A repetition this long is as good as any longer one.
const LONGEST: usize = 16;
/// Kinds of repetitions by their length: how often each is right is watched by itself.
const KINDS: usize = 3;
/// Tokens taken in at a time: a long prompt is no reason to make others wait.
const AT_A_TIME: usize = 1024;

/// Looking up in one sequence: how many tokens of what is found become drafts, by its kind.
#[derive(Clone, Debug, Default)]
pub struct Lookups {
    grams: Ngrams,
    depths: [Depth; KINDS],
}

/// How often looked-up drafts were right in all sequences, by the kind of repetition.
pub type LookupAcceptance = [Acceptance; KINDS];

/// Drafts that were looked up.
#[derive(Clone, Debug, PartialEq)]
pub struct LookedUp {
    /// The drafts; at least one.
    pub drafts: Vec<TokenId>,
    /// From what kind of repetition.
    pub kind: Kind,
    /// How many of them are likely to be right.
    pub expected: f64,
}

impl Lookups {
    /// What a round may check, at most so many; `cost` decides unless the depth is `fixed`.
    pub fn find(
        &mut self,
        tokens: &[TokenId],
        everyone: &LookupAcceptance,
        cost: &StepCost,
        batch: Batch,
        (at_most, fixed): (usize, bool),
    ) -> Option<LookedUp> {
        let found = self.grams.find(tokens)?;
        let follows = &tokens[found.next..];
        let at_most = at_most.min(follows.len());
        let depth = &self.depths[found.kind.0];
        let prior = &everyone[found.kind.0];
        let count = match fixed {
            true => at_most,
            false => depth.choose(prior, cost, batch, at_most),
        };
        (count > 0).then(|| LookedUp {
            drafts: follows[..count].to_vec(),
            kind: found.kind,
            expected: depth.expected(prior, count),
        })
    }

    /// Takes a round in.
    pub fn observe(
        &mut self,
        everyone: &mut LookupAcceptance,
        kind: Kind,
        drafted: usize,
        accepted: usize,
    ) {
        self.depths[kind.0].observe(drafted, accepted);
        everyone[kind.0].observe(drafted, accepted);
    }

    /// What was found was not tried.
    pub fn pass_over(&mut self, kind: Kind) {
        self.depths[kind.0].observe(0, 0);
    }
}

/// How long a repetition is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(usize);

/// Where a repetition was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    /// Place of the token that followed it.
    next: usize,
    /// How long it is.
    kind: Kind,
}

/// Where every few tokens of a sequence were last.
#[derive(Clone, Debug, Default)]
struct Ngrams {
    /// Place behind the last occurrence of a gram, the one at the end left out.
    last: HashMap<[TokenId; GRAM], usize>,
    /// Grams that end before this place are known.
    known: usize,
}

impl Ngrams {
    /// Finds what followed the last time the tokens ended as they do now; `None` while there is more
    /// to take in than goes at a time. `tokens` only ever grows from call to call.
    fn find(&mut self, tokens: &[TokenId]) -> Option<Found> {
        if self.last.is_empty() {
            self.last.reserve(tokens.len());
        }
        let first = self.known.max(GRAM);
        let until = tokens.len().min(first + AT_A_TIME);
        for end in first..until {
            if let Some(gram) = tokens[..end].last_chunk::<GRAM>() {
                self.last.insert(*gram, end);
            }
        }
        self.known = until;
        if until < tokens.len() {
            return None;
        }
        let next = *self.last.get(tokens.last_chunk::<GRAM>()?)?;
        let before = tokens[..next].iter().rev().zip(tokens.iter().rev());
        let length = before.take(LONGEST).take_while(|(a, b)| a == b).count();
        let kind = Kind(match length {
            ..=4 => 0,
            5..=9 => 1,
            _ => 2,
        });
        Some(Found { next, kind })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_repetition_is_found_and_its_length_told() {
        let mut grams = Ngrams::default();
        assert_eq!(grams.find(&[1, 2, 3, 4]), None);
        let tokens = [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3];
        let found = grams.find(&tokens).unwrap();
        assert_eq!((found.next, found.kind), (8, Kind(0)));
        let long: Vec<TokenId> = (0..12).chain(0..12).collect();
        let found = Ngrams::default().find(&long).unwrap();
        assert_eq!((found.next, found.kind), (12, Kind(2)));
        // A run of one token follows itself.
        assert_eq!(Ngrams::default().find(&[7; 5]).unwrap().next, 4);
    }

    #[test]
    fn a_long_text_is_taken_in_over_several_rounds() {
        let tokens: Vec<TokenId> = (0..3000).chain(10..20).collect();
        let mut grams = Ngrams::default();
        let tries = (1..).find(|_| grams.find(&tokens).is_some());
        assert_eq!(tries, Some(3));
        assert_eq!(grams.find(&tokens).map(|found| found.next), Some(20));
    }

    proptest! {
        /// However the tokens come in, what is found is the last place with the same ending.
        #[test]
        fn it_is_the_last_place_with_the_same_ending(
            tokens in prop::collection::vec(0u32..3, 0..60),
            steps in prop::collection::vec(1usize..9, 1..20),
        ) {
            let mut grams = Ngrams::default();
            let mut len = 0;
            for step in steps {
                len = (len + step).min(tokens.len());
                let known = &tokens[..len];
                let by_hand = (GRAM..len)
                    .rev()
                    .find(|&end| len >= GRAM && known[end - GRAM..end] == known[len - GRAM..]);
                prop_assert_eq!(grams.find(known).map(|found| found.next), by_hand);
            }
        }
    }
}
