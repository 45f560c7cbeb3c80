//! Paths that cannot leave the workspace.
//!
//! A path is walked one component at a time over open folders, links included, so neither
//! `..`, nor an absolute path, nor a link that points out, nor a folder that is swapped for a
//! link meanwhile can lead outside. The walk asks nothing of the kernel beyond `openat` and is
//! therefore the same on every file system and kernel.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::Path,
};

use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags},
    io::Errno,
};

/// Links followed in one path before it counts as a loop.
const MAX_LINKS: usize = 40;
/// Bytes of a path that are looked at; the kernel's own limit.
const MAX_PATH: usize = 4096;
/// Files past this size are not loaded by a tool.
pub const MAX_FILE: u64 = 64 << 20;

const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Why a tool could not use a path. The text says it to the model, without the path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Nothing there, or a link to nothing.
    #[error("no such file")]
    Missing,
    /// A folder where a file was wanted.
    #[error("is a directory")]
    IsFolder,
    /// A file where a folder was wanted.
    #[error("not a directory")]
    NotFolder,
    /// Bytes that are not UTF-8 text, or a device, pipe or socket.
    #[error("not a text file")]
    NotText,
    /// The path leads out of the workspace.
    #[error("outside the workspace")]
    Outside,
    /// Empty where it may not be, too long, or with a zero byte.
    #[error("not a valid path")]
    Invalid,
    /// Links that lead in a circle.
    #[error("too many links")]
    Loop,
    /// Larger than [`MAX_FILE`].
    #[error("file too large")]
    TooLarge,
    /// It is not what it was when the tool looked at it.
    #[error("was changed by someone else; read it again")]
    Changed,
    /// The system refused.
    #[error("{0}")]
    System(&'static str),
}

impl From<Errno> for PathError {
    fn from(e: Errno) -> Self {
        match e {
            Errno::NOENT => Self::Missing,
            Errno::ISDIR => Self::IsFolder,
            Errno::NOTDIR => Self::NotFolder,
            Errno::LOOP => Self::Loop,
            Errno::NAMETOOLONG | Errno::INVAL => Self::Invalid,
            Errno::ACCESS | Errno::PERM => Self::System("permission denied"),
            Errno::NOSPC | Errno::DQUOT => Self::System("no space left on the disk"),
            Errno::ROFS => Self::System("the file system is read-only"),
            _ => Self::System("input/output error"),
        }
    }
}

impl From<io::Error> for PathError {
    fn from(e: io::Error) -> Self {
        Errno::from_io_error(&e).map_or(Self::System("input/output error"), Self::from)
    }
}

/// What stands at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A pipe, socket or device.
    Special,
    /// Nothing.
    Nothing,
}

/// The folder that a run works in.
#[derive(Debug)]
pub struct Workspace {
    root: OwnedFd,
}

/// A place inside the workspace: an open folder and a name in it that is no link.
#[derive(Debug)]
pub struct Spot {
    folder: OwnedFd,
    name: OsString,
    kind: Kind,
    through_link: bool,
}

/// What to do about folders on the way that do not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parents {
    /// They are an error.
    Expect,
    /// Make them.
    Make,
}

impl Workspace {
    /// Opens the folder; an error if it is none.
    pub fn open(root: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: fs::open(root, flags, Mode::empty())?,
        })
    }

    /// Walks `path` and says what stands at its end.
    pub fn find(&self, path: &str, parents: Parents) -> Result<Spot, PathError> {
        Walk::start(self.root.try_clone()?, path)?.run(parents)
    }

    /// A regular file at `path`, opened to be read.
    pub fn open_file(&self, path: &str) -> Result<File, PathError> {
        self.find(path, Parents::Expect)?.open(OFlags::RDONLY)
    }

    /// Names in the folder at `path`, sorted bytewise, folders with a trailing `/`.
    pub fn list(&self, path: &str) -> Result<Vec<String>, PathError> {
        let spot = self.find(path, Parents::Expect)?;
        match spot.kind {
            Kind::Folder => {}
            Kind::Nothing => return Err(PathError::Missing),
            Kind::File | Kind::Special => return Err(PathError::NotFolder),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = fs::openat(&spot.folder, &*spot.name, flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in fs::Dir::read_from(&folder)? {
            let entry = entry?;
            let mut name = entry.file_name().to_bytes().to_vec();
            if name == b"." || name == b".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    let found = fs::statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
                    FileType::from_raw_mode(found.st_mode)
                }
                known => known,
            };
            if kind == FileType::Directory {
                name.push(b'/');
            }
            names.push(name);
        }
        names.sort();
        Ok(names
            .iter()
            .map(|n| String::from_utf8_lossy(n).into_owned())
            .collect())
    }
}

impl Spot {
    /// The folder that holds it.
    pub fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Its name in that folder.
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// What stood there when it was looked up.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// `Ok` when it is a file or, if no link led here, nothing yet.
    pub fn writable(&self) -> Result<(), PathError> {
        match self.kind {
            Kind::File => Ok(()),
            Kind::Folder => Err(PathError::IsFolder),
            Kind::Special => Err(PathError::NotText),
            Kind::Nothing if self.through_link => Err(PathError::Missing),
            Kind::Nothing => Ok(()),
        }
    }

