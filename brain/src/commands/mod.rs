//! Commands beside `serve`, one file each.

pub mod bench;
pub mod generate;
pub mod inspect;
pub mod pull;
pub mod quantize;
