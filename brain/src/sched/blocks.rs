//! Pools of KV blocks, one per layer group.
//!
//! A [`Block`] is the right to use a block. It can be neither copied nor made from a number, so a
//! block has one holder at a time, cannot be given back twice, and (by its group's type) cannot
//! end up in the other group's pool. Taking and giving back are O(1).

use std::marker::PhantomData;

use super::types::BlockId;

/// The full-attention layers: a block for every position.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// The sliding-window layers: blocks for the window and the rows being computed.
#[derive(Debug, PartialEq, Eq)]
pub struct Sliding;

/// A block held by one owner, who gives it back to the pool it came from.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a block that is not given back is lost to its pool"]
pub struct Block<G> {
    id: BlockId,
    group: PhantomData<G>,
}

impl<G> Block<G> {
    /// Its number, as executors know it.
    pub fn id(&self) -> BlockId {
        self.id
    }
}

/// The blocks of one layer group that nobody holds.
#[derive(Debug)]
pub struct BlockPool<G> {
    /// A stack: the block given back last is the warmest in the device's caches.
    free: Vec<BlockId>,
    total: usize,
    group: PhantomData<G>,
}

impl<G> BlockPool<G> {
    /// A pool of blocks 0 to `total`, all free.
    pub fn new(total: u32) -> Self {
        Self {
            free: (0..total).rev().map(BlockId).collect(),
            total: total as usize,
            group: PhantomData,
        }
    }

    /// A free block, if there is one.
    pub fn take(&mut self) -> Option<Block<G>> {
        let id = self.free.pop()?;
        Some(Block {
            id,
            group: PhantomData,
        })
    }

    /// Makes a block free again.
    pub fn give_back(&mut self, block: Block<G>) {
        self.free.push(block.id);
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that somebody holds.
    pub fn used(&self) -> usize {
        self.total - self.free.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Take,
        GiveBack(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            Just(Op::Take),
            any::<prop::sample::Index>().prop_map(Op::GiveBack)
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Invariants after every operation: held and free blocks are disjoint and together are
        /// all blocks; a take fails exactly when all are held.
        #[test]
        fn every_block_has_one_place(total in 0u32..20, ops in prop::collection::vec(op(), 0..200)) {
            let mut pool = BlockPool::<Full>::new(total);
            let mut held: Vec<Block<Full>> = Vec::new();
            for op in ops {
                match op {
                    Op::Take => match pool.take() {
                        Some(block) => held.push(block),
                        None => prop_assert_eq!(held.len(), total as usize),
                    },
                    Op::GiveBack(which) if !held.is_empty() => {
                        let block = held.swap_remove(which.index(held.len()));
                        pool.give_back(block);
                    }
                    Op::GiveBack(_) => {}
                }
                let mut seen: BTreeSet<_> = held.iter().map(Block::id).collect();
                prop_assert_eq!(seen.len(), held.len(), "a block is held twice");
                seen.extend(pool.free.iter().copied());
                prop_assert_eq!(seen.len(), total as usize, "a block is lost or in two places");
                prop_assert_eq!(pool.used(), held.len());
                prop_assert_eq!(pool.free() + pool.used(), pool.total());
            }
        }
    }
}
