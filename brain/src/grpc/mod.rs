//! The gRPC front end: a thin translation between `marathon.brain.v1` and the engine.
//!
//! A call is lowered to tokens ([`lower`], [`sampling`]), the engine computes, and a stream is a
//! cursor over the generation's log whose text is made on the way out ([`events`]). Everything
//! that is slow in proportion to its input (templates, tokenising) runs on blocking threads.

mod convert;
mod events;
pub mod health;
mod lower;
mod problem;
pub mod sampling;
mod service;

use std::sync::Arc;

use crate::{
    engine::Engine,
    sched::types::{DraftDepth, TokenId},
    text::model::TextModel,
};

pub use service::BrainService;

/// What is served, for GetModel and for lowering requests.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Name that clients see.
    pub name: String,
    /// Identity of model and numerics.
    pub fingerprint: String,
    /// "cpu", "cuda" or "fake".
    pub device: &'static str,
    /// What drafts; empty when nothing does.
    pub drafter: String,
    /// Drafts per round of requests that do not say.
    pub draft: DraftDepth,
    /// Sampling of requests that leave fields unset.
    pub defaults: sampling::Defaults,
    /// Never emitted.
    pub suppressed: Vec<TokenId>,
    /// The model's own stop tokens.
    pub stop_tokens: Vec<TokenId>,
}

/// What every call works with.
#[derive(Clone)]
pub struct Serving {
    /// Computes.
    pub engine: Engine,
    /// Translates.
    pub text: Arc<TextModel>,
    /// Describes.
    pub facts: Arc<ModelFacts>,
}
