//! How many drafts a sequence gets in its next round.
//!
//! Two things decide: how likely each draft is to be accepted, watched per sequence and position,
//! and what one more draft costs, measured over whole steps (see `cost`). The depth chosen is the
//! one with the most tokens per second. Depth 0 is a fair answer, from which a cheap probe looks
//! now and then whether drafting has become worth it.
//!
//! Pure: times come in as numbers, and nothing here can change a token.

use super::cost::{Batch, StepCost};

/// Positions watched one by one; deeper ones count as the last.
const WATCHED: usize = 16;
/// Weight of what was known before the first observation, in observations.
const PRIOR_WEIGHT: f64 = 3.0;
/// What an observation still weighs after the next one.
const MEMORY: f64 = 0.96;
/// A draft must beat the average token by this much: measured times waver.
const MARGIN: f64 = 1.02;
/// Rounds that a sequence goes without drafts, while others draft, before its own are tried again.
const RETRY_AFTER: u32 = 64;

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
    /// Takes a round in: of `drafted` drafts the first `accepted` were right.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        // The first wrong draft was checked too; those behind it say nothing.
        for position in 0..drafted.min(accepted + 1) {
            let at = position.min(WATCHED - 1);
            self.checked[at] = self.checked[at] * MEMORY + 1.0;
            self.accepted[at] *= MEMORY;
            if position < accepted {
                self.accepted[at] += 1.0;
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
        // A guess fades as experience comes in; the experience of all stays what one is part of.
        let weight = match prior {
            Some(_) => PRIOR_WEIGHT,
            None => PRIOR_WEIGHT * (1.0 - self.checked[at] * (1.0 - MEMORY)),
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
        self.acceptance.observe(drafted, accepted);
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

    /// Drafts for the next round, at most `at_most`.
    pub fn choose(
        &self,
        everyone: &Acceptance,
        cost: &StepCost,
        batch: Batch,
        at_most: usize,
    ) -> usize {
        let Some((base, per_draft)) = cost.of(batch) else {
            return 0;
        };
        let base = base / batch.sequences.max(1) as f64;
        let (mut best, mut best_rate) = (0, 1.0 / base.max(f64::MIN_POSITIVE) * MARGIN);
        let (mut tokens, mut survives) = (1.0, 1.0);
        for depth in 1..=at_most {
            survives *= self.acceptance.conditional(Some(everyone), depth - 1);
            tokens += survives;
            let rate = tokens / (base + per_draft * depth as f64).max(f64::MIN_POSITIVE);
            if rate > best_rate {
                (best, best_rate) = (depth, rate);
            }
        }
        if best == 0 && at_most > 0 && (cost.wants_probe(batch) || self.wants_retry()) {
            return 1;
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LONE: Batch = Batch {
        sequences: 1,
        context: 1000,
    };

    /// A drafter and a device as they really are, unknown to the code under test.
    #[derive(Clone, Copy)]
    struct Truth {
        /// Chance of a right draft.
        right: f64,
        /// Cost of a draft in shares of a step without drafts.
        slope: f64,
        /// How much steps waver, in shares of their time.
        noise: f64,
    }

    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 40) as f64 / (1u64 << 24) as f64
        }
    }

    /// Plays rounds in sequences of `length` tokens; returns the depths chosen and how many
    /// steps without drafts the time per token is worth.
    fn play(truth: Truth, length: usize, rounds: usize) -> (Vec<usize>, f64) {
        let (mut everyone, mut cost) = (Acceptance::default(), StepCost::default());
        let (mut depth, mut chosen, mut numbers) = (Depth::default(), Vec::new(), Numbers(9));
        let (mut drafts, mut emitted, mut tokens, mut time) = (0, 0, 0, 0.0);
        for _ in 0..rounds {
            let accepted = (0..drafts)
                .take_while(|_| numbers.next() < truth.right)
                .count();
            depth.observe(drafts, accepted);
            everyone.observe(drafts, accepted);
            emitted += accepted + 1;
            tokens += accepted + 1;
            let left = length.saturating_sub(emitted + 1);
            let next = depth.choose(&everyone, &cost, LONE, left.min(8));
            let mean = (drafts + next) as f64 / 2.0;
            let step = (1.0 + truth.slope * mean) * (1.0 + truth.noise * (numbers.next() - 0.5));
            time += step;
            cost.observe(LONE, mean, Duration::from_secs_f64(step / 1000.0));
            drafts = next;
            chosen.push(next);
            if emitted >= length {
                (depth, drafts, emitted) = (Depth::default(), 0, 0);
            }
        }
        (chosen, time / tokens as f64)
    }

    #[test]
    fn good_cheap_drafts_go_deep() {
        let (depths, cost) = play(
            Truth {
                right: 0.95,
                slope: 0.05,
                noise: 0.2,
            },
            4000,
            600,
        );
        let late = &depths[500..];
        assert!(late.iter().sum::<usize>() >= 600, "{late:?}");
        assert!(cost < 0.25, "{cost}");
    }

    #[test]
    fn middling_drafts_get_a_middling_depth() {
        let (depths, cost) = play(
            Truth {
                right: 0.6,
                slope: 0.15,
                noise: 0.2,
            },
            4000,
            600,
        );
        let mean = depths[500..].iter().sum::<usize>() as f64 / 100.0;
        assert!((1.0..4.5).contains(&mean), "{mean}");
        assert!(cost < 0.8, "{cost}");
    }

    #[test]
    fn drafting_never_costs_whatever_drafts_bring_and_take() {
        let (mut worst, mut played) = (0.0f64, 0);
        for right in [0.0, 0.2, 0.5, 0.8, 0.95, 1.0] {
            for slope in [0.0, 0.02, 0.1, 0.3, 0.6, 0.9, 1.5, 4.0] {
                for (noise, length) in [(0.0, 30), (0.0, 4000), (0.3, 30), (0.3, 4000)] {
                    let (_, cost) = play(
                        Truth {
                            right,
                            slope,
                            noise,
                        },
                        length,
                        4000,
                    );
                    assert!(
                        cost <= 1.02,
                        "right {right}, slope {slope}, noise {noise}, length {length}: {cost}"
                    );
                    worst = worst.max(cost);
                    played += 1;
                }
            }
        }
        println!("{played} mixes, at worst {worst:.4} of the time without drafts");
    }

    #[test]
    fn drafting_comes_back_when_drafts_become_good() {
        let (mut everyone, mut cost) = (Acceptance::default(), StepCost::default());
        let mut depth = Depth::default();
        let mut drafts = 0;
        let mut play = |right: bool, rounds: usize| {
            for _ in 0..rounds {
                let accepted = if right { drafts } else { 0 };
                depth.observe(drafts, accepted);
                everyone.observe(drafts, accepted);
                let next = depth.choose(&everyone, &cost, LONE, 4);
                let mean = (drafts + next) as f64 / 2.0;
                cost.observe(LONE, mean, Duration::from_secs_f64(1e-3 + 1e-4 * mean));
                drafts = next;
            }
            drafts
        };
        assert_eq!(play(false, 400), 0);
        assert!(play(true, 20_000) >= 2);
    }

    #[test]
    fn a_sequence_with_bad_drafts_among_good_ones_is_left_alone() {
        let (mut everyone, mut cost) = (Acceptance::default(), StepCost::default());
        (0..50).for_each(|_| everyone.observe(4, 4));
        cost.observe(LONE, 0.0, Duration::from_millis(1));
        cost.observe(LONE, 4.0, Duration::from_millis(2));
        let mut bad = Depth::default();
        assert!(bad.choose(&everyone, &cost, LONE, 4) > 0);
        (0..40).for_each(|_| bad.observe(4, 0));
        assert_eq!(bad.choose(&everyone, &cost, LONE, 4), 0);
        (0..RETRY_AFTER).for_each(|_| bad.observe(0, 0));
        assert_eq!(bad.choose(&everyone, &cost, LONE, 4), 1, "tried again");
        bad.observe(1, 0);
        assert_eq!(bad.choose(&everyone, &cost, LONE, 4), 0);
    }

    #[test]
    fn nothing_is_drafted_unmeasured_or_beyond_the_limit() {
        let (everyone, mut cost) = (Acceptance::default(), StepCost::default());
        let depth = Depth::default();
        assert_eq!(depth.choose(&everyone, &cost, LONE, 4), 0);
        cost.observe(LONE, 0.0, Duration::ZERO);
        assert_eq!(
            depth.choose(&everyone, &cost, LONE, 4),
            0,
            "no time is no measurement"
        );
        cost.observe(LONE, 0.0, Duration::from_millis(1));
        assert!((1..=4).contains(&depth.choose(&everyone, &cost, LONE, 4)));
        assert_eq!(depth.choose(&everyone, &cost, LONE, 0), 0);
    }
}
