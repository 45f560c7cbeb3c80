//! What drafts cost, learned from steps as they are run, and how much may be spent on learning.
//!
//! For each batch size one figure decides: what a draft adds to a step, as a share of the step
//! without drafts. It is measured, not inferred: a few steps without drafts, then a dozen with, close
//! by. Both grow alike as the context does, so that the share stays true for long.
//!
//! Machines are busy with other things too, and a step that was held up says nothing about drafts.
//! So the least of the steps without drafts is compared with a low quantile of those with, and the
//! median of several such trials is believed: one that went wrong changes nothing.
//!
//! Looking costs something: where drafts do not pay, those that are made to see whether they still
//! do not; where they pay, the steps without. Both are spread so thinly that they take
//! [`EXPLORED`] of the time, and a purse keeps what drafts brought and took altogether: when it is
//! empty, nobody drafts until it has filled again. So drafting, right or wrong in what it believes,
//! is never slower than not drafting by much more than that.

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
}

/// What was drafted in a step, in all its sequences together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafted {
    /// Drafts made for the step after it.
    pub made: usize,
    /// Drafts checked.
    pub checked: usize,
    /// Of those, accepted.
    pub accepted: usize,
}

impl Drafted {
    /// Drafts of each sequence: made in one step and checked in the next, each is half of one.
    fn of_each(self, batch: Batch) -> f64 {
        (self.made + self.checked) as f64 / 2.0 / batch.sequences as f64
    }
}

/// Batches of 1, 2, 3–4, 5–8, … sequences.
pub(super) const BATCH_CLASSES: usize = 10;

#[derive(Clone, Debug)]
struct BatchCost {
    /// Seconds of a step without drafts.
    base: Option<f64>,
    /// Context of that step.
    context: usize,
    /// There was one, here or at another context.
    was_based: bool,
    /// Steps with drafts since the base was measured.
    age: u32,
    /// Steps without drafts, one after the other, that will be the next base.
    undrafted: Vec<f64>,
    /// What a draft for every sequence adds, in shares of the base, in the steps of the trial at hand:
    /// making it in one step and checking it in the next.
    trial: Vec<f64>,
    /// What drafts added in a step that made far more than it checked, and how many they were: they are
    /// checked in the next step.
    half: Option<(f64, f64)>,
    /// What a draft adds, of each trial that is over.
    trials: Recent,
    /// What drafts brought less what they took, and what may be spent, in steps.
    purse: f64,
    /// Tokens by drafts, a step and sequence, lately.
    gain: f64,
    /// Steps since the last one in which drafts were made.
    idle: u32,
    /// The drafts that are checked next are a probe.
    probing: bool,
    /// The last probe brought more than it took.
    promising: bool,
    /// Probes in a row that brought nothing.
    vain_probes: u32,
}

impl Default for BatchCost {
    fn default() -> Self {
        Self {
            base: None,
            context: 0,
            was_based: false,
            age: 0,
            undrafted: Vec::new(),
            trial: Vec::new(),
            half: None,
            trials: Recent::default(),
            purse: PURSE / 2.0,
            gain: 0.0,
            idle: 0,
            probing: false,
            promising: false,
            vain_probes: 0,
        }
    }
}

/// The newest of some measurements.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent(VecDeque<f64>);

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
/// Share of the base that a draft for all is guessed to cost before one was measured.
const COST_GUESS: f64 = 0.1;
/// Share of the time that is spent on learning.
const EXPLORED: f64 = 0.005;
/// Steps that the purse holds at most.
const PURSE: f64 = 8.0;
/// Probes in vain make the next one wait longer, by up to so many doublings.
const PROBE_DOUBLINGS: u32 = 2;
/// Steps with drafts after which there is a new trial, at least.
const BASE_AGE: f64 = 128.0;
/// What the gain of a step weighs in the mean.
const NEW_GAIN: f64 = 0.05;

impl Recent {
    pub(super) fn push(&mut self, value: f64) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The middle one; the larger of two.
    pub(super) fn median(&self) -> Option<f64> {
        quantile(self.0.iter().copied().collect(), 0.5)
    }
}

/// The value that this share lies below.
pub(super) fn quantile(mut values: Vec<f64>, share: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * share) as usize).copied()
}

