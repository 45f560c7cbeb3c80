//! `model.safetensors.index.json`: which tensor is in which file. Read alike by whoever fetches,
//! looks at or loads a checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::shown::{shown, shown_text};

/// All weights in one file. Where it is there, no index is read.
pub(crate) const WHOLE: &str = "model.safetensors";
/// The index of many files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// What is wrong with an index, to stand behind its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum IndexFault {
    /// Not JSON, or of another form.
    #[error("is not an index: {0}")]
    Syntax(String),
    /// Nothing in it.
    #[error("names no file of weights")]
    Empty,
    /// A name with a path in it could point anywhere on the disk.
    #[error(
        "says that tensor {} is in \"{}\", which is not a plain file name",
        shown(.tensor),
        shown(.file)
    )]
    NotPlain {
        /// The tensor.
        tensor: String,
        /// What is said to be its file.
        file: String,
    },
}

/// The file of every tensor.
#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    /// By the tensors' names.
    pub(crate) weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads an index whose files may be named however they are.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, IndexFault> {
        serde_json::from_slice(text)
            .map_err(|error| IndexFault::Syntax(shown_text(&error.to_string())))
    }

    /// Reads an index that is sound.
    pub(crate) fn sound(text: &[u8]) -> Result<Self, IndexFault> {
        let index = Self::parse(text)?;
        if index.weight_map.is_empty() {
            return Err(IndexFault::Empty);
        }
        match index.weight_map.iter().find(|(_, file)| !is_plain(file)) {
            None => Ok(index),
            Some((tensor, file)) => Err(IndexFault::NotPlain {
                tensor: tensor.clone(),
                file: file.clone(),
            }),
        }
    }

    /// Its files, each once.
    pub(crate) fn files(&self) -> BTreeSet<&String> {
        self.weight_map.values().collect()
    }
}

/// Longest name of a file that every system takes.
const LONGEST: usize = 200;

/// Whether this is the name of a file beside the index, and of one that is to be seen.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && name.len() <= LONGEST
        && !name.contains(['/', '\\'])
        && !name.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sound_index_names_plain_files() {
        let index = br#"{"weight_map": {"a": "x-2", "b": "x-1", "c": "x-2"}}"#;
        let index = Index::sound(index).unwrap();
        assert_eq!(
            index.files(),
            BTreeSet::from([&"x-1".into(), &"x-2".into()])
        );
        assert_eq!(
            Index::sound(br#"{"weight_map": {}}"#).unwrap_err(),
            IndexFault::Empty
        );
        for bad in ["[]", "", "{}", r#"{"weight_map": 7}"#] {
            let fault = Index::sound(bad.as_bytes()).unwrap_err();
            assert!(matches!(fault, IndexFault::Syntax(_)), "{fault}");
        }
        let long = "x".repeat(LONGEST + 1);
        for bad in [
            "../x", "/x", "", ".", "..", ".x", r"a\\b", r"a\nb", r"a\u0000", &long,
        ] {
            let index = format!(r#"{{"weight_map": {{"a": "y", "b": "{bad}"}}}}"#);
            let fault = Index::sound(index.as_bytes()).unwrap_err();
            let IndexFault::NotPlain { tensor, .. } = &fault else {
                panic!("{bad}: {fault}")
            };
            assert_eq!(tensor, "b");
            assert!(!fault.to_string().contains(char::is_control), "{fault:?}");
        }
    }
}
