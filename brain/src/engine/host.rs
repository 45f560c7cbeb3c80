//! The host tier: blocks that the device had no room for, in this machine's memory.
//!
//! Units and anchors are found by their content address, as everywhere. Beyond the limit the ones
//! used longest ago go: an anchor before its units, later units before earlier ones, since what is
//! left of a chain must be its beginning. An anchor is of use as long as its whole chain is here or
//! on the device.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::sched::{
    below::Found,
    image::AnchorImage,
    tokens::{PrefixKey, TokenList},
    types::TokenId,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Name {
    Unit(PrefixKey),
    Anchor(PrefixKey, Vec<TokenId>),
}

#[derive(Debug)]
struct Unit {
    parent: Option<PrefixKey>,
    bytes: Vec<u8>,
    used: u64,
}

#[derive(Debug)]
struct Anchor {
    image: AnchorImage,
    bytes: Vec<u8>,
    used: u64,
}

/// Units that are remembered as missing, at most.
const MOST_MISSING: usize = 1 << 16;

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct HostTier {
    limit: u64,
    bytes: u64,
    uses: u64,
    units: HashMap<PrefixKey, Unit>,
    /// By the key of their units; of one key usually one.
    anchors: HashMap<PrefixKey, Vec<Anchor>>,
    by_use: BTreeMap<u64, Name>,
    /// Units that something here follows, and that are not here.
    missing: HashSet<PrefixKey>,
}

impl HostTier {
    /// An empty tier of so many bytes at most.
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether something here follows this unit, which is not here.
    pub(super) fn misses(&self, key: &PrefixKey) -> bool {
        self.missing.contains(key)
    }

    /// Whether a unit is here.
    pub(super) fn has_unit(&self, key: &PrefixKey) -> bool {
        self.units.contains_key(key)
    }

    /// Whether an anchor is here, itself or a longer one in its place.
    pub(super) fn has_anchor(&self, image: &AnchorImage) -> bool {
        let there = self.anchors.get(&image.key).into_iter().flatten();
        let mut tails = there.map(|anchor| &anchor.image.tail);
        tails.any(|tail| tail.starts_with(&image.tail))
    }

    /// A unit's bytes.
    pub(super) fn unit(&self, key: &PrefixKey) -> Option<&[u8]> {
        self.units.get(key).map(|unit| &unit.bytes[..])
    }

    /// The bytes of an anchor's own blocks.
    pub(super) fn anchor(&self, image: &AnchorImage) -> Option<&[u8]> {
        let there = self.anchors.get(&image.key)?;
        let there = there.iter().find(|there| there.image.tail == image.tail)?;
        Some(&there.bytes)
    }

    /// Takes a unit in. What is over the limit goes when [`HostTier::trim`] is called.
    pub(super) fn put_unit(&mut self, key: PrefixKey, parent: Option<PrefixKey>, bytes: Vec<u8>) {
        self.missing.remove(&key);
        if self.units.contains_key(&key) {
            return;
        }
        self.note_missing(parent);
        self.bytes += bytes.len() as u64;
        let used = self.use_now(Name::Unit(key));
        self.units.insert(
            key,
            Unit {
                parent,
                bytes,
                used,
            },
        );
    }

    /// Takes an anchor in, in place of those that it makes needless. Its chain counts as used.
    pub(super) fn put_anchor(&mut self, image: AnchorImage, bytes: Vec<u8>) {
        if self.has_anchor(&image) {
            return;
        }
        let there = self.anchors.remove(&image.key).unwrap_or_default();
        let (needless, mut kept): (Vec<_>, Vec<_>) = there
            .into_iter()
            .partition(|there| image.tail.starts_with(&there.image.tail));
        for anchor in needless {
            self.by_use.remove(&anchor.used);
            self.bytes -= anchor.bytes.len() as u64;
        }
        let leaf = (image.units > 0).then_some(image.key);
        self.note_missing(leaf);
        self.bytes += bytes.len() as u64;
        let used = self.use_now(Name::Anchor(image.key, image.tail.clone()));
        let key = image.key;
        kept.push(Anchor { image, bytes, used });
        self.anchors.insert(key, kept);
        self.use_chain(leaf);
    }

    /// An anchor was used: it and its chain go last.
    pub(super) fn touch(&mut self, image: &AnchorImage) {
        let used = self.use_now(Name::Anchor(image.key, image.tail.clone()));
        let there = self.anchors.get_mut(&image.key).into_iter().flatten();
        let mut there = there.filter(|there| there.image.tail == image.tail);
        match there.next() {
            Some(anchor) => {
                let before = std::mem::replace(&mut anchor.used, used);
                self.by_use.remove(&before);
            }
            None => {
                self.by_use.remove(&used);
            }
        }
        self.use_chain((image.units > 0).then_some(image.key));
    }

