//! The gRPC front end: a thin translation between `marathon.brain.v1` and what is served.

mod convert;
mod events;
pub mod health;
mod service;

pub use service::BrainService;
