//! What can go wrong before or beside a run, with an exit status each.

use std::path::PathBuf;

use crate::{brain::BrainError, driver::DriverError, journal::JournalError};

/// Exit statuses of the program. 0 is success.
pub mod exit {
    /// Anything that has no status of its own.
    pub const OTHER: u8 = 1;
    /// Command line or configuration.
    pub const USAGE: u8 = 2;
    /// The brain cannot be reached, or refuses.
    pub const BRAIN: u8 = 3;
    /// Another pilot holds the store.
    pub const STORE_LOCKED: u8 = 4;
    /// The store is damaged.
    pub const STORE_DAMAGED: u8 = 5;
    /// No such run.
    pub const UNKNOWN_RUN: u8 = 6;
    /// The workspace is missing or no folder.
    pub const WORKSPACE: u8 = 7;
    /// The store cannot be read or written (disk full, permissions).
    pub const STORE_IO: u8 = 8;
    /// The run stands still and can be resumed.
    pub const PAUSED: u8 = 10;
}

/// An error that ends a command.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Command line or configuration.
    #[error("{0}")]
    Usage(String),
    /// The workspace is missing or no folder.
    #[error("workspace {path}: {reason}")]
    Workspace {
        /// As given.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The store.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The brain.
    #[error(transparent)]
    Brain(#[from] BrainError),
    /// A run.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The demo did not come to its end.
    #[error("the demo failed: {0}")]
    Demo(String),
    /// Anything else, with what was being done.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl Error {
    /// The exit status that tells this error from others.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => exit::USAGE,
            Self::Workspace { .. } => exit::WORKSPACE,
            Self::Journal(error) => journal_code(error),
            Self::Brain(BrainError::Config(_)) => exit::USAGE,
            Self::Brain(_) => exit::BRAIN,
            Self::Driver(DriverError::Journal(error)) => journal_code(error),
            Self::Driver(DriverError::Brain(_)) => exit::BRAIN,
            Self::Driver(DriverError::Impossible(_)) => exit::USAGE,
            Self::Driver(_) | Self::Demo(_) | Self::Io { .. } => exit::OTHER,
        }
    }
}

fn journal_code(error: &JournalError) -> u8 {
    match error {
        JournalError::Locked { .. } => exit::STORE_LOCKED,
        JournalError::Damaged { .. } | JournalError::Newer { .. } => exit::STORE_DAMAGED,
        JournalError::UnknownRun(_) | JournalError::NoStore(_) => exit::UNKNOWN_RUN,
        _ => exit::STORE_IO,
    }
}
