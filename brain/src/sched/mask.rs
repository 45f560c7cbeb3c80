//! The tokens that may come next: a bit for each of the vocabulary.

use super::types::TokenId;

/// A set of tokens. Ids beyond its size are not in it.
#[derive(Clone, PartialEq, Eq)]
pub struct Mask {
    words: Box<[u32]>,
    vocab: usize,
}

impl Mask {
    /// No token of a vocabulary of so many.
    pub fn none(vocab: usize) -> Self {
        Self {
            words: vec![0; vocab.div_ceil(32)].into(),
            vocab,
        }
    }

    /// How many tokens the vocabulary has.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The bits, token 0 the lowest of the first word; those behind the vocabulary are 0.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Whether a token is in the set.
    pub fn allows(&self, id: TokenId) -> bool {
        let word = self.words.get(id as usize / 32).copied().unwrap_or(0);
        word >> (id % 32) & 1 == 1
    }

    /// Takes a token in; one beyond the vocabulary is passed over.
    pub fn insert(&mut self, id: TokenId) {
        if (id as usize) < self.vocab {
            self.words[id as usize / 32] |= 1 << (id % 32);
        }
    }

    /// Takes a token out.
    pub fn remove(&mut self, id: TokenId) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }

    /// Takes in every token whose bit is set in `words`; bits beyond the vocabulary are passed over.
    pub fn insert_words(&mut self, words: &[u32]) {
        for (mine, theirs) in self.words.iter_mut().zip(words) {
            *mine |= theirs;
        }
        let tail = self.vocab % 32;
        if tail > 0
            && let Some(last) = self.words.last_mut()
        {
            *last &= (1 << tail) - 1;
        }
    }

    /// Whether it has no token.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The tokens, ascending.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> + '_ {
        // Most words of a large vocabulary are empty: they cost a look.
        let words = self
            .words
            .iter()
            .zip(0u32..)
            .filter(|(word, _)| **word != 0);
        words.flat_map(|(&word, at)| {
            let left = std::iter::successors(Some(word), |left| {
                let left = left & (left - 1);
                (left != 0).then_some(left)
            });
            left.map(move |left| at * 32 + left.trailing_zeros())
        })
    }

    /// The token, if there is one alone.
    pub fn only(&self) -> Option<TokenId> {
        let mut tokens = self.iter();
        let first = tokens.next()?;
        tokens.next().is_none().then_some(first)
    }
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        write!(f, "Mask({count} of {})", self.vocab)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_what_the_vocabulary_has(
            vocab in 1usize..100,
            inserted in prop::collection::vec(0u32..130, 0..40),
            removed in prop::collection::vec(0u32..130, 0..10),
        ) {
            let mut mask = Mask::none(vocab);
            let mut set = std::collections::BTreeSet::new();
            for id in inserted {
                mask.insert(id);
                if (id as usize) < vocab {
                    set.insert(id);
                }
            }
            for id in removed {
                mask.remove(id);
                set.remove(&id);
            }
            prop_assert_eq!(mask.iter().collect::<Vec<_>>(), set.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(mask.is_empty(), set.is_empty());
            prop_assert_eq!(mask.only(), (set.len() == 1).then(|| *set.first().unwrap()));
            prop_assert!((0..200).all(|id| mask.allows(id) == set.contains(&id)));
            let mut all = Mask::none(vocab);
            all.insert_words(&[u32::MAX; 9]);
            let mut each = Mask::none(vocab);
            (0..vocab as TokenId).for_each(|id| each.insert(id));
            prop_assert_eq!(all, each);
        }
    }
}
