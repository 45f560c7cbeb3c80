//! What is wrong with a checkpoint, and what to do about it.

use serde::Serialize;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// The file it is in.
    pub file: String,
    /// The tensor it is about, if it is about one.
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
            file: file.to_owned(),
            tensor: None,
            problem: problem.into(),
            remedy: remedy.into(),
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
            tensor: Some(tensor.to_owned()),
            ..Self::of_file(file, problem, remedy)
        }
    }
}

/// The remedy for a file that is not whole.
pub const FETCH_AGAIN: &str = "fetch the file again";
/// The remedy for tensors that do not belong to the configuration beside them.
pub const SAME_CHECKPOINT: &str = "take config.json and the weights from the same checkpoint";
