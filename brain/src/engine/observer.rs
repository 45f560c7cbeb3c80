//! Whoever wants to hear what the engine does, as it does it.

use std::fmt::Debug;

use crate::sched::sequence::Outcome;

/// Hears of rounds and ends. Called on the engine's thread, so it must neither wait nor panic.
pub trait Observer: Debug + Send + Sync {
    /// A sequence emitted.
    fn round(&self, emitted: usize, drafted: usize, accepted: usize);

    /// A generation ended.
    fn finished(&self, outcome: &Outcome);
}
