//! Harness of the whole-process tests: real programs, real sockets, real signals.
//!
//! A test waits for a state (a line, an exit, an event), never for a time; every wait has a
//! deadline that fails with all that the program printed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod brain;
mod generation;
mod program;
#[path = "../../pilot/tests/support/scripted.rs"]
pub mod scripted;
mod tree;

pub use brain::{Brain, BrainOptions};
pub use generation::{Generation, fake_spec, generate, read_tokens, spec};
pub use program::{Finished, Program, command, repository_root};
pub use tree::snapshot;
