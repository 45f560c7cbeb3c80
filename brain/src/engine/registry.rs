//! The generations that are known, by their callers and the ids these chose.

use std::{collections::HashMap, sync::Arc, time::Duration};

use super::generation::Generation;

/// Known generations.
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_id: HashMap<(Arc<str>, String), Arc<Generation>>,
}

impl Registry {
    /// The generation of this caller under this id.
    pub(super) fn get(&self, owner: &Arc<str>, id: &str) -> Option<&Arc<Generation>> {
        self.by_id.get(&(owner.clone(), id.to_owned()))
    }

    pub(super) fn insert(&mut self, generation: Arc<Generation>) {
        self.by_id.insert(name(&generation), generation);
    }

    /// Forgets a generation, unless the id has passed to another one.
    pub(super) fn remove(&mut self, generation: &Arc<Generation>) {
        let name = name(generation);
        let there = self.by_id.get(&name);
        if there.is_some_and(|there| Arc::ptr_eq(there, generation)) {
            self.by_id.remove(&name);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Generation>> {
        self.by_id.values()
    }

    /// Those not ended.
    pub(super) fn live(&self) -> usize {
        self.all()
            .filter(|generation| !generation.attendance().0)
            .count()
    }

    /// Forgets the ended log that has been quiet longest; false when all are read or computed.
    pub(super) fn forget_one(&mut self) -> bool {
        let quietest = self
            .all()
            .filter_map(|generation| match generation.attendance() {
                (true, Some(since)) => Some((since, generation.clone())),
                _ => None,
            })
            .min_by_key(|(since, _)| *since);
        match quietest {
            Some((_, generation)) => {
                self.remove(&generation);
                true
            }
            None => false,
        }
    }

    /// Takes out generations nobody reads: those whose lease is over at `now`, and of the others
    /// that are still computed the longest unread, until at most `orphans` stay. With the time at
    /// which the next lease may end.
    ///
    /// A generation that a predecessor began has its whole lease: its reader lost brain and had no
    /// say in it.
    pub(super) fn take_overdue(
        &mut self,
        now: Duration,
        lease: Duration,
        orphans: usize,
    ) -> (Vec<Arc<Generation>>, Duration) {
        let (mut overdue, mut kept) = (Vec::new(), Vec::new());
        let mut next = now.saturating_add(lease);
        for generation in self.all() {
            let (ended, Some(since)) = generation.attendance() else {
                continue;
            };
            let until = since.saturating_add(lease);
            if until <= now {
                overdue.push(generation.clone());
                continue;
            }
            next = next.min(until);
            if !ended && !generation.is_awaited() {
                kept.push((since, generation.clone()));
            }
        }
        kept.sort_by_key(|(since, _)| *since);
        let excess = kept.len().saturating_sub(orphans);
        overdue.extend(
            kept.into_iter()
                .take(excess)
                .map(|(_, generation)| generation),
        );
        for generation in &overdue {
            self.remove(generation);
        }
        (overdue, next)
    }
}

fn name(generation: &Generation) -> (Arc<str>, String) {
    (generation.owner.clone(), generation.id.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{
            clock::{Clock, ManualClock},
            generation::Started,
        },
        sched::{request::Request, types::SamplingParams},
    };

    const LEASE: Duration = Duration::from_secs(60);

    fn generation(id: &str, quiet_since: Duration) -> Generation {
        let request = Request::new([1], SamplingParams::greedy(9));
        let started = Started::of(&request, request.hash());
        Generation::new(id.into(), &request, started, Vec::new(), quiet_since)
    }

    fn registry(generations: impl IntoIterator<Item = Generation>) -> Registry {
        let mut registry = Registry::default();
        for generation in generations {
            registry.insert(Arc::new(generation));
        }
        registry
    }

    fn ids(generations: &[Arc<Generation>]) -> Vec<&str> {
        let mut ids: Vec<_> = generations.iter().map(|there| there.id.as_str()).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn who_reads_keeps_its_generation_and_what_is_taken_out_is_not_found() {
        let at = Duration::from_secs;
        let mut registry = registry([generation("read", at(1)), generation("unread", at(1))]);
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::default());
        let read = registry.get(&"".into(), "read").unwrap().clone();
        let reader = read.read_from(0, &clock).unwrap();
        let (overdue, _) = registry.take_overdue(at(61), LEASE, 0);
        assert_eq!(ids(&overdue), ["unread"]);
        assert!(registry.get(&"".into(), "unread").is_none());
        drop(reader);
        let (overdue, _) = registry.take_overdue(at(61), LEASE, 0);
        assert_eq!(ids(&overdue), ["read"]);
        assert_eq!(registry.len(), 0);
    }

    #[test]
    fn what_a_predecessor_began_is_no_orphan_until_somebody_has_read_it() {
        let at = Duration::from_secs;
        let mut registry = registry([
            generation("old", at(1)),
            generation("new", at(2)),
            generation("awaited", at(1)).awaited(),
            generation("left", at(1)).awaited(),
        ]);
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::default());
        let left = registry.get(&"".into(), "left").unwrap().clone();
        drop(left.read_from(0, &clock).unwrap());
        let (overdue, next) = registry.take_overdue(at(3), LEASE, 1);
        assert_eq!((ids(&overdue), next), (vec!["left", "old"], at(61)));
        let (overdue, _) = registry.take_overdue(at(61), LEASE, 1);
        assert_eq!(ids(&overdue), ["awaited"], "its lease is over");
    }
}
