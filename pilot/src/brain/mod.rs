//! The model, over gRPC.

pub mod client;

pub use client::{AnswerEvent, AnswerStream, BrainClient, BrainOptions, Model};

/// Why the brain did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrainError {
    /// Not there, gone in the middle, or too slow: asking again later may help.
    #[error("brain {address} cannot be reached: {reason}; is it running? (`brain serve`)")]
    Away {
        /// Where it should be.
        address: String,
        /// Why it is not.
        reason: String,
    },
    /// It serves another model than was asked for.
    #[error("brain {address} serves another model: {reason}")]
    OtherModel {
        /// Where it is.
        address: String,
        /// Its words.
        reason: String,
    },
    /// It refused for good.
    #[error("brain {address} refused: {reason}")]
    Refused {
        /// Where it is.
        address: String,
        /// Its words.
        reason: String,
    },
    /// The address, token file or certificate cannot be used.
    #[error("{0}")]
    Config(String),
    /// It broke the contract.
    #[error("brain {address} broke the contract: {reason}; do its version and pilot's match?")]
    Protocol {
        /// Where it is.
        address: String,
        /// What it did.
        reason: String,
    },
}
