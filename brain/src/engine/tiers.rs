//! The tiers below the device's memory: this machine's memory, and below it the snapshot store.
//!
//! What the prefix cache gives up goes down: its bytes are copied from the device before anything
//! overwrites them, into the host tier and, if they are not on disk yet, to the thread that writes
//! snapshots. What a request's prompt needs comes up: from disk into the host tier while the request
//! waits ([`super::fetch`]), from there into blocks when it is admitted. Each way is taken only where
//! it is sooner than computing the tokens again, by the rates measured so far.

use std::{collections::HashMap, sync::Arc, time::Duration};

use super::{
    clock::Clock,
    fetch::{Fetcher, Job},
    fill::{FromHost, fill},
    host::HostTier,
    saver::Saver,
};
use crate::{
    backend::{ExecError, Executor},
    sched::{
        below::{Below, Dropped, Found},
        image::Restored,
        scheduler::Scheduler,
        tokens::{PrefixKey, TokenList},
        types::{Group, SeqId},
    },
    snapshot::file::Content,
};

/// Bytes fetched for requests that wait that may stand over the host tier's limit.
const STAGED_MOST: u64 = 512 << 20;

/// What went down and came up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Bytes in the host tier, now.
    pub host_bytes: u64,
    /// Bytes copied from the device because the cache gave their blocks up.
    pub spilled_bytes: u64,
    /// Bytes that came back to the device.
    pub loaded_bytes: u64,
    /// Bytes read from disk for requests.
    pub fetched_bytes: u64,
    /// Pieces that wait to be written to disk, now.
    pub saving: usize,
}

/// Bytes a second, as measured: a mean in which the newer count more.
#[derive(Clone, Copy, Debug, Default)]
struct Rate(Option<f64>);

impl Rate {
    fn observe(&mut self, bytes: u64, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        if bytes == 0 || seconds <= 0.0 {
            return;
        }
        let rate = bytes as f64 / seconds;
        self.0 = Some(self.0.map_or(rate, |before| 0.75 * before + 0.25 * rate));
    }

    /// Seconds that so many bytes take; none as long as nothing was measured.
    fn seconds(&self, bytes: u64) -> f64 {
        self.0.map_or(0.0, |rate| bytes as f64 / rate)
    }
}

/// Whether a way that takes so many seconds is sooner than computing the tokens that it spares. As
/// long as one of the two was not measured it is taken, and measured.
fn is_sooner(seconds: f64, spared: usize, row_seconds: Option<f64>) -> bool {
    seconds == 0.0 || row_seconds.is_none_or(|row| seconds < spared as f64 * row)
}

/// See the module's description.
pub(super) struct Tiers {
    host: HostTier,
    host_limit: u64,
    saver: Option<Saver>,
    fetcher: Option<Fetcher>,
    clock: Arc<dyn Clock>,
    stride: usize,
    /// Bytes of a unit.
    unit_bytes: u64,
    /// Fetched for sequences that wait.
    staged: HashMap<SeqId, u64>,
    /// Being read, for sequences that may have been cancelled since.
    under_way: HashMap<SeqId, u64>,
    /// From the host tier to the device.
    load: Rate,
    /// From disk to the host tier.
    read: Rate,
    /// The device does not give its blocks.
    off: bool,
    stats: TierStats,
}

impl Tiers {
    /// Tiers of a host tier of so many bytes and of the store that `saver` writes to.
    pub(super) fn new(
        host_limit: u64,
        saver: Option<Saver>,
        clock: Arc<dyn Clock>,
        scheduler: &Scheduler,
    ) -> std::io::Result<Self> {
        let store = saver.as_ref().map(|saver| saver.store().clone());
        let fetcher = store.map(|store| Fetcher::start(store, clock.clone()));
        let limits = scheduler.limits();
        let per_unit = scheduler.stride() / limits.full_block_size;
        Ok(Self {
            host: HostTier::new(host_limit),
            host_limit,
            saver,
            fetcher: fetcher.transpose()?,
            clock,
            stride: scheduler.stride(),
            unit_bytes: (per_unit * limits.full_block_bytes) as u64,
            staged: HashMap::new(),
            under_way: HashMap::new(),
            load: Rate::default(),
            read: Rate::default(),
            off: false,
            stats: TierStats::default(),
        })
    }

    /// Counters.
    pub(super) fn stats(&self) -> TierStats {
        TierStats {
            host_bytes: self.host.bytes(),
            saving: self.saver.as_ref().map_or(0, Saver::pending),
            ..self.stats
        }
    }

    /// What saves the cache, if anything does.
    pub(super) fn saver(&mut self) -> Option<&mut Saver> {
        self.saver.as_mut()
    }

