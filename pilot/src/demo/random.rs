//! A small generator of pseudo-random choices: the same seed gives the same workspace on every
//! machine. Not for secrets.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A sequence of choices named by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        // The high half of the product: no modulo bias worth speaking of for small `end`.
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// True this often, in percent.
    pub fn percent(&mut self, share: usize) -> bool {
        self.below(100) < share
    }

    /// One of them; they are not empty.
    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }

    /// All of them in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// `count` different ones in random order, or all if there are fewer.
    pub fn sample<T: Clone>(&mut self, items: &[T], count: usize) -> Vec<T> {
        let mut all = items.to_vec();
        self.shuffle(&mut all);
        all.truncate(count);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_a_function_of_the_seed() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..50).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn every_item_comes_up_and_none_twice() {
        let mut random = Random::new(3);
        let items: Vec<u32> = (0..10).collect();
        let mut seen = random.sample(&items, 20);
        assert_ne!(seen, items);
        seen.sort_unstable();
        assert_eq!(seen, items);
        let hits: std::collections::BTreeSet<u32> = (0..500).map(|_| random.pick(&items)).collect();
        assert_eq!(hits.len(), 10);
    }
}