impl StepCost {
    /// Takes in how long a step took that only decoded, and what was drafted in it.
    pub fn observe(&mut self, batch: Batch, drafted: Drafted, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if batch.sequences == 0 || seconds <= 0.0 {
            return;
        }
        let guess = self.guess(batch);
        let cost = &mut self.by_batch[class(batch.sequences)];
        if !cost.is_near(batch.context) {
            cost.base = None;
            cost.undrafted.clear();
            cost.half = None;
        }
        let drafts = drafted.of_each(batch);
        cost.account(batch, drafted, cost.share().unwrap_or(guess));
        if drafts == 0.0 {
            cost.half = None;
            cost.rebase(seconds, batch.context);
            return;
        }
        cost.undrafted.clear();
        cost.age += 1;
        let Some(base) = cost.base else {
            // Nothing to compare with; a step with drafts says nothing about one without.
            return;
        };
        // Few drafts between many sequences are drowned by how steps waver.
        if drafts >= 0.25 {
            cost.try_out(seconds / base - 1.0, drafts, drafted);
        }
    }

    /// What a draft for every sequence adds to a step, as a share of it; `None` while nobody is to
    /// draft: because steps without drafts have to be measured, or the purse is empty.
    pub fn share(&self, batch: Batch) -> Option<f64> {
        let cost = &self.by_batch[class(batch.sequences)];
        if cost.wants_base() || cost.purse <= 0.0 {
            return None;
        }
        let share = cost.share().unwrap_or_else(|| self.guess(batch));
        Some(share.max(LEAST_COST))
    }

    /// Whether the cost of drafts is only guessed.
    pub fn is_guessed(&self, batch: Batch) -> bool {
        let cost = &self.by_batch[class(batch.sequences)];
        cost.trials.len() == 0 && cost.trial.len() < TRIAL / 3
    }

    /// Whether nobody has drafted for so long that all sequences should try a draft.
    pub fn wants_probe(&self, batch: Batch) -> bool {
        self.share(batch)
            .is_some_and(|share| self.by_batch[class(batch.sequences)].probe_is_due(share))
    }

    /// Whether sequences of such batches draft, more than to try it.
    pub fn drafts(&self, batch: Batch) -> bool {
        let cost = &self.by_batch[class(batch.sequences)];
        cost.idle == 0 && !cost.probing
    }

    /// From the nearest batch size that knows.
    fn guess(&self, batch: Batch) -> f64 {
        let own = class(batch.sequences);
        let known = self.by_batch.iter().enumerate();
        let known = known.filter_map(|(at, cost)| Some((at.abs_diff(own), cost.trials.median()?)));
        let nearest = known.min_by_key(|(distance, _)| *distance);
        nearest.map_or(COST_GUESS, |(_, share)| share.max(LEAST_COST))
    }
}

impl BatchCost {
    /// Books what drafts brought and took, at that share of a step for each.
    fn account(&mut self, batch: Batch, drafted: Drafted, share: f64) {
        let spent = drafted.of_each(batch) * share;
        let brought = drafted.accepted as f64 / batch.sequences as f64;
        let earned = EXPLORED * (1.0 + spent) + brought - spent;
        self.purse = (self.purse + earned).clamp(-PURSE, PURSE);
        self.gain += NEW_GAIN * (brought - self.gain);
        if self.probing && drafted.checked > 0 {
            self.promising = drafted.accepted as f64 > share * drafted.checked as f64;
            self.vain_probes = if self.promising {
                0
            } else {
                self.vain_probes + 1
            };
            self.probing = false;
        }
        if drafted.made == 0 {
            self.idle = self.idle.saturating_add(1);
        } else {
            self.probing |= self.idle > 0;
            self.promising = false;
            self.idle = 0;
        }
    }

    /// A step without drafts. The last one in a row of them is always part of a new base: while
    /// nobody drafts, the base stays new.
    fn rebase(&mut self, seconds: f64, context: usize) {
        self.context = context;
        self.undrafted.push(seconds);
        if self.undrafted.len() >= BURST {
            self.base = self.undrafted.drain(..).min_by(f64::total_cmp);
            (self.age, self.was_based) = (0, true);
        }
    }