    /// The same, to end it; nothing is read from disk any more.
    pub(super) fn take_saver(&mut self) -> Option<Saver> {
        self.fetcher.take().into_iter().for_each(Fetcher::end);
        self.saver.take()
    }

    /// With a device to copy from and to, and what the scheduler knows of the cost of prefill.
    pub(super) fn reach<'a>(
        &'a mut self,
        executor: &'a mut dyn Executor,
        row_seconds: Option<f64>,
    ) -> Reach<'a> {
        Reach {
            tiers: self,
            executor,
            row_seconds,
        }
    }

    /// Begins to read from disk what a new sequence needs, if that is worth it; true when it has to
    /// be held until then.
    pub(super) fn prefetch(&mut self, seq: SeqId, scheduler: &Scheduler) -> bool {
        let (Some(saver), Some(fetcher)) = (&self.saver, &mut self.fetcher) else {
            return false;
        };
        let Some((tokens, known, above)) = scheduler.prefix_of(seq) else {
            return false;
        };
        let in_host = self.host.best(tokens, self.stride, known, above);
        let above = in_host.map_or(above, |found| found.image.spares(tokens, self.stride));
        let have = |key: &PrefixKey| self.host.has_unit(key);
        let Some(found) = saver.store().best(tokens, self.stride, known, above, have) else {
            return false;
        };
        let chain = found.chain.iter().enumerate().skip(known);
        let missing = chain.filter(|(_, key)| !self.host.has_unit(key));
        let units: Vec<_> = missing
            .map(|(at, key)| {
                let before = at.checked_sub(1).and_then(|at| found.chain.get(at));
                (*key, before.copied())
            })
            .collect();
        let anchor_bytes = saver.store().anchor_bytes(&found.image);
        let bytes = units.len() as u64 * self.unit_bytes + anchor_bytes;
        let spared = found.image.spares(tokens, self.stride) - above;
        let nobodys = self.under_way.iter();
        let nobodys = nobodys.filter(|(seq, _)| !self.staged.contains_key(*seq));
        let nobodys: u64 = nobodys.map(|(_, bytes)| bytes).sum();
        let staged = self.staged.values().sum::<u64>() + nobodys;
        let takes = self.read.seconds(bytes) + self.load.seconds(bytes);
        let worth = is_sooner(takes, spared, scheduler.row_seconds());
        if !worth || staged + bytes > self.host_limit.max(STAGED_MOST) {
            return false;
        }
        let begun = fetcher.begin(Job { seq, found, units });
        if begun {
            self.staged.insert(seq, bytes);
            self.under_way.insert(seq, bytes);
        }
        begun
    }

    /// Whether something is being read from disk.
    pub(super) fn is_fetching(&self) -> bool {
        self.fetcher.as_ref().is_some_and(Fetcher::is_busy)
    }

    /// Takes in what has been read, waiting at most that long for the first of it; returns the
    /// sequences that need not be held any more.
    pub(super) fn arrived(&mut self, mut patience: Duration) -> Vec<SeqId> {
        let mut arrived = Vec::new();
        let Some(fetcher) = &mut self.fetcher else {
            return arrived;
        };
        while let Some(fetched) = fetcher.next(patience) {
            patience = Duration::ZERO;
            let Job { seq, found, units } = fetched.job;
            arrived.push(seq);
            self.under_way.remove(&seq);
            match fetched.read {
                Ok((bytes, anchor)) => {
                    let read = bytes.iter().map(Vec::len).sum::<usize>() + anchor.len();
                    self.read.observe(read as u64, fetched.elapsed);
                    self.stats.fetched_bytes += read as u64;
                    for ((key, parent), bytes) in units.into_iter().zip(bytes) {
                        self.host.put_unit(key, parent, bytes);
                    }
                    self.host.put_anchor(found.image, anchor);
                }
                Err(reason) => {
                    self.staged.remove(&seq);
                    tracing::warn!(
                        reason,
                        "a saved prefix cannot be used; it is computed again"
                    );
                }
            }
        }
        if !fetcher.is_busy() {
            // Whatever became of the reading, nobody is held for nothing.
            arrived.extend(self.staged.keys());
            self.under_way.clear();
        }
        arrived
    }

    /// Lets go of what was fetched for sequences that wait no more.
    pub(super) fn settle(&mut self, scheduler: &Scheduler) {
        self.staged.retain(|seq, _| scheduler.is_waiting(*seq));
        // What arrives for one that was cancelled in the meantime is nobody's.
        self.host.trim(self.staged.values().sum());
    }

    fn save(&mut self, dropped: &Dropped, executor: &mut dyn Executor) -> Result<(), ExecError> {
        let store = self.saver.as_ref().map(|saver| saver.store().clone());
        let to_host = self.host_limit > 0;
        // From the first unit on, so that what the disk gets follows what it has.
        for unit in dropped.units.iter().rev() {
            let in_host = self.host.has_unit(&unit.key);
            let up = to_host && !in_host && (dropped.worth || self.host.misses(&unit.key));
            let saver = self.saver.as_mut().filter(|saver| saver.has_room());
            let down = saver.filter(|_| dropped.worth && !has(&store, &unit.key));
            if !up && down.is_none() {
                continue;
            }
            let mut bytes = Vec::new();
            executor.save_blocks(Group::Full, &unit.blocks, &mut bytes)?;
            self.stats.spilled_bytes += bytes.len() as u64;
            if let Some(saver) = down {
                let content = Content::Units {
                    parent: unit.parent,
                    keys: vec![unit.key],
                };
                saver.give(content, bytes.clone());
            }
            if up {
                self.host.put_unit(unit.key, unit.parent, bytes);
            }
        }
        if !dropped.worth {
            return Ok(());
        }
        let up = to_host && !self.host.has_anchor(&dropped.image);
        let saver = self.saver.as_mut().filter(|saver| saver.has_room());
        let down = saver.filter(|saver| !saver.store().has_anchor(&dropped.image));
        if !up && down.is_none() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        executor.save_blocks(Group::Full, &dropped.blocks.tail, &mut bytes)?;
        executor.save_blocks(Group::Sliding, &dropped.blocks.window, &mut bytes)?;
        self.stats.spilled_bytes += bytes.len() as u64;
        if let Some(saver) = down {
            saver.give(Content::Anchor(dropped.image.clone()), bytes.clone());
        }
        if up {
            self.host.put_anchor(dropped.image.clone(), bytes);
        }
        Ok(())
    }
}

