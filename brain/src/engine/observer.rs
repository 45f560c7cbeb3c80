//! Whoever wants to hear what the engine does, as it does it.

use std::{fmt::Debug, time::Duration};

use crate::sched::sequence::Outcome;

/// One turn of the engine's loop that computed something: what, and where its time went. What lies
/// between two turns is housekeeping: commands, saving, leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Sequences that emitted, those whose prompt ended in this step included.
    pub emitting: usize,
    /// Drafts checked.
    pub drafts: usize,
    /// Tokens of prompts computed.
    pub prefill: usize,
    /// When planning began, on the engine's clock.
    pub begun: Duration,
    /// When the device began.
    pub planned: Duration,
    /// When the device was done.
    pub computed: Duration,
    /// When readers could see what was emitted.
    pub published: Duration,
}

/// Hears of rounds and ends. Called on the engine's thread, so it must neither wait nor panic.
pub trait Observer: Debug + Send + Sync {
    /// A sequence emitted.
    fn round(&self, emitted: usize, drafted: usize, accepted: usize);

    /// A generation ended.
    fn finished(&self, outcome: &Outcome);

    /// A step was computed and its results were published. Whoever does not ask does not hear it.
    fn turn(&self, turn: &Turn) {
        let _ = turn;
    }
}
