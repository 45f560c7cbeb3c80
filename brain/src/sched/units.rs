//! Units: the full-group blocks of a stride of tokens, by the address of the prefix they end.
//!
//! A unit is there as long as anything follows it, another unit or an anchor; its parent is there
//! as long as it is. So the units that a list of tokens finds are always its first ones.

use std::collections::{BTreeSet, HashMap};

use super::{
    below::DroppedUnit,
    blocks::{Full, Kept},
    table::Pools,
    tokens::{PrefixKey, TokenList},
    types::BlockId,
};

/// A stretch of one stride of tokens.
#[derive(Debug)]
pub(super) struct Unit {
    parent: Option<PrefixKey>,
    /// Its blocks, in order of position.
    pub(super) blocks: Vec<Kept<Full>>,
    /// Units that follow it and anchors at its end.
    followers: usize,
}

/// All units.
#[derive(Debug, Default)]
pub(super) struct Units {
    by_key: HashMap<PrefixKey, Unit>,
}

impl Units {
    /// How many units the tokens find.
    pub(super) fn known(&self, tokens: &TokenList) -> usize {
        let there = |unit: usize| {
            tokens
                .key(unit)
                .is_some_and(|key| self.by_key.contains_key(&key))
        };
        let (mut known, mut probe) = (0, 1);
        while there(probe) {
            known = probe;
            probe *= 2;
        }
        let mut unknown = probe;
        while known + 1 < unknown {
            let middle = known + (unknown - known) / 2;
            match there(middle) {
                true => known = middle,
                false => unknown = middle,
            }
        }
        known
    }

    /// A unit and those before it, last first.
    pub(super) fn chain(&self, last: Option<PrefixKey>) -> impl Iterator<Item = &Unit> {
        let last = last.and_then(|key| self.by_key.get(&key));
        std::iter::successors(last, |unit| {
            unit.parent.as_ref().and_then(|key| self.by_key.get(key))
        })
    }

    /// Makes sure that the first `units` units of the tokens are there; `keep` gives the blocks,
    /// by number, of those that are missing.
    pub(super) fn publish(
        &mut self,
        pools: &mut Pools,
        tokens: &TokenList,
        units: usize,
        mut keep: impl FnMut(&mut Pools, usize) -> Kept<Full>,
    ) {
        let per_unit = pools.geometry.stride() / pools.geometry.full_block;
        for unit in self.known(tokens) + 1..=units {
            let (Some(key), Some(parent)) = (tokens.key(unit), tokens.key(unit - 1)) else {
                return;
            };
            let at = (unit - 1) * per_unit;
            let blocks = (at..at + per_unit).map(|at| keep(pools, at)).collect();
            self.append(key, (unit > 1).then_some(parent), blocks);
        }
    }

    /// The keys of a unit and of those before it, first first.
    pub(super) fn keys(&self, mut last: Option<PrefixKey>) -> Vec<PrefixKey> {
        let mut keys = Vec::new();
        while let Some(key) = last {
            keys.push(key);
            last = self.by_key.get(&key).and_then(|unit| unit.parent);
        }
        keys.reverse();
        keys
    }

    /// A unit's blocks.
    pub(super) fn get(&self, key: &PrefixKey) -> Option<&[Kept<Full>]> {
        self.by_key.get(key).map(|unit| &*unit.blocks)
    }

    /// Puts a unit behind its parent, which is there.
    pub(super) fn append(
        &mut self,
        key: PrefixKey,
        parent: Option<PrefixKey>,
        blocks: Vec<Kept<Full>>,
    ) {
        self.hold(parent);
        let unit = Unit {
            parent,
            blocks,
            followers: 0,
        };
        self.by_key.insert(key, unit);
    }

    /// Something more follows a unit.
    pub(super) fn hold(&mut self, key: Option<PrefixKey>) {
        if let Some(unit) = key.and_then(|key| self.by_key.get_mut(&key)) {
            unit.followers += 1;
        }
    }

    /// Something that followed a unit is gone; units that nothing follows go too, and are told to
    /// `gone` if anybody asks.
    pub(super) fn release(
        &mut self,
        pools: &mut Pools,
        mut key: Option<PrefixKey>,
        mut gone: Option<&mut Vec<DroppedUnit>>,
    ) {
        while let Some(at) = key {
            let Some(unit) = self.by_key.get_mut(&at) else {
                return;
            };
            unit.followers -= 1;
            if unit.followers > 0 {
                return;
            }
            key = unit.parent;
            let Some(unit) = self.by_key.remove(&at) else {
                return;
            };
            if let Some(gone) = &mut gone {
                gone.push(DroppedUnit {
                    key: at,
                    parent: unit.parent,
                    blocks: unit.blocks.iter().map(Kept::id).collect(),
                });
            }
            for block in unit.blocks {
                pools.full.forget(block);
            }
        }
    }

    /// Whether a block becomes free when one follower of this unit goes.
    pub(super) fn is_freed_with(&self, pools: &Pools, key: Option<PrefixKey>) -> bool {
        let unit = key.and_then(|key| self.by_key.get(&key));
        unit.is_some_and(|unit| {
            unit.followers == 1 && unit.blocks.iter().any(|one| pools.full.is_last(one))
        })
    }

    /// Every block, for audits.
    pub(super) fn blocks(&self) -> BTreeSet<BlockId> {
        let blocks = self.by_key.values().flat_map(|unit| &unit.blocks);
        blocks.map(Kept::id).collect()
    }

    /// Checks that every unit has as many followers as it counts, and at least one; `anchors` are
    /// those at its ends.
    pub(super) fn audit(&self, anchors: impl Iterator<Item = PrefixKey>) -> Result<(), String> {
        let mut followers: HashMap<PrefixKey, usize> = HashMap::new();
        let parents = self.by_key.values().filter_map(|unit| unit.parent);
        for key in parents.chain(anchors) {
            *followers.entry(key).or_default() += 1;
        }
        for (key, unit) in &self.by_key {
            let counted = followers.remove(key).unwrap_or(0);
            if counted == 0 || counted != unit.followers {
                let counts = unit.followers;
                return Err(format!(
                    "a unit counts {counts} followers and has {counted}"
                ));
            }
        }
        match followers.is_empty() {
            true => Ok(()),
            false => Err("an anchor or a unit hangs on a unit that is gone".into()),
        }
    }
}
