//! The engine: generations as logs, computed by one thread, read by any number of cursors.
//!
//! Front ends hold an [`Engine`] and call [`Engine::generate`]; it starts the generation of an id
//! or finds it, and returns a [`Cursor`] from any index of its log. The thread behind it drives
//! the pure scheduler and the executor and never waits for a reader.

pub mod clock;
mod error;
mod fetch;
mod fill;
mod generation;
mod handle;
mod host;
mod ledger;
mod observer;
mod open;
mod persist;
mod registry;
mod revive;
mod saver;
mod thread;
mod tiers;
mod watchdog;

pub use crate::snapshot::ledger::RunUsage;
pub use error::{EngineError, Health};
pub use generation::{Cursor, LogEvent, MOST_AT_ONCE, Started};
pub use handle::{Engine, EngineConfig, EngineStats, StartError};
pub use observer::{Observer, Turn};
pub use open::{Attached, Prepared};
pub use saver::{Revival, Revive, Storage};
pub use tiers::TierStats;