fn has(store: &Option<Arc<crate::snapshot::kv::KvStore>>, key: &PrefixKey) -> bool {
    store.as_ref().is_some_and(|store| store.has_unit(key))
}

/// The tiers with the device at hand.
pub(super) struct Reach<'a> {
    tiers: &'a mut Tiers,
    executor: &'a mut dyn Executor,
    row_seconds: Option<f64>,
}

impl Below for Reach<'_> {
    fn best(&mut self, tokens: &TokenList, known: usize, above: usize) -> Option<Found> {
        let Tiers {
            host,
            stride,
            unit_bytes,
            load,
            ..
        } = &mut *self.tiers;
        let found = host.best(tokens, *stride, known, above)?;
        let own = host.anchor(&found.image).map_or(0, <[u8]>::len) as u64;
        let units = found.chain.len().saturating_sub(known) as u64;
        let takes = load.seconds(units * *unit_bytes + own);
        let spared = found.image.spares(tokens, *stride) - above;
        if !is_sooner(takes, spared, self.row_seconds) {
            return None;
        }
        // What is about to be kept must not push it out.
        host.touch(&found.image);
        Some(found)
    }

    fn keep(&mut self, dropped: Vec<Dropped>) {
        for dropped in dropped {
            if self.tiers.off {
                return;
            }
            if let Err(error) = self.tiers.save(&dropped, self.executor) {
                tracing::warn!(%error, "blocks cannot be saved; what is given up is computed again");
                self.tiers.off = true;
            }
        }
        let staged = self.tiers.staged.values().sum();
        self.tiers.host.trim(staged);
    }

    fn fill(&mut self, found: &Found, restored: &Restored) -> bool {
        let begun = self.tiers.clock.now();
        let mut source = FromHost(&self.tiers.host);
        match fill(&mut source, found, restored, self.executor) {
            Ok(bytes) => {
                let elapsed = self.tiers.clock.now().saturating_sub(begun);
                self.tiers.load.observe(bytes, elapsed);
                self.tiers.stats.loaded_bytes += bytes;
                true
            }
            Err(reason) => {
                tracing::debug!(reason, "a prefix did not come back; it is computed again");
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_taken_until_it_is_known_to_be_slower() {
        let mut rate = Rate::default();
        assert!(is_sooner(rate.seconds(1 << 30), 10, Some(1e-3)));
        rate.observe(0, Duration::from_secs(1));
        rate.observe(1000, Duration::ZERO);
        assert_eq!(rate.seconds(5), 0.0, "that said nothing");
        // A megabyte a second, and ten tokens in ten milliseconds.
        rate.observe(1 << 20, Duration::from_secs(1));
        assert!(is_sooner(rate.seconds(10 << 10), 10, Some(1e-3)));
        assert!(!is_sooner(rate.seconds(11 << 10), 10, Some(1e-3)));
        assert!(is_sooner(rate.seconds(11 << 10), 10, None));
        // A quarter of what is new counts.
        rate.observe(5 << 20, Duration::from_secs(1));
        assert_eq!(rate.seconds(2 << 20), 1.0);
    }
}
