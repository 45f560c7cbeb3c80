//! Programs that die with the demo: one that was killed itself cannot end the others any more.

use std::{ffi::OsString, io, os::unix::process::CommandExt, path::Path, process::Command};

use rustix::process::{Pid, Signal};

use crate::error::Error;

/// A command for `program` that ends when the calling thread does. Its process becomes the
/// program, so that its number and its end are the program's.
pub fn command(program: &Path) -> Command {
    // Not this program's path: the file may be replaced while it runs.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg("bound")
        .arg(std::process::id().to_string())
        .arg(program);
    command
}

/// The other end of [`command`], in the new process. Returns only when it fails.
pub fn become_program(parent: i32, line: &[OsString]) -> Error {
    let failed = |source| {
        let program = line
            .first()
            .map(|name| name.to_string_lossy())
            .unwrap_or_default();
        Error::Io {
            what: format!("starting {program}"),
            source,
        }
    };
    if let Err(e) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        return failed(e.into());
    }
    // A parent that was gone before sends no signal.
    if rustix::process::getppid() != Pid::from_raw(parent) {
        return failed(io::Error::other("who asked for it is gone"));
    }
    match line {
        [program, arguments @ ..] => failed(Command::new(program).args(arguments).exec()),
        [] => failed(io::ErrorKind::InvalidInput.into()),
    }
}
