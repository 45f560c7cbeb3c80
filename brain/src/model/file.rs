//! Opening the files of a checkpoint. What lies under a name is looked at first: opening a named
//! pipe waits for a writer, for ever if none comes, and a device has no end.

use crate::size::show;
use std::{
    fs::{File, FileType, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Something under a file's name that is no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is {what}, not a file: put the file, or a link to it, in its place")]
pub(crate) struct NoFile {
    /// What it is: "a named pipe".
    pub(crate) what: &'static str,
}

impl NoFile {
    /// Whether this is why a file was not opened.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

/// What to do about a file that cannot be read, to stand behind what the system said of it; empty
/// where that says enough.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    const ENDLESS_LINK: i32 = rustix::io::Errno::LOOP.raw_os_error();
    match error.kind() {
        io::ErrorKind::NotFound => "fetch it, or look whether the folder is the right one",
        io::ErrorKind::PermissionDenied => {
            "let the user that runs brain read it and enter the folders above it"
        }
        _ if error.raw_os_error() == Some(ENDLESS_LINK) => {
            "the link leads back to itself: put the file in its place"
        }
        _ => "",
    }
}

/// An error of reading and its [`remedy`], as one text.
pub(crate) fn why(error: &io::Error) -> String {
    match remedy(error) {
        "" => error.to_string(),
        remedy => format!("{error}; {remedy}"),
    }
}

/// Whether something lies under this name, be it a link that leads nowhere. A folder that may not
/// be looked into is an error, not an empty one.
pub(crate) fn is_there(path: &Path) -> io::Result<bool> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Opens a file, or what a link leads to, if it is a regular one. Never waits for another process.
///
/// # Errors
/// [`NoFile`] inside of an error of the kind `InvalidInput`; else what the system says.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    regular(&std::fs::metadata(path)?)?;
    // Between the look and the opening something else may have come in its place.
    let no_waiting = rustix::fs::OFlags::NONBLOCK.bits();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(no_waiting.cast_signed())
        .open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file to append to and to read, or makes it. Never waits for another process.
///
/// # Errors
/// As for [`open`], of named pipes.
pub(crate) fn open_to_append(path: &Path) -> io::Result<File> {
    let no_waiting = rustix::fs::OFlags::NONBLOCK.bits();
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .custom_flags(no_waiting.cast_signed())
        .open(path)?;
    let found = file.metadata()?;
    if found.file_type().is_fifo() {
        regular(&found)?;
    }
    Ok(file)
}

/// Bytes of a configuration, tokenizer, template or index, at most: the largest, a tokenizer, has 33 MB.
const MAX_SMALL: u64 = 128 << 20;

/// All bytes of one of the small files of a checkpoint, if [`open`] takes it.
///
/// # Errors
/// Those of [`open`]; one of the kind `FileTooLarge` for what cannot be such a file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, MAX_SMALL)
}

fn read_up_to(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let mut bytes = Vec::new();
    // What the system says of its length is not asked: it may grow meanwhile.
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let problem = format!(
            "it has more than {}, and no such file of a model has: take the checkpoint's own",
            show(most)
        );
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

fn regular(about: &Metadata) -> io::Result<()> {
    if about.is_file() {
        return Ok(());
    }
    let what = name(about.file_type());
    Err(io::Error::new(io::ErrorKind::InvalidInput, NoFile { what }))
}

fn name(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "something else",
    }
}

/// Makes a named pipe for a test.
#[cfg(test)]
pub(crate) fn make_pipe(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_and_links_to_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), b"bytes").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read(&path(name)).unwrap(), b"bytes", "{name}");
        }
        make_pipe(&path("pipe"));
        std::os::unix::fs::symlink("pipe", path("to-pipe")).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for (name, what) in [
            (path("pipe"), "a named pipe"),
            (path("to-pipe"), "a named pipe"),
            (path("folder"), "a folder"),
            (path("socket"), "a socket"),
            ("/dev/zero".into(), "a device"),
        ] {
            let error = read(&name).unwrap_err();
            assert_eq!(NoFile::of(&error), Some(NoFile { what }), "{error}");
            assert!(error.to_string().contains("in its place"), "{error}");
        }
        let error = read(&path("none")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(NoFile::of(&error), None);
    }

    #[test]
    fn what_is_too_large_to_be_a_small_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, [7; 100]).unwrap();
        assert_eq!(read_up_to(&path, 100).unwrap(), [7; 100]);
        let error = read_up_to(&path, 99).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("more than 99 B"), "{error}");
    }

    #[test]
    fn what_keeps_a_file_from_being_read_has_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink("round", path("round")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("dangling")).unwrap();
        for (name, there, remedy) in [
            ("none", false, "; fetch it"),
            ("dangling", true, "; fetch it"),
            ("round", true, "; the link leads back to itself"),
        ] {
            assert_eq!(is_there(&path(name)).unwrap(), there, "{name}");
            let error = why(&read(&path(name)).unwrap_err());
            assert!(error.contains(remedy), "{name}: {error}");
        }
        // Whoever may read everything, as root, never sees this one.
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        assert!(why(&denied).contains("let the user that runs brain read it"));
        std::fs::write(path("file"), b"").unwrap();
        assert!(is_there(&path("file/below")).is_err());
    }
}
