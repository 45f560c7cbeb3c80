//! The two programs as the demo starts, hears and kills them.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    net::TcpListener,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::Sender,
    thread,
};

use super::bound;
use crate::run::event::RunEvent;

/// What the demo hears.
#[derive(Debug)]
pub enum Heard {
    /// A brain is ready.
    BrainReady {
        /// Which of them.
        life: u32,
    },
    /// A brain's standard output ended.
    BrainGone {
        /// Which of them.
        life: u32,
    },
    /// From a pilot.
    Pilot {
        /// Which of them.
        life: u32,
        /// What it said.
        event: Box<RunEvent>,
    },
    /// A pilot's standard output ended.
    PilotGone {
        /// Which of them.
        life: u32,
    },
    /// The user asked for the end.
    Stop,
}

/// A started process. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Number of this start of the program.
    pub life: u32,
}

impl Process {
    /// Kills it with SIGKILL and waits until it is gone.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// Bytes of memory that it needed at most, up to now.
    pub fn peak_memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))?;
        let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already; there is nobody left to tell.
        let _ = self.kill();
    }
}

/// True for a process that SIGKILL ended.
pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(rustix::process::Signal::KILL.as_raw())
}

/// How brains are started.
#[derive(Debug, Clone)]
pub struct BrainProgram {
    /// The program.
    pub program: PathBuf,
    /// HOST:PORT.
    pub address: String,
    /// Whether it drafts.
    pub drafter: bool,
    /// Where its words go.
    pub log: PathBuf,
}

impl BrainProgram {
    /// The program's place: as given, or beside this program.
    pub fn find(given: Option<&Path>) -> Result<PathBuf, String> {
        let program = match given {
            Some(path) => path.to_owned(),
            None => std::env::current_exe()
                .map_err(|e| format!("this program does not know where it is: {e}"))?
                .with_file_name("brain"),
        };
        if program.is_file() {
            return Ok(program);
        }
        Err(format!(
            "no brain at {}; build it (`cargo build --release`) or name it with --brain-program",
            program.display()
        ))
    }

    /// A loopback address that nobody listens on.
    pub fn free_address() -> io::Result<String> {
        Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
    }

    /// Starts it. It is heard as ready when it says so.
    pub fn start(&self, life: u32, heard: &Sender<Heard>) -> io::Result<Process> {
        let mut command = clean(&self.program);
        command.args(["serve", "--model", "demo", "--grpc-addr", &self.address]);
        // The demo's brain is nobody else's.
        command.args(["--http-addr", "none"]);
        if !self.drafter {
            command.args(["--drafter", "none", "--draft-tokens", "off"]);
        }
        let mut child = command.stderr(append(&self.log)?).spawn()?;
        let words = child.stdout.take();
        let heard = heard.clone();
        thread::spawn(move || {
            for line in words
                .into_iter()
                .flat_map(|pipe| BufReader::new(pipe).lines())
            {
                let Ok(line) = line else { break };
                if line.starts_with("ready ") && heard.send(Heard::BrainReady { life }).is_err() {
                    return;
                }
            }
            // The demo may be over.
            let _ = heard.send(Heard::BrainGone { life });
        });
        Ok(Process { child, life })
    }
}

/// How pilots are started.
#[derive(Debug, Clone)]
pub struct PilotProgram {
    /// This program.
    pub program: PathBuf,
    /// Where its brain is.
    pub brain: String,
    /// Its store.
    pub store: PathBuf,
    /// Its workspace.
    pub workspace: PathBuf,
    /// Seed of the run.
    pub seed: u64,
    /// The goal.
    pub goal: String,
    /// Where its words go.
    pub log: PathBuf,
}

/// Name of the run in its store.
pub const RUN: &str = "demo";

impl PilotProgram {
    /// Begins the run or goes on with it. `fail_at` is where it dies.
    pub fn start(
        &self,
        life: u32,
        begin: bool,
        fail_at: Option<(&str, u64)>,
        heard: &Sender<Heard>,
    ) -> io::Result<Process> {
        let mut command = clean(&self.program);
        if begin {
            command.args(["run", &self.goal, "--run", RUN, "--allow-bash"]);
            command.args(["--answer-reserve", "256", "--seed", &self.seed.to_string()]);
            command.arg("--workspace").arg(&self.workspace);
        } else {
            command.args(["resume", RUN]);
        }
        command
            .args(["--json", "--brain", &self.brain])
            .arg("--store")
            .arg(&self.store);
        if let Some((place, passes)) = fail_at {
            command.arg("--fail-at").arg(format!("{place}:{passes}"));
        }
        let mut child = command.stderr(append(&self.log)?).spawn()?;
        let words = child.stdout.take();
        let heard = heard.clone();
        thread::spawn(move || {
            for line in words
                .into_iter()
                .flat_map(|pipe| BufReader::new(pipe).lines())
            {
                let Ok(line) = line else { break };
                // A killed pilot may leave half a line.
                let Ok(event) = serde_json::from_str(&line) else {
                    continue;
                };
                if heard
                    .send(Heard::Pilot {
                        life,
                        event: Box::new(event),
                    })
                    .is_err()
                {
                    return;
                }
            }
            let _ = heard.send(Heard::PilotGone { life });
        });
        Ok(Process { child, life })
    }
}

/// A command with piped output that no setting in the environment reaches.
fn clean(program: &Path) -> Command {
    let mut command = bound::command(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("BRAIN_") || text.starts_with("PILOT_") {
            command.env_remove(&name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn append(log: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(log)
}

/// The last words in a log, on one line.
pub fn last_words(log: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(600)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    lines
        .last()
        .copied()
        .unwrap_or("(it said nothing)")
        .to_owned()
}
