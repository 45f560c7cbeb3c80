//! How many tokens of a prompt are computed beside sequences that decode.
//!
//! A prompt of any length must make nobody wait much longer than usual for the next token. So a step
//! gets as many rows of prefill as make it a set number of times as long as the steps before, by what
//! such rows were seen to take. What a row takes depends on how many tokens lie before it, on how
//! many rows there are, and on the machine: so the newest steps count, what was seen at a shorter
//! context is scaled up, and rows grow step by step, never by a leap into what was not seen.
//!
//! Pure: times come in as numbers, and nothing here can change a token.

use std::{collections::VecDeque, time::Duration};

use super::cost::{BATCH_CLASSES, Batch, Recent, class, quantile};

/// What steps take that decode, and what rows of prefill beside them add.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    /// Seconds of the newest steps that only decoded, drafts and all, by size of the batch.
    usual: [VecDeque<f64>; BATCH_CLASSES],
    /// Steps beside a prompt since one only decoded, by size of the batch.
    unseen: [usize; BATCH_CLASSES],
    /// The newest steps that did both.
    beside: VecDeque<Seen>,
    /// Seconds a row, of the newest steps that computed nothing but prompts.
    alone: Recent,
}

/// What rows of prefill added to a step.
#[derive(Clone, Copy, Debug)]
struct Seen {
    rows: usize,
    /// Tokens before them, on average.
    context: usize,
    /// Seconds a row.
    each: f64,
}

/// Steps that are remembered: that did both, and that only decoded.
const REMEMBERED: usize = 9;
const USUAL: usize = 32;
/// What is usual: a quarter of them took no longer. Those were not held up, even where most were.
const QUIET: f64 = 0.25;
/// Which of them is believed: two thirds took no longer. One that was held up is none of them.
const BELIEVED: f64 = 2.0 / 3.0;
/// Steps that only decode before any prompt is computed beside them: who waits for what is usual
/// must know it.
const FIRST: usize = 3;
/// Steps beside prompts after which one only decodes: those who decode get longer and machines get
/// busy, and by an old measure a long prompt would get a row at a time, or far too many.
const LOOK_AGAIN: usize = 16;
/// Rows beside sequences that decode when none were seen yet, and at most so many times what was.
const FIRST_ROWS: usize = 4;
const GROWTH: usize = 2;
/// Rows where no step takes any time: there is nothing to go by.
const TIMELESS_ROWS: usize = 16;
/// Rows cost something, whatever the clock says: this share of a step all together.
const LEAST_COST: f64 = 0.01;

/// What is left of a step for rows of prefill.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Room {
    /// None in this step: what those usually take that only decode has to be seen first, or again.
    Later,
    /// So many seconds.
    Seconds(f64),
    /// So many rows: there is no time to go by.
    Rows(usize),
}

impl Pace {
    /// Takes in how long a step took that only decoded.
    pub fn observe_decode(&mut self, batch: Batch, elapsed: Duration) {
        self.unseen[class(batch.sequences)] = 0;
        let usual = &mut self.usual[class(batch.sequences)];
        if usual.len() == USUAL {
            usual.pop_front();
        }
        usual.push_back(elapsed.as_secs_f64());
    }

    /// Takes in how long a step took that computed `rows` of prompts, with `context` tokens before
    /// them on average, beside a batch or alone.
    pub fn observe_prefill(
        &mut self,
        batch: Batch,
        (rows, context): (usize, usize),
        elapsed: Duration,
    ) {
        let seconds = elapsed.as_secs_f64();
        if rows == 0 || seconds <= 0.0 {
            return;
        }
        if batch.sequences == 0 {
            self.alone.push(seconds / rows as f64);
            return;
        }
        self.unseen[class(batch.sequences)] += 1;
        let Some(usual) = self.usual_of(batch) else {
            return;
        };
        if self.beside.len() == REMEMBERED {
            self.beside.pop_front();
        }
        let added = (seconds - usual).max(LEAST_COST * usual);
        self.beside.push_back(Seen {
            rows,
            context,
            each: added / rows as f64,
        });
    }

