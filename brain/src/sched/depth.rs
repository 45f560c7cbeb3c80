//! How many drafts a sequence gets in its next round.
//!
//! Two things decide: how likely each draft is to be accepted, watched per sequence and position,
//! and what one more draft costs, measured over whole steps (see `cost`). The depth chosen is the
//! one with the most tokens per second. Depth 0 is a fair answer, from which all sequences together
//! look now and then whether drafting has become worth it.
//!
//! Pure: times come in as numbers, and nothing here can change a token.

use super::cost::{Batch, StepCost};

/// Positions watched one by one; deeper ones count as the last.
const WATCHED: usize = 16;
/// Weight of what was known before the first observation, in observations.
const PRIOR_WEIGHT: f64 = 3.0;
/// The same of what all sequences have seen.
const EVERYONES_WEIGHT: f64 = 20.0;
/// Standard deviations by which a sequence must differ from all before it counts for itself. Those that
/// differ by luck alone draft together: a step in which a few draft costs more for each draft than one
/// in which all do. (Of a fading memory the true deviation is 0.7 of what its weight says.)
const OWN: f64 = 1.5;
/// What an observation still weighs after the next one: one of a sequence, and one of all.
const MEMORY: f64 = 0.98;
const EVERYONES_MEMORY: f64 = 0.998;
/// Drafts must promise this much more tokens before anybody begins with them: measured times waver.
const MARGIN: f64 = 1.02;
/// Rounds that a sequence goes without drafts, while others draft, before its own are tried again.
const RETRY_AFTER: u32 = 64;
/// Drafts at most while what they cost is a guess.
const GUESSED_MOST: usize = 2;

/// How often drafts were accepted at each position, given that all before them were.
#[derive(Clone, Debug)]
pub struct Acceptance {
    checked: [f64; WATCHED],
    accepted: [f64; WATCHED],
}

impl Default for Acceptance {
    fn default() -> Self {
        Self {
            checked: [0.0; WATCHED],
            accepted: [0.0; WATCHED],
        }
    }
}

impl Acceptance {
    /// Takes in a round of one of all sequences: of `drafted` drafts the first `accepted` were right.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        self.remember(drafted, accepted, EVERYONES_MEMORY);
    }

    fn remember(&mut self, drafted: usize, accepted: usize, memory: f64) {
        // The first wrong draft was checked too; those behind it say nothing.
        for position in 0..drafted.min(accepted + 1) {
            let at = position.min(WATCHED - 1);
            self.checked[at] = self.checked[at] * memory + 1.0;
            self.accepted[at] *= memory;
            if position < accepted {
                self.accepted[at] += 1.0;
            }
        }
        // What is not tried any more is forgotten, so that bad luck once does not keep it untried.
        if drafted > 0 {
            for at in drafted.min(WATCHED)..WATCHED {
                self.checked[at] *= memory;
                self.accepted[at] *= memory;
            }
        }
    }

    /// How likely the draft at `position` is right if all before it are. What was not seen is
    /// taken from `prior`, the experience of all sequences, or else from the position before.
    fn conditional(&self, prior: Option<&Acceptance>, position: usize) -> f64 {
        let at = position.min(WATCHED - 1);
        let expected = match prior {
            Some(prior) => prior.conditional(None, position),
            None if at == 0 => 0.7,
            None => self.conditional(None, at - 1) * 0.95,
        };
        let (checked, accepted) = (self.checked[at], self.accepted[at]);
        let luck = OWN * (expected * (1.0 - expected) * checked).sqrt();
        if prior.is_some() && (accepted - expected * checked).abs() <= luck {
            return expected;
        }
        // A guess fades as experience comes in; the experience of all stays what one is part of.
        let weight = match prior {
            Some(_) => EVERYONES_WEIGHT * (1.0 - 0.8 * self.checked[at] * (1.0 - MEMORY)),
            None => PRIOR_WEIGHT * (1.0 - self.checked[at] * (1.0 - EVERYONES_MEMORY)),
        };
        (self.accepted[at] + expected * weight) / (self.checked[at] + weight)
    }
}

/// The depth of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Depth {
    acceptance: Acceptance,
    idle_rounds: u32,
    retries: u32,
}

impl Depth {
    /// Takes a round in.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        self.acceptance.remember(drafted, accepted, MEMORY);
        if drafted == 0 {
            self.idle_rounds += 1;
            return;
        }
        if drafted > 1 {
            self.retries = 0;
        } else if self.wants_retry() {
            self.retries += 1;
        }
        self.idle_rounds = 0;
    }

    fn wants_retry(&self) -> bool {
        self.idle_rounds >= RETRY_AFTER << self.retries.min(4)
    }

    /// How many of so many drafts are likely to be right.
    pub fn expected(&self, everyone: &Acceptance, drafts: usize) -> f64 {
        let (mut expected, mut survives) = (0.0, 1.0);
        for position in 0..drafts {
            survives *= self.acceptance.conditional(Some(everyone), position);
            expected += survives;
        }
        expected
    }

    /// Drafts for the next round, at most `at_most`.
    pub fn choose(
        &self,
        everyone: &Acceptance,
        cost: &StepCost,
        batch: Batch,
        at_most: usize,
    ) -> usize {
        let Some(share) = cost.share(batch) else {
            return 0;
        };
        let most = match cost.is_guessed(batch) {
            true => at_most.min(GUESSED_MOST),
            false => at_most,
        };
        let least = if cost.drafts(batch) { 1.0 } else { MARGIN };
        let (mut best, mut best_rate) = (0, least);
        let (mut tokens, mut survives) = (1.0, 1.0);
        for depth in 1..=most {
            survives *= self.acceptance.conditional(Some(everyone), depth - 1);
            tokens += survives;
            let rate = tokens / (1.0 + share * depth as f64);
            if rate > best_rate {
                (best, best_rate) = (depth, rate);
            }
        }
        let tries = cost.wants_probe(batch) || cost.drafts(batch) && self.wants_retry();
        match best {
            0 => at_most.min(usize::from(tries)),
            _ => best,
        }
    }
}

#[cfg(test)]
#[path = "depth_tests.rs"]
mod tests;
