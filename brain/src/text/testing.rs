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

/// Asserts that work on an input eight times as large takes about as long as eight times the work
/// on the input: quadratic work would take eight times longer. Time on the processor counts, and
/// of that the best of several attempts, so that other programs do not matter.
#[track_caller]
pub(crate) fn assert_linear(name: &str, size: usize, mut work: impl FnMut(usize)) {
    let mut best = |size: usize, times: usize| {
        let mut time = || {
            let start = on_cpu();
            (0..times).for_each(|_| work(size));
            on_cpu() - start
        };
        (0..4).map(|_| time()).min().unwrap_or_default()
    };
    let (short, long) = (best(size, 8), best(8 * size, 1));
    // The clock advances in steps of some milliseconds.
    assert!(
        long < short * 4 + Duration::from_millis(40),
        "{name}: {short:?} for eight times {size}, {long:?} for the whole"
    );
}

/// Processor time of this thread.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}
