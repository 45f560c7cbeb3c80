//! `bash`: a shell command, run by a supervisor that outlives pilot.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    thread,
};

use tokio::sync::oneshot;

use super::{
    Class, Declaration, Execution, Facts, Standing, Tool, ToolCall, ToolContext, ToolOutput,
    declare::{Arguments, Declared},
    limit, place, process,
    spool::{Ending, ExitRecord, Request, Spool, Status},
    supervisor::{self, MAX_OUTPUT},
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "bash",
    description: "Run a shell command.",
    parameters: r#"{"type": "object", "properties": {"command": {"type": "string", "description": "Command line."}, "timeout": {"type": "integer", "description": "Seconds before it is stopped."}}, "required": ["command"]}"#,
};

/// Seconds a command may take when the call does not say.
const DEFAULT_TIMEOUT: u64 = 120;
/// Seconds a call may ask for.
const MAX_TIMEOUT: u64 = 3600;
/// Supervisors that are started for one command before it counts as impossible.
const ATTEMPTS: usize = 3;
/// PATH of a command when pilot itself has none.
const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// The answer when nobody can tell whether the command ran to its end.
const LOST: &str = "the command was started and its result was lost; look at the files before \
                    you repeat it";

/// The tool.
#[derive(Debug)]
pub struct Bash {
    /// The program whose `supervise` runs a command.
    supervisor: io::Result<PathBuf>,
}

impl Bash {
    /// Commands are supervised by this very program.
    pub fn of_this_program() -> Self {
        // Not its path: the file may be replaced by a newer pilot while this one works.
        let running = PathBuf::from("/proc/self/exe");
        Self {
            supervisor: std::fs::metadata(&running).map(|_| running),
        }
    }

    /// Commands are supervised by `program`.
    pub fn supervised_by(program: PathBuf) -> Self {
        Self {
            supervisor: Ok(program),
        }
    }
}

impl Tool for Bash {
    fn declaration(&self) -> Declaration {
        DECLARED.to_owned()
    }

    fn class(&self) -> Class {
        Class::Unsafe
    }

    fn prepare(&self, call: &ToolCall, context: &ToolContext) -> Result<Facts, ToolOutput> {
        let arguments = DECLARED.arguments(call)?;
        if arguments.text("command").contains('\0') {
            return Err(ToolOutput::error("argument command holds a zero byte"));
        }
        match arguments.number("timeout") {
            Some(n) if n == 0 || n > MAX_TIMEOUT => Err(ToolOutput::error(format_args!(
                "argument timeout must be 1 to {MAX_TIMEOUT}"
            ))),
            _ => Ok(Facts::Spool {
                name: format!("call-{}", context.call),
            }),
        }
    }

