//! Quantises a checkpoint: plain numbers in, four or eight bits out, in a layout that other engines
//! read too.
//!
//! The encoders ([`nvfp4`], [`fp8`]), the layout of the result and its configuration are pure;
//! [`run`] reads, writes and remembers in a journal what is done.

pub mod config;
pub mod e4m3;
pub mod encode;
pub mod error;
mod folder;
pub mod fp8;
pub mod grid;
pub mod journal;
pub mod layout;
pub mod nvfp4;
pub mod report;
pub mod run;
mod seal;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
