//! How many drafts a sequence gets in its next round.
//!
//! Two things decide: how likely each draft is to be accepted, watched per sequence and position,
//! and what one more draft costs, measured over whole steps. A draft is worth it when the token
//! it is likely to bring costs less time than a token costs on average. Depth 0 is a fair answer,
//! from which a cheap probe looks now and then whether drafting has become worth it.
//!
//! Pure: times come in as numbers, and nothing here can change a token.

use std::time::Duration;

/// Positions watched one by one; deeper ones count as the last.
const WATCHED: usize = 16;
/// Weight of what was known before the first observation, in observations.
const PRIOR_WEIGHT: f64 = 3.0;
/// What an observation still weighs after the next one.
const MEMORY: f64 = 0.96;
/// A draft must beat the average token by this much: measured times waver.
const MARGIN: f64 = 1.02;
/// Rounds without drafts before the first probe, and at most between probes.
const PROBE_AFTER: u32 = 16;
const PROBE_AT_MOST: u32 = 256;

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
        (self.accepted[at] + expected * PRIOR_WEIGHT) / (self.checked[at] + PRIOR_WEIGHT)
    }
}

/// What a step's cost depends on, drafts aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences that decode.
    pub sequences: usize,
    /// Tokens each has in the cache, on average.
    pub context: usize,
}

/// What steps cost, learned from steps that only decode.
///
/// For each batch size: the time of a step without drafts, and what each draft adds to it. Both
/// are measured, not inferred from one another: a step without drafts is asked for when the last
/// one is too long ago, or was at too different a context, to compare with.
#[derive(Clone, Debug, Default)]
pub struct StepCost {
    by_batch: [BatchCost; BATCH_CLASSES],
}

/// Batches of 1, 2, 3–4, 5–8, … sequences.
const BATCH_CLASSES: usize = 10;

#[derive(Clone, Copy, Debug, Default)]
struct BatchCost {
    /// Seconds of a step without drafts.
    base: Option<f64>,
    /// Context of that step.
    context: usize,
    /// Seconds that a draft adds: making it in one step and checking it in the next.
    per_draft: Option<f64>,
    /// Steps since the last one without drafts.
    age: u32,
}

/// Share of the base that a draft is guessed to cost before one was measured.
const COST_GUESS: f64 = 0.1;
/// Steps after which the base is measured again.
const BASE_AGE: u32 = 128;
/// Steps in which the base is fresh: what they add to it is the drafts' cost and little else.
const FRESH: u32 = 2;

impl StepCost {
    /// Takes in how long a step took that verified or made `drafts` drafts (the mean of both).
    pub fn observe(&mut self, batch: Batch, drafts: f64, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if batch.sequences == 0 || seconds <= 0.0 {
            return;
        }
        let cost = &mut self.by_batch[class(batch.sequences)];
        if !cost.is_comparable(batch.context) {
            cost.base = None;
        }
        // One slow step (a page fault, another process) must not turn the judgement.
        let expected = cost
            .base
            .map(|base| base + drafts * cost.per_draft.unwrap_or(COST_GUESS * base));
        let seconds = expected.map_or(seconds, |expected| seconds.min(3.0 * expected));
        if drafts == 0.0 {
            let base = cost.base.unwrap_or(seconds);
            cost.base = Some(base + 0.25 * (seconds - base));
            cost.context = batch.context;
            cost.age = 0;
        } else if let Some(base) = cost.base {
            let per_draft = cost.per_draft.unwrap_or(COST_GUESS * base);
            let added = (seconds - base).max(0.0) / drafts;
            let trust = if cost.age < FRESH { 0.4 } else { 0.1 };
            cost.per_draft = Some(per_draft + trust * drafts.min(1.0) * (added - per_draft));
            cost.age += 1;
        }
    }

    /// Seconds of a step without drafts, and of every draft in it; `None` when the former has to
    /// be measured.
    fn of(&self, batch: Batch) -> Option<(f64, f64)> {
        let cost = &self.by_batch[class(batch.sequences)];
        let base = cost.base.filter(|_| cost.is_comparable(batch.context))?;
        Some((base, cost.per_draft.unwrap_or(COST_GUESS * base)))
    }
}

impl BatchCost {
    /// Whether the base was measured lately enough, at about this context.
    fn is_comparable(&self, context: usize) -> bool {
        let near = (self.context / 4).max(256);
        self.age < BASE_AGE && self.context.abs_diff(context) <= near
    }
}

fn class(sequences: usize) -> usize {
    (sequences.max(1).next_power_of_two().trailing_zeros() as usize).min(BATCH_CLASSES - 1)
}

/// The depth of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Depth {
    acceptance: Acceptance,
    idle_rounds: u32,
    probe_after: u32,
}

impl Depth {
    /// Takes a round in.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        self.acceptance.observe(drafted, accepted);
        if drafted > 0 {
            self.idle_rounds = 0;
            let paid = accepted > 0;
            self.probe_after = if paid {
                PROBE_AFTER
            } else {
                (self.probe_after * 2).min(PROBE_AT_MOST)
            };
        } else {
            self.idle_rounds += 1;
        }
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
        if best == 0 && at_most > 0 && self.idle_rounds >= self.probe_after.max(PROBE_AFTER) {
            return 1;
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);
    const LONE: Batch = Batch {
        sequences: 1,
        context: 1000,
    };
    const PAIR: Batch = Batch {
        sequences: 2,
        context: 1000,
    };

