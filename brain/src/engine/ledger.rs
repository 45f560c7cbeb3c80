//! The usage ledger: what each run took since it was first seen, whatever became of brain since.
//!
//! Kept in memory and written by the thread that writes logs; a brain that is killed loses at most
//! the sums of the steps that it had just run.

use std::{collections::HashMap, sync::Arc};

use crate::snapshot::ledger::{RunUsage, Sums};

/// Runs told apart, at most. Beyond that the one that has been quiet longest is added to its
/// caller's nameless requests.
const MOST_RUNS: usize = 4096;

type Name = (Arc<str>, Arc<str>);

#[derive(Debug, Default)]
struct Entry {
    usage: RunUsage,
    /// When it last changed, in changes of the ledger.
    changed: u64,
}

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    runs: HashMap<Name, Entry>,
    changes: u64,
    /// Runs that were added to another one since they were last asked for.
    gone: Vec<Name>,
}

impl Ledger {
    /// Takes in what a predecessor wrote, in order.
    pub(super) fn take_in(&mut self, sums: Vec<Sums>) {
        for Sums { owner, run, usage } in sums {
            let name = (owner.into(), run.into());
            self.changes += 1;
            let changed = self.changes;
            // Which runs are told apart was decided when this was written.
            match usage == RunUsage::default() {
                true => self.runs.remove(&name),
                false => self.runs.insert(name, Entry { usage, changed }),
            };
        }
    }

    /// Adds to what a run took.
    pub(super) fn add(&mut self, owner: &Arc<str>, run: &Arc<str>, more: &RunUsage) {
        self.entry(&(owner.clone(), run.clone())).usage.add(more);
    }

    fn entry(&mut self, name: &Name) -> &mut Entry {
        self.changes += 1;
        let changes = self.changes;
        if !self.runs.contains_key(name) && self.runs.len() >= MOST_RUNS {
            self.fold_quietest();
        }
        let entry = self.runs.entry(name.clone()).or_default();
        entry.changed = changes;
        entry
    }

    fn fold_quietest(&mut self) {
        let named = self.runs.iter().filter(|((_, run), _)| !run.is_empty());
        let quietest = named.min_by_key(|(_, entry)| entry.changed);
        let Some(name) = quietest.map(|(name, _)| name.clone()) else {
            return;
        };
        if let Some(entry) = self.runs.remove(&name) {
            let nameless = (name.0.clone(), "".into());
            let into = self.runs.entry(nameless).or_default();
            into.usage.add(&entry.usage);
            into.changed = self.changes;
            self.gone.push(name);
        }
    }

    /// What the caller's runs took, by name.
    pub(super) fn of(&self, owner: &str) -> Vec<(Arc<str>, RunUsage)> {
        let own = self.runs.iter().filter(|((of, _), _)| &**of == owner);
        let mut own: Vec<_> = own
            .map(|((_, run), entry)| (run.clone(), entry.usage))
            .collect();
        own.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        own
    }

    /// What one of the caller's runs took.
    pub(super) fn of_run(&self, owner: &str, run: &str) -> Option<RunUsage> {
        let name = (owner.into(), run.into());
        self.runs.get(&name).map(|entry| entry.usage)
    }

    /// The sums that changed after the given number of changes, and the number now. Runs that are
    /// gone come with nothing.
    pub(super) fn changed_after(&mut self, changes: u64) -> (Vec<Sums>, u64) {
        let gone = self.gone.drain(..).map(|name| (name, RunUsage::default()));
        let gone: Vec<_> = gone.collect();
        let changed = self.runs.iter().filter(|(_, run)| run.changed > changes);
        let changed = changed.map(|(name, run)| (name.clone(), run.usage));
        let sums = gone
            .into_iter()
            .chain(changed)
            .map(|((owner, run), usage)| Sums {
                owner: (*owner).to_owned(),
                run: (*run).to_owned(),
                usage,
            });
        (sums.collect(), self.changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(generated_tokens: u64) -> RunUsage {
        RunUsage {
            generated_tokens,
            ..RunUsage::default()
        }
    }

    #[test]
    fn runs_of_one_name_and_two_callers_are_two() {
        let mut ledger = Ledger::default();
        let (mine, theirs, run): (Arc<str>, Arc<str>, Arc<str>) =
            ("me".into(), "them".into(), "run".into());
        ledger.add(&mine, &run, &tokens(3));
        ledger.add(&theirs, &run, &tokens(5));
        ledger.add(&mine, &run, &tokens(4));
        assert_eq!(ledger.of("me"), [(run.clone(), tokens(7))]);
        assert_eq!(ledger.of_run("them", "run"), Some(tokens(5)));
        assert_eq!(ledger.of_run("nobody", "run"), None);
    }

    #[test]
    fn a_successor_reads_what_was_told_of_changes() {
        let mut ledger = Ledger::default();
        let owner: Arc<str> = "me".into();
        let (mut written, mut seen) = (Vec::new(), 0);
        for step in 0..3 * MOST_RUNS {
            let run = format!("run {}", step % (MOST_RUNS + 100));
            ledger.add(&owner, &run.into(), &tokens(1));
            if step % 100 == 0 {
                let (sums, changes) = ledger.changed_after(seen);
                written.extend(sums);
                seen = changes;
            }
        }
        written.extend(ledger.changed_after(seen).0);
        assert_eq!(ledger.changed_after(ledger.changes).0, []);
        let mut successor = Ledger::default();
        successor.take_in(written);
        assert!(successor.of("me") == ledger.of("me"), "other sums");
        let all: u64 = ledger
            .of("me")
            .iter()
            .map(|(_, run)| run.generated_tokens)
            .sum();
        assert_eq!(all, 3 * MOST_RUNS as u64, "nothing is lost");
        assert!(ledger.runs.len() <= MOST_RUNS + 1);
    }
}
