//! What steps cost, learned from steps as they are run.
//!
//! For each batch size two figures: the time of a step without drafts, and what each draft adds to
//! it. Both are measured, not inferred from one another: a few steps without drafts are asked for
//! when the last ones are too long ago, or were at too different a context, to compare with; and
//! where nobody drafts any more, a probe is due now and then, ever more rarely while it changes
//! nothing. A third figure says what a row of prefill adds.
//!
//! Machines are busy with other things too, and a step that was held up says nothing about drafts.
//! So the cost of a draft is measured in trials: the least of a few steps without drafts, then a
//! dozen with, close by, so that both are held up alike. A trial yields a share of a step, the
//! median of several trials is believed, and one that went wrong changes nothing.

use std::{collections::VecDeque, time::Duration};

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
    /// Seconds that a row of prefill adds to a step.
    prefill: Recent,
}

/// Batches of 1, 2, 3–4, 5–8, … sequences.
const BATCH_CLASSES: usize = 10;

#[derive(Clone, Debug, Default)]
struct BatchCost {
    /// Seconds of a step without drafts.
    base: Option<f64>,
    /// Context of that step.
    context: usize,
    /// Steps with drafts since the base was measured.
    age: u32,
    /// Steps without drafts, one after the other, that will be the next base.
    undrafted: Vec<f64>,
    /// What a draft adds, in shares of the base, in each step of the trial at hand: making it in
    /// one step and checking it in the next.
    trial: Vec<f64>,
    /// The same, of each trial that is over.
    trials: Recent,
    /// Steps without drafts since the last one with drafts.
    idle: u32,
    /// Probes in a row that changed nothing.
    vain_probes: u32,
}

/// The newest of some measurements.
#[derive(Clone, Debug, Default)]
struct Recent(VecDeque<f64>);

/// Measurements remembered.
const REMEMBERED: usize = 9;
/// Steps without drafts that make a base: the least of them.
const BURST: usize = 4;
/// Steps with drafts of a trial.
const TRIAL: usize = 12;
/// What is taken of them: the value that this share lies below. The least of [`BURST`] steps is
/// about the same quantile, so that steady noise falls out of the comparison.
const QUANTILE: f64 = 0.25;
/// Trials that follow each other without a pause in the beginning.
const FIRST_TRIALS: usize = 3;
/// A draft costs something, whatever the measurements say.
const LEAST_COST: f64 = 0.01;
/// Share of the base that a draft is guessed to cost before one was measured.
const COST_GUESS: f64 = 0.1;
/// Steps with drafts after which there is a new trial.
const BASE_AGE: u32 = 256;
/// Steps without drafts before a probe; twice as many after each probe in vain, up to the most.
const PROBE_AFTER: u32 = 32;
const PROBE_DOUBLINGS: u32 = 5;
/// Rows of prefill from which a step says what such a row costs.
const PREFILL_ROWS: usize = 8;

impl Recent {
    fn push(&mut self, value: f64) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    /// The middle one; the larger of two.
    fn median(&self) -> Option<f64> {
        quantile(self.0.iter().copied().collect(), 0.5)
    }
}

/// The value that this share lies below.
fn quantile(mut values: Vec<f64>, share: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * share) as usize).copied()
}

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
            cost.undrafted.clear();
        }
        if drafts == 0.0 {
            cost.rebase(seconds, batch.context);
            return;
        }
        cost.undrafted.clear();
        let Some(base) = cost.base else {
            // Nothing to compare with; a step with drafts says nothing about one without.
            return;
        };
        cost.age += 1;
        // Few drafts between many sequences are drowned by how steps waver.
        if 4.0 * drafts >= batch.sequences as f64 {
            cost.try_out((seconds / base - 1.0) / drafts);
        }
    }

    /// Takes in how long a step took that computed `rows` of prefill beside a decoding batch.
    pub fn observe_prefill(&mut self, batch: Batch, rows: usize, elapsed: Duration) {
        let base = match batch.sequences {
            0 => 0.0,
            _ => self.by_batch[class(batch.sequences)].base.unwrap_or(0.0),
        };
        let added = elapsed.as_secs_f64() - base;
        if rows >= PREFILL_ROWS && added > 0.0 {
            self.prefill.push(added / rows as f64);
        }
    }

    /// Rows of prefill that make a step of this batch at most `times` as long as it is without
    /// them; `None` when too little is known.
    pub fn prefill_rows(&self, batch: Batch, times: f64) -> Option<usize> {
        // An old base will do: nothing is compared with it.
        let base = self.by_batch[class(batch.sequences)].base?;
        let per_row = self.prefill.median()?;
        Some(((times - 1.0) * base / per_row.max(f64::MIN_POSITIVE)) as usize)
    }

    /// Seconds of a step without drafts, and of every draft in it; `None` when the former has to
    /// be measured.
    pub fn of(&self, batch: Batch) -> Option<(f64, f64)> {
        let cost = &self.by_batch[class(batch.sequences)];
        let base = cost.base.filter(|_| cost.is_comparable(batch.context))?;
        // The guesses are of a depth of one for all.
        let of_all = base / batch.sequences.max(1) as f64;
        let per_draft = cost
            .per_draft()
            .map_or(of_all * COST_GUESS, |share| base * share);
        Some((base, per_draft.max(of_all * LEAST_COST)))
    }

    /// Seconds that a row of prefill takes, if that was measured.
    pub fn of_row(&self) -> Option<f64> {
        self.prefill.median()
    }

    /// Whether nobody has drafted for so long that the cost of a draft should be looked at again.
    pub fn wants_probe(&self, batch: Batch) -> bool {
        self.by_batch[class(batch.sequences)].probe_is_due()
    }
}

