//! The two ways in which a tool changes a file, each on the disk when it returns.

use std::{fs::File, io::Write};

use rustix::fs::{self, AtFlags, Mode, OFlags};

use super::beneath::{self, Kind, PathError, Spot};
use crate::driver::failpoint::FailPoints;

/// Adds `added` at the end of the file and waits until it is on the disk. `from` is the length that
/// the file must have. Nothing is ever cut off or written over: what somebody else adds in the same
/// moment stays.
pub fn append(spot: &Spot, from: u64, added: &[u8], fail: &FailPoints) -> Result<(), PathError> {
    let mut file = spot.open(OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
    expect_len(&file, from)?;
    let (first, rest) = added.split_at(added.len() / 2);
    file.write_all(first)?;
    fail.hit("mid-tool");
    file.write_all(rest)?;
    file.sync_all()?;
    if spot.kind() == Kind::Nothing {
        spot.sync_folder()?;
    }
    Ok(())
}

/// Puts `content` in the file's place as one step: no reader and no crash sees a part of it.
pub fn replace(spot: &Spot, content: &[u8], fail: &FailPoints) -> Result<(), PathError> {
    spot.writable()?;
    // Always the same name, so that a second try after a crash leaves nothing behind.
    let tag = blake3::hash(spot.name().as_encoded_bytes()).to_hex();
    let temporary = format!(".pilot-{}.new", &tag[..16]);
    match fs::unlinkat(spot.folder(), &temporary, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(fs::openat(
        spot.folder(),
        &temporary,
        flags,
        Mode::from_raw_mode(0o666),
    )?);
    let written = (|| {
        if spot.kind() == Kind::File {
            let old = fs::statat(spot.folder(), spot.name(), AtFlags::SYMLINK_NOFOLLOW)?;
            fs::fchmod(&file, Mode::from_raw_mode(old.st_mode & 0o7777))?;
        }
        file.write_all(content)?;
        file.sync_all()?;
        fail.hit("mid-tool");
        fs::renameat(spot.folder(), &temporary, spot.folder(), spot.name())?;
        Ok::<(), PathError>(())
    })();
    if let Err(e) = written {
        // A full disk must not keep the half-written copy.
        let _ = fs::unlinkat(spot.folder(), &temporary, AtFlags::empty());
        return Err(e);
    }
    spot.sync_folder()
}

/// Undoes a torn append that left a file of `torn` bytes: it gets its old length back, or goes if it
/// had not existed.
pub fn cut_back(spot: &Spot, torn: u64, old_len: Option<u64>) -> Result<(), PathError> {
    let file = spot.open(OFlags::RDWR)?;
    expect_len(&file, torn)?;
    match old_len {
        Some(len) => {
            file.set_len(len)?;
            Ok(file.sync_all()?)
        }
        None => {
            fs::unlinkat(spot.folder(), spot.name(), AtFlags::empty())?;
            spot.sync_folder()
        }
    }
}

fn expect_len(file: &File, len: u64) -> Result<(), PathError> {
    if file.metadata()?.len() == len {
        Ok(())
    } else {
        Err(PathError::Changed)
    }
}

/// The file's bytes, or `None` when there is no file yet.
pub fn current_bytes(spot: &Spot) -> Result<Option<Vec<u8>>, PathError> {
    if spot.kind() == Kind::Nothing {
        spot.writable()?;
        return Ok(None);
    }
    beneath::load(&mut spot.open(OFlags::RDONLY)?).map(Some)
}

/// The same, and an error for anything that is no text.
pub fn current(spot: &Spot) -> Result<Option<Vec<u8>>, PathError> {
    let Some(bytes) = current_bytes(spot)? else {
        return Ok(None);
    };
    beneath::text(bytes).map(|text| Some(text.into_bytes()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tools::beneath::{Parents, Workspace};

    fn find(folder: &tempfile::TempDir) -> Spot {
        let workspace = Workspace::open(folder.path()).unwrap();
        workspace.find("f", Parents::Expect).unwrap()
    }

    #[test]
    fn what_somebody_else_wrote_meanwhile_is_kept() {
        for before in [None, Some("old\n")] {
            let folder = tempfile::tempdir().unwrap();
            let old = before.unwrap_or_default();
            if before.is_some() {
                fs::write(folder.path().join("f"), old).unwrap();
            }
            let spot = find(&folder);
            let theirs = format!("{old}theirs\n");
            fs::write(folder.path().join("f"), &theirs).unwrap();
            let fail = FailPoints::default();
            let appended = append(&spot, old.len() as u64, b"ours\n", &fail);
            assert_eq!(appended, Err(PathError::Changed));
            let read = || fs::read_to_string(folder.path().join("f")).unwrap();
            assert_eq!(read(), theirs);
            // What was torn was shorter than what stands there now.
            let spot = find(&folder);
            let torn = old.len() as u64 + 2;
            let old_len = before.map(|old| old.len() as u64);
            assert_eq!(cut_back(&spot, torn, old_len), Err(PathError::Changed));
            assert_eq!(read(), theirs);
        }
    }
}
