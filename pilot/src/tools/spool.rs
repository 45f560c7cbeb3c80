//! A folder per shell command, beside the store, in which the command's supervisor and pilot
//! meet. It outlives both.
//!
//! | file | written by | says |
//! |---|---|---|
//! | `request.json` | pilot, before anything starts | what to run |
//! | `claim` | the supervisor, locked for its whole life | who runs it; exists once, ever |
//! | `stdout`, `stderr` | the command | its output |
//! | `exit.json` | the supervisor, at the end, in one step | how it ended |
//!
//! The claim is on the disk before the command starts. So no claim means that nothing ran, even
//! after a power cut; a claim that nobody holds, without an exit record, means that nobody knows.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::{fs::FlockOperation, io::Errno};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::process::{self, ProcessMark};
use crate::journal::disk;

/// Everything a supervisor needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Given to `sh -c`.
    pub command: String,
    /// Working folder and HOME.
    pub workspace: PathBuf,
    /// PATH of the command.
    pub search_path: String,
    /// Seconds until it is stopped.
    pub timeout_s: u64,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// By itself; 128 + n for signal n.
    Exit(i32),
    /// Stopped at its deadline.
    TimedOut,
    /// Stopped because it wrote more than the limit.
    TooMuchOutput,
    /// The shell could not be started.
    NotStarted,
}

/// The exit record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// How it ended.
    pub ending: Ending,
    /// Bytes of standard output and standard error at that moment. What comes later (the shell's
    /// words about the children that were stopped) is not the command's.
    pub output: [u64; 2],
    /// Every process of the command is gone.
    pub all_dead: bool,
}

/// What the folder says.
#[derive(Debug, PartialEq, Eq)]
pub enum Status {
    /// Nothing ran, and nothing will unless a supervisor is started.
    NotStarted,
    /// A supervisor is at work.
    Running,
    /// It ended.
    Ended(ExitRecord),
    /// It was started, and what watched over it is gone.
    Lost,
}

/// One command's folder.
#[derive(Debug, Clone)]
pub struct Spool {
    folder: PathBuf,
}

/// Held by the supervisor while it lives.
#[derive(Debug)]
pub struct Claim {
    _locked: File,
}

impl Spool {
    /// The folder `name` under `root`. Characters other than letters, digits, `-` and `_`
    /// become `_`, so that no name leads elsewhere.
    pub fn new(root: &Path, name: &str) -> Self {
        let safe = |c: char| {
            if c.is_ascii_alphanumeric() || c == '-' {
                c
            } else {
                '_'
            }
        };
        Self {
            folder: root.join(name.chars().map(safe).collect::<String>()),
        }
    }

    /// A folder that exists already, as a supervisor is given it.
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes the folder and writes the request, unless an earlier try did. Both, and the folders of
    /// the run and of all runs, are on the disk when it returns.
    pub fn request(&self, request: &Request) -> io::Result<()> {
        disk::make_folders(&self.folder)?;
        if self.read::<Request>("request.json").is_err() {
            self.write("request.json", request)?;
        }
        // An earlier try may have died between making a name and this.
        self.folder
            .ancestors()
            .take(3)
            .try_for_each(disk::sync_folder)
    }

    /// The request.
    pub fn load(&self) -> io::Result<Request> {
        self.read("request.json")
    }

    /// What the folder says now.
    pub fn status(&self) -> io::Result<Status> {
        let claim = match File::open(self.folder.join("claim")) {
            Ok(claim) => claim,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Status::NotStarted),
            Err(e) => return Err(e),
        };
        match rustix::fs::flock(&claim, FlockOperation::NonBlockingLockShared) {
            Ok(()) => self.ended(),
            Err(Errno::WOULDBLOCK) => Ok(Status::Running),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits until no supervisor holds the claim, then says how the command ended.
    pub fn wait(&self) -> io::Result<Status> {
        let claim = match File::open(self.folder.join("claim")) {
            Ok(claim) => claim,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Status::NotStarted),
            Err(e) => return Err(e),
        };
        rustix::io::retry_on_intr(|| rustix::fs::flock(&claim, FlockOperation::LockShared))?;
        self.ended()
    }

    fn ended(&self) -> io::Result<Status> {
        match self.read("exit.json") {
            Ok(record) => Ok(Status::Ended(record)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Status::Lost),
            // Written in one step: a damaged record is a damaged disk, and tells nothing.
            Err(e) if e.kind() == io::ErrorKind::InvalidData => Ok(Status::Lost),
            Err(e) => Err(e),
        }
    }

    /// Claims the command for the calling process. `None` if anyone ever claimed it.
    pub fn claim(&self) -> io::Result<Option<Claim>> {
        let mine = self.folder.join(format!("claim.{}", std::process::id()));
        // A leftover of a dead process with the same number.
        remove(&mine)?;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&mine)?;
        // Locked before it gets its name, so that nobody ever finds a claim not yet locked.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(&encode(&process::myself()?)?)?;
        file.sync_all()?;
        let linked = fs::hard_link(&mine, self.folder.join("claim"));
        remove(&mine)?;
        match linked {
            Ok(()) => {
                disk::sync_folder(&self.folder)?;
                Ok(Some(Claim { _locked: file }))
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Who claimed it.
    pub fn claimant(&self) -> io::Result<ProcessMark> {
        self.read("claim")
    }

    /// A file for the command's output.
    pub fn output(&self, name: &str) -> io::Result<File> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.folder.join(name))
    }

    /// Bytes in the files of standard output and standard error.
    pub fn output_len(&self) -> io::Result<[u64; 2]> {
        let len = |name: &str| fs::metadata(self.folder.join(name)).map(|found| found.len());
        Ok([len("stdout")?, len("stderr")?])
    }

    /// Writes the exit record, after the output, in one step.
    pub fn finish(&self, record: &ExitRecord) -> io::Result<()> {
        for name in ["stdout", "stderr"] {
            self.output(name)?.sync_all()?;
        }
        self.write("exit.json", record)
    }

    /// Removes the folders beside this one.
    pub fn discard_others(&self) -> io::Result<()> {
        let Some(root) = self.folder.parent() else {
            return Ok(());
        };
        let listing = match fs::read_dir(root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            listing => listing?,
        };
        for entry in listing {
            let entry = entry?;
            if entry.path() != self.folder && entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        let temporary = self.folder.join(format!("{name}.{}", std::process::id()));
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(&encode(value)?)?;
        file.sync_all()?;
        fs::rename(&temporary, self.folder.join(name))?;
        disk::sync_folder(&self.folder)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> io::Result<T> {
        let bytes = fs::read(self.folder.join(name))?;
        serde_json::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }
}

fn encode(value: &impl Serialize) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::other)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
