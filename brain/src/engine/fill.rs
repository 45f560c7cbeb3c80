//! Gives restored blocks their bytes, wherever these lie.

use std::borrow::Cow;

use super::host::HostTier;
use crate::{
    backend::Executor,
    sched::{
        below::Found,
        image::{AnchorImage, Restored},
        tokens::PrefixKey,
        types::Group,
    },
    snapshot::kv::KvStore,
};

/// Where bytes come from. Errors say why they do not.
pub(super) trait Source {
    /// Of a unit's blocks.
    fn unit(&mut self, key: &PrefixKey) -> Result<&[u8], String>;

    /// Of an anchor's own blocks: its tail, then its window.
    fn anchor(&mut self, image: &AnchorImage) -> Result<Cow<'_, [u8]>, String>;
}

/// Fills what was restored; returns how many bytes it took.
///
/// # Errors
/// Why it could not: what the blocks hold then is not defined.
pub(super) fn fill(
    source: &mut dyn Source,
    found: &Found,
    restored: &Restored,
    executor: &mut dyn Executor,
) -> Result<u64, String> {
    let block_bytes = executor.limits().full_block_bytes;
    let mut filled = 0;
    for (at, blocks) in &restored.units {
        let key = found.chain.get(*at).ok_or("a unit outside its chain")?;
        let bytes = source.unit(key)?;
        filled += bytes.len();
        executor
            .load_blocks(Group::Full, blocks, bytes)
            .map_err(|error| error.to_string())?;
    }
    let data = source.anchor(&found.image)?;
    filled += data.len();
    let (tail, window) = data
        .split_at_checked(restored.blocks.tail.len() * block_bytes)
        .ok_or("the blocks of an anchor are too few")?;
    let groups = [
        (Group::Full, &restored.blocks.tail, tail),
        (Group::Sliding, &restored.blocks.window, window),
    ];
    for (group, blocks, bytes) in groups {
        executor
            .load_blocks(group, blocks, bytes)
            .map_err(|error| error.to_string())?;
    }
    Ok(filled as u64)
}

/// The host tier as a source.
pub(super) struct FromHost<'a>(pub(super) &'a HostTier);

impl Source for FromHost<'_> {
    fn unit(&mut self, key: &PrefixKey) -> Result<&[u8], String> {
        let unit = self.0.unit(key);
        unit.ok_or_else(|| "a unit is not in the host tier any more".into())
    }

    fn anchor(&mut self, image: &AnchorImage) -> Result<Cow<'_, [u8]>, String> {
        let anchor = self.0.anchor(image).map(Cow::Borrowed);
        anchor.ok_or_else(|| "an anchor is not in the host tier any more".into())
    }
}

/// The snapshot store as a source; it keeps the file that it read last, since units that follow
/// each other lie in one.
pub(super) struct FromStore<'a> {
    store: &'a KvStore,
    file: (Vec<PrefixKey>, Vec<u8>),
}

impl<'a> FromStore<'a> {
    pub(super) fn new(store: &'a KvStore) -> Self {
        Self {
            store,
            file: Default::default(),
        }
    }
}

impl Source for FromStore<'_> {
    fn unit(&mut self, key: &PrefixKey) -> Result<&[u8], String> {
        if !self.file.0.contains(key) {
            let read = self.store.read_units(key);
            self.file = read.map_err(|error| error.to_string())?;
        }
        let (keys, data) = &self.file;
        let len = data.len() / keys.len().max(1);
        let place = keys.iter().position(|there| there == key);
        let bytes = place.and_then(|place| data.get(place * len..(place + 1) * len));
        bytes.ok_or_else(|| "a file of units has the wrong length".into())
    }

    fn anchor(&mut self, image: &AnchorImage) -> Result<Cow<'_, [u8]>, String> {
        let read = self.store.read_anchor(image).map(Cow::Owned);
        read.map_err(|error| error.to_string())
    }
}
