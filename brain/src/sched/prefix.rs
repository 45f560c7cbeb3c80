//! The prefix cache: what was computed before and may be read again.
//!
//! Two things are kept. **Units**: the full-group blocks of a stretch of tokens, found by the
//! content address of the prefix that ends with it, each once however many share it. **Anchors**:
//! the places from which a sequence can go on exactly as if it had never stopped, because the
//! windows of all sliding layers were kept there as they were computed. A prompt is taken over up
//! to an anchor and no further, since recomputing "the last window" would not give the same bits.
//!
//! An anchor lies at a multiple of the stride, where any number of sequences can go on at the same
//! time: they read the blocks before it and write to blocks of their own. Behind it an anchor may
//! have a tail, the last tokens of an ended generation. The first who goes on from these takes
//! their blocks over, to write behind them; others find the anchor at its multiple.
//!
//! Anchors are left where an agent comes back to: at the end of a generation, at the end of a
//! prompt, at the end of the first turn (instructions and tools) and where two prompts part ways.
//! The newest of each run are pinned for a lease. What goes when blocks are needed, and in which
//! order, is told in `eviction`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::Duration,
};

use super::{
    below::Dropped,
    blocks::{Full, Kept, Sliding},
    pins::{Pins, Place},
    table::{Pools, Table},
    tokens::{PrefixKey, TokenList},
    types::{BlockId, SeqId, TokenId},
    units::Units,
};

/// How much is kept, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Anchors at most; 0 turns the cache off.
    pub anchors: usize,
    /// Bytes of blocks that nobody but the cache holds, at most.
    pub bytes: u64,
    /// How long a run's newest anchors are not given up while anything else can be.
    pub pin_lease: Duration,
    /// Bytes that the pins of one run may hold.
    pub pin_bytes_per_run: u64,
    /// Bytes that all pins may hold.
    pub pin_bytes: u64,
    /// Tell what is given up for its blocks: somebody keeps its bytes.
    pub spill: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            anchors: 256,
            bytes: u64::MAX,
            pin_lease: Duration::from_secs(15 * 60),
            pin_bytes_per_run: u64::MAX,
            pin_bytes: u64::MAX,
            spill: false,
        }
    }
}

/// Who leaves an anchor, and why.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The sequence that computed it.
    pub seq: SeqId,
    /// Its run, told apart from those of other callers; `None` without one.
    pub run: Option<&'a str>,
    /// Where in its run; `None` for a place that belongs to no run in particular.
    pub place: Option<Place>,
    /// The time.
    pub now: Duration,
}

/// Names an anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AnchorId(pub u64);

/// An anchor that fits a request, found but not yet taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The anchor.
    pub anchor: AnchorId,
    /// Tokens that need not be computed.
    pub len: usize,
    /// The tail is taken over: nobody else reads it.
    pub takes_tail: bool,
    /// Blocks of the full group that come with it.
    pub full: usize,
    /// Blocks of both groups that come with it and that the cache held alone until now.
    pub idle: (usize, usize),
}

#[derive(Debug)]
pub(super) struct Anchor {
    /// Address of the tokens before the tail.
    pub(super) key: PrefixKey,
    /// Strides before the tail.
    pub(super) units: usize,
    pub(super) tail: Vec<TokenId>,
    pub(super) tail_blocks: Vec<Kept<Full>>,
    pub(super) window: Vec<Kept<Sliding>>,
    /// Number of the first block of the window.
    pub(super) window_first: usize,
    pub(super) left_by: SeqId,
    pub(super) hits: u32,
    /// A newer anchor goes on from it and nobody else ever did.
    pub(super) superseded: bool,
    /// Grows with every use of any anchor.
    pub(super) used: u64,
}

/// See the module's description.
#[derive(Debug)]
pub struct PrefixCache {
    pub(super) units: Units,
    pub(super) anchors: BTreeMap<AnchorId, Anchor>,
    pub(super) by_key: HashMap<PrefixKey, BTreeSet<AnchorId>>,
    pub(super) pins: Pins,
    pub(super) config: CacheConfig,
    pub(super) block_bytes: (u64, u64),
    /// What was given up and not yet asked for.
    pub(super) dropped: Vec<Dropped>,
    next_id: u64,
    uses: u64,
}

impl PrefixCache {
    /// An empty cache; `block_bytes` are those of a block of the full and of the sliding group.
    pub fn new(config: CacheConfig, block_bytes: (u64, u64)) -> Self {
        Self {
            units: Units::default(),
            anchors: BTreeMap::new(),
            by_key: HashMap::new(),
            pins: Pins::default(),
            config,
            block_bytes,
            dropped: Vec::new(),
            next_id: 0,
            uses: 0,
        }
    }

