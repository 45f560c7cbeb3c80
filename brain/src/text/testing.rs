//! What the tests of the text layer share: the demo's tokenizer and a piece of its vocabulary.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

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

/// Asserts that work eight times as large takes nowhere near 64 times as long. The best of
/// several attempts counts, so that a busy machine does not make it fail.
#[track_caller]
pub(crate) fn assert_linear(name: &str, size: usize, mut work: impl FnMut(usize)) {
    let mut best = |size: usize| {
        let time = |work: &mut dyn FnMut(usize)| {
            let start = Instant::now();
            work(size);
            start.elapsed()
        };
        (0..5).map(|_| time(&mut work)).min().unwrap_or_default()
    };
    let (short, long) = (best(size), best(8 * size));
    assert!(
        long < short * 32 + Duration::from_millis(20),
        "{name}: {short:?} for {size}, {long:?} for eight times that"
    );
}