impl BatchCost {
    /// A step without drafts. The last one in a row of them is always part of a new base: while
    /// nobody drafts, the base stays new.
    fn rebase(&mut self, seconds: f64, context: usize) {
        self.context = context;
        self.undrafted.push(seconds);
        if self.undrafted.len() >= BURST {
            self.base = self.undrafted.drain(..).min_by(f64::total_cmp);
            self.age = 0;
        }
    }

    /// A step with drafts, each of which added that share of the base.
    fn try_out(&mut self, added: f64) {
        if self.age as usize > TRIAL {
            return;
        }
        self.trial.push(added);
        if self.trial.len() == TRIAL {
            let result = quantile(std::mem::take(&mut self.trial), QUANTILE);
            result
                .into_iter()
                .for_each(|result| self.trials.push(result));
        }
    }

    /// What a draft adds, in shares of the base.
    fn per_draft(&self) -> Option<f64> {
        let so_far = || quantile(self.trial.clone(), 0.5);
        self.trials.median().or_else(so_far)
    }

    /// Whether the base was measured lately enough, at about this context.
    fn is_comparable(&self, context: usize) -> bool {
        self.age < self.trial_due() && self.is_near(context)
    }

    /// Steps with drafts between one base and the next.
    fn trial_due(&self) -> u32 {
        match self.trials.0.len() < FIRST_TRIALS {
            true => TRIAL as u32,
            false => BASE_AGE,
        }
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

    /// As many steps without drafts as make a base.
    fn burst(cost: &mut StepCost, batch: Batch, time: Duration) {
        (0..BURST).for_each(|_| cost.observe(batch, 0.0, time));
    }

    #[test]
    fn base_and_slope_are_found() {
        let mut cost = StepCost::default();
        assert_eq!(cost.of(LONE), None);
        cost.observe(LONE, 4.0, MILLI);
        assert_eq!(cost.of(LONE), None, "a step with drafts is no base");
        burst(&mut cost, LONE, MILLI);
        for _ in 0..TRIAL - 1 {
            cost.observe(LONE, 4.0, MILLI * 3);
        }
        let (base, per_draft) = cost.of(LONE).unwrap();
        assert!((base - 1e-3).abs() < 1e-6, "{base}");
        assert!((per_draft - 0.5e-3).abs() < 1e-6, "{per_draft}");
        let pair = Batch {
            sequences: 2,
            ..LONE
        };
        assert_eq!(cost.of(pair), None);
        let far = Batch {
            context: 2000,
            ..LONE
        };
        assert_eq!(cost.of(far), None);
        (0..BASE_AGE).for_each(|_| cost.observe(LONE, 4.0, MILLI * 3));
        assert_eq!(cost.of(LONE), None, "the base is old");
    }

    #[test]
    fn a_jump_of_the_context_is_not_taken_for_the_cost_of_drafts() {
        let mut cost = StepCost::default();
        burst(&mut cost, LONE, MILLI);
        (0..11).for_each(|_| cost.observe(LONE, 4.0, MILLI.mul_f64(1.2)));
        let before = cost.of(LONE).unwrap().1 * 10.0;
        let far = Batch {
            context: 50_000,
            ..LONE
        };
        cost.observe(far, 2.0, MILLI * 10);
        burst(&mut cost, far, MILLI * 10);
        let (base, per_draft) = cost.of(far).unwrap();
        assert!((base - 1e-2).abs() < 1e-9 && (per_draft - before).abs() < 1e-9);
    }

    #[test]
    fn steps_that_were_held_up_do_not_turn_the_judgement() {
        let mut cost = StepCost::default();
        for step in 0..90u32 {
            // Every fifth step is held up, drafted or not.
            let held_up = if step % 5 == 0 { 20 } else { 1 };
            let drafts = if step % 16 < 4 { 0.0 } else { 2.0 };
            let time = MILLI.mul_f64(1.0 + 0.1 * drafts) * held_up;
            cost.observe(LONE, drafts, time);
        }
        let (base, per_draft) = cost.of(LONE).unwrap();
        assert!((base - 1e-3).abs() < 1e-6, "{base}");
        assert!((per_draft - 0.1e-3).abs() < 1e-6, "{per_draft}");
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

    #[test]
    fn rows_of_prefill_are_as_many_as_the_time_allows() {
        let mut cost = StepCost::default();
        assert_eq!(cost.prefill_rows(LONE, 2.5), None);
        burst(&mut cost, LONE, MILLI);
        assert_eq!(cost.prefill_rows(LONE, 2.5), None);
        // 100 rows take 10 ms more than a step of the batch alone.
        (0..9).for_each(|_| cost.observe_prefill(LONE, 100, MILLI * 11));
        assert_eq!(cost.prefill_rows(LONE, 2.5), Some(15));
    }
}
