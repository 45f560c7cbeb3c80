//! Anchors as a snapshot sees them: what to save, and how to take it in again.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    blocks::{BlockPool, Kept},
    pins::Place,
    prefix::{Anchor, AnchorId, Origin, PrefixCache},
    table::{Geometry, Pools},
    tokens::PrefixKey,
    types::{BlockId, Group, SeqId, TokenId},
};

/// An anchor without its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnchorImage {
    /// Address of the tokens before the tail.
    pub key: PrefixKey,
    /// Strides before the tail.
    pub units: usize,
    /// The tokens behind them.
    pub tail: Vec<TokenId>,
    /// Number of the first block of the window.
    pub window_first: usize,
    /// The run that is pinned there, and where in it.
    pub pin: Option<(String, Place)>,
}

/// The blocks of a window and of a tail, in order of position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnchorBlocks {
    /// Of the full group.
    pub tail: Vec<BlockId>,
    /// Of the sliding group.
    pub window: Vec<BlockId>,
}

/// An anchor whose blocks wait for their bytes.
#[derive(Debug)]
pub struct Restored {
    /// It. To be given up when the bytes do not come.
    pub anchor: AnchorId,
    /// Units that were not there, by their number in the chain.
    pub units: Vec<(usize, Vec<BlockId>)>,
    /// Its own blocks.
    pub blocks: AnchorBlocks,
}

impl AnchorImage {
    /// How many blocks of its own such an anchor has; `None` when it cannot be one.
    pub fn block_counts(&self, geometry: Geometry) -> Option<(usize, usize)> {
        let stride = geometry.stride();
        let start = self.units.checked_mul(stride)?;
        let end = start.checked_add(self.tail.len())?;
        let window_first = start.saturating_sub(geometry.window) / geometry.sliding_block;
        if self.tail.len() > stride || end == 0 || window_first != self.window_first {
            return None;
        }
        let tail = self.tail.len().div_ceil(geometry.full_block);
        let window = end.div_ceil(geometry.sliding_block) - window_first;
        Some((tail, window))
    }
}

impl PrefixCache {
    /// Anchors that somebody may come back to, the last used first.
    pub fn worth_saving(&self) -> Vec<AnchorId> {
        let there = self.anchors.iter().filter(|(_, anchor)| !anchor.superseded);
        let mut there: Vec<_> = there.map(|(&id, anchor)| (anchor.used, id)).collect();
        there.sort_unstable_by(|a, b| b.cmp(a));
        there.into_iter().map(|(_, id)| id).collect()
    }

    /// What an anchor is.
    pub fn image(&self, id: AnchorId) -> Option<AnchorImage> {
        let anchor = self.anchors.get(&id)?;
        let pin = self.pins.of(id);
        Some(AnchorImage {
            key: anchor.key,
            units: anchor.units,
            tail: anchor.tail.clone(),
            window_first: anchor.window_first,
            pin: pin.map(|(run, place)| (run.to_owned(), place)),
        })
    }

    /// The keys of the units before an anchor, first first.
    pub fn chain(&self, id: AnchorId) -> Vec<PrefixKey> {
        let leaf = self.anchors.get(&id).and_then(Anchor::leaf);
        self.units.keys(leaf)
    }

    /// The blocks of a unit.
    pub fn unit_blocks(&self, key: &PrefixKey) -> Option<Vec<BlockId>> {
        Some(self.units.get(key)?.iter().map(Kept::id).collect())
    }

    /// The blocks of an anchor.
    pub fn anchor_blocks(&self, id: AnchorId) -> Option<AnchorBlocks> {
        let anchor = self.anchors.get(&id)?;
        Some(AnchorBlocks {
            tail: anchor.tail_blocks.iter().map(Kept::id).collect(),
            window: anchor.window.iter().map(Kept::id).collect(),
        })
    }

    /// Makes room for an anchor in the blocks of others that were not used as lately. What is given
    /// up has to be kept before the blocks are filled.
    pub(super) fn restore_over_others(
        &mut self,
        pools: &mut Pools,
        now: Duration,
        image: &AnchorImage,
        chain: &[PrefixKey],
    ) -> Option<Restored> {
        let per_unit = pools.geometry.stride() / pools.geometry.full_block;
        let (tail, window) = image.block_counts(pools.geometry)?;
        if self.has(image) {
            return None;
        }
        loop {
            let known = chain.partition_point(|key| self.units.get(key).is_some());
            let full = (chain.len() - known) * per_unit + tail;
            let short = match (full > pools.full.free(), window > pools.sliding.free()) {
                (true, _) => Some(Group::Full),
                (_, true) => Some(Group::Sliding),
                _ if self.anchors.len() >= self.config.anchors => Some(Group::Full),
                _ => None,
            };
            let Some(short) = short else { break };
            if !self.drop_one(pools, now, short) {
                return None;
            }
        }
        self.restore(pools, now, image, chain)
    }

    /// Whether an anchor is there, itself or a longer one in its place.
    fn has(&self, image: &AnchorImage) -> bool {
        let there = self.by_key.get(&image.key).into_iter().flatten();
        let mut there = there.filter_map(|id| self.anchors.get(id));
        there.any(|there| there.tail.starts_with(&image.tail))
    }

    /// Makes room for a saved anchor in blocks that are free.
    pub(super) fn restore(
        &mut self,
        pools: &mut Pools,
        now: Duration,
        image: &AnchorImage,
        chain: &[PrefixKey],
    ) -> Option<Restored> {
        let geometry = pools.geometry;
        let (tail, window) = image.block_counts(geometry)?;
        if chain.len() != image.units
            || self.anchors.len() >= self.config.anchors
            || self.has(image)
            || (image.units > 0 && chain.last() != Some(&image.key))
        {
            return None;
        }
        let known = chain.partition_point(|key| self.units.get(key).is_some());
        let per_unit = geometry.stride() / geometry.full_block;
        let full = (chain.len() - known) * per_unit + tail;
        if full > pools.full.free() || window > pools.sliding.free() {
            return None;
        }
        let mut units = Vec::with_capacity(chain.len() - known);
        for (at, &key) in chain.iter().enumerate().skip(known) {
            let blocks = take(&mut pools.full, per_unit);
            units.push((at, blocks.iter().map(Kept::id).collect()));
            let parent = at.checked_sub(1).and_then(|at| chain.get(at)).copied();
            self.units.append(key, parent, blocks);
        }
        let nobody = SeqId(u64::MAX);
        let anchor = Anchor {
            tail: image.tail.clone(),
            tail_blocks: take(&mut pools.full, tail),
            window: take(&mut pools.sliding, window),
            window_first: image.window_first,
            ..self.anchor(image.key, image.units, nobody)
        };
        // A pin that lies on a newer anchor stays there.
        let pin = image.pin.as_ref();
        let pin = pin.filter(|(run, place)| !self.pins.has(run, *place));
        let origin = Origin {
            seq: nobody,
            run: pin.map(|(run, _)| run.as_str()),
            place: pin.map(|(_, place)| *place),
            now,
        };
        let anchor = self.insert_over_limits(pools, origin, anchor);
        let blocks = self.anchor_blocks(anchor)?;
        Some(Restored {
            anchor,
            units,
            blocks,
        })
    }
}

/// Blocks that are free, as many of them as there are.
fn take<G>(pool: &mut BlockPool<G>, count: usize) -> Vec<Kept<G>> {
    let mut kept = Vec::with_capacity(count);
    while kept.len() < count {
        let Some(block) = pool.take() else { break };
        kept.push(pool.retire(block));
    }
    kept
}
