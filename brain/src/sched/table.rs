//! Block tables: which blocks a sequence holds in each layer group.

use std::collections::VecDeque;

use super::{
    blocks::{Block, BlockPool, Full, Kept, Sliding},
    types::BlockTables,
};
use crate::backend::Limits;

/// Sizes that say which block a position lies in. All are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Slots of a block of the full group.
    pub full_block: usize,
    /// Slots of a block of the sliding group.
    pub sliding_block: usize,
    /// Keys a sliding layer sees, the query's own included.
    pub window: usize,
}

impl Geometry {
    /// The geometry of an executor.
    pub fn of(limits: &Limits) -> Self {
        Self {
            full_block: limits.full_block_size,
            sliding_block: limits.sliding_block_size,
            window: limits.window,
        }
    }

    /// Every so many positions a block of both groups ends: only there can a prefix be shared,
    /// because who goes on from there writes to blocks of its own.
    pub fn stride(&self) -> usize {
        let (mut a, mut b) = (self.full_block, self.sliding_block);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        self.full_block / a.max(1) * self.sliding_block
    }

    /// Blocks of the full group for the first `len` positions.
    pub fn full_blocks(&self, len: usize) -> usize {
        len.div_ceil(self.full_block)
    }

    /// Blocks of the sliding group that a sequence of `len` tokens holds at most while `rows` new
    /// rows are computed: the window kept before them may begin anywhere in its first block.
    pub fn sliding_blocks(&self, len: usize, rows: usize) -> usize {
        let span = self.window + self.stride() + rows;
        let whole = len.div_ceil(self.sliding_block);
        whole.min((span - 1).div_ceil(self.sliding_block) + 1)
    }

    /// The last place before the newest of `committed` tokens where a prefix can be shared.
    pub fn boundary(&self, committed: usize) -> usize {
        committed.saturating_sub(1) / self.stride() * self.stride()
    }

    /// First position that a sequence of `committed` tokens still needs in the sliding group.
    ///
    /// A window before the last place where it can be shared: whoever goes on from there finds
    /// it whole. That is at least one key more than the next query sees, so that the last
    /// committed position can be computed again (its output is not in the cache).
    fn sliding_from(&self, committed: usize) -> usize {
        self.boundary(committed).saturating_sub(self.window)
    }
}

/// The pools of both layer groups.
#[derive(Debug)]
pub struct Pools {
    /// Blocks of the full-attention layers.
    pub full: BlockPool<Full>,
    /// Blocks of the sliding layers.
    pub sliding: BlockPool<Sliding>,
    /// Which position lies where.
    pub geometry: Geometry,
}

/// The blocks that hold a sequence's keys and values.
///
/// The full group has a block for every position from 0. The sliding group has blocks from the
/// window on; [`Table::slide`] gives earlier ones back. A table holds its blocks until
/// [`Table::release`].
#[derive(Debug, Default)]
#[must_use = "a table holds blocks; release it"]
pub struct Table {
    full: Vec<Block<Full>>,
    sliding: VecDeque<Block<Sliding>>,
    sliding_first: usize,
}

impl Table {
    /// Positions `0..covers` have a slot in both groups (those the window has left excepted).
    pub fn covers(&self, geometry: Geometry) -> usize {
        self.reach(geometry, 0, 0)
    }

    /// What [`Table::covers`] would be with that many more blocks.
    pub fn reach(&self, geometry: Geometry, more_full: usize, more_sliding: usize) -> usize {
        let full = (self.full.len() + more_full) * geometry.full_block;
        let sliding_end = self.sliding_first + self.sliding.len() + more_sliding;
        full.min(sliding_end * geometry.sliding_block)
    }

    /// Blocks missing, in the full and in the sliding group, to cover positions `0..len`.
    pub fn missing(&self, geometry: Geometry, len: usize) -> (usize, usize) {
        let full = len.div_ceil(geometry.full_block);
        let sliding = len.div_ceil(geometry.sliding_block);
        (
            full.saturating_sub(self.full.len()),
            sliding.saturating_sub(self.sliding_first + self.sliding.len()),
        )
    }

    /// Takes blocks so that positions `0..len` are covered; all that are missing or none.
    pub fn grow(&mut self, pools: &mut Pools, len: usize) -> bool {
        let (full, sliding) = self.missing(pools.geometry, len);
        if full > pools.full.free() || sliding > pools.sliding.free() {
            return false;
        }
        self.full.extend((0..full).map_while(|_| pools.full.take()));
        self.sliding
            .extend((0..sliding).map_while(|_| pools.sliding.take()));
        true
    }

    /// Gives sliding blocks back that a sequence of `committed` tokens never reads again.
    pub fn slide(&mut self, pools: &mut Pools, committed: usize) {
        let first_needed = pools.geometry.sliding_from(committed) / pools.geometry.sliding_block;
        while self.sliding_first < first_needed {
            let Some(block) = self.sliding.pop_front() else {
                break;
            };
            pools.sliding.give_back(block);
            self.sliding_first += 1;
        }
    }

    /// Gives blocks back that lie wholly behind position `len`.
    pub fn trim(&mut self, pools: &mut Pools, len: usize) {
        let (full, sliding) = (
            len.div_ceil(pools.geometry.full_block),
            len.div_ceil(pools.geometry.sliding_block),
        );
        while self.full.len() > full {
            let Some(block) = self.full.pop() else { break };
            pools.full.give_back(block);
        }
        while self.sliding_first + self.sliding.len() > sliding {
            let Some(block) = self.sliding.pop_back() else {
                break;
            };
            pools.sliding.give_back(block);
        }
    }

