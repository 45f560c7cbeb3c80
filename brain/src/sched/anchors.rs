//! Anchors: ended generations whose blocks are kept for the request that goes on from them.
//!
//! An agent's next prompt extends the tokens of its last generation. A sliding layer's window is
//! gone everywhere but at the end of a generation, so that end is the one place from which a
//! sequence can go on exactly as if it had never stopped. An anchor is that end: a token list and
//! the blocks with its keys and values. A request whose tokens start with exactly that list takes
//! the blocks over; nobody else can use them.
//!
//! Anchors are a cache: the newest of each run is kept, and the least recently made go first when
//! blocks are needed.

use std::collections::BTreeMap;

use super::{
    table::{Pools, Table},
    tokens::TokenList,
};

/// Blocks at the end of a generation.
#[derive(Debug)]
struct Anchor {
    /// Tokens whose keys and values the table holds.
    tokens: TokenList,
    table: Table,
    run: String,
}

/// An anchor that fits a request, found but not yet taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    age: u64,
    /// Tokens it holds.
    pub len: usize,
    /// Blocks it holds in the full and in the sliding group.
    pub held: (usize, usize),
}

/// All anchors.
#[derive(Debug, Default)]
pub struct Anchors {
    /// By age, oldest first.
    all: BTreeMap<u64, Anchor>,
    /// By length and hash of the tokens.
    index: BTreeMap<(usize, u64), u64>,
    /// The anchor of each run; requests without a run are not here.
    newest: BTreeMap<String, u64>,
    next_age: u64,
    at_most: usize,
    held: (usize, usize),
}

impl Anchors {
    /// A cache of at most that many anchors.
    pub fn new(at_most: usize) -> Self {
        Self {
            at_most,
            ..Self::default()
        }
    }

    /// How many anchors there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Blocks held by all anchors, in the full and in the sliding group.
    pub fn held(&self) -> (usize, usize) {
        self.held
    }

    /// Keeps the end of a generation: `table` holds the keys and values of exactly `tokens`.
    pub fn keep(&mut self, pools: &mut Pools, run: &str, tokens: TokenList, table: Table) {
        let Some(hash) = tokens.prefix_hash(tokens.len()) else {
            table.release(pools);
            return;
        };
        if let Some(&older) = self.newest.get(run) {
            self.drop_anchor(pools, older);
        }
        if let Some(&same) = self.index.get(&(tokens.len(), hash)) {
            self.drop_anchor(pools, same);
        }
        let age = self.next_age;
        self.next_age += 1;
        let (full, sliding) = table.held();
        self.held = (self.held.0 + full, self.held.1 + sliding);
        self.index.insert((tokens.len(), hash), age);
        if !run.is_empty() {
            self.newest.insert(run.to_owned(), age);
        }
        self.all.insert(
            age,
            Anchor {
                tokens,
                table,
                run: run.to_owned(),
            },
        );
        while self.all.len() > self.at_most && self.drop_oldest(pools) {}
    }

    /// The longest anchor that the tokens start with.
    pub fn find(&self, tokens: &TokenList) -> Option<Hit> {
        let mut longest = tokens.len();
        // One look-up per distinct length, longest first; there are few anchors.
        while let Some((&(len, _), _)) = self.index.range(..=(longest, u64::MAX)).next_back() {
            let hit = tokens
                .prefix_hash(len)
                .and_then(|hash| self.index.get(&(len, hash)));
            if let Some((&age, anchor)) = hit.and_then(|age| self.all.get_key_value(age))
                && anchor.tokens.ids() == &tokens.ids()[..len]
            {
                return Some(Hit {
                    age,
                    len,
                    held: anchor.table.held(),
                });
            }
            longest = len.checked_sub(1)?;
        }
        None
    }

    /// Takes an anchor's blocks over. The anchor is gone.
    pub fn take(&mut self, hit: Hit) -> Option<Table> {
        self.remove(hit.age).map(|anchor| anchor.table)
    }

    /// Frees the blocks of the oldest anchor; false when there is none.
    pub fn drop_oldest(&mut self, pools: &mut Pools) -> bool {
        match self.all.first_key_value() {
            Some((&age, _)) => self.drop_anchor(pools, age),
            None => false,
        }
    }