    /// How many anchors there are.
    pub fn len(&self) -> usize {
        self.anchors.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.anchors.is_empty()
    }

    /// How far the tokens are known at all, in strides: up to there another prompt went the same
    /// way, whether an anchor is there or not.
    pub fn known_units(&self, tokens: &TokenList) -> usize {
        self.units.known(tokens)
    }

    /// The anchor that spares most of the tokens; at least one is left to compute.
    pub fn find(&self, pools: &Pools, tokens: &TokenList) -> Option<Hit> {
        let stride = pools.geometry.stride();
        let usable = tokens.len().checked_sub(1)?;
        let mut units = self.known_units(tokens).min(usable / stride);
        loop {
            let found = tokens
                .key(units)
                .and_then(|key| self.by_key.get(&key))
                .into_iter()
                .flatten()
                .filter_map(|&id| self.hit(pools, id, tokens, usable))
                .max_by_key(|hit| (hit.len, std::cmp::Reverse(hit.anchor)));
            if found.is_some() {
                return found;
            }
            units = units.checked_sub(1)?;
        }
    }

    /// What an anchor whose key fits spares.
    fn hit(&self, pools: &Pools, id: AnchorId, tokens: &TokenList, usable: usize) -> Option<Hit> {
        let anchor = self.anchors.get(&id)?;
        let stride = pools.geometry.stride();
        let start = anchor.units * stride;
        let behind = tokens.ids().get(start..usable)?;
        let common = anchor.tail.iter().zip(behind);
        let common = common.take_while(|(mine, theirs)| mine == theirs).count();
        let takes_tail = common % stride != 0 && anchor.is_writable_from(pools, start + common);
        let len = start
            + if takes_tail {
                common
            } else {
                common / stride * stride
            };
        if len == 0 {
            return None;
        }
        let tail = anchor.tail_blocks.iter();
        let tail = tail.take(match takes_tail {
            true => usize::MAX,
            false => (len - start) / pools.geometry.full_block,
        });
        let window = anchor.window.iter();
        let window = window.take(match takes_tail {
            true => usize::MAX,
            false => (len / pools.geometry.sliding_block).saturating_sub(anchor.window_first),
        });
        let units = self
            .units
            .chain(anchor.leaf())
            .flat_map(|unit| &unit.blocks);
        let (mut full, mut idle) = (0, (0, 0));
        for block in units.chain(tail) {
            full += 1;
            idle.0 += usize::from(pools.full.is_unread(block));
        }
        for block in window {
            idle.1 += usize::from(pools.sliding.is_unread(block));
        }
        Some(Hit {
            anchor: id,
            len,
            takes_tail,
            full,
            idle,
        })
    }

    /// Goes on from an anchor: a table of the blocks of its first `hit.len` positions, of which
    /// none that will be written is read by anyone else.
    pub fn take(&mut self, pools: &mut Pools, hit: Hit) -> Option<Table> {
        self.uses += 1;
        let uses = self.uses;
        let anchor = self.anchors.get_mut(&hit.anchor)?;
        anchor.used = uses;
        anchor.hits += 1;
        let geometry = pools.geometry;
        let start = anchor.units * geometry.stride();
        let first = anchor.window_first;
        let (own_tail, own_window) = match hit.takes_tail {
            true => anchor.split_tail(geometry.full_block, geometry.sliding_block, start, hit.len),
            false => (Vec::new(), Vec::new()),
        };
        let anchor = self.anchors.get(&hit.anchor)?;
        let shared_tail = (hit.len - start) / geometry.full_block;
        let shared_window = (hit.len / geometry.sliding_block).saturating_sub(first);
        let mut full: Vec<_> = self
            .units
            .chain(anchor.leaf())
            .flat_map(|unit| unit.blocks.iter().rev())
            .map(|block| pools.full.lend(block))
            .collect();
        full.reverse();
        full.extend(
            anchor
                .tail_blocks
                .iter()
                .take(shared_tail)
                .map(|block| pools.full.lend(block)),
        );
        let mut window: VecDeque<_> = anchor
            .window
            .iter()
            .take(shared_window)
            .map(|block| pools.sliding.lend(block))
            .collect();
        full.extend(own_tail.into_iter().map(|kept| pools.full.claim(kept)));
        window.extend(own_window.into_iter().map(|kept| pools.sliding.claim(kept)));
        if hit.takes_tail {
            self.cut_tail(pools, hit.anchor);
        }
        Some(Table::of(full, window, first))
    }

