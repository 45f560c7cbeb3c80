//! The vocabulary as grammars read it: the bytes of every token in one trie.

use std::sync::Arc;

use toktrie::{TokRxInfo, TokTrie, TokenizerEnv};

use crate::{
    sched::{mask::Mask, types::TokenId},
    text::tokenizer::{TokenText, Tokenizer},
};

/// A trie of all tokens. Grammars are matched byte by byte, so that text may be cut into tokens in
/// any way the model likes.
pub(super) struct Vocabulary {
    trie: TokTrie,
}

impl Vocabulary {
    /// Reads the tokenizer's table. A special token is never text: grammars name it by its number.
    pub(super) fn of(tokenizer: &Tokenizer) -> Arc<Self> {
        let size = tokenizer.vocab_size() as TokenId;
        let words: Vec<Vec<u8>> = (0..size)
            .map(|id| match tokenizer.token(id) {
                TokenText::Bytes(bytes) if is_text(bytes) => bytes.to_vec(),
                TokenText::Special(spelling) => {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], spelling.as_bytes()].concat()
                }
                TokenText::Bytes(_) | TokenText::Unknown => Vec::new(),
            })
            .collect();
        let info = TokRxInfo::new(size, tokenizer.markers().eos);
        Arc::new(Self {
            trie: TokTrie::from(&info, &words),
        })
    }
}

/// Every token of text, in a mask of so many.
pub(super) fn text_tokens(tokenizer: &Tokenizer, vocab: usize) -> Mask {
    let mut mask = Mask::none(vocab);
    for id in 0..tokenizer.vocab_size() as TokenId {
        if matches!(tokenizer.token(id), TokenText::Bytes(_)) {
            mask.insert(id);
        }
    }
    mask
}

/// The byte that marks special tokens in the trie is in no text.
fn is_text(bytes: &[u8]) -> bool {
    bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER)
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// The model cuts text as it likes: no token is forced for its bytes alone.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
