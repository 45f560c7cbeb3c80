//! A growing list of tokens that knows the hash of each of its prefixes.

use super::types::TokenId;

/// Tokens of a sequence, prompt and answer together, with a chained hash at every length.
///
/// The chain makes "does this list start with that one?" a single comparison of hashes, whatever
/// the lengths. It only finds candidates: who acts on a hit compares the tokens themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenList {
    ids: Vec<TokenId>,
    /// `chain[i]` is the hash of `ids[..=i]`.
    chain: Vec<u64>,
}

impl TokenList {
    /// The list of the given tokens.
    pub fn new(ids: impl IntoIterator<Item = TokenId>) -> Self {
        let mut list = Self::default();
        for id in ids {
            list.push(id);
        }
        list
    }

    /// Appends one token.
    pub fn push(&mut self, id: TokenId) {
        let last = self.chain.last().copied().unwrap_or(CHAIN_START);
        self.ids.push(id);
        self.chain
            .push(mix(last ^ mix(u64::from(id).wrapping_add(ID_OFFSET))));
    }

    /// How many tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The tokens.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Hash of the first `len` tokens; `None` past the end and for the empty prefix.
    pub fn prefix_hash(&self, len: usize) -> Option<u64> {
        self.chain.get(len.checked_sub(1)?).copied()
    }

    /// Forgets all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.chain.truncate(len);
    }
}

const CHAIN_START: u64 = 0x243f_6a88_85a3_08d3;
const ID_OFFSET: u64 = 0x1319_8a2e_0370_7344;

/// A bijection on 64 bits in which every input bit moves every output bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 31)).wrapping_mul(0x7fb5_d329_728e_a185);
    x = (x ^ (x >> 27)).wrapping_mul(0x81da_def4_bc2d_d44d);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_the_hash_of_the_list_it_is() {
        let long = TokenList::new([5, 0, 7, 7, 1]);
        for len in 1..=5 {
            let short = TokenList::new(long.ids()[..len].iter().copied());
            assert_eq!(long.prefix_hash(len), short.prefix_hash(len));
        }
        assert_eq!(long.prefix_hash(0), None);
        assert_eq!(long.prefix_hash(6), None);
    }

    #[test]
    fn order_and_length_change_the_hash() {
        let hash = |ids: &[TokenId]| TokenList::new(ids.iter().copied()).prefix_hash(ids.len());
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
        assert_ne!(hash(&[0]), hash(&[0, 0]));
        assert_ne!(hash(&[0]), hash(&[1]));
    }

    #[test]
    fn a_cut_list_grows_on_as_if_never_longer() {
        let mut list = TokenList::new([1, 2, 3, 4]);
        list.truncate(2);
        list.push(9);
        assert_eq!(list, TokenList::new([1, 2, 9]));
    }
}