    /// From the last unit to the first, so that the first goes last.
    fn use_chain(&mut self, mut at: Option<PrefixKey>) {
        while let Some(key) = at {
            if !self.units.contains_key(&key) {
                return;
            }
            let used = self.use_now(Name::Unit(key));
            let Some(unit) = self.units.get_mut(&key) else {
                return;
            };
            let before = std::mem::replace(&mut unit.used, used);
            at = unit.parent;
            self.by_use.remove(&before);
        }
    }

    fn use_now(&mut self, name: Name) -> u64 {
        self.uses += 1;
        self.by_use.insert(self.uses, name);
        self.uses
    }

    fn note_missing(&mut self, key: Option<PrefixKey>) {
        let Some(key) = key.filter(|key| !self.units.contains_key(key)) else {
            return;
        };
        if self.missing.len() >= MOST_MISSING {
            // Only a hint: what it would have kept is computed again.
            self.missing.clear();
        }
        self.missing.insert(key);
    }

    /// Gives up what was used longest ago until the rest fits; `over` bytes more than the limit are
    /// let stand.
    pub(super) fn trim(&mut self, over: u64) {
        while self.bytes > self.limit.saturating_add(over) {
            let Some((_, name)) = self.by_use.pop_first() else {
                return;
            };
            match name {
                Name::Unit(key) => {
                    let unit = self.units.remove(&key);
                    self.bytes -= unit.map_or(0, |unit| unit.bytes.len() as u64);
                }
                Name::Anchor(key, tail) => self.remove_anchor(&key, &tail),
            }
        }
    }

    fn remove_anchor(&mut self, key: &PrefixKey, tail: &[TokenId]) {
        let Some(there) = self.anchors.get_mut(key) else {
            return;
        };
        if let Some(at) = there.iter().position(|there| there.image.tail == tail) {
            self.bytes -= there.swap_remove(at).bytes.len() as u64;
        }
        if there.is_empty() {
            self.anchors.remove(key);
        }
    }

