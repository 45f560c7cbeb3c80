//! The scheduler's pure core: no socket, clock, thread, file or device.
//!
//! `plan(now)` says what to compute next, `commit(output)` takes the result in. Everything here is
//! a function of its arguments, so that property tests and the engine thread drive the same code.

pub mod below;
pub mod blocks;
pub mod commit;
pub mod constraint;
pub mod cost;
pub mod depth;
mod eviction;
pub mod fair;
pub mod image;
pub mod mask;
pub mod math;
pub mod ngram;
pub mod pace;
pub mod philox;
pub mod pins;
mod plan;
pub(crate) use plan::MOST_CHECKED;
pub mod prefix;
pub mod request;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod stats;
pub mod table;
pub mod tokens;
pub mod types;
mod units;
