//! One child process: its lines as they come, its signals and its end.

use std::{
    fmt::Write as _,
    io::{BufRead as _, BufReader, Read},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// How long a state may take to come: long, since a loaded machine is slow and a wait that is met
/// costs nothing.
const PATIENCE: Duration = Duration::from_secs(120);

/// The folder with the workspace's `Cargo.toml`.
pub fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .unwrap()
}

/// A command that runs `brain` or `pilot` as built beside this test, with an environment of its
/// own: what the tester has set must not change a result.
pub fn command(program: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join(program);
    assert!(
        path.is_file(),
        "{} is not built: run `cargo build --workspace --bins` first",
        path.display()
    );
    let mut command = Command::new(path);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

#[derive(Default)]
struct Output {
    printed: Mutex<Printed>,
    changed: Condvar,
}

#[derive(Default)]
struct Printed {
    /// (stream, line) in the order they came.
    lines: Vec<(&'static str, String)>,
    /// Streams that have ended: 2 when no process holds either any more.
    ended: usize,
}

impl Output {
    /// Waits until `found` finds something, or `None` when nothing more can come or it takes too
    /// long.
    fn wait<T>(&self, mut found: impl FnMut(&Printed) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + PATIENCE;
        let mut printed = self.printed.lock().unwrap();
        loop {
            if let Some(found) = found(&printed) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if printed.ended == 2 || left.is_zero() {
                return None;
            }
            printed = self.changed.wait_timeout(printed, left).unwrap().0;
        }
    }
}

/// A running program. Dropping it kills it.
pub struct Program {
    child: Child,
    pidfd: OwnedFd,
    output: Arc<Output>,
    ended: Option<ExitStatus>,
    name: String,
}

/// How a program ended and what it printed.
#[derive(Debug)]
pub struct Finished {
    /// The exit status; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Program {
    /// Starts a command with both outputs captured and no input.
    pub fn start(command: &mut Command) -> Self {
        let name = format!("{command:?}");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let output = Arc::<Output>::default();
        read_lines("out", child.stdout.take().unwrap(), &output);
        read_lines("err", child.stderr.take().unwrap(), &output);
        Self {
            child,
            pidfd,
            output,
            ended: None,
            name,
        }
    }

    /// Runs a command to its end.
    pub fn run(command: &mut Command) -> Finished {
        Self::start(command).finish()
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The first line, of either output, in which `find` finds something. Panics when the program
    /// ends without it or takes too long.
    pub fn wait_for<T>(&mut self, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        let mut seen = 0;
        let found = self.output.wait(|printed| {
            let new = &printed.lines[seen..];
            seen = printed.lines.len();
            new.iter().find_map(|(_, line)| find(line))
        });
        found.unwrap_or_else(|| panic!("{}: no {what}{}", self.name, self.printed()))
    }

    /// SIGKILL, and the proof that it is gone.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn signal(&self, signal: Signal) {
        // A process that has ended by itself needs no signal.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// Waits for the end. Panics when it takes too long.
    pub fn wait(&mut self) -> ExitStatus {
        if let Some(status) = self.ended {
            return status;
        }
        let limit = Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&limit)).unwrap();
        assert!(ready == 1, "{} goes on and on{}", self.name, self.printed());
        let status = self.child.wait().unwrap();
        self.ended = Some(status);
        status
    }

    /// Waits for the end and takes all that was printed.
    pub fn finish(mut self) -> Finished {
        let status = self.wait();
        let closed = self
            .output
            .wait(|printed| (printed.ended == 2).then_some(()));
        assert!(
            closed.is_some(),
            "{} left its output to a child{}",
            self.name,
            self.printed()
        );
        let printed = self.output.printed.lock().unwrap();
        let text = |wanted| {
            printed
                .lines
                .iter()
                .filter(|(stream, _)| *stream == wanted)
                .fold(String::new(), |mut text, (_, line)| {
                    let _ = writeln!(text, "{line}");
                    text
                })
        };
        Finished {
            code: status.code(),
            stdout: text("out"),
            stderr: text("err"),
        }
    }

    /// Everything printed so far, for a message.
    pub fn printed(&self) -> String {
        let printed = self.output.printed.lock().unwrap();
        printed
            .lines
            .iter()
            .fold(String::from("; it printed:"), |mut text, (stream, line)| {
                let _ = write!(text, "\n  {stream}: {line}");
                text
            })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

fn read_lines(stream: &'static str, from: impl Read + Send + 'static, output: &Arc<Output>) {
    let output = Arc::clone(output);
    thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut bytes = Vec::new();
        while reader
            .read_until(b'\n', &mut bytes)
            .is_ok_and(|read| read > 0)
        {
            let line = String::from_utf8_lossy(&bytes)
                .trim_end_matches('\n')
                .to_owned();
            output.printed.lock().unwrap().lines.push((stream, line));
            output.changed.notify_all();
            bytes.clear();
        }
        output.printed.lock().unwrap().ended += 1;
        output.changed.notify_all();
    });
}
