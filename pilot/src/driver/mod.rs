//! Commits, then acts.

pub mod failpoint;

use crate::{brain::BrainError, journal::JournalError, run::entry::RunId};

/// Why a run could not go on in this process. Its journal is as it was.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The brain, while a run was being created.
    #[error(transparent)]
    Brain(#[from] BrainError),
    /// The journal holds entries in an order that no pilot writes.
    #[error("run {run}: entry {sequence} does not follow from those before it: {reason}")]
    History {
        /// The run.
        run: RunId,
        /// Which entry.
        sequence: u64,
        /// Why not.
        reason: String,
    },
    /// A bug: an effect's thread died.
    #[error("internal error: {0}")]
    Internal(String),
}
