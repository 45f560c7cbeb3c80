//! Fairness between runs: who is served next.
//!
//! Fair queueing over rows with one virtual clock. Every account counts the rows it was served;
//! the clock advances by the rows served to anyone, divided by the accounts alive: it reads what a
//! perfectly fair server would have given each. Less served goes first. Who comes, or comes back,
//! starts at the clock, and so can neither save up nor be made to pay for the past. A waiting
//! account stands still while the clock passes it, newcomers behind it: nobody starves.

use std::collections::HashMap;

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

/// Steps of the clock per row, so that a row divides among many accounts.
const PER_ROW: u64 = 1 << 16;

#[derive(Debug)]
struct Share {
    served: u64,
    /// Sequences alive.
    sequences: usize,
}

/// Rows served per account, in steps of the clock.
#[derive(Debug, Default)]
pub struct Shares {
    alive: HashMap<Account, Share>,
    clock: u64,
}

impl Shares {
    /// A sequence of this account comes.
    pub fn enter(&mut self, account: &Account) {
        let share = self.alive.entry(account.clone()).or_insert(Share {
            served: self.clock,
            sequences: 0,
        });
        share.sequences += 1;
    }

    /// A sequence of this account goes.
    pub fn leave(&mut self, account: &Account) {
        if let Some(share) = self.alive.get_mut(account) {
            share.sequences = share.sequences.saturating_sub(1);
            if share.sequences == 0 {
                self.alive.remove(account);
            }
        }
    }

    /// Rows were computed for this account.
    pub fn charge(&mut self, account: &Account, rows: usize) {
        let alive = self.alive.len() as u64;
        if let Some(share) = self.alive.get_mut(account) {
            let steps = rows as u64 * PER_ROW;
            share.served += steps;
            self.clock += steps / alive;
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

    #[test]
    fn a_newcomer_starts_level_and_then_less_served_is_sooner() {
        let mut shares = Shares::default();
        let (old, new) = (Account::of("old", 0), Account::of("new", 1));
        shares.enter(&old);
        shares.charge(&old, 80);
        shares.enter(&new);
        assert_eq!(shares.level(&new), shares.level(&old));
        shares.charge(&new, 10);
        assert!(shares.level(&old) < shares.level(&new));
    }

    #[test]
    fn an_endless_stream_of_newcomers_passes_nobody_for_long() {
        let mut shares = Shares::default();
        let waiting = Account::of("waiting", 0);
        shares.enter(&waiting);
        shares.charge(&waiting, 500);
        let passed = (1..10_000)
            .take_while(|&n| {
                let newcomer = Account::of("", n);
                shares.enter(&newcomer);
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
        shares.enter(&run);
        shares.enter(&run);
        shares.charge(&run, 5);
        shares.leave(&run);
        assert_eq!(shares.level(&run), 5 * PER_ROW);
        shares.leave(&run);
        assert!(shares.alive.is_empty());
    }
}
