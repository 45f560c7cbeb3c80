//! What a run is, without any I/O: entries, the state they fold into, and what to do next.
//!
//! Nothing here knows a clock, a socket, a thread or a file (a test of the repository looks). The driver asks
//! [`decide::decide`] what comes next, performs it, journals the outcome as an [`entry::Entry`] and
//! folds it into the [`state::State`]. Recovery is the same fold over what the journal holds.

pub mod budget;
pub mod decide;
pub mod entry;
pub mod event;
pub mod log;
pub mod prompt;
pub mod repetition;
pub mod retry;
pub mod room;
pub mod seed;
pub mod state;
