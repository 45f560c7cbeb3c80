//! One pilot per store: a lock that the kernel drops with its holder, and a note of who that is.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

use rustix::fs::{FlockOperation, flock};

use super::JournalError;

/// Held for as long as the store is open.
#[derive(Debug)]
pub(super) struct StoreLock {
    _file: File,
}

impl StoreLock {
    /// Takes the lock of the store at `store`, at once or not at all.
    pub(super) fn take(store: &Path) -> Result<Self, JournalError> {
        let path = store.join("lock");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|error| JournalError::io(format!("opening {}", path.display()), error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(JournalError::Locked {
                    path: store.to_owned(),
                    holder: holder(&mut file),
                });
            }
            Err(error) => {
                return Err(JournalError::io(
                    format!("locking {}", path.display()),
                    error,
                ));
            }
        }
        note_holder(&mut file)
            .map_err(|error| JournalError::io(format!("writing {}", path.display()), error))?;
        Ok(Self { _file: file })
    }
}

/// The note is for people; the lock itself is the kernel's.
fn note_holder(file: &mut File) -> std::io::Result<()> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let note = format!("process {} on {}\n", std::process::id(), host.trim());
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(note.as_bytes())
}

fn holder(file: &mut File) -> String {
    let mut note = String::new();
    match file.take(200).read_to_string(&mut note) {
        Ok(_) if !note.trim().is_empty() => note.trim().to_owned(),
        _ => "another pilot".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_holder_is_told_who_is_first() {
        let folder = tempfile::tempdir().unwrap();
        let first = StoreLock::take(folder.path()).unwrap();
        let error = StoreLock::take(folder.path()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, JournalError::Locked { .. }));
        assert!(
            text.contains(&format!("process {}", std::process::id())),
            "{text}"
        );
        drop(first);
        StoreLock::take(folder.path()).unwrap();
    }
}