    /// What rows of prefill may add to a step of this batch that is to take at most `times` as long
    /// as usual.
    pub fn room(&self, batch: Batch, times: f64) -> Room {
        let class = class(batch.sequences);
        if self.usual[class].len() < FIRST || self.unseen[class] >= LOOK_AGAIN {
            return Room::Later;
        }
        match self.usual_of(batch) {
            Some(usual) => Room::Seconds((times - 1.0) * usual),
            None => Room::Rows(TIMELESS_ROWS),
        }
    }

    /// Rows with `context` tokens before them that fit into the room.
    pub fn rows(&self, context: usize, room: Room) -> usize {
        let seconds = match room {
            Room::Later => return 0,
            Room::Rows(rows) => return rows,
            Room::Seconds(seconds) => seconds,
        };
        let seen = self.beside.iter().map(|seen| seen.rows * GROWTH).max();
        let most = seen.map_or(FIRST_ROWS, |most| most.max(FIRST_ROWS));
        ((seconds / self.each(context)) as usize).min(most)
    }

    /// What is left of the room behind so many rows.
    pub fn room_behind(&self, room: Room, rows: usize, context: usize) -> Room {
        match room {
            Room::Later => Room::Later,
            Room::Rows(left) => Room::Rows(left.saturating_sub(rows)),
            Room::Seconds(left) => {
                Room::Seconds((left - rows as f64 * self.each(context)).max(0.0))
            }
        }
    }

    /// Seconds that a row of a prompt takes, if any was seen: alone, if any was.
    pub fn of_row(&self) -> Option<f64> {
        let beside = || quantile(self.beside.iter().map(|seen| seen.each).collect(), 0.5);
        self.alone.median().or_else(beside)
    }

    /// Seconds of a row with so many tokens before it. Attention is what grows, and it is never all
    /// of a row: in proportion to the context is too much rather than too little.
    fn each(&self, context: usize) -> f64 {
        let scaled =
            |seen: &Seen| seen.each * (context as f64 / seen.context.max(1) as f64).max(1.0);
        let seen = quantile(self.beside.iter().map(scaled).collect(), BELIEVED);
        // Few rows share what a step of prompts alone shares among many.
        let alone = || self.alone.median().map(|each| 2.0 * each);
        seen.or_else(alone).unwrap_or(f64::MIN_POSITIVE)
    }