    /// Frees the blocks of every anchor.
    pub fn clear(&mut self, pools: &mut Pools) {
        while self.drop_oldest(pools) {}
    }

    fn drop_anchor(&mut self, pools: &mut Pools, age: u64) -> bool {
        let Some(anchor) = self.remove(age) else {
            return false;
        };
        anchor.table.release(pools);
        true
    }

    fn remove(&mut self, age: u64) -> Option<Anchor> {
        let anchor = self.all.remove(&age)?;
        if let Some(hash) = anchor.tokens.prefix_hash(anchor.tokens.len()) {
            self.index.remove(&(anchor.tokens.len(), hash));
        }
        if self.newest.get(&anchor.run) == Some(&age) {
            self.newest.remove(&anchor.run);
        }
        let (full, sliding) = anchor.table.held();
        self.held = (self.held.0 - full, self.held.1 - sliding);
        Some(anchor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::{blocks::BlockPool, table::Geometry};

    fn pools() -> Pools {
        let geometry = Geometry {
            full_block: 4,
            sliding_block: 4,
            window: 8,
        };
        Pools {
            full: BlockPool::new(32),
            sliding: BlockPool::new(32),
            geometry,
        }
    }

    fn keep(anchors: &mut Anchors, pools: &mut Pools, run: &str, ids: &[u32]) {
        let mut table = Table::default();
        assert!(table.grow(pools, ids.len()));
        anchors.keep(pools, run, TokenList::new(ids.iter().copied()), table);
    }

    fn find(anchors: &Anchors, ids: &[u32]) -> Option<usize> {
        anchors
            .find(&TokenList::new(ids.iter().copied()))
            .map(|hit| hit.len)
    }

    #[test]
    fn only_a_whole_anchor_is_a_hit_and_the_longest_wins() {
        let (mut anchors, mut pools) = (Anchors::new(8), pools());
        keep(&mut anchors, &mut pools, "a", &[1, 2, 3]);
        keep(&mut anchors, &mut pools, "b", &[1, 2, 3, 4, 5]);
        keep(&mut anchors, &mut pools, "c", &[1, 2, 9, 4]);
        assert_eq!(find(&anchors, &[1, 2]), None);
        assert_eq!(find(&anchors, &[1, 2, 3]), Some(3));
        assert_eq!(find(&anchors, &[1, 2, 3, 4, 6, 7]), Some(3));
        assert_eq!(find(&anchors, &[1, 2, 3, 4, 5, 6]), Some(5));
        assert_eq!(find(&anchors, &[2, 2, 3, 4, 5, 6]), None);
    }

    #[test]
    fn a_run_keeps_its_newest_and_the_oldest_goes_first() {
        let (mut anchors, mut pools) = (Anchors::new(2), pools());
        keep(&mut anchors, &mut pools, "a", &[1]);
        keep(&mut anchors, &mut pools, "a", &[1, 2]);
        assert_eq!((anchors.len(), find(&anchors, &[1, 5])), (1, None));
        keep(&mut anchors, &mut pools, "", &[3]);
        keep(&mut anchors, &mut pools, "", &[4]);
        assert_eq!((anchors.len(), find(&anchors, &[1, 2])), (2, None));
        assert_eq!(pools.full.used(), anchors.held().0);
    }

    #[test]
    fn taking_moves_the_blocks_and_clearing_frees_them() {
        let (mut anchors, mut pools) = (Anchors::new(8), pools());
        keep(&mut anchors, &mut pools, "a", &[1, 2, 3, 4, 5]);
        keep(&mut anchors, &mut pools, "b", &[7]);
        let hit = anchors.find(&TokenList::new([1, 2, 3, 4, 5])).unwrap();
        let table = anchors.take(hit).unwrap();
        assert_eq!(table.held(), (2, 2));
        assert!(anchors.take(hit).is_none());
        anchors.clear(&mut pools);
        assert_eq!(pools.full.used(), 2);
        table.release(&mut pools);
        assert_eq!((pools.full.used(), pools.sliding.used()), (0, 0));
    }
}