    /// Runs the command, or joins the one that was started under the same name before. It never
    /// runs twice under one name.
    fn execute(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Execution {
        let started = DECLARED.arguments(call).and_then(|arguments| {
            let job = self.job(&arguments, facts, context).map_err(cannot_run)?;
            // Calls are made one after the other: the results of all others are in the journal.
            job.spool.discard_others().map_err(cannot_run)?;
            job.spool.request(&job.request).map_err(cannot_run)?;
            Ok(job)
        });
        let job = match started {
            Ok(job) => job,
            Err(refusal) => return Execution::Ended(refusal),
        };
        let (told, result) = oneshot::channel();
        let fail = context.fail.clone();
        thread::spawn(move || {
            let ended = job.run(|| fail.hit("mid-tool")).unwrap_or_else(cannot_run);
            // Nobody listens when pilot is leaving; the next one joins the command.
            let _ = told.send(ended);
        });
        let cancelled = std::pin::pin!(context.cancel.cancelled());
        match futures::executor::block_on(futures::future::select(result, cancelled)) {
            futures::future::Either::Left((Ok(output), _)) => Execution::Ended(output),
            futures::future::Either::Left((Err(_), _)) => {
                Execution::Ended(ToolOutput::error("the command could not be watched"))
            }
            futures::future::Either::Right(_) => Execution::Interrupted,
        }
    }

    fn inspect(&self, _: &ToolCall, facts: &Facts, context: &ToolContext) -> Standing {
        let Facts::Spool { name } = facts else {
            return Standing::Unknown(LOST.to_owned());
        };
        match Spool::new(&context.spool, name).status() {
            // Nothing ran, or executing again joins it; a lost one is said to be lost there.
            Ok(Status::NotStarted | Status::Running | Status::Ended(_)) => Standing::Redo,
            Ok(Status::Lost) => {
                let orphans = end_orphans(&Spool::new(&context.spool, name));
                Standing::Unknown(lost(orphans))
            }
            Err(_) => Standing::Unknown(LOST.to_owned()),
        }
    }
}

impl Bash {
    fn job(&self, arguments: &Arguments, facts: &Facts, context: &ToolContext) -> io::Result<Job> {
        let Facts::Spool { name } = facts else {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        };
        let supervisor = match &self.supervisor {
            Ok(program) => program.clone(),
            Err(e) => return Err(e.kind().into()),
        };
        let search_path = std::env::var("PATH").unwrap_or_else(|_| SEARCH_PATH.to_owned());
        Ok(Job {
            spool: Spool::new(&context.spool, name),
            supervisor,
            request: Request {
                command: arguments.text("command").to_owned(),
                workspace: context.workspace.canonicalize()?,
                search_path,
                timeout_s: arguments.number("timeout").unwrap_or(DEFAULT_TIMEOUT),
            },
        })
    }
}

struct Job {
    spool: Spool,
    supervisor: PathBuf,
    request: Request,
}

impl Job {
    fn run(&self, started: impl Fn()) -> io::Result<ToolOutput> {
        let mut status = self.spool.status()?;
        for _ in 0..ATTEMPTS {
            if status != Status::NotStarted {
                break;
            }
            let mut supervisor = supervisor::start(&self.supervisor, self.spool.folder())?;
            started();
            supervisor.wait()?;
            // Another supervisor, started by a pilot that died, may have been faster.
            status = self.spool.status()?;
        }
        if status == Status::Running {
            status = self.spool.wait()?;
        }
        match status {
            Status::Ended(record) => self.describe(&record),
            Status::Lost => {
                let known = lost(end_orphans(&self.spool));
                Ok(ToolOutput::error(format_args!(
                    "the outcome is unknown: {known}"
                )))
            }
            Status::NotStarted | Status::Running => Err(io::ErrorKind::Other.into()),
        }
    }

    fn describe(&self, record: &ExitRecord) -> io::Result<ToolOutput> {
        let mut output = load(&self.spool.folder().join("stdout"), record.output[0])?;
        let errors = load(&self.spool.folder().join("stderr"), record.output[1])?;
        if !output.is_empty() && !output.ends_with('\n') && !errors.is_empty() {
            output.push('\n');
        }
        output.push_str(&errors);
        let output = self.without_place(&output);
        let output = output.strip_suffix('\n').unwrap_or(&output);
        let output = limit::cap(output, "write it to a file and read that in parts");
        let gap = if output.is_empty() { "" } else { "\n" };
        let why = match record.ending {
            Ending::Exit(0) if output.is_empty() => return Ok(ToolOutput::ok("(no output)")),
            Ending::Exit(0) => return Ok(ToolOutput::ok(output)),
            Ending::Exit(code) => {
                return Ok(ToolOutput::ok(format!("{output}{gap}exit code {code}")));
            }
            Ending::TimedOut => format!("command timed out after {} s", self.request.timeout_s),
            Ending::TooMuchOutput => {
                format!(
                    "command stopped: more than {} MiB of output",
                    MAX_OUTPUT >> 20
                )
            }
            Ending::NotStarted => "the shell could not be started".to_owned(),
        };
        let alive = if record.all_dead {
            ""
        } else {
            "; some of its processes cannot be stopped"
        };
        Ok(ToolOutput::error(format_args!("{why}{alive}{gap}{output}")))
    }

    fn without_place(&self, output: &str) -> String {
        match self.request.workspace.to_str() {
            Some(workspace) => place::hide(output, workspace),
            None => output.to_owned(),
        }
    }
}

fn end_orphans(spool: &Spool) -> io::Result<bool> {
    process::end_orphans(&spool.claimant()?, supervisor::GRACE)
}

fn lost(orphans_gone: io::Result<bool>) -> String {
    match orphans_gone {
        Ok(true) => LOST.to_owned(),
        Ok(false) | Err(_) => format!("{LOST}; it may still run"),
    }
}

fn cannot_run(e: io::Error) -> ToolOutput {
    ToolOutput::error(format_args!("the command could not be run: {}", e.kind()))
}

fn load(path: &Path, len: u64) -> io::Result<String> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(e) => return Err(e),
    };
    let mut bytes = Vec::new();
    file.take(len.min(MAX_OUTPUT)).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
