//! What is wrong with a checkpoint, and what to do about it.

use std::path::Path;

use serde::Serialize;

use crate::model::{
    file::{self, NoFile},
    shown::{shown, shown_path},
};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// The file it is in, its name as it may be shown.
    pub file: String,
    /// The tensor it is about, if it is about one; its name as it may be shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl Problem {
    /// Of a file as a whole.
    pub fn of_file(file: &str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            file: shown_path(Path::new(file)),
            tensor: None,
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// Of a file that could not be read.
    pub fn of_reading(name: &str, error: &std::io::Error) -> Self {
        if let Some(NoFile { what }) = NoFile::of(error) {
            let remedy = "put the file, or a link to it, in its place";
            return Self::of_file(name, format!("is {what}, not a file"), remedy);
        }
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::of_file(name, "is not there", FETCH_AGAIN),
            _ => {
                let remedy = match file::remedy(error) {
                    "" => "look at the disk",
                    remedy => remedy,
                };
                Self::of_file(name, format!("cannot be read: {error}"), remedy)
            }
        }
    }

    /// Of a tensor.
    pub fn of_tensor(
        file: &str,
        tensor: &str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            tensor: Some(shown(tensor)),
            ..Self::of_file(file, problem, remedy)
        }
    }
}

/// The remedy for a file that is not whole.
pub const FETCH_AGAIN: &str = "fetch the file again";
/// The remedy for tensors that do not belong to the configuration beside them.
pub const SAME_CHECKPOINT: &str = "take config.json and the weights from the same checkpoint";