    /// The anchor here that spares the most of the tokens, if more than `above`; the device has the
    /// first `known` units.
    pub(super) fn best(
        &self,
        tokens: &TokenList,
        stride: usize,
        known: usize,
        above: usize,
    ) -> Option<Found> {
        if self.anchors.is_empty() {
            return None;
        }
        let here = |unit: &usize| tokens.key(*unit).is_some_and(|key| self.has_unit(&key));
        let reach = known + (known + 1..).take_while(here).count();
        (0..=reach).rev().find_map(|units| {
            if (units + 1) * stride <= above {
                return None;
            }
            let there = self.anchors.get(&tokens.key(units)?)?.iter();
            let best = there
                .map(|there| (there.image.spares(tokens, stride), &there.image))
                .max_by_key(|(spares, _)| *spares)?;
            let (spares, image) = best;
            let chain = (1..=units).map_while(|unit| tokens.key(unit)).collect();
            (spares > above).then(|| Found {
                image: image.clone(),
                chain,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STRIDE: usize = 2;

    fn tokens(ids: &[TokenId]) -> TokenList {
        TokenList::new(PrefixKey::root("f", "o", "s"), STRIDE, ids.iter().copied())
    }

    fn image(of: &TokenList, units: usize, tail: &[TokenId]) -> AnchorImage {
        AnchorImage {
            key: of.key(units).unwrap(),
            units,
            tail: tail.to_vec(),
            window_first: 0,
            pin: None,
        }
    }

    fn put_chain(tier: &mut HostTier, of: &TokenList, units: usize) {
        for unit in 1..=units {
            let parent = (unit > 1).then(|| of.key(unit - 1).unwrap());
            tier.put_unit(of.key(unit).unwrap(), parent, vec![unit as u8; 10]);
        }
    }

    #[test]
    fn the_longest_whole_chain_is_found_and_no_other() {
        let of = tokens(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let mut tier = HostTier::new(1000);
        put_chain(&mut tier, &of, 3);
        tier.put_anchor(image(&of, 3, &[7]), vec![0; 5]);
        tier.put_anchor(image(&of, 1, &[3]), vec![0; 5]);
        let best = tier.best(&of, STRIDE, 0, 0).unwrap();
        assert_eq!((best.image.units, best.chain.len()), (3, 3));
        assert_eq!(tier.best(&of, STRIDE, 0, 7), None, "no more than is there");
        assert_eq!(tier.best(&of, STRIDE, 0, 6).unwrap(), best);
        // Another text finds what it shares.
        let other = tokens(&[1, 2, 3, 9, 9, 9]);
        assert_eq!(tier.best(&other, STRIDE, 0, 0).unwrap().image.units, 1);
        // A unit in the middle is gone: the device has to have it.
        let mut holed = HostTier::new(1000);
        holed.put_unit(of.key(3).unwrap(), of.key(2), vec![0; 10]);
        holed.put_anchor(image(&of, 3, &[7]), vec![0; 5]);
        assert!(holed.misses(&of.key(2).unwrap()));
        assert_eq!(holed.best(&of, STRIDE, 0, 0), None);
        assert!(holed.best(&of, STRIDE, 2, 0).is_some());
        holed.put_unit(of.key(2).unwrap(), of.key(1), vec![0; 10]);
        assert!(!holed.misses(&of.key(2).unwrap()) && holed.misses(&of.key(1).unwrap()));
    }

    #[test]
    fn what_was_used_longest_ago_goes_and_beginnings_last() {
        let (a, b) = (tokens(&[1, 2, 3, 4, 5]), tokens(&[6, 7, 8, 9, 5]));
        let mut tier = HostTier::new(50);
        for of in [&a, &b] {
            put_chain(&mut tier, of, 2);
            tier.put_anchor(image(of, 2, &[]), vec![0; 5]);
        }
        assert_eq!(tier.bytes(), 50);
        tier.touch(&image(&a, 2, &[]));
        put_chain(&mut tier, &tokens(&[3, 3, 3]), 1);
        tier.trim(0);
        assert_eq!(tier.bytes(), 45, "the older anchor went, and one unit");
        assert!(tier.best(&a, STRIDE, 0, 0).is_some());
        assert!(tier.best(&b, STRIDE, 0, 0).is_none());
        assert!(tier.has_unit(&b.key(1).unwrap()) && !tier.has_unit(&b.key(2).unwrap()));
        tier.trim(1000);
        assert_eq!(tier.bytes(), 45, "so many more are let stand");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Put(Vec<TokenId>, usize),
        Touch(Vec<TokenId>),
        Trim(u64),
    }

    fn ids() -> impl Strategy<Value = Vec<TokenId>> {
        prop::collection::vec(0u32..2, 1..12)
    }

    proptest! {
        /// Bytes are those of what is there, and what is found is all there.
        #[test]
        fn the_books_balance(
            ops in prop::collection::vec(
                prop_oneof![
                    4 => (ids(), 0usize..3).prop_map(|(ids, tail)| Op::Put(ids, tail)),
                    1 => ids().prop_map(Op::Touch),
                    1 => (0u64..40).prop_map(Op::Trim),
                ],
                0..60,
            ),
            wanted in ids(),
        ) {
            let mut tier = HostTier::new(120);
            for op in ops {
                match op {
                    Op::Put(ids, tail) => {
                        let of = tokens(&ids);
                        let units = ids.len() / STRIDE;
                        put_chain(&mut tier, &of, units);
                        let from = (units * STRIDE + tail).min(ids.len());
                        let tail = &ids[units * STRIDE..from];
                        tier.put_anchor(image(&of, units, tail), vec![0; 3 + tail.len()]);
                    }
                    Op::Touch(ids) => {
                        let of = tokens(&ids);
                        tier.touch(&image(&of, ids.len() / STRIDE, &[]));
                    }
                    Op::Trim(over) => {
                        tier.trim(over);
                        prop_assert!(tier.bytes <= 120 + over);
                    }
                }
                let units: usize = tier.units.values().map(|unit| unit.bytes.len()).sum();
                let anchors: usize = tier.anchors.values().flatten().map(|one| one.bytes.len()).sum();
                prop_assert_eq!(tier.bytes, (units + anchors) as u64);
                let there = tier.units.len() + tier.anchors.values().flatten().count();
                prop_assert_eq!(tier.by_use.len(), there);
            }
            let of = tokens(&wanted);
            if let Some(found) = tier.best(&of, STRIDE, 0, 0) {
                prop_assert!(found.chain.iter().all(|key| tier.has_unit(key)));
                prop_assert!(tier.anchor(&found.image).is_some());
                prop_assert!(found.image.spares(&of, STRIDE) < wanted.len());
            }
        }
    }
}
