//! Commands beside `serve`, one file each.

pub mod generate;
pub mod pull;
