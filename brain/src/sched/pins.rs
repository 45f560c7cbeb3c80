//! Pins: the newest anchors of each run, held for a lease and within a quota.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::prefix::{AnchorId, CacheConfig, Origin};

/// Where in its run an anchor lies. A run has one pin for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// At the end of a prompt: a client that writes the answer anew comes back to it.
    Prompt,
    /// At the end of a generation: a client that keeps the answer's tokens comes back to it.
    End,
}

#[derive(Debug)]
struct Pin {
    anchor: AnchorId,
    until: Duration,
    bytes: u64,
}

/// All pins, by run and place.
#[derive(Debug, Default)]
pub(super) struct Pins {
    by_run: BTreeMap<(String, Place), Pin>,
}

impl Pins {
    /// Moves a run's pin to a newer anchor; returns the one that it lay on. Beyond a quota the
    /// newer one is remembered, but not held.
    pub(super) fn set(
        &mut self,
        config: &CacheConfig,
        origin: Origin<'_>,
        (run, place): (&str, Place),
        anchor: AnchorId,
        bytes: u64,
    ) -> Option<AnchorId> {
        let key = (run.to_owned(), place);
        let older = self.by_run.remove(&key).map(|pin| pin.anchor);
        let held = |pins: &mut dyn Iterator<Item = &Pin>| -> u64 {
            pins.filter(|pin| pin.until > origin.now)
                .map(|pin| pin.bytes)
                .sum()
        };
        let other = match place {
            Place::Prompt => Place::End,
            Place::End => Place::Prompt,
        };
        let of_run = held(&mut self.by_run.get(&(run.to_owned(), other)).into_iter());
        let of_all = held(&mut self.by_run.values());
        let fits = of_run.saturating_add(bytes) <= config.pin_bytes_per_run
            && of_all.saturating_add(bytes) <= config.pin_bytes;
        let lease = if fits {
            config.pin_lease
        } else {
            Duration::ZERO
        };
        let until = origin.now.saturating_add(lease);
        self.by_run.insert(
            key,
            Pin {
                anchor,
                until,
                bytes,
            },
        );
        older
    }

    /// The anchors held at that time.
    pub(super) fn anchors(&self, now: Duration) -> BTreeSet<AnchorId> {
        let held = self.by_run.values().filter(|pin| pin.until > now);
        held.map(|pin| pin.anchor).collect()
    }

    /// Whose pin lies on an anchor, and where in the run.
    pub(super) fn of(&self, anchor: AnchorId) -> Option<(&str, Place)> {
        let mut pins = self.by_run.iter().filter(|(_, pin)| pin.anchor == anchor);
        pins.next().map(|((run, place), _)| (run.as_str(), *place))
    }

    /// Whether the run has a pin there.
    pub(super) fn has(&self, run: &str, place: Place) -> bool {
        self.by_run.contains_key(&(run.to_owned(), place))
    }

    /// An anchor has taken the place of another.
    pub(super) fn replace(&mut self, older: AnchorId, newer: AnchorId) {
        for pin in self.by_run.values_mut() {
            if pin.anchor == older {
                pin.anchor = newer;
            }
        }
    }

    /// An anchor is gone.
    pub(super) fn forget(&mut self, anchor: AnchorId) {
        self.by_run.retain(|_, pin| pin.anchor != anchor);
    }
}
