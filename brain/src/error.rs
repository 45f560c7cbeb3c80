//! What ends the program, with an exit code each.

use std::process::ExitCode;

use crate::hub::HubError;

/// An error that ends the program. Each is one line that says what was wrong and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag, a variable or the configuration file.
    #[error("{0}")]
    Usage(String),
    /// The checkpoint, its tokenizer or its template.
    #[error("{0}")]
    Checkpoint(String),
    /// The address.
    #[error("{0}")]
    Address(String),
    /// The device or its memory.
    #[error("{0}")]
    Device(String),
    /// While serving.
    #[error("{0}")]
    Serving(String),
    /// A second signal came before the end was reached.
    #[error("ended at once by a second signal")]
    Forced,
}

/// The exit codes as `--help` shows them.
pub const EXIT_CODES: &str = "\
Exit codes:
  0  ended as asked
  2  a flag, a BRAIN_ variable or the configuration file is wrong
  3  the checkpoint cannot be served
  4  the address cannot be listened on
  5  the device cannot hold the model
  6  serving failed; a device that broke is a reason: start brain again
  7  ended at once by a second signal";

impl From<HubError> for Error {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Name(_) | HubError::Setting { .. } => Self::Usage(error.to_string()),
            error => Self::Checkpoint(error.to_string()),
        }
    }
}

impl Error {
    /// Its exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Checkpoint(_) => 3,
            Self::Address(_) => 4,
            Self::Device(_) => 5,
            Self::Serving(_) => 6,
            Self::Forced => 7,
        }
    }

    /// The same, for `main`.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }
}
