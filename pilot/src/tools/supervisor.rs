//! The small process that runs one shell command, so that the command and its result outlive
//! pilot. It writes to its spool folder and talks to nobody.

use std::{
    io,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use super::{
    process,
    spool::{Ending, ExitRecord, Request, Spool},
};

/// Bytes of standard output, and of standard error, after which a command is stopped.
pub const MAX_OUTPUT: u64 = 16 << 20;
/// From SIGTERM to SIGKILL.
pub const GRACE: Duration = Duration::from_secs(2);
const OUTPUT_CHECK: Duration = Duration::from_millis(200);

/// Starts a supervisor for `folder` that does not need this process any further.
///
/// # Errors
/// When `program` cannot be started.
pub fn start(program: &Path, folder: &Path) -> io::Result<Child> {
    Command::new(program)
        .arg("supervise")
        .arg(folder)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// The body of `pilot supervise FOLDER`: claims the command, runs it, writes the exit record.
/// Does nothing when the command was claimed before.
///
/// # Errors
/// When the folder cannot be read or written; the command is then not started, or its outcome
/// is unknown to the reader of the folder.
pub fn supervise(folder: &Path) -> io::Result<()> {
    let spool = Spool::at(folder.to_owned());
    let request = spool.load()?;
    rustix::process::setsid()?;
    // Orphans of the command come to this process instead of init.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let Some(_claim) = spool.claim()? else {
        return Ok(());
    };
    let record = match spawn(&spool, &request) {
        Ok(child) => watch(&spool, child, Duration::from_secs(request.timeout_s))?,
        Err(_) => ExitRecord {
            ending: Ending::NotStarted,
            output: [0, 0],
            all_dead: true,
        },
    };
    spool.finish(&record)
}

fn spawn(spool: &Spool, request: &Request) -> io::Result<Child> {
    Command::new("/bin/sh")
        .arg("-c")
        .arg(&request.command)
        .current_dir(&request.workspace)
        .env_clear()
        .env("PATH", &request.search_path)
        .env("HOME", &request.workspace)
        .env("LANG", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(spool.output("stdout")?)
        .stderr(spool.output("stderr")?)
        .spawn()
}

fn watch(spool: &Spool, mut child: Child, timeout: Duration) -> io::Result<ExitRecord> {
    let deadline = Instant::now().checked_add(timeout);
    let (told, end) = mpsc::channel();
    thread::spawn(move || {
        // The receiver is gone only when this process ends.
        let _ = told.send(child.wait());
    });
    let ending = loop {
        let left = deadline.map_or(OUTPUT_CHECK, |d| {
            d.saturating_duration_since(Instant::now())
        });
        match end.recv_timeout(left.min(OUTPUT_CHECK)) {
            Ok(status) => break Ending::Exit(code(status?)),
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("wait failed")),
            Err(RecvTimeoutError::Timeout) if left.is_zero() => break Ending::TimedOut,
            Err(RecvTimeoutError::Timeout)
                if spool.output_len()?.iter().any(|len| *len > MAX_OUTPUT) =>
            {
                break Ending::TooMuchOutput;
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    let output = spool.output_len()?;
    // Also after a normal end: what was left in the background ends with the command.
    let all_dead = process::end_family(GRACE)?;
    Ok(ExitRecord {
        ending,
        output,
        all_dead,
    })
}

fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .or_else(|| status.signal().map(|n| 128 + n))
        .unwrap_or(-1)
}