    /// A table of blocks that hold positions from 0 on, and from block number `sliding_first` on.
    pub(super) fn of(
        full: Vec<Block<Full>>,
        sliding: VecDeque<Block<Sliding>>,
        sliding_first: usize,
    ) -> Self {
        Self {
            full,
            sliding,
            sliding_first,
        }
    }

    /// The blocks, and the number of the first sliding one.
    pub(super) fn into_blocks(self) -> (Vec<Block<Full>>, VecDeque<Block<Sliding>>, usize) {
        (self.full, self.sliding, self.sliding_first)
    }

    /// The blocks of the full group, from position 0 on.
    pub(super) fn full(&self) -> &[Block<Full>] {
        &self.full
    }

    /// First position that the sliding group still has.
    pub fn sliding_start(&self, geometry: Geometry) -> usize {
        self.sliding_first * geometry.sliding_block
    }

    /// Keeps the sliding blocks that a sequence needs to go on from `len` tokens, a multiple of
    /// the stride. With the number of the first one; `None` where the window is gone.
    pub(super) fn keep_window(
        &self,
        pools: &mut Pools,
        len: usize,
    ) -> Option<(Vec<Kept<Sliding>>, usize)> {
        let block = pools.geometry.sliding_block;
        let first = len.saturating_sub(pools.geometry.window) / block;
        let from = first.checked_sub(self.sliding_first)?;
        let to = (len / block).checked_sub(self.sliding_first)?;
        if to > self.sliding.len() {
            return None;
        }
        let kept = self.sliding.range(from..to);
        Some((kept.map(|block| pools.sliding.keep(block)).collect(), first))
    }

    /// Whether every block that positions from `start` on lie in is the sequence's own.
    pub fn may_write_from(&self, pools: &Pools, start: usize) -> bool {
        let full = start / pools.geometry.full_block;
        let sliding = (start / pools.geometry.sliding_block).saturating_sub(self.sliding_first);
        self.full
            .iter()
            .skip(full)
            .all(|block| pools.full.may_write(block))
            && self
                .sliding
                .iter()
                .skip(sliding)
                .all(|block| pools.sliding.may_write(block))
    }

    /// Gives every block back.
    pub fn release(self, pools: &mut Pools) {
        for block in self.full {
            pools.full.give_back(block);
        }
        for block in self.sliding {
            pools.sliding.give_back(block);
        }
    }

    /// Blocks held in the full and in the sliding group.
    pub fn held(&self) -> (usize, usize) {
        (self.full.len(), self.sliding.len())
    }

    /// Sliding blocks that no other sequence holds.
    pub fn window_held_alone(&self, pools: &Pools) -> usize {
        let shared = |block: &&Block<Sliding>| pools.sliding.is_shared(block);
        self.sliding.len() - self.sliding.iter().filter(shared).count()
    }

    /// The numbers of the blocks, for a step. The one thing a step does per block of context.
    pub fn ids(&self) -> BlockTables {
        BlockTables {
            full: self.full.iter().map(Block::id).collect(),
            sliding: self.sliding.iter().map(Block::id).collect(),
            sliding_first: self.sliding_first,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pools(geometry: Geometry, full: u32, sliding: u32) -> Pools {
        Pools {
            full: BlockPool::new(full),
            sliding: BlockPool::new(sliding),
            geometry,
        }
    }

    proptest! {
        /// A sequence that grows by rounds of any size with any number of rejected rows always
        /// covers what the next round reads and writes, and holds no more than the stated bound.
        #[test]
        fn a_growing_table_covers_the_window_and_stays_within_its_bound(
            full_block in 1usize..9,
            sliding_block in 1usize..9,
            window in 1usize..20,
            rounds in prop::collection::vec((1usize..12, 0usize..12), 1..40),
        ) {
            let geometry = Geometry { full_block, sliding_block, window };
            let mut pools = pools(geometry, 1000, 1000);
            let mut table = Table::default();
            let mut committed = 0;
            let widest = 11;
            for (rows, rejected) in rounds {
                prop_assert!(table.grow(&mut pools, committed + rows));
                prop_assert!(table.covers(geometry) >= committed + rows);
                let oldest_key = geometry.boundary(committed).saturating_sub(window);
                prop_assert!(table.sliding_first * sliding_block <= oldest_key);
                prop_assert!(oldest_key <= committed.saturating_sub(window));
                let (full, sliding) = table.held();
                prop_assert!(sliding <= geometry.sliding_blocks(usize::MAX / 2, widest));
                prop_assert!(full <= geometry.full_blocks(committed + widest));
                committed += rows - rejected.min(rows - 1);
                table.slide(&mut pools, committed);
            }
            table.trim(&mut pools, committed);
            prop_assert_eq!(table.held().0, geometry.full_blocks(committed));
            prop_assert!(table.covers(geometry) >= committed);
            table.release(&mut pools);
            prop_assert_eq!((pools.full.used(), pools.sliding.used()), (0, 0));
        }

        /// Growing takes everything or nothing.
        #[test]
        fn growing_past_the_pool_changes_nothing(
            len in 1usize..100, full in 0u32..12, sliding in 0u32..12,
        ) {
            let geometry = Geometry { full_block: 4, sliding_block: 3, window: 5 };
            let mut pools = pools(geometry, full, sliding);
            let mut table = Table::default();
            let fits = len <= table.reach(geometry, full as usize, sliding as usize);
            prop_assert_eq!(table.grow(&mut pools, len), fits);
            if !fits {
                prop_assert_eq!(table.held(), (0, 0));
            }
            table.release(&mut pools);
            prop_assert_eq!((pools.full.used(), pools.sliding.used()), (0, 0));
        }
    }
}