    /// A step with so many drafts a sequence, which added that share of the base. Making a draft and
    /// checking it do not cost the same: one of the two alone says nothing.
    fn try_out(&mut self, added: f64, drafts: f64, Drafted { made, checked, .. }: Drafted) {
        let half = self.half.take();
        if self.age as usize > TRIAL {
            return;
        }
        let balanced = made.min(checked) * 2 >= made.max(checked);
        if !balanced && made > checked {
            self.half = Some((added, drafts));
            return;
        }
        let before = match balanced {
            true => Some((0.0, 0.0)),
            false => half,
        };
        let Some((before, drafts_before)) = before else {
            return;
        };
        let added = (before + added) / (drafts_before + drafts);
        self.trial.push(added);
        if self.trial.len() == TRIAL {
            let result = quantile(std::mem::take(&mut self.trial), QUANTILE);
            result
                .into_iter()
                .for_each(|result| self.trials.push(result));
        }
    }

    /// What a draft for every sequence adds, in shares of the base.
    fn share(&self) -> Option<f64> {
        let so_far = || quantile(self.trial.clone(), 0.5);
        self.trials.median().or_else(so_far)
    }

    /// Whether steps without drafts have to be measured: at first, and then as often as can be
    /// afforded.
    fn wants_base(&self) -> bool {
        let trials = self.trials.len();
        let affordable = BURST as f64 * self.gain / EXPLORED;
        let due = match trials {
            0 if !self.was_based => return true,
            0..FIRST_TRIALS => (TRIAL as f64).max(affordable / 10.0),
            _ => BASE_AGE.max(affordable),
        };
        f64::from(self.age) >= due
    }

    fn is_near(&self, context: usize) -> bool {
        self.context.abs_diff(context) <= (self.context / 4).max(256)
    }

    fn probe_is_due(&self, share: f64) -> bool {
        let pause = share / EXPLORED * f64::from(1 << self.vain_probes.min(PROBE_DOUBLINGS));
        !self.probing && (self.promising || f64::from(self.idle) >= pause)
    }
}

