//! What steps cost, learned from steps that only decode.
//!
//! For each batch size two figures: the time of a step without drafts, and what each draft adds to
//! it. Both are measured, not inferred from one another: a step without drafts is asked for when
//! the last one is too long ago, or was at too different a context, to compare with; and where
//! nobody drafts any more, a probe is due now and then, ever more rarely while it changes nothing.

use std::time::Duration;

/// What a step's cost depends on, drafts aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences that decode.
    pub sequences: usize,
    /// Tokens each has in the cache, on average.
    pub context: usize,
}

/// The cost of steps, by batch size.
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
    /// Steps since the last one without drafts.
    age: u32,
    /// Seconds that a draft adds: making it in one step and checking it in the next. May come out
    /// below 0 for a while; cutting that off at once would bias the mean upwards.
    per_draft: Option<f64>,
    /// Steps that taught it.
    seen: u32,
    /// Steps without drafts since the last one with drafts.
    idle: u32,
    /// Probes in a row that changed nothing.
    vain_probes: u32,
}

/// Share of the base that a draft is guessed to cost before one was measured.
const COST_GUESS: f64 = 0.1;
/// Steps after which the base is measured again.
const BASE_AGE: u32 = 128;
/// Steps in which the base is fresh: what they add to it is the drafts' cost and little else.
const FRESH: u32 = 2;
/// Steps after which a single step is not believed to be very different.
const SETTLED: u32 = 8;
/// Steps without drafts before a probe; twice as many after each probe in vain, up to the most.
const PROBE_AFTER: u32 = 32;
const PROBE_DOUBLINGS: u32 = 5;

impl StepCost {
    /// Takes in how long a step took that verified or made `drafts` drafts (the mean of both).
    pub fn observe(&mut self, batch: Batch, drafts: f64, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if batch.sequences == 0 || seconds <= 0.0 {
            return;
        }
        let cost = &mut self.by_batch[class(batch.sequences)];
        cost.count_probes(drafts, batch.sequences);
        if !cost.is_near(batch.context) {
            cost.base = None;
        }
        let Some(base) = cost.base else {
            // Nothing to compare with; a step with drafts says nothing about one without.
            if drafts == 0.0 {
                cost.rebase(seconds, batch.context);
            }
            return;
        };
        let per_draft = cost.per_draft.unwrap_or(COST_GUESS * base);
        // One slow step (a page fault, another process) must not turn the judgement.
        let doubt = if cost.seen < SETTLED { 3.0 } else { 1.5 };
        let seconds = seconds.min(doubt * (base + drafts * per_draft.max(0.0)));
        if drafts == 0.0 {
            let trust = if cost.age < BASE_AGE { 0.25 } else { 0.5 };
            cost.rebase(base + trust * (seconds - base), batch.context);
            return;
        }
        let trust = if cost.age < FRESH { 0.5 } else { 0.1 };
        // Few drafts between many sequences are drowned by how steps waver.
        let weight = (2.0 * drafts / batch.sequences as f64).min(1.0);
        let added = (seconds - base) / drafts;
        cost.per_draft = Some(per_draft + trust * weight * (added - per_draft));
        cost.seen = cost.seen.saturating_add(1);
        cost.age += 1;
    }

    /// Seconds of a step without drafts, and of every draft in it; `None` when the former has to
    /// be measured.
    pub fn of(&self, batch: Batch) -> Option<(f64, f64)> {
        let cost = &self.by_batch[class(batch.sequences)];
        let base = cost.base.filter(|_| cost.is_comparable(batch.context))?;
        Some((base, cost.per_draft.unwrap_or(COST_GUESS * base).max(0.0)))
    }

    /// Whether nobody has drafted for so long that the cost of a draft should be looked at again.
    pub fn wants_probe(&self, batch: Batch) -> bool {
        self.by_batch[class(batch.sequences)].probe_is_due()
    }
}

impl BatchCost {
    fn rebase(&mut self, base: f64, context: usize) {
        self.base = Some(base);
        self.context = context;
        self.age = 0;
    }

