//! What a brain leaves on disk so that its successor goes on where it stopped.
//!
//! Three kinds of files, in a folder that belongs to one model in one shape (its [`Identity`]):
//!
//! * `units-*.kv` and `anchor-*.kv` ([`kv`]): blocks of the prefix cache. Content-addressed, each
//!   written once, whole, checksummed and then moved into place. A run whose blocks are here goes
//!   on without computing its prompt again.
//! * `generations/*.log` ([`log`]): the tokens of generations, appended as they come. A client that
//!   comes back for one finds it under its id, whatever happened to the brain.
//! * `usage.ledger` ([`ledger`]): what each run took.
//!
//! Nothing here is trusted: a file that is not what it says is moved to `quarantine/` and its
//! content computed again. A file that cannot be read now, for whatever the system says, is left
//! where it is. Nothing here is needed: a disk that is full or broken costs a warning.

pub mod file;
mod index;
pub mod kv;
pub mod ledger;
pub mod log;
mod record;

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::backend::Limits;

/// What bytes on disk mean: they are of use to this model in this shape alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Of the model and its numerics.
    pub fingerprint: String,
    /// Sizes and order of blocks.
    pub layout: String,
}

impl Identity {
    /// The identity of what an executor with these limits stores.
    pub fn new(fingerprint: &str, limits: &Limits) -> Self {
        let order = match cfg!(target_endian = "little") {
            true => "little",
            false => "big",
        };
        let layout = format!(
            "1; full {} slots {} bytes; sliding {} slots {} bytes; window {}; {order} endian",
            limits.full_block_size,
            limits.full_block_bytes,
            limits.sliding_block_size,
            limits.sliding_block_bytes,
            limits.window,
        );
        Self {
            fingerprint: fingerprint.to_owned(),
            layout,
        }
    }

    /// Name of its folder.
    fn folder(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("marathon brain snapshot identity 1");
        for part in [&self.fingerprint, &self.layout] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize().to_hex()[..32].to_owned()
    }
}

/// Why a folder cannot be used. Every form names it.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// It cannot be made, opened or read.
    #[error("the snapshot folder: {path}: {source}", path = path.display())]
    Io {
        /// Which folder or file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has it.
    #[error(
        "the snapshot folder {path} is in use by another brain: give each brain a folder of its own",
        path = path.display()
    )]
    InUse {
        /// Which folder.
        path: PathBuf,
    },
}

/// Bytes in quarantine, at most: there to be looked at, not to fill the disk.
pub const QUARANTINE_MOST: u64 = 256 << 20;

/// A folder that this process alone writes to.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    identity: Identity,
    /// Held while it lives.
    _lock: File,
}

impl Folder {
    /// Makes or opens the folder of an identity below `root`. Nobody else may read it: it holds
    /// what users wrote.
    ///
    /// # Errors
    /// [`SnapshotError`] when it cannot be used, or another process uses it.
    pub fn open(root: &Path, identity: Identity) -> Result<Self, SnapshotError> {
        let path = root.join(identity.folder());
        let failed = |path: &Path, source| SnapshotError::Io {
            path: path.to_owned(),
            source,
        };
        for folder in [path.join("quarantine"), path.join("generations")] {
            let made = DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder);
            made.map_err(|source| failed(&folder, source))?;
        }
        let lock = path.join("lock");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock)
            .map_err(|source| failed(&lock, source))?;
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        match rustix::fs::flock(&file, exclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(SnapshotError::InUse { path }),
            Err(error) => return Err(failed(&lock, error.into())),
        }
        Ok(Self {
            path,
            identity,
            _lock: file,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Where the logs of generations are.
    pub fn generations(&self) -> PathBuf {
        self.path.join("generations")
    }

    /// Takes a file that is of no use out of the way, and says so. Beyond [`QUARANTINE_MOST`] the
    /// oldest that are there go.
    pub fn quarantine(&self, file: &Path, reason: &str) {
        let Some(name) = file.file_name() else {
            return;
        };
        let quarantine = self.path.join("quarantine");
        let moved = fs::rename(file, quarantine.join(name)).or_else(|_| fs::remove_file(file));
        tracing::warn!(
            file = %file.display(),
            reason,
            moved = moved.is_ok(),
            "a file of the snapshot folder was put into quarantine; what it held is computed again"
        );
        keep_newest(&quarantine, QUARANTINE_MOST);
    }
}

/// Removes the oldest files of a folder until the others have at most so many bytes.
fn keep_newest(folder: &Path, most: u64) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some((metadata.modified().ok()?, entry.path(), metadata.len()))
        })
        .collect();
    files.sort();
    let mut bytes = 0u64;
    for (_, path, len) in files.iter().rev() {
        bytes = bytes.saturating_add(*len);
        if bytes > most {
            // It is in nobody's way but the disk's.
            let _ = fs::remove_file(path);
        }
    }
}

/// Makes the names in a file's folder durable, after a file was put there or moved.
fn sync_folder(file: &Path) -> io::Result<()> {
    match file.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_folder_the_newest_files_stay() {
        let folder = tempfile::tempdir().unwrap();
        let day = std::time::Duration::from_secs(86400);
        for (age, name) in ["new", "old", "older"].iter().enumerate() {
            let path = folder.path().join(name);
            fs::write(&path, [0; 100]).unwrap();
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            let then = std::time::SystemTime::now() - day * age as u32;
            file.set_modified(then).unwrap();
        }
        let there = |name: &str| folder.path().join(name).exists();
        keep_newest(folder.path(), 300);
        assert!(there("new") && there("old") && there("older"));
        keep_newest(folder.path(), 250);
        assert!(there("new") && there("old") && !there("older"));
        keep_newest(folder.path(), 99);
        assert!(!there("new") && !there("old"));
    }
}
