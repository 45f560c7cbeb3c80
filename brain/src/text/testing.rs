//! What the tests of the text layer share: the demo's tokenizer and a piece of its vocabulary.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
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

/// Asserts that work eight times as large takes nowhere near 64 times as long. Time on the
/// processor counts, and of that the best of several attempts: other programs do not matter.
#[track_caller]
pub(crate) fn assert_linear(name: &str, size: usize, mut work: impl FnMut(usize)) {
    let mut best = |size: usize| {
        let mut time = || {
            let start = on_cpu();
            work(size);
            on_cpu() - start
        };
        (0..5).map(|_| time()).min().unwrap_or_default()
    };
    let (short, long) = (best(size), best(8 * size));
    assert!(
        long < short * 32 + Duration::from_millis(20),
        "{name}: {short:?} for {size}, {long:?} for eight times that"
    );
}

/// Processor time of this thread.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}
