//! Pools of KV blocks, one per layer group.
//!
//! A block is held in two ways. A [`Block`] is the right of a sequence to read it, a [`Kept`] the
//! wish of the prefix cache to keep it. Neither can be copied or made from a number: the pool hands
//! them out and counts them, so a block cannot be given back twice, and (by its group's type)
//! cannot end up in the other group's pool. A block is free when nobody holds it, and may be
//! written while one sequence holds it and the cache does not. Every operation is O(1).

use std::marker::PhantomData;

use super::types::BlockId;

/// The full-attention layers: a block for every position.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// The sliding-window layers: blocks for the window and the rows being computed.
#[derive(Debug, PartialEq, Eq)]
pub struct Sliding;

/// A block that a sequence holds.
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

/// A block that the prefix cache holds.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a kept block that is not dropped is lost to its pool"]
pub struct Kept<G> {
    id: BlockId,
    group: PhantomData<G>,
}

impl<G> Kept<G> {
    /// Its number, as executors know it.
    pub fn id(&self) -> BlockId {
        self.id
    }
}

/// Who holds a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holders {
    sequences: u32,
    kept: u32,
}

/// The blocks of one layer group.
#[derive(Debug)]
pub struct BlockPool<G> {
    /// A stack: the block given back last is the warmest in the device's caches.
    free: Vec<BlockId>,
    holders: Vec<Holders>,
    /// Blocks that the cache alone holds.
    kept_alone: usize,
    group: PhantomData<G>,
}

impl<G> BlockPool<G> {
    /// A pool of blocks 0 to `total`, all free.
    pub fn new(total: u32) -> Self {
        Self {
            free: (0..total).rev().map(BlockId).collect(),
            holders: vec![Holders::default(); total as usize],
            kept_alone: 0,
            group: PhantomData,
        }
    }

    /// A free block, if there is one.
    pub fn take(&mut self) -> Option<Block<G>> {
        let id = self.free.pop()?;
        self.change(id, |holders| holders.sequences += 1);
        Some(block(id))
    }

    /// A sequence lets a block go.
    pub fn give_back(&mut self, block: Block<G>) {
        self.change(block.id, |holders| holders.sequences -= 1);
    }

    /// The cache keeps a block that a sequence holds.
    pub fn keep(&mut self, block: &Block<G>) -> Kept<G> {
        self.change(block.id, |holders| holders.kept += 1);
        kept(block.id)
    }

    /// The cache keeps a block once more.
    pub fn keep_again(&mut self, block: &Kept<G>) -> Kept<G> {
        self.change(block.id, |holders| holders.kept += 1);
        kept(block.id)
    }

    /// A sequence reads a block that the cache keeps.
    pub fn lend(&mut self, kept: &Kept<G>) -> Block<G> {
        self.change(kept.id, |holders| holders.sequences += 1);
        block(kept.id)
    }

    /// The cache lets a block go.
    pub fn forget(&mut self, kept: Kept<G>) {
        self.change(kept.id, |holders| holders.kept -= 1);
    }

    /// A sequence takes a block over from the cache.
    pub fn claim(&mut self, kept: Kept<G>) -> Block<G> {
        let block = self.lend(&kept);
        self.forget(kept);
        block
    }

    /// The cache takes a block over from a sequence.
    pub fn retire(&mut self, block: Block<G>) -> Kept<G> {
        let kept = self.keep(&block);
        self.give_back(block);
        kept
    }

    /// Whether the holder may write to it: nobody else reads it.
    pub fn may_write(&self, block: &Block<G>) -> bool {
        let alone = Holders {
            sequences: 1,
            kept: 0,
        };
        self.holders.get(block.id.0 as usize) == Some(&alone)
    }

    /// Whether other sequences hold it too.
    pub fn is_shared(&self, block: &Block<G>) -> bool {
        self.holders
            .get(block.id.0 as usize)
            .is_some_and(|holders| holders.sequences > 1)
    }

    /// Whether forgetting it makes it free.
    pub fn is_last(&self, kept: &Kept<G>) -> bool {
        let alone = Holders {
            sequences: 0,
            kept: 1,
        };
        self.holders.get(kept.id.0 as usize) == Some(&alone)
    }