    /// `None` when no time passed.
    fn usual_of(&self, batch: Batch) -> Option<f64> {
        let usual = &self.usual[class(batch.sequences)];
        let usual = quantile(usual.iter().copied().collect(), QUIET);
        usual.filter(|&seconds| seconds > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONE: Batch = Batch {
        sequences: 1,
        context: 1000,
    };
    const MILLI: Duration = Duration::from_millis(1);

    /// Computes a prompt beside a lone sequence on a machine that takes `cost(rows, context)`
    /// milliseconds a step; returns the longest step, and how many there were.
    fn prefill(
        pace: &mut Pace,
        (mut context, end): (usize, usize),
        mut cost: impl FnMut(usize, usize) -> f64,
    ) -> (f64, usize) {
        let (mut longest, mut steps) = (0.0f64, 0);
        while context < end {
            let room = pace.room(LONE, 2.5);
            if room == Room::Later {
                pace.observe_decode(LONE, MILLI.mul_f64(cost(0, context)));
                continue;
            }
            let rows = pace.rows(context, room).max(1);
            let rows = rows.min(end - context);
            let took = cost(rows, context);
            longest = longest.max(took);
            pace.observe_prefill(LONE, (rows, context), MILLI.mul_f64(took));
            context += rows;
            steps += 1;
            assert!(steps < 100_000, "the prompt gets nowhere");
        }
        (longest, steps)
    }

    fn used_to(usual: f64) -> Pace {
        let mut pace = Pace::default();
        (0..9).for_each(|_| pace.observe_decode(LONE, MILLI.mul_f64(usual)));
        pace
    }

    #[test]
    fn what_is_usual_is_seen_before_anybody_is_made_to_wait() {
        let mut pace = Pace::default();
        for _ in 0..FIRST {
            assert_eq!(pace.room(LONE, 2.5), Room::Later);
            assert_eq!(pace.rows(0, Room::Later), 0);
            pace.observe_decode(LONE, MILLI);
        }
        assert!(
            matches!(pace.room(LONE, 2.5), Room::Seconds(left) if (left - 1.5e-3).abs() < 1e-9)
        );
        let crowd = Batch {
            sequences: 9,
            ..LONE
        };
        assert_eq!(
            pace.room(crowd, 2.5),
            Room::Later,
            "another batch is another step"
        );
    }

    #[test]
    fn no_step_is_longer_than_it_may_be_on_any_machine_at_any_context() {
        // A part for any rows at all, a part for each, and one that grows with what lies before.
        for (fixed, each, attention) in [
            (0.0, 0.15, 0.0),
            (0.3, 0.05, 2e-5),
            (0.0, 0.002, 1e-6),
            (0.4, 0.2, 1e-5),
            (0.0, 0.0, 1e-6),
        ] {
            let cost = |rows: usize, context: usize| match rows {
                0 => 1.0,
                _ => 1.0 + fixed + rows as f64 * (each + attention * context as f64),
            };
            let mut pace = used_to(1.0);
            let (longest, steps) = prefill(&mut pace, (0, 50_000), cost);
            let least = 1.0 + fixed + each + attention * 50_000.0;
            assert!(
                longest <= least.max(2.6),
                "{longest} with {fixed} {each} {attention}"
            );
            // What may be used is used: never less than half of it, on average.
            let work: f64 = (0..50_000).map(|at| each + attention * f64::from(at)).sum();
            let fewest = work / (1.5 - fixed);
            assert!(
                steps as f64 <= 2.0 * fewest + 200.0,
                "{steps} steps where {fewest:.0} do, with {fixed} {each} {attention}"
            );
            // Another prompt begins deep in what is known.
            let (longest, _) = prefill(&mut pace, (40_000, 41_000), cost);
            assert!(longest <= least.max(2.6), "{longest} from the cache");
        }
    }

    #[test]
    fn steps_that_were_held_up_slow_a_prompt_down_little() {
        let mut step = 0;
        let mut held_up = |rows: usize, _: usize| {
            step += 1;
            let factor = if step % 6 == 0 { 8.0 } else { 1.0 };
            factor * (1.0 + 0.1 * rows as f64)
        };
        let mut pace = used_to(1.0);
        let (_, steps) = prefill(&mut pace, (0, 6000), &mut held_up);
        assert!(steps < 700, "{steps} steps where 400 do");
    }

    #[test]
    fn a_machine_that_was_busy_before_the_prompt_came_is_not_taken_for_a_slow_one() {
        let mut pace = used_to(1.0);
        (0..20).for_each(|_| pace.observe_decode(LONE, MILLI * 5));
        let (longest, _) = prefill(&mut pace, (0, 6000), |rows, _| 1.0 + 0.1 * rows as f64);
        assert!(longest <= 2.6, "{longest}");
    }

    #[test]
    fn a_machine_that_gets_slow_or_fast_beside_a_prompt_is_seen_again() {
        for (factor, fewest, most) in [(3.0, 400, 1100), (0.3, 100, 700)] {
            let mut pace = used_to(1.0);
            let cost = |rows: usize, _: usize| factor * (1.0 + 0.1 * rows as f64);
            let (_, steps) = prefill(&mut pace, (0, 6000), cost);
            assert!(
                (fewest..most).contains(&steps),
                "{steps} steps where 400 do, on a machine that is {factor} times as slow"
            );
            let (longest, _) = prefill(&mut pace, (6000, 7000), cost);
            assert!(longest <= 2.6 * factor, "{longest} where {factor} is usual");
        }
    }

    #[test]
    fn a_clock_that_stands_still_stops_nothing() {
        let mut pace = Pace::default();
        (0..9).for_each(|_| pace.observe_decode(LONE, Duration::ZERO));
        let room = pace.room(LONE, 2.5);
        assert_eq!(pace.rows(0, room), TIMELESS_ROWS);
        assert_eq!(pace.room_behind(room, 10, 0), Room::Rows(6));
        assert_eq!(pace.of_row(), None);
    }
}
