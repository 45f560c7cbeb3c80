//! `pilot demo`: a marathon on the small built-in model that is killed again and again, beside the
//! same marathon left alone, and the proof that both did the same and the right thing.

pub mod oracle;
pub mod random;
pub mod snapshot;
pub mod workspace;

use crate::{cli::DemoArgs, error::Error};

/// Runs the demo; the exit status says whether it held.
pub fn run(_args: &DemoArgs) -> Result<u8, Error> {
    Err(Error::Usage("not yet".to_owned()))
}
