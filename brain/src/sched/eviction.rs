//! What the prefix cache gives up, and in which order.
//!
//! When blocks are needed the least recently used anchors go first, superseded ones before all others
//! and pinned ones last. What goes for that reason is told, so that its bytes can be kept below
//! ([`super::below`]); what is over the limits or not to be trusted goes alike.

use std::time::Duration;

use super::{
    below::{Dropped, DroppedUnit},
    prefix::{Anchor, AnchorId, PrefixCache},
    table::Pools,
    types::{Group, SeqId},
};

impl PrefixCache {
    /// Gives up one anchor, if possible one whose end frees a block of that group; false when
    /// there is none.
    pub fn drop_one(&mut self, pools: &mut Pools, now: Duration, wanted: Group) -> bool {
        let pinned = self.pins.anchors(now);
        let order = |(id, anchor): &(&AnchorId, &Anchor)| {
            (pinned.contains(id), !anchor.superseded, anchor.used)
        };
        let frees = |(_, anchor): &(&AnchorId, &Anchor)| match wanted {
            Group::Sliding => anchor.window.iter().any(|one| pools.sliding.is_last(one)),
            Group::Full => self.frees_full(pools, anchor),
        };
        let best = self.anchors.iter().filter(frees).min_by_key(order);
        let chosen = best.or_else(|| self.anchors.iter().min_by_key(order));
        match chosen.map(|(&id, _)| id) {
            Some(id) if self.config.spill => self.spill(pools, id),
            Some(id) => self.remove(pools, id),
            None => false,
        }
    }

    /// Gives an anchor up and tells what it was.
    fn spill(&mut self, pools: &mut Pools, id: AnchorId) -> bool {
        let (Some(image), Some(blocks)) = (self.image(id), self.anchor_blocks(id)) else {
            return false;
        };
        let Some(anchor) = self.anchors.get(&id) else {
            return false;
        };
        let (worth, left_by) = (!anchor.superseded, anchor.left_by);
        let mut units = Vec::new();
        self.remove_telling(pools, id, Some(&mut units));
        self.dropped.push(Dropped {
            image,
            blocks,
            units,
            worth,
            left_by,
        });
        true
    }

    /// What was given up since it was last asked for. The bytes are there until blocks are written.
    pub(super) fn take_dropped(&mut self) -> Vec<Dropped> {
        std::mem::take(&mut self.dropped)
    }

    fn frees_full(&self, pools: &Pools, anchor: &Anchor) -> bool {
        self.units.is_freed_with(pools, anchor.leaf())
            || anchor.tail_blocks.iter().any(|one| pools.full.is_last(one))
    }

    /// Gives up what a sequence left: it is not to be trusted.
    pub fn distrust(&mut self, pools: &mut Pools, seq: SeqId) {
        let left = self
            .anchors
            .iter()
            .filter(|(_, anchor)| anchor.left_by == seq);
        let left: Vec<_> = left.map(|(&id, _)| id).collect();
        for id in left {
            self.remove(pools, id);
        }
        self.dropped.retain(|dropped| dropped.left_by != seq);
    }

    /// Gives up everything, what was given up before included: the bytes are gone.
    pub fn clear(&mut self, pools: &mut Pools) {
        self.dropped.clear();
        while let Some((&id, _)) = self.anchors.first_key_value() {
            self.remove(pools, id);
        }
    }

    /// Gives up what is over the limits.
    pub(super) fn enforce(&mut self, pools: &mut Pools, now: Duration) {
        loop {
            let bytes = pools.full.kept() as u64 * self.block_bytes.0
                + pools.sliding.kept() as u64 * self.block_bytes.1;
            let over = self.anchors.len() > self.config.anchors || bytes > self.config.bytes;
            if !over || !self.drop_one(pools, now, Group::Full) {
                return;
            }
        }
    }

    pub(super) fn remove(&mut self, pools: &mut Pools, id: AnchorId) -> bool {
        self.remove_telling(pools, id, None)
    }

    /// The same; units that go with it are told to `gone` if anybody asks.
    fn remove_telling(
        &mut self,
        pools: &mut Pools,
        id: AnchorId,
        gone: Option<&mut Vec<DroppedUnit>>,
    ) -> bool {
        let Some(anchor) = self.anchors.remove(&id) else {
            return false;
        };
        self.pins.forget(id);
        if let Some(there) = self.by_key.get_mut(&anchor.key) {
            there.remove(&id);
            if there.is_empty() {
                self.by_key.remove(&anchor.key);
            }
        }
        self.release(pools, anchor, gone);
        true
    }

    /// Lets an anchor's blocks go, and the units that only it was kept for.
    pub(super) fn release(
        &mut self,
        pools: &mut Pools,
        anchor: Anchor,
        gone: Option<&mut Vec<DroppedUnit>>,
    ) {
        let leaf = anchor.leaf();
        for block in anchor.tail_blocks {
            pools.full.forget(block);
        }
        for block in anchor.window {
            pools.sliding.forget(block);
        }
        self.units.release(pools, leaf, gone);
    }
}
