//! Where a run's facts are kept.

pub mod codec;
pub mod disk;
mod guard;
mod high_water;
mod lock;
pub mod memory;
mod opening;
pub mod share;
pub mod sled;
mod tree;

use std::path::PathBuf;

use crate::run::entry::{Entry, RunId};

/// How far an append must have come when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Survives a kill of this process; a power cut may lose it (never out of order). For facts that
    /// can be had again: tokens of a running answer, rendered messages.
    Lazy,
    /// Survives a power cut. Everything before it does too.
    Synced,
}

/// Where a run's journal ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Entries in the journal, which is the sequence of the next.
    pub next: u64,
    /// Hash of the last record (zeros when there is none).
    pub hash: [u8; 32],
}

impl Head {
    /// Head of a journal without entries.
    pub const EMPTY: Self = Self {
        next: 0,
        hash: [0; 32],
    };
}

/// An entry with its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Contiguous from 0.
    pub sequence: u64,
    /// Which opening of the store wrote it; grows.
    pub epoch: u64,
    /// Wall clock of the writer, milliseconds since 1970. For people; order comes from `sequence`.
    pub wall_ms: u64,
    /// The fact.
    pub entry: Entry,
}

/// What `list` knows of a run.
#[derive(Clone, Debug)]
pub struct RunListing {
    /// The run.
    pub run: RunId,
    /// Its head, or what is wrong with its journal.
    pub head: Result<Head, String>,
}

/// Many runs, to be read. Calls block.
pub trait History: Send + Sync {
    /// Every run, by id.
    fn runs(&self) -> Result<Vec<RunListing>, JournalError>;

    /// All records of the run, verified.
    fn load(&self, run: &RunId) -> Result<Vec<Record>, JournalError>;
}

/// Many runs, to be written. Calls block.
pub trait Journal: History {
    /// Where the run's journal ends; [`Head::EMPTY`] when there is none.
    fn head(&self, run: &RunId) -> Result<Head, JournalError>;

    /// Appends all of `entries` or none, if the run's head is still `expected`.
    fn append(
        &self,
        run: &RunId,
        expected: Head,
        entries: &[Entry],
        durability: Durability,
    ) -> Result<Head, JournalError>;
}

/// Why a journal did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process has the store open.
    #[error("store {path} is in use by {holder}; wait for it, stop it, or use another --store")]
    Locked {
        /// The store.
        path: PathBuf,
        /// Host and process, as far as they are known.
        holder: String,
    },
    /// What is stored cannot be what was written. Nothing was changed or deleted.
    #[error(
        "store {path} is damaged: {what}; nothing was changed: keep a copy and restore a backup"
    )]
    Damaged {
        /// The store.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },
    /// A newer pilot wrote it.
    #[error("store {path} was written by a newer pilot ({what}); use that version")]
    Newer {
        /// The store.
        path: PathBuf,
        /// What is not understood.
        what: String,
    },
    /// There is no store.
    #[error("no store at {0}; `pilot run` makes one, --store names another")]
    NoStore(PathBuf),
    /// No such run.
    #[error("no run {0} in this store; `pilot list` shows those there are")]
    UnknownRun(String),
    /// The run's head is not where the writer thought: two writers.
    #[error("run {run}: another writer appended (head at {found}, expected {expected})")]
    Conflict {
        /// The run.
        run: RunId,
        /// Where the writer thought the head was.
        expected: u64,
        /// Where it is.
        found: u64,
    },
    /// An entry is larger than the store takes.
    #[error("an entry of {size} bytes is over the {limit} that a record may have")]
    TooLarge {
        /// Encoded size.
        size: usize,
        /// Largest allowed.
        limit: usize,
    },
    /// Reading or writing failed. After a failed write the store must be opened again.
    #[error("store: {what}: {reason}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        reason: String,
    },
}

impl JournalError {
    /// An I/O failure while doing `what`.
    pub fn io(what: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::Io {
            what: what.into(),
            reason: reason.to_string(),
        }
    }
}
