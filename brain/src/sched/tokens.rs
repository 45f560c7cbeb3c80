//! A growing list of tokens that knows the content address of each of its prefixes.
//!
//! Prefixes are addressed at multiples of a stride by a chain of BLAKE3 hashes that begins with
//! the model's fingerprint, the caller and the caller's salt. Equal keys mean that all of these and
//! the tokens are equal: nobody can find, guess or collide with what another caller computed.

use serde::{Deserialize, Serialize};

use super::types::TokenId;

/// Content address of a prefix: of its tokens, the model, the caller and the salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PrefixKey(pub [u8; 32]);

impl PrefixKey {
    /// The key of the empty prefix.
    pub fn root(fingerprint: &str, owner: &str, salt: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("marathon brain prefix 1");
        for part in [fingerprint, owner, salt] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The key of this prefix with these tokens behind it.
    fn then(&self, tokens: &[TokenId]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}

/// Tokens of a sequence, prompt and answer together, with the keys of their prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenList {
    ids: Vec<TokenId>,
    stride: usize,
    /// `keys[i]` addresses the first `i * stride` tokens.
    keys: Vec<PrefixKey>,
}

impl TokenList {
    /// The list of the given tokens, addressed at multiples of `stride` (at least 1).
    pub fn new(root: PrefixKey, stride: usize, ids: impl IntoIterator<Item = TokenId>) -> Self {
        let mut list = Self {
            ids: Vec::new(),
            stride: stride.max(1),
            keys: vec![root],
        };
        for id in ids {
            list.push(id);
        }
        list
    }

    /// Appends one token.
    pub fn push(&mut self, id: TokenId) {
        self.ids.push(id);
        let whole = self.keys.len() * self.stride;
        if self.ids.len() == whole
            && let Some(last) = self.keys.last()
        {
            let key = last.then(&self.ids[whole - self.stride..]);
            self.keys.push(key);
        }
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

    /// Key of the first `index * stride` tokens, if there are so many.
    pub fn key(&self, index: usize) -> Option<PrefixKey> {
        self.keys.get(index).copied()
    }

    /// Forgets all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.keys.truncate(self.ids.len() / self.stride + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(stride: usize, ids: &[TokenId]) -> TokenList {
        TokenList::new(PrefixKey::root("f", "o", "s"), stride, ids.iter().copied())
    }

    #[test]
    fn a_prefix_has_the_key_of_the_list_it_is() {
        let long = list(2, &[5, 0, 7, 7, 1]);
        for len in 0..=5 {
            let short = list(2, &long.ids()[..len]);
            assert_eq!(long.key(len / 2), short.key(len / 2));
        }
        assert_eq!(long.key(2), list(2, &[5, 0, 7, 7]).key(2));
        assert_eq!(long.key(3), None);
    }

    #[test]
    fn tokens_order_model_caller_and_salt_change_the_key() {
        let key = |ids: &[TokenId]| list(2, ids).key(1);
        assert_ne!(key(&[1, 2]), key(&[2, 1]));
        assert_ne!(key(&[0, 0]), list(2, &[0, 0]).key(0));
        let roots = [
            ("f", "o", "s"),
            ("g", "o", "s"),
            ("f", "p", "s"),
            ("f", "os", ""),
        ];
        let keys: std::collections::BTreeSet<_> = roots
            .into_iter()
            .map(|(model, owner, salt)| PrefixKey::root(model, owner, salt))
            .collect();
        assert_eq!(keys.len(), roots.len());
    }

    #[test]
    fn a_cut_list_grows_on_as_if_never_longer() {
        for cut in 0..=6 {
            let mut cut_list = list(2, &[1, 2, 3, 4, 5, 6]);
            cut_list.truncate(cut);
            cut_list.push(9);
            let whole: Vec<_> = (1..=cut as u32).chain([9]).collect();
            assert_eq!(cut_list, list(2, &whole));
        }
    }
}