pub(super) fn class(sequences: usize) -> usize {
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

    const NONE: Drafted = Drafted {
        made: 0,
        checked: 0,
        accepted: 0,
    };

    /// A step that makes and checks so many drafts, of which as many are right.
    fn of(drafts: usize, accepted: usize) -> Drafted {
        Drafted {
            made: drafts,
            checked: drafts,
            accepted,
        }
    }

    /// As many steps without drafts as make a base.
    fn burst(cost: &mut StepCost, batch: Batch, time: Duration) {
        (0..BURST).for_each(|_| cost.observe(batch, NONE, time));
    }

    #[test]
    fn the_share_of_a_draft_is_found_for_a_lone_sequence_and_for_many() {
        let mut cost = StepCost::default();
        assert_eq!(cost.share(LONE), None);
        cost.observe(LONE, of(4, 4), MILLI);
        assert_eq!(cost.share(LONE), None, "a step with drafts is no base");
        burst(&mut cost, LONE, MILLI);
        assert!(cost.is_guessed(LONE));
        for _ in 0..TRIAL {
            cost.observe(LONE, of(4, 4), MILLI * 3);
        }
        cost.observe(LONE, NONE, MILLI);
        assert!(!cost.is_guessed(LONE));
        let share = |cost: &StepCost, batch| {
            let cost: &BatchCost = &cost.by_batch[class(batch)];
            cost.share()
        };
        assert!((share(&cost, 1).unwrap() - 0.5).abs() < 1e-6);
        let crowd = Batch {
            sequences: 4,
            ..LONE
        };
        assert!(
            (cost.guess(crowd) - 0.5).abs() < 1e-6,
            "as if it were alone"
        );
        burst(&mut cost, crowd, MILLI);
        // Two drafts for each.
        (0..TRIAL).for_each(|_| cost.observe(crowd, of(8, 8), MILLI * 3));
        assert!((share(&cost, 4).unwrap() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn drafts_of_one_trial_are_not_taken_for_those_of_another() {
        let mut cost = StepCost::default();
        // Making one takes a tenth of a step, checking it a whole one.
        let step = |cost: &mut StepCost, made: usize, checked: usize| {
            let drafted = Drafted {
                made,
                checked,
                accepted: checked,
            };
            let time = 1.0 + 0.1 * made as f64 + checked as f64;
            cost.observe(LONE, drafted, MILLI.mul_f64(time));
        };
        burst(&mut cost, LONE, MILLI);
        for _ in 0..TRIAL {
            [(2, 0), (2, 2), (0, 2), (0, 0), (1, 0), (0, 1), (0, 0)]
                .iter()
                .for_each(|&(made, checked)| step(&mut cost, made, checked));
        }
        let share = cost.by_batch[class(1)].share().unwrap();
        assert!((share - 1.1).abs() < 1e-6, "{share}");
    }

    #[test]
    fn a_jump_of_the_context_is_not_taken_for_the_cost_of_drafts() {
        let mut cost = StepCost::default();
        burst(&mut cost, LONE, MILLI);
        (0..TRIAL).for_each(|_| cost.observe(LONE, of(2, 2), MILLI.mul_f64(1.2)));
        let far = Batch {
            context: 50_000,
            ..LONE
        };
        (0..TRIAL).for_each(|_| cost.observe(far, of(2, 2), MILLI * 12));
        burst(&mut cost, far, MILLI * 10);
        assert!((cost.share(far).unwrap() - 0.1).abs() < 1e-6);
    }

    #[test]
    fn steps_that_were_held_up_do_not_turn_the_judgement() {
        let mut cost = StepCost::default();
        for step in 0..90u32 {
            // Every fifth step is held up, drafted or not.
            let held_up = if step % 5 == 0 { 20 } else { 1 };
            let drafts = if step % 16 < 4 { 0 } else { 2 };
            let time = MILLI.mul_f64(1.0 + 0.1 * f64::from(drafts)) * held_up;
            cost.observe(LONE, of(drafts as usize, drafts as usize), time);
        }
        let share = cost.by_batch[class(1)].share().unwrap();
        assert!((share - 0.1).abs() < 1e-6, "{share}");
    }

    /// A cost at which a draft takes half a step.
    fn measured() -> StepCost {
        let mut cost = StepCost::default();
        for _ in 0..FIRST_TRIALS {
            burst(&mut cost, LONE, MILLI);
            (0..TRIAL).for_each(|_| cost.observe(LONE, of(1, 1), MILLI.mul_f64(1.5)));
        }
        burst(&mut cost, LONE, MILLI);
        cost
    }

    /// Steps until a probe is due; then it is made, and checked.
    fn probe(cost: &mut StepCost, accepted: usize) -> u32 {
        let mut steps = 0;
        while !cost.wants_probe(LONE) {
            cost.observe(LONE, NONE, MILLI);
            steps += 1;
        }
        let made = Drafted { made: 1, ..NONE };
        cost.observe(LONE, made, MILLI.mul_f64(1.25));
        assert!(!cost.wants_probe(LONE), "its result is waited for");
        let checked = Drafted {
            checked: 1,
            accepted,
            ..NONE
        };
        cost.observe(LONE, checked, MILLI.mul_f64(1.25));
        steps
    }

    #[test]
    fn probes_take_their_share_of_the_time_and_go_on_while_they_pay() {
        let mut cost = measured();
        let pause = (0.5 / EXPLORED) as u32;
        let waits = [0; 5].map(|accepted| probe(&mut cost, accepted));
        // The last step of those that measured made a draft.
        let pauses = [1, 2, 4, 4, 4].map(|times| times * pause);
        let near = waits.iter().zip(pauses);
        assert!(
            near.into_iter()
                .all(|(a, b)| a.abs_diff(b) <= BURST as u32 + 1),
            "{waits:?}"
        );
        probe(&mut cost, 1);
        assert_eq!(probe(&mut cost, 1), 0, "it paid: another at once");
        assert_eq!(probe(&mut cost, 0), 0);
        assert!(probe(&mut cost, 0) > pause - 3);
    }

    #[test]
    fn who_loses_stops_and_may_go_on_when_the_purse_has_filled() {
        let mut cost = measured();
        let mut drafted = 0;
        while cost.share(LONE).is_some() {
            cost.observe(LONE, of(1, 0), MILLI.mul_f64(1.5));
            drafted += 1;
        }
        assert!(
            (8..=20).contains(&drafted),
            "{drafted} rounds at half a step each"
        );
        let mut waited = 0;
        while cost.share(LONE).is_none() {
            cost.observe(LONE, NONE, MILLI);
            waited += 1;
        }
        assert!(waited <= (0.6 / EXPLORED) as u32, "{waited}");
    }
}