    /// Leaves an anchor at `len` tokens, a multiple of the stride, of a sequence that goes on.
    pub fn keep_at(
        &mut self,
        pools: &mut Pools,
        origin: Origin<'_>,
        tokens: &TokenList,
        len: usize,
        table: &Table,
    ) -> Option<AnchorId> {
        let (stride, block) = (pools.geometry.stride(), pools.geometry.full_block);
        let units = len / stride;
        if units == 0 || table.full().len() < units * stride / block || self.config.anchors == 0 {
            return None;
        }
        let key = tokens.key(units)?;
        let (window, window_first) = table.keep_window(pools, len)?;
        let full = table.full();
        self.units
            .publish(pools, tokens, units, |pools, at| pools.full.keep(&full[at]));
        let anchor = Anchor {
            window,
            window_first,
            ..self.anchor(key, units, origin.seq)
        };
        Some(self.insert(pools, origin, anchor))
    }

    /// Leaves an anchor at the end of a generation: `table` holds the keys and values of exactly
    /// `tokens`, and the window before their boundary.
    pub fn keep_end(
        &mut self,
        pools: &mut Pools,
        origin: Origin<'_>,
        tokens: &TokenList,
        table: Table,
    ) -> Option<AnchorId> {
        let geometry = pools.geometry;
        let stride = geometry.stride();
        let has_window =
            |len: usize| table.sliding_start(geometry) <= len.saturating_sub(geometry.window);
        let boundary = [
            geometry.boundary(tokens.len()),
            tokens.len() / stride * stride,
        ]
        .into_iter()
        .find(|&boundary| has_window(boundary));
        let place = boundary.and_then(|boundary| {
            let key = tokens.key(boundary / stride)?;
            (!tokens.is_empty() && self.config.anchors > 0).then_some((boundary, key))
        });
        let Some((boundary, key)) = place else {
            table.release(pools);
            return None;
        };
        let units = boundary / stride;
        let (full, sliding, sliding_first) = table.into_blocks();
        self.units
            .publish(pools, tokens, units, |pools, at| pools.full.keep(&full[at]));
        let mut full = full.into_iter();
        for block in full.by_ref().take(boundary / geometry.full_block) {
            pools.full.give_back(block);
        }
        let tail_blocks = full.map(|block| pools.full.retire(block)).collect();
        let window_first = boundary.saturating_sub(geometry.window) / geometry.sliding_block;
        let mut sliding = sliding.into_iter();
        for block in sliding.by_ref().take(window_first - sliding_first) {
            pools.sliding.give_back(block);
        }
        let anchor = Anchor {
            tail: tokens.ids()[boundary..].to_vec(),
            tail_blocks,
            window: sliding.map(|block| pools.sliding.retire(block)).collect(),
            window_first,
            ..self.anchor(key, units, origin.seq)
        };
        Some(self.insert(pools, origin, anchor))
    }

    /// A newer anchor goes on from this one: it may go first, unless others went on from it too.
    pub fn supersede(&mut self, older: AnchorId, newer: AnchorId) {
        if let Some(anchor) = self.anchors.get_mut(&older)
            && older != newer
            && anchor.hits <= 1
        {
            anchor.superseded = true;
        }
    }

    /// An anchor is about to be of use: others go before it.
    pub(super) fn touch(&mut self, id: AnchorId) {
        self.uses += 1;
        if let Some(anchor) = self.anchors.get_mut(&id) {
            anchor.used = self.uses;
        }
    }

    /// Every block that it holds, for audits.
    pub(super) fn blocks(&self) -> (BTreeSet<BlockId>, BTreeSet<BlockId>) {
        let tails = self.anchors.values().flat_map(|anchor| &anchor.tail_blocks);
        let windows = self.anchors.values().flat_map(|anchor| &anchor.window);
        let mut full = self.units.blocks();
        full.extend(tails.map(Kept::id));
        (full, windows.map(Kept::id).collect())
    }

    /// Checks that the units are those that the anchors need.
    pub(super) fn audit(&self) -> Result<(), String> {
        self.units
            .audit(self.anchors.values().filter_map(Anchor::leaf))
    }

    pub(super) fn anchor(&mut self, key: PrefixKey, units: usize, left_by: SeqId) -> Anchor {
        self.uses += 1;
        Anchor {
            key,
            units,
            tail: Vec::new(),
            tail_blocks: Vec::new(),
            window: Vec::new(),
            window_first: 0,
            left_by,
            hits: 0,
            superseded: false,
            used: self.uses,
        }
    }

