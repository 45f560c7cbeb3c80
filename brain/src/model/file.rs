//! Opening the files of a checkpoint. What lies under a name is looked at first: opening a named
//! pipe waits for a writer, for ever if none comes, and a device has no end.

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

/// All bytes of a file that [`open`] takes.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
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
}
