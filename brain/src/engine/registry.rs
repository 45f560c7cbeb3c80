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

    /// Generations nobody reads: those whose lease is over at `now`, and of the others that are
    /// still computed the longest unread, until at most `orphans` stay. With the time at which
    /// the next lease may end.
    pub(super) fn overdue(
        &self,
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
            if !ended {
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
        (overdue, next)
    }
}

fn name(generation: &Generation) -> (Arc<str>, String) {
    (generation.owner.clone(), generation.id.clone())
}
