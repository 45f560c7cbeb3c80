//! What is finished of a quantised checkpoint, so that an interrupted run goes on where it was.
//!
//! A shard is written beside its name, synced and renamed; only then a line of the journal says
//! that it is done, with its length and the seal of its bytes, so that whoever goes on can tell
//! whether the file is still that one. The first line says of what source and by what recipe: another run does not go
//! on with what is not its own. A last line that was cut off counts as not written.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    error::{ErrorSum, exact},
    layout::Recipe,
};

/// The journal's name in the folder of the result.
pub const FILE: &str = "quantize.journal";

/// What the first line says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// Version of this format.
    pub version: u32,
    /// How weights are encoded.
    pub recipe: Recipe,
    /// Hash of the names, types, shapes, lengths and times of the source.
    pub source: String,
}

/// What was done to a matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The matrix, without `.weight`.
    pub module: String,
    /// Its errors.
    pub sum: ErrorSum,
    /// Share of the looked-at blocks that lie on the grid of Q4_0.
    #[serde(with = "exact")]
    pub grid: f64,
}

/// What a further line says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// The shard's file.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// The seal of its bytes.
    pub seal: String,
    /// The matrices in it that were encoded.
    pub records: Vec<Record>,
}

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file system.
    #[error("{file}: {source}{}", advice(.source))]
    Io {
        /// The journal.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another process writes it.
    #[error("another process is writing {0}: let it end, or end it")]
    Busy(PathBuf),
    /// It is about something else.
    #[error(
        "{folder} holds unfinished work {difference}: finish it the same way, remove the folder, or \
         give another"
    )]
    Other {
        /// The folder.
        folder: PathBuf,
        /// Where they differ.
        difference: &'static str,
    },
    /// It is damaged.
    #[error("{0} is damaged: remove the folder and begin again")]
    Damaged(PathBuf),
}

/// What to do about a disk that refuses, to stand behind what the system said.
pub(super) fn advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; make room and run the same command to go on"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "; give a folder that can be written"
        }
        _ => "",
    }
}

/// An open journal, locked against other processes.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal of a folder, or begins it. The result is what is finished already.
    pub fn open(folder: &Path, opening: &Opening) -> Result<(Self, Vec<Finished>), JournalError> {
        let path = folder.join(FILE);
        let io = |source| JournalError::Io {
            file: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => JournalError::Busy(path.clone()),
            TryLockError::Error(error) => io(error),
        })?;
        let mut text = String::new();
        file.read_to_string(&mut text)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::InvalidData => JournalError::Damaged(path.clone()),
                _ => io(error),
            })?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].lines();
        let mut journal = Self {
            path: path.clone(),
            file,
        };
        let damaged = |_| JournalError::Damaged(path.clone());
        let Some(first) = lines.next() else {
            journal.cut(0)?;
            journal.append(opening)?;
            return Ok((journal, Vec::new()));
        };
        let found: Opening = serde_json::from_str(first).map_err(damaged)?;
        if let Some(difference) = difference(&found, opening) {
            return Err(JournalError::Other {
                folder: folder.to_owned(),
                difference,
            });
        }
        let finished = lines
            .map(|line| serde_json::from_str(line).map_err(damaged))
            .collect::<Result<_, _>>()?;
        journal.cut(whole as u64)?;
        Ok((journal, finished))
    }

    /// Says that a shard is done.
    pub fn finished(&mut self, finished: &Finished) -> Result<(), JournalError> {
        self.append(finished)
    }

    /// Removes it: the result is complete.
    pub fn remove(self) -> Result<(), JournalError> {
        std::fs::remove_file(&self.path).map_err(|source| JournalError::Io {
            file: self.path.clone(),
            source,
        })
    }

    fn cut(&mut self, length: u64) -> Result<(), JournalError> {
        self.file
            .set_len(length)
            .and_then(|()| self.file.seek(SeekFrom::Start(length)))
            .map(|_| ())
            .map_err(|source| self.io(source))
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), JournalError> {
        let mut text =
            serde_json::to_string(line).map_err(|error| self.io(std::io::Error::other(error)))?;
        text.push('\n');
        self.file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_data())
            .map_err(|source| self.io(source))
    }

    fn io(&self, source: std::io::Error) -> JournalError {
        JournalError::Io {
            file: self.path.clone(),
            source,
        }
    }
}

fn difference(found: &Opening, wanted: &Opening) -> Option<&'static str> {
    if found.version != wanted.version {
        return Some("of another version of this program");
    }
    if found.source != wanted.source {
        return Some("of another source, or the source has changed since");
    }
    (found.recipe != wanted.recipe).then_some("with other options")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::layout::Format;

    fn opening() -> Opening {
        Opening {
            version: 1,
            recipe: Recipe {
                format: Format::Nvfp4,
                attention: false,
                shard_size: 1 << 20,
            },
            source: "a".into(),
        }
    }

    fn finished(file: &str) -> Finished {
        Finished {
            file: file.into(),
            bytes: 7,
            seal: "s".into(),
            records: vec![Record {
                module: "m".into(),
                sum: ErrorSum {
                    elements: 16,
                    ..ErrorSum::default()
                },
                grid: 0.0,
            }],
        }
    }

    #[test]
    fn finished_shards_are_remembered_and_a_torn_line_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Journal::open(dir.path(), &opening()).unwrap();
        let (mut journal, none) = open();
        assert_eq!(none, []);
        journal.finished(&finished("one")).unwrap();
        drop(journal);
        let path = dir.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        journal = open().0;
        journal.finished(&finished("two")).unwrap();
        drop(journal);
        let both = std::fs::read(&path).unwrap();
        for length in whole.len()..=both.len() {
            std::fs::write(&path, &both[..length]).unwrap();
            let (mut journal, found) = open();
            let expected = if length == both.len() { 2 } else { 1 };
            assert_eq!(found.len(), expected, "{length}");
            journal.finished(&finished("three")).unwrap();
            drop(journal);
            assert_eq!(open().1.last(), Some(&finished("three")));
        }
        open().0.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn only_the_same_work_is_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(dir.path(), &opening()).unwrap();
        let busy = Journal::open(dir.path(), &opening()).unwrap_err();
        assert!(matches!(busy, JournalError::Busy(_)), "{busy}");
        drop(journal);
        let mut other = opening();
        other.recipe.attention = true;
        let error = Journal::open(dir.path(), &other).unwrap_err().to_string();
        assert!(error.contains("with other options"), "{error}");
        other = opening();
        other.source = "b".into();
        let error = Journal::open(dir.path(), &other).unwrap_err().to_string();
        assert!(error.contains("of another source"), "{error}");
        std::fs::write(dir.path().join(FILE), "{}\n").unwrap();
        let error = Journal::open(dir.path(), &opening()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged(_)), "{error}");
    }
}
