//! What lies below the device's memory, as the scheduler sees it.
//!
//! Blocks that the prefix cache gives up are told as [`Dropped`]: until the next step runs or blocks
//! are filled, their bytes are still there to be saved. When a sequence is about to be admitted,
//! [`Below::best`] may name a prefix of its tokens that can be had from below; the cache makes room
//! and [`Below::fill`] brings the bytes. The scheduler itself moves none.

use super::{
    image::{AnchorBlocks, AnchorImage, Restored},
    tokens::{PrefixKey, TokenList},
    types::{BlockId, SeqId},
};

/// A unit that went with the last thing that followed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedUnit {
    /// Its key.
    pub key: PrefixKey,
    /// The unit before it; `None` for the first of a prompt.
    pub parent: Option<PrefixKey>,
    /// Its blocks.
    pub blocks: Vec<BlockId>,
}

/// An anchor that the cache gave up for its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// What it was.
    pub image: AnchorImage,
    /// Its own blocks.
    pub blocks: AnchorBlocks,
    /// Units that went with it, the last one first.
    pub units: Vec<DroppedUnit>,
    /// Somebody may come back to it: no newer anchor stands in its place.
    pub worth: bool,
    /// The sequence that computed it.
    pub left_by: SeqId,
}

/// A prefix that can be had from below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The anchor at its end.
    pub image: AnchorImage,
    /// The keys of its units, first first.
    pub chain: Vec<PrefixKey>,
}

/// Where blocks go that the device has no room for, and where they come back from.
pub trait Below {
    /// The anchor that spares the most of these tokens, if it spares more than `above` and is had
    /// sooner than these are computed. The device has the first `known` units.
    fn best(&mut self, tokens: &TokenList, known: usize, above: usize) -> Option<Found>;

    /// Saves what the cache gave up, as far as that is worth it.
    fn keep(&mut self, dropped: Vec<Dropped>);

    /// Fills the blocks of a found anchor; false when its bytes did not come. Everything that the
    /// cache gave up was kept before: its blocks may be among these.
    fn fill(&mut self, found: &Found, restored: &Restored) -> bool;
}

/// Nothing lies below.
#[derive(Clone, Copy, Debug)]
pub struct Nothing;

impl Below for Nothing {
    fn best(&mut self, _tokens: &TokenList, _known: usize, _above: usize) -> Option<Found> {
        None
    }

    fn keep(&mut self, _dropped: Vec<Dropped>) {}

    fn fill(&mut self, _found: &Found, _restored: &Restored) -> bool {
        false
    }
}

impl AnchorImage {
    /// How many of the tokens this anchor spares, given that their prefix at its units has its key;
    /// at least one is left to compute.
    pub fn spares(&self, tokens: &TokenList, stride: usize) -> usize {
        let start = self.units * stride;
        let usable = tokens.len().saturating_sub(1);
        let Some(behind) = tokens.ids().get(start..usable) else {
            return 0;
        };
        let common = self.tail.iter().zip(behind);
        start + common.take_while(|(mine, theirs)| mine == theirs).count()
    }
}