    /// Opens the regular file that stands here, and never waits for a pipe.
    pub fn open(&self, how: OFlags) -> Result<File, PathError> {
        match self.kind {
            Kind::File => {}
            Kind::Folder => return Err(PathError::IsFolder),
            Kind::Special => return Err(PathError::NotText),
            Kind::Nothing if how.contains(OFlags::CREATE) => self.writable()?,
            Kind::Nothing => return Err(PathError::Missing),
        }
        let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = fs::openat(&self.folder, &*self.name, flags, Mode::from_raw_mode(0o666))?;
        // The name may have changed hands since it was looked up.
        match kind_of(&fd)? {
            Kind::File => Ok(File::from(fd)),
            Kind::Folder => Err(PathError::IsFolder),
            Kind::Special | Kind::Nothing => Err(PathError::NotText),
        }
    }

    /// Makes the file and its entry in the folder durable.
    pub fn sync(&self) -> Result<(), PathError> {
        self.open(OFlags::RDONLY)?.sync_all()?;
        self.sync_folder()
    }

    /// Makes the folder's entries durable.
    pub fn sync_folder(&self) -> Result<(), PathError> {
        sync_folder(self.folder.as_fd())
    }
}

/// Reads a whole file, unless it is past [`MAX_FILE`].
pub fn load(file: &mut File) -> Result<Vec<u8>, PathError> {
    if file.metadata()?.len() > MAX_FILE {
        return Err(PathError::TooLarge);
    }
    let mut bytes = Vec::new();
    // A file that grows while it is read must not fill memory.
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(PathError::TooLarge);
    }
    Ok(bytes)
}

/// Text, or [`PathError::NotText`] for anything with a zero byte or not UTF-8.
pub fn text(bytes: Vec<u8>) -> Result<String, PathError> {
    if bytes.contains(&0) {
        return Err(PathError::NotText);
    }
    String::from_utf8(bytes).map_err(|_| PathError::NotText)
}

fn sync_folder(folder: BorrowedFd<'_>) -> Result<(), PathError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(fs::fsync(fs::openat(folder, ".", flags, Mode::empty())?)?)
}

fn kind_of(fd: impl AsFd) -> Result<Kind, PathError> {
    Ok(match FileType::from_raw_mode(fs::fstat(fd)?.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Folder,
        _ => Kind::Special,
    })
}

struct Walk {
    /// The folders from the root down to where the walk stands; never empty.
    folders: Vec<OwnedFd>,
    root: OwnedFd,
    todo: VecDeque<OsString>,
    links: usize,
}

impl Walk {
    fn start(root: OwnedFd, path: &str) -> Result<Self, PathError> {
        if path.len() >= MAX_PATH || path.contains('\0') {
            return Err(PathError::Invalid);
        }
        let mut walk = Self {
            folders: Vec::new(),
            root,
            todo: VecDeque::new(),
            links: 0,
        };
        walk.push_front(path.as_bytes())?;
        Ok(walk)
    }

    fn push_front(&mut self, path: &[u8]) -> Result<(), PathError> {
        if path.first() == Some(&b'/') {
            return Err(PathError::Outside);
        }
        let parts = path
            .split(|b| *b == b'/')
            .filter(|p| !p.is_empty() && *p != b".");
        for part in parts.rev() {
            self.todo.push_front(OsStr::from_bytes(part).to_owned());
        }
        Ok(())
    }

    fn here(&self) -> BorrowedFd<'_> {
        self.folders.last().unwrap_or(&self.root).as_fd()
    }

    fn run(mut self, parents: Parents) -> Result<Spot, PathError> {
        while let Some(name) = self.todo.pop_front() {
            if name == ".." {
                self.folders.pop().ok_or(PathError::Outside)?;
                continue;
            }
            let found = match fs::openat(self.here(), &*name, LOOK, Mode::empty()) {
                Ok(found) => found,
                Err(Errno::NOENT) if self.todo.is_empty() => return self.end(name, Kind::Nothing),
                Err(Errno::NOENT) if parents == Parents::Make && self.links == 0 => {
                    self.make_folder(&name)?
                }
                Err(e) => return Err(e.into()),
            };
            let mode = fs::fstat(&found)?.st_mode;
            match FileType::from_raw_mode(mode) {
                FileType::Symlink => {
                    self.links += 1;
                    if self.links > MAX_LINKS {
                        return Err(PathError::Loop);
                    }
                    let target = fs::readlinkat(&found, "", Vec::new())?;
                    self.push_front(&OsString::from_vec(target.into_bytes()).into_vec())?;
                }
                FileType::Directory => self.folders.push(found),
                _ if !self.todo.is_empty() => return Err(PathError::NotFolder),
                FileType::RegularFile => return self.end(name, Kind::File),
                _ => return self.end(name, Kind::Special),
            }
        }
        // A folder: the place is the folder itself.
        self.end(OsString::from("."), Kind::Folder)
    }

    fn make_folder(&self, name: &OsStr) -> Result<OwnedFd, PathError> {
        if self.todo.iter().any(|part| part == "..") {
            return Err(PathError::Missing);
        }
        match fs::mkdirat(self.here(), name, Mode::from_raw_mode(0o777)) {
            Ok(()) => sync_folder(self.here())?,
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(fs::openat(self.here(), name, LOOK, Mode::empty())?)
    }

    fn end(mut self, name: OsString, kind: Kind) -> Result<Spot, PathError> {
        let folder = self.folders.pop().unwrap_or(self.root);
        Ok(Spot {
            folder,
            name,
            kind,
            through_link: self.links > 0,
        })
    }
}
