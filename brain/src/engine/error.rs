//! Why the engine does not do what it was asked.

use std::time::Duration;

use crate::sched::request::Reject;

/// A request that the engine turns down. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// Not an id.
    #[error("{0:?} is not a generation id: use 1 to 128 characters of letters, digits and . _ : -")]
    BadId(String),
    /// The id is taken by another request.
    #[error("generation {id} exists with another request: choose another id")]
    Conflict {
        /// The id.
        id: String,
    },
    /// Nothing is known under the id.
    #[error("generation {id} is not known here: send its whole request to start it")]
    NotFound {
        /// The id.
        id: String,
    },
    /// The generation ended before that index.
    #[error("generation {id} ended with {len} tokens; there is none to read from index {from} on")]
    OutOfRange {
        /// The id.
        id: String,
        /// The index asked for.
        from: usize,
        /// Tokens of the log.
        len: usize,
    },
    /// The request itself cannot be served.
    #[error(transparent)]
    Refused(#[from] Reject),
    /// Too much is being computed or kept already.
    #[error("{there} {what} are the most that are taken on: try again later")]
    Busy {
        /// How many there are.
        there: usize,
        /// Of what.
        what: &'static str,
    },
    /// No new work is taken on.
    #[error("brain is shutting down: ask again when it is back")]
    Draining,
    /// The engine has stopped for good.
    #[error("the engine has stopped: {0}")]
    Unhealthy(String),
}

/// How the engine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Idle, or at work and getting on.
    Well,
    /// One step takes suspiciously long.
    Stuck(Duration),
    /// It has stopped for good, for this reason.
    Stopped(String),
}