    /// Whether the base was measured lately enough, at about this context.
    fn is_comparable(&self, context: usize) -> bool {
        self.age < BASE_AGE && self.is_near(context)
    }

    fn is_near(&self, context: usize) -> bool {
        self.context.abs_diff(context) <= (self.context / 4).max(256)
    }

    fn probe_is_due(&self) -> bool {
        self.idle >= PROBE_AFTER << self.vain_probes.min(PROBE_DOUBLINGS)
    }

    fn count_probes(&mut self, drafts: f64, sequences: usize) {
        if drafts == 0.0 {
            self.idle = self.idle.saturating_add(1);
            return;
        }
        if drafts > 0.5 * sequences as f64 {
            // More than a probe: drafting pays again.
            self.vain_probes = 0;
        } else if self.probe_is_due() {
            self.vain_probes = self.vain_probes.saturating_add(1);
        }
        self.idle = 0;
    }
}

fn class(sequences: usize) -> usize {
    (sequences.max(1).next_power_of_two().trailing_zeros() as usize).min(BATCH_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);
    const LONE: Batch = Batch {
        sequences: 1,
        context: 1000,
    };

    #[test]
    fn base_and_slope_are_found() {
        let mut cost = StepCost::default();
        assert_eq!(cost.of(LONE), None);
        cost.observe(LONE, 4.0, MILLI);
        assert_eq!(cost.of(LONE), None, "a step with drafts is no base");
        cost.observe(LONE, 0.0, MILLI);
        (0..60).for_each(|_| cost.observe(LONE, 4.0, MILLI * 3));
        let (base, per_draft) = cost.of(LONE).unwrap();
        assert!((base - 1e-3).abs() < 1e-6, "{base}");
        assert!((per_draft - 0.5e-3).abs() < 2e-5, "{per_draft}");
        assert_eq!(
            cost.of(Batch {
                sequences: 2,
                ..LONE
            }),
            None
        );
        assert_eq!(
            cost.of(Batch {
                context: 2000,
                ..LONE
            }),
            None
        );
        (60..BASE_AGE).for_each(|_| cost.observe(LONE, 4.0, MILLI * 3));
        assert_eq!(cost.of(LONE), None, "the base is old");
    }

    #[test]
    fn a_jump_of_the_context_is_not_taken_for_the_cost_of_drafts() {
        let mut cost = StepCost::default();
        cost.observe(LONE, 0.0, MILLI);
        (0..50).for_each(|_| cost.observe(LONE, 4.0, MILLI.mul_f64(1.2)));
        let before = cost.of(LONE).unwrap().1;
        let far = Batch {
            context: 50_000,
            ..LONE
        };
        cost.observe(far, 2.0, MILLI * 10);
        cost.observe(far, 0.0, MILLI * 10);
        assert_eq!(cost.of(far), Some((MILLI.as_secs_f64() * 10.0, before)));
    }

    #[test]
    fn a_few_slow_steps_do_not_turn_the_judgement() {
        let mut cost = StepCost::default();
        cost.observe(LONE, 0.0, MILLI);
        (0..50).for_each(|_| cost.observe(LONE, 2.0, MILLI.mul_f64(1.2)));
        cost.observe(LONE, 2.0, MILLI * 500);
        assert!(cost.of(LONE).unwrap().1 < 0.14e-3);
    }

    #[test]
    fn probes_in_vain_become_rare_and_drafting_resets_them() {
        let mut cost = StepCost::default();
        let until_due = |cost: &mut StepCost| {
            let mut steps = 0;
            while !cost.wants_probe(LONE) {
                cost.observe(LONE, 0.0, MILLI);
                steps += 1;
            }
            steps
        };
        assert_eq!(until_due(&mut cost), 32);
        for expected in [64, 128, 256, 512, 1024, 1024] {
            // A probe is seen twice: when its draft is made and when it is checked.
            cost.observe(LONE, 0.5, MILLI);
            cost.observe(LONE, 0.5, MILLI);
            assert_eq!(until_due(&mut cost), expected);
        }
        cost.observe(LONE, 0.5, MILLI);
        cost.observe(LONE, 2.0, MILLI);
        assert_eq!(until_due(&mut cost), 32);
    }
}