    /// Whether no sequence reads it.
    pub fn is_unread(&self, kept: &Kept<G>) -> bool {
        self.holders
            .get(kept.id.0 as usize)
            .is_some_and(|holders| holders.sequences == 0)
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that sequences hold, each counted once.
    pub fn used(&self) -> usize {
        self.holders.len() - self.free.len() - self.kept_alone
    }

    /// Blocks that the cache alone holds.
    pub fn kept(&self) -> usize {
        self.kept_alone
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.holders.len()
    }

    /// All changes of who holds a block go through here.
    fn change(&mut self, id: BlockId, change: impl FnOnce(&mut Holders)) {
        let Some(holders) = self.holders.get_mut(id.0 as usize) else {
            return;
        };
        let kept_alone = |holders: &Holders| holders.sequences == 0 && holders.kept > 0;
        let before = kept_alone(holders);
        change(holders);
        let after = kept_alone(holders);
        if *holders == Holders::default() {
            self.free.push(id);
        }
        self.kept_alone = self.kept_alone + usize::from(after) - usize::from(before);
    }
}

fn block<G>(id: BlockId) -> Block<G> {
    Block {
        id,
        group: PhantomData,
    }
}

fn kept<G>(id: BlockId) -> Kept<G> {
    Kept {
        id,
        group: PhantomData,
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
        Keep(prop::sample::Index),
        Lend(prop::sample::Index),
        Forget(prop::sample::Index),
        Claim(prop::sample::Index),
        Retire(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        let which = any::<prop::sample::Index>;
        prop_oneof![
            2 => Just(Op::Take),
            1 => which().prop_map(Op::GiveBack),
            1 => which().prop_map(Op::Keep),
            1 => which().prop_map(Op::Lend),
            1 => which().prop_map(Op::Forget),
            1 => which().prop_map(Op::Claim),
            1 => which().prop_map(Op::Retire),
        ]
    }

    proptest! {
        /// Invariants after every operation: a block is free exactly when nobody holds it, the
        /// counts are those of a model that knows every holder, and a block may be written exactly
        /// while one sequence is its only holder.
        #[test]
        fn every_block_has_its_holders(total in 0u32..12, ops in prop::collection::vec(op(), 0..300)) {
            let mut pool = BlockPool::<Full>::new(total);
            let (mut held, mut kept): (Vec<Block<Full>>, Vec<Kept<Full>>) = Default::default();
            for op in ops {
                match op {
                    Op::Take => match pool.take() {
                        Some(block) => held.push(block),
                        None => prop_assert_eq!(pool.free(), 0),
                    },
                    Op::GiveBack(which) if !held.is_empty() => {
                        let block = held.swap_remove(which.index(held.len()));
                        pool.give_back(block);
                    }
                    Op::Keep(which) if !held.is_empty() => {
                        kept.push(pool.keep(&held[which.index(held.len())]));
                    }
                    Op::Lend(which) if !kept.is_empty() => {
                        held.push(pool.lend(&kept[which.index(kept.len())]));
                    }
                    Op::Forget(which) if !kept.is_empty() => {
                        let one = kept.swap_remove(which.index(kept.len()));
                        pool.forget(one);
                    }
                    Op::Claim(which) if !kept.is_empty() => {
                        let one = kept.swap_remove(which.index(kept.len()));
                        held.push(pool.claim(one));
                    }
                    Op::Retire(which) if !held.is_empty() => {
                        let block = held.swap_remove(which.index(held.len()));
                        kept.push(pool.retire(block));
                    }
                    _ => {}
                }
                let by_sequences: BTreeSet<_> = held.iter().map(Block::id).collect();
                let by_cache: BTreeSet<_> = kept.iter().map(Kept::id).collect();
                let alone = by_cache.difference(&by_sequences).count();
                prop_assert_eq!((pool.used(), pool.kept()), (by_sequences.len(), alone));
                prop_assert_eq!(pool.free() + pool.used() + pool.kept(), pool.total());
                for id in &pool.free {
                    prop_assert!(!by_sequences.contains(id) && !by_cache.contains(id));
                }
                for block in &held {
                    let readers = held.iter().filter(|other| other.id() == block.id()).count();
                    let lone = readers == 1 && !by_cache.contains(&block.id());
                    prop_assert_eq!(pool.may_write(block), lone);
                }
                for one in &kept {
                    let keepers = kept.iter().filter(|other| other.id() == one.id()).count();
                    let unread = !by_sequences.contains(&one.id());
                    prop_assert_eq!(pool.is_unread(one), unread);
                    prop_assert_eq!(pool.is_last(one), unread && keepers == 1);
                }
            }
        }
    }
}
