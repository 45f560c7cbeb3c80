//! What lies below the device's memory in a simulation: a heap of bytes that holds so much and, now
//! and then, does not give back what it said it had.

use std::collections::HashMap;

use brain::{
    backend::{
        Executor as _,
        fake::{FakeExecutor, slot_bytes},
    },
    model::kv_dtype::KvDtype,
    sched::{
        below::{Below, Dropped, Found},
        image::{AnchorImage, Restored},
        tokens::{PrefixKey, TokenList},
        types::{BlockId, Group},
    },
};

/// The heap.
#[derive(Debug, Default)]
pub struct Heap {
    units: HashMap<PrefixKey, Vec<u8>>,
    anchors: Vec<(AnchorImage, Vec<u8>)>,
    /// Anchors that it holds, at most.
    limit: usize,
    /// Times that something was asked of it: every seventh time it fails.
    asked: usize,
}

impl Heap {
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }
}

/// It, with the device at hand.
pub struct AtHand<'a> {
    pub heap: &'a mut Heap,
    pub device: &'a mut FakeExecutor,
    pub kv: KvDtype,
    pub stride: usize,
}

impl AtHand<'_> {
    fn bytes(&mut self, group: Group, blocks: &[BlockId]) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.device.save_blocks(group, blocks, &mut bytes).unwrap();
        bytes
    }
}

impl Below for AtHand<'_> {
    fn best(&mut self, tokens: &TokenList, known: usize, above: usize) -> Option<Found> {
        let there = |unit: &usize| {
            let key = tokens.key(*unit);
            key.is_some_and(|key| self.heap.units.contains_key(&key))
        };
        let reach = known + (known + 1..).take_while(there).count();
        let images = self.heap.anchors.iter().map(|(image, _)| image);
        let fits = images
            .filter(|image| image.units <= reach && tokens.key(image.units) == Some(image.key));
        let best = fits.max_by_key(|image| image.spares(tokens, self.stride))?;
        let chain = (1..=best.units).map(|unit| tokens.key(unit).unwrap());
        (best.spares(tokens, self.stride) > above).then(|| Found {
            image: best.clone(),
            chain: chain.collect(),
        })
    }

    fn keep(&mut self, dropped: Vec<Dropped>) {
        for dropped in dropped {
            for unit in &dropped.units {
                let bytes = self.bytes(Group::Full, &unit.blocks);
                self.heap.units.insert(unit.key, bytes);
            }
            if !dropped.worth || self.heap.limit == 0 {
                continue;
            }
            let mut bytes = self.bytes(Group::Full, &dropped.blocks.tail);
            bytes.extend(self.bytes(Group::Sliding, &dropped.blocks.window));
            if self.heap.anchors.len() == self.heap.limit {
                self.heap.anchors.remove(0);
            }
            self.heap.anchors.push((dropped.image, bytes));
        }
    }

    fn fill(&mut self, found: &Found, restored: &Restored) -> bool {
        self.heap.asked += 1;
        if self.heap.asked.is_multiple_of(7) {
            return false;
        }
        let anchor = self
            .heap
            .anchors
            .iter()
            .find(|(image, _)| *image == found.image);
        let Some((_, own)) = anchor else {
            return false;
        };
        for (at, blocks) in &restored.units {
            let Some(bytes) = self.heap.units.get(&found.chain[*at]) else {
                return false;
            };
            self.device.load_blocks(Group::Full, blocks, bytes).unwrap();
        }
        let blocks = &restored.blocks;
        let slots = blocks.tail.len() * self.device.limits().full_block_size;
        let tail = slots * slot_bytes(self.kv);
        let (tail, window) = own.split_at(tail);
        self.device
            .load_blocks(Group::Full, &blocks.tail, tail)
            .unwrap();
        self.device
            .load_blocks(Group::Sliding, &blocks.window, window)
            .unwrap();
        true
    }
}
