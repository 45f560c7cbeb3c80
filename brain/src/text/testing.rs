//! What the tests of the text layer share: the demo's tokenizer and a piece of its vocabulary.

use std::sync::{Arc, OnceLock};

use super::tokenizer::Tokenizer;
use crate::sched::types::TokenId;

pub(crate) const TOKENIZER: &[u8] = include_bytes!("../../assets/demo/tokenizer.json");
pub(crate) const TEMPLATE: &str = include_str!("../../assets/demo/chat_template.jinja");

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static SHARED: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    SHARED
        .get_or_init(|| Arc::new(Tokenizer::from_bytes(TOKENIZER, "demo").unwrap()))
        .clone()
}

/// Ids of a text in which special tokens are spelled.
pub(crate) fn ids(text: &str) -> Vec<TokenId> {
    tokenizer().encode_with_specials(text).unwrap()
}
