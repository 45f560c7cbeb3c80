//! Checkpoints by name: `google/gemma-4-31B-it` from a model hub, through the cache on the disk
//! that Python's `huggingface_hub` shares.
//!
//! [`name`] says what a name is, [`settings`] where the hub and its cache are, [`files`] (pure)
//! which files brain needs, [`cache`] how they lie on the disk, [`client`] asks the hub,
//! [`download`] fetches one file whole or not at all, [`pull`] puts them together, and [`locate`]
//! turns settings into folders.
//!
//! The cache's files and the protocol are the ones of `huggingface_hub`, so that either program
//! finds and completes what the other began. The client is our own, over `reqwest`: the Rust
//! libraries for this hub check neither size nor hash of what they resumed.

pub mod cache;
pub mod client;
pub mod download;
pub mod error;
pub mod files;
pub mod locate;
pub mod name;
pub mod progress;
pub mod pull;
pub mod settings;

pub use error::HubError;
pub use name::ModelName;
pub use settings::HubSettings;
