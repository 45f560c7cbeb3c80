//! Sines and cosines by position, from the same table as on the processor.

use std::sync::Arc;

use marathon_kernels::abi::DevicePtr;

use super::card::{Card, Region};
use crate::{backend::cpu::rope::RopeTable, model::plan::Rope};

/// A table on the card: `[positions][pairs]` of (cosine, sine).
#[derive(Clone)]
pub(super) struct Turns {
    memory: Arc<Region>,
    pairs: usize,
}

impl Turns {
    pub(super) fn new(card: &mut Card, rope: &Rope, head_dim: usize, positions: usize) -> Self {
        let pairs = RopeTable::pairs_of(rope, head_dim);
        let memory = card.upload(positions * pairs * 8, || {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let table = RopeTable::new(rope, head_dim, positions, threads);
            let numbers = table.turns().iter().flat_map(|(cos, sin)| [*cos, *sin]);
            numbers.flat_map(f32::to_le_bytes).collect()
        });
        Self {
            memory: Arc::new(memory),
            pairs,
        }
    }

    pub(super) fn at(&self) -> DevicePtr {
        self.memory.at
    }

    /// Pairs that turn.
    pub(super) fn pairs(&self) -> u32 {
        self.pairs as u32
    }
}
