//! Fairness between runs: who is served next.
//!
//! Fair queueing over rows with one virtual clock. Every account has a weight and counts the rows it
//! was served, divided by it; the clock advances by the rows served to anyone, divided by the weights
//! alive: it reads what a perfectly fair server would have given each. Less served goes first, and so
//! an account of twice the weight gets twice the rows. Who comes, or comes back,
//! starts at the clock, and so can neither save up nor be made to pay for the past. A waiting
//! account stands still while the clock passes it, newcomers behind it: nobody starves.

use std::{collections::HashMap, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

/// Whose account a sequence's rows go to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Account {
    /// A named run: all its sequences share one.
    Run(String),
    /// A request without a run: one of its own.
    Lone(u64),
}

impl Account {
    /// The account of a request: its run's, or its own.
    pub fn of(run_id: &str, sequence: u64) -> Self {
        if run_id.is_empty() {
            Self::Lone(sequence)
        } else {
            Self::Run(run_id.to_owned())
        }
    }
}

/// Steps of the clock per row at weight 1, so that a row divides among many accounts.
const PER_ROW: u64 = 1 << 20;

/// How much more than others a sequence's account gets: twice as much for every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Priority(i8);

impl Priority {
    /// The least and the most.
    pub const RANGE: RangeInclusive<i32> = -4..=4;

    /// A priority; `None` outside the range.
    pub fn new(level: i32) -> Option<Self> {
        let fits = Self::RANGE.contains(&level);
        fits.then(|| i8::try_from(level).ok().map(Self)).flatten()
    }

    /// 16 for the usual one.
    fn weight(self) -> u64 {
        1 << (self.0 - *Self::RANGE.start() as i8)
    }
}

#[derive(Debug)]
struct Share {
    served: u64,
    /// Sequences alive.
    sequences: usize,
    /// Of the newest sequence's priority.
    weight: u64,
}

/// Rows served per account, in steps of the clock.
#[derive(Debug, Default)]
pub struct Shares {
    alive: HashMap<Account, Share>,
    /// Of all that are alive.
    weight: u64,
    clock: u64,
}

impl Shares {
    /// A sequence of this account comes.
    pub fn enter(&mut self, account: &Account, priority: Priority) {
        let share = self.alive.entry(account.clone()).or_insert(Share {
            served: self.clock,
            sequences: 0,
            weight: 0,
        });
        share.sequences += 1;
        self.weight = self.weight - share.weight + priority.weight();
        share.weight = priority.weight();
    }

    /// A sequence of this account goes.
    pub fn leave(&mut self, account: &Account) {
        if let Some(share) = self.alive.get_mut(account) {
            share.sequences = share.sequences.saturating_sub(1);
            if share.sequences == 0 {
                self.weight -= share.weight;
                self.alive.remove(account);
            }
        }
    }

    /// Rows were computed for this account.
    pub fn charge(&mut self, account: &Account, rows: usize) {
        let all = self.weight.max(1);
        if let Some(share) = self.alive.get_mut(account) {
            let steps = rows as u64 * PER_ROW;
            share.served += steps / share.weight.max(1);
            self.clock += steps / all;
        }
    }

    /// Less is sooner.
    pub fn level(&self, account: &Account) -> u64 {
        self.alive
            .get(account)
            .map_or(self.clock, |share| share.served)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Priority = Priority(0);

    #[test]
    fn a_newcomer_starts_level_and_then_less_served_is_sooner() {
        let mut shares = Shares::default();
        let (old, new) = (Account::of("old", 0), Account::of("new", 1));
        shares.enter(&old, USUAL);
        shares.charge(&old, 80);
        shares.enter(&new, USUAL);
        assert_eq!(shares.level(&new), shares.level(&old));
        shares.charge(&new, 10);
        assert!(shares.level(&old) < shares.level(&new));
    }

    #[test]
    fn an_endless_stream_of_newcomers_passes_nobody_for_long() {
        let mut shares = Shares::default();
        let waiting = Account::of("waiting", 0);
        shares.enter(&waiting, USUAL);
        shares.charge(&waiting, 500);
        let passed = (1..10_000)
            .take_while(|&n| {
                let newcomer = Account::of("", n);
                shares.enter(&newcomer, USUAL);
                let sooner = shares.level(&newcomer) < shares.level(&waiting);
                shares.charge(&newcomer, 8);
                shares.leave(&newcomer);
                sooner
            })
            .count();
        assert_eq!(passed, 0, "the clock stood at the only account's level");
    }

    #[test]
    fn an_account_lives_as_long_as_its_sequences() {
        let mut shares = Shares::default();
        let run = Account::of("run", 0);
        shares.enter(&run, USUAL);
        shares.enter(&run, USUAL);
        shares.charge(&run, 5);
        shares.leave(&run);
        assert_eq!(shares.level(&run), 5 * PER_ROW / USUAL.weight());
        shares.leave(&run);
        assert!(shares.alive.is_empty() && shares.weight == 0);
    }

    #[test]
    fn every_step_of_priority_doubles_the_share_and_nobody_starves() {
        let levels = [-4, 0, 1, 4];
        let mut shares = Shares::default();
        let accounts = levels.map(|level| Account::of(&format!("run {level}"), 0));
        for (account, level) in accounts.iter().zip(levels) {
            shares.enter(account, Priority::new(level).unwrap());
        }
        let mut rows = [0u64; 4];
        for _ in 0..10_000 {
            let next = (0..4)
                .min_by_key(|&at| shares.level(&accounts[at]))
                .unwrap();
            shares.charge(&accounts[next], 8);
            rows[next] += 1;
        }
        let weights = levels.map(|level| Priority::new(level).unwrap().weight());
        let all: u64 = weights.iter().sum();
        for (rows, weight) in rows.into_iter().zip(weights) {
            let fair = 10_000 * weight / all;
            assert!(rows.abs_diff(fair) <= 1 + fair / 100, "{rows} of {fair}");
        }
        assert!(Priority::new(5).is_none() && Priority::new(-5).is_none());
    }
}