    /// Takes an anchor in whose units are there, in place of any that it makes needless.
    fn insert(&mut self, pools: &mut Pools, origin: Origin<'_>, anchor: Anchor) -> AnchorId {
        let id = self.insert_over_limits(pools, origin, anchor);
        self.enforce(pools, origin.now);
        id
    }

    /// The same where nothing may be given up now: the blocks of some are not filled yet.
    pub(super) fn insert_over_limits(
        &mut self,
        pools: &mut Pools,
        origin: Origin<'_>,
        mut anchor: Anchor,
    ) -> AnchorId {
        self.units.hold(anchor.leaf());
        let id = AnchorId(self.next_id);
        self.next_id += 1;
        let there = self.by_key.get(&anchor.key).into_iter().flatten();
        let there: Vec<AnchorId> = there.copied().collect();
        let longer = there.iter().copied().find(|there| {
            let tail = self.anchors.get(there).map(|there| &there.tail);
            tail.is_some_and(|tail| tail.starts_with(&anchor.tail))
        });
        if let Some(longer) = longer {
            self.release(pools, anchor, None);
            self.uses += 1;
            if let Some(there) = self.anchors.get_mut(&longer) {
                (there.used, there.superseded) = (self.uses, false);
            }
            self.pin(pools, origin, longer);
            return longer;
        }
        let shorter: Vec<_> = there
            .into_iter()
            .filter(|there| {
                let tail = self.anchors.get(there).map(|there| &there.tail);
                tail.is_some_and(|tail| anchor.tail.starts_with(tail))
            })
            .collect();
        for &shorter in &shorter {
            anchor.hits += self.anchors.get(&shorter).map_or(0, |there| there.hits);
            self.pins.replace(shorter, id);
        }
        self.by_key.entry(anchor.key).or_default().insert(id);
        self.anchors.insert(id, anchor);
        for shorter in shorter {
            self.remove(pools, shorter);
        }
        self.pin(pools, origin, id);
        id
    }

    fn pin(&mut self, pools: &Pools, origin: Origin<'_>, id: AnchorId) {
        let (Some(run), Some(place)) = (origin.run, origin.place) else {
            return;
        };
        let Some(anchor) = self.anchors.get(&id) else {
            return;
        };
        let per_unit = pools.geometry.stride() / pools.geometry.full_block;
        let full = (anchor.units * per_unit + anchor.tail_blocks.len()) as u64;
        let bytes = full * self.block_bytes.0 + anchor.window.len() as u64 * self.block_bytes.1;
        let older = self.pins.set(&self.config, origin, (run, place), id, bytes);
        if let Some(older) = older {
            self.supersede(older, id);
        }
    }

    /// Shortens an anchor whose tail is gone to the multiple of the stride it lies at.
    fn cut_tail(&mut self, pools: &mut Pools, id: AnchorId) {
        let geometry = pools.geometry;
        let Some(anchor) = self.anchors.get_mut(&id) else {
            return;
        };
        anchor.tail.clear();
        for block in anchor.tail_blocks.drain(..) {
            pools.full.forget(block);
        }
        let end = anchor.units * geometry.stride() / geometry.sliding_block;
        let whole = end.saturating_sub(anchor.window_first);
        for block in anchor.window.drain(whole.min(anchor.window.len())..) {
            pools.sliding.forget(block);
        }
        if anchor.units == 0 {
            self.remove(pools, id);
        }
    }
}

impl Anchor {
    /// The last unit before the tail.
    pub(super) fn leaf(&self) -> Option<PrefixKey> {
        (self.units > 0).then_some(self.key)
    }

    /// Whether nobody else reads what lies in the blocks of positions from `len` on.
    fn is_writable_from(&self, pools: &Pools, len: usize) -> bool {
        let start = self.units * pools.geometry.stride();
        let tail = (len - start) / pools.geometry.full_block;
        let window = (len / pools.geometry.sliding_block).saturating_sub(self.window_first);
        let mut full = self.tail_blocks.iter().skip(tail);
        let mut sliding = self.window.iter().skip(window);
        full.all(|block| pools.full.is_last(block))
            && sliding.all(|block| pools.sliding.is_last(block))
    }

    /// Parts with the blocks of positions from `len` on.
    fn split_tail(
        &mut self,
        full_block: usize,
        sliding_block: usize,
        start: usize,
        len: usize,
    ) -> (Vec<Kept<Full>>, Vec<Kept<Sliding>>) {
        let tail = ((len - start) / full_block).min(self.tail_blocks.len());
        let window = (len / sliding_block).saturating_sub(self.window_first);
        let window = window.min(self.window.len());
        (
            self.tail_blocks.split_off(tail),
            self.window.split_off(window),
        )
    }
}