    /// Runs rounds with the given chance of a right draft and cost per draft (in shares of the
    /// base); the depth chosen in each of the last 100.
    fn settle(right: f64, slope: f64, at_most: usize) -> Vec<usize> {
        let (mut everyone, mut cost) = (Acceptance::default(), StepCost::default());
        let (mut depth, mut chosen, mut luck) = (Depth::default(), Vec::new(), 0u64);
        let mut drafts = 0;
        for _ in 0..600 {
            let mut accepted = 0;
            while accepted < drafts {
                luck = luck.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if (luck >> 40) as f64 / (1u64 << 24) as f64 >= right {
                    break;
                }
                accepted += 1;
            }
            depth.observe(drafts, accepted);
            everyone.observe(drafts, accepted);
            let next = depth.choose(&everyone, &cost, LONE, at_most);
            let mean = (drafts + next) as f64 / 2.0;
            cost.observe(LONE, mean, MILLI.mul_f64(1.0 + slope * mean));
            drafts = next;
            chosen.push(drafts);
        }
        chosen.split_off(500)
    }

    #[test]
    fn good_cheap_drafts_go_deep_and_never_past_the_limit() {
        let depths = settle(0.95, 0.05, 8);
        assert!(depths.iter().sum::<usize>() >= 600, "{depths:?}");
        assert!(depths.iter().all(|&d| d <= 8));
    }

    #[test]
    fn useless_drafts_are_left_but_for_probes() {
        let depths = settle(0.0, 0.2, 8);
        assert!(depths.iter().sum::<usize>() <= 10, "{depths:?}");
    }

    #[test]
    fn drafts_dearer_than_tokens_are_left_though_right() {
        let depths = settle(0.9, 1.5, 8);
        assert!(depths.iter().sum::<usize>() <= 15, "{depths:?}");
    }

    #[test]
    fn middling_drafts_get_a_middling_depth() {
        let depths = settle(0.6, 0.15, 8);
        let mean = depths.iter().sum::<usize>() as f64 / 100.0;
        assert!((1.0..4.5).contains(&mean), "{mean}");
    }

    #[test]
    fn a_probe_finds_out_that_drafts_have_become_good() {
        let mut depth = Depth::default();
        let (everyone, mut cost) = (Acceptance::default(), StepCost::default());
        for k in 0..100 {
            let drafts = f64::from(k % 3);
            cost.observe(LONE, drafts, MILLI.mul_f64(1.0 + 0.3 * drafts));
        }
        for _ in 0..200 {
            depth.observe(1, 0);
        }
        assert_eq!(depth.choose(&everyone, &cost, LONE, 4), 0);
        let mut last = 0;
        for _ in 0..20_000 {
            depth.observe(last, last);
            last = depth.choose(&everyone, &cost, LONE, 4);
        }
        assert!(last >= 2, "{last}");
    }

    #[test]
    fn a_jump_of_the_context_is_not_taken_for_the_cost_of_drafts() {
        let (everyone, mut cost) = (Acceptance::default(), StepCost::default());
        let depth = Depth::default();
        cost.observe(LONE, 0.0, MILLI);
        (0..50).for_each(|_| cost.observe(LONE, 4.0, MILLI.mul_f64(1.2)));
        let chosen = depth.choose(&everyone, &cost, LONE, 8);
        assert!(chosen >= 2);
        let far = Batch {
            context: 50_000,
            ..LONE
        };
        cost.observe(far, 2.0, MILLI * 10);
        cost.observe(far, 0.0, MILLI * 10);
        assert!(depth.choose(&everyone, &cost, far, 8) >= chosen);
    }

    #[test]
    fn the_cost_without_drafts_is_measured_first_and_again() {
        let (everyone, mut cost) = (Acceptance::default(), StepCost::default());
        let depth = Depth::default();
        cost.observe(LONE, 0.0, Duration::ZERO);
        assert_eq!(
            depth.choose(&everyone, &cost, LONE, 4),
            0,
            "no time is no measurement"
        );
        cost.observe(LONE, 0.0, MILLI);
        assert!(depth.choose(&everyone, &cost, LONE, 4) > 0);
        assert_eq!(
            depth.choose(&everyone, &cost, LONE, 0),
            0,
            "no more than allowed"
        );
        assert_eq!(
            depth.choose(&everyone, &cost, PAIR, 4),
            0,
            "another batch is another cost"
        );
        let far = Batch {
            context: 2000,
            ..LONE
        };
        assert_eq!(
            depth.choose(&everyone, &cost, far, 4),
            0,
            "another context is another cost"
        );
        (0..BASE_AGE).for_each(|_| cost.observe(LONE, 4.0, MILLI));
        assert_eq!(
            depth.choose(&everyone, &cost, LONE, 4),
            0,
            "the measurement is old"
        );
    }
}
