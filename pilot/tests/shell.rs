//! The shell under its real supervisor: results, limits, and every moment at which pilot can die.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
};

use pilot::{
    driver::failpoint::FailPoints,
    tools::{
        Execution, Facts, Standing, Tool, ToolCall, ToolContext, ToolOutput,
        bash::Bash,
        spool::{Request, Spool, Status},
    },
};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

const PILOT: &str = env!("CARGO_BIN_EXE_pilot");

struct Bench {
    root: tempfile::TempDir,
    tool: Bash,
    context: ToolContext,
}

impl Bench {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let workspace = root.path().join("workspace");
        fs::create_dir(&workspace).unwrap();
        let context = ToolContext {
            workspace,
            spool: root.path().join("spool"),
            call: 7,
            cancel: Default::default(),
            fail: Arc::new(FailPoints::default()),
        };
        Self {
            root,
            tool: Bash::supervised_by(PathBuf::from(PILOT)),
            context,
        }
    }

    fn call(arguments: Value) -> ToolCall {
        ToolCall {
            id: "call_0".into(),
            name: "bash".into(),
            arguments: arguments.to_string(),
        }
    }

    fn output(&self, arguments: Value) -> ToolOutput {
        let call = Self::call(arguments);
        let facts = match self.tool.prepare(&call, &self.context) {
            Ok(facts) => facts,
            Err(refusal) => return refusal,
        };
        match self.tool.execute(&call, &facts, &self.context) {
            Execution::Ended(output) => output,
            Execution::Interrupted => panic!("not interrupted"),
        }
    }

    fn run(&mut self, command: &str) -> String {
        self.context.call += 1;
        self.output(json!({"command": command})).text
    }

    fn spool(&self) -> Spool {
        Spool::new(&self.context.spool, &format!("call-{}", self.context.call))
    }

    fn request(&self, command: &str) -> Request {
        Request {
            command: command.into(),
            workspace: self.context.workspace.canonicalize().unwrap(),
            search_path: "/usr/bin:/bin".into(),
            timeout_s: 30,
        }
    }

    fn facts(&self) -> Facts {
        Facts::Spool {
            name: format!("call-{}", self.context.call),
        }
    }
}

/// Blocks until somebody writes a line into the pipe of this name.
fn line_from(pipe: &PathBuf) -> String {
    let mut line = String::new();
    BufReader::new(fs::File::open(pipe).unwrap())
        .read_line(&mut line)
        .unwrap();
    line.trim().to_owned()
}

fn make_pipe(path: &PathBuf) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.trim().is_empty() && !rest.starts_with(" Z"))
}

#[test]
fn results_read_as_documented() {
    let mut bench = Bench::new();
    assert_eq!(bench.run("echo out; echo err >&2"), "out\nerr");
    assert_eq!(
        bench.run("printf out; echo err >&2; exit 3"),
        "out\nerr\nexit code 3"
    );
    assert_eq!(bench.run("true"), "(no output)");
    assert_eq!(bench.run("false"), "exit code 1");
    assert_eq!(bench.run("kill -9 $$"), "exit code 137");
    assert_eq!(bench.run("printf 'a\\n\\n'"), "a\n");
    assert_eq!(bench.run("cat; echo end"), "end");
    assert_eq!(bench.run("printf '\\377'"), "\u{fffd}");
    assert_eq!(bench.run("pwd; ls $HOME/.. | wc -l"), ".\n2");
    let long = bench.run("seq 1 100000");
    assert!(long.starts_with("1\n2\n") && long.ends_with("\n100000") && long.len() < 17_000);
}

#[test]
fn the_environment_is_cleared() {
    let mut bench = Bench::new();
    let shown = bench.run("env | cut -d= -f1 | grep -v '^_$' | sort");
    assert_eq!(shown, "HOME\nLANG\nPATH\nPWD");
    // The lock that says "a supervisor lives" must not live on in the command.
    let files = bench.run("ls -l /proc/self/fd");
    assert!(
        files.contains("stdout") && !files.contains("claim"),
        "{files}"
    );
}

#[test]
fn hostile_arguments_are_refused() {
    let bench = Bench::new();
    for (arguments, said) in [
        (json!({}), "error: argument command is missing"),
        (
            json!({"command": "a\0b"}),
            "error: argument command holds a zero byte",
        ),
        (
            json!({"command": "a", "timeout": 0}),
            "error: argument timeout must be 1 to 3600",
        ),
        (
            json!({"command": "a", "timeout": u64::MAX}),
            "error: argument timeout must be 1 to 3600",
        ),
    ] {
        assert_eq!(bench.output(arguments).text, said);
    }
    assert!(!bench.context.spool.exists());
}

#[test]
fn a_deadline_ends_the_whole_family() {
    let mut bench = Bench::new();
    // One ignores the polite signal, one has left the session, one was orphaned.
    let command = "echo begun; (trap '' TERM; echo $$ >a; while :; do sleep 1; done) & \
                   setsid sh -c 'echo $$ >b; exec sleep 1000' & \
                   (sh -c 'echo $$ >c; exec sleep 1000' &) ; sleep 1000";
    let mut pids = Vec::new();
    // A machine that is busy may need longer until all three have begun.
    for timeout in [1, 5, 60] {
        bench.context.call += 1;
        let output = bench.output(json!({"command": command, "timeout": timeout}));
        assert_eq!(
            output.text,
            format!("error: command timed out after {timeout} s\nbegun")
        );
        assert!(output.error);
        let written = |name| fs::read_to_string(bench.context.workspace.join(name)).ok();
        pids = ["a", "b", "c"].into_iter().filter_map(written).collect();
        if pids.len() == 3 {
            break;
        }
    }
    assert_eq!(pids.len(), 3);
    for pid in pids {
        assert!(!is_alive(pid.trim()), "{pid}");
    }
}

#[test]
fn the_end_is_the_shells_end_and_not_the_pipes() {
    let mut bench = Bench::new();
    // Waiting for the pipe would come to the deadline, and say so.
    assert_eq!(bench.run("sleep 1000 & echo $! >pid; echo done"), "done");
    let pid = fs::read_to_string(bench.context.workspace.join("pid")).unwrap();
    assert!(!is_alive(pid.trim()), "left behind");
}

#[test]
fn endless_output_is_stopped() {
    let bench = Bench::new();
    let output = bench.output(json!({"command": "yes", "timeout": 60}));
    let note = output.text.lines().next().unwrap();
    assert_eq!(note, "error: command stopped: more than 16 MiB of output");
}

#[test]
fn one_name_runs_once_however_many_supervisors_start() {
    let bench = Bench::new();
    let spool = bench.spool();
    spool.request(&bench.request("echo ran >>ledger")).unwrap();
    let all: Vec<_> = (0..8)
        .map(|_| {
            Command::new(PILOT)
                .arg("supervise")
                .arg(spool.folder())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut one in all {
        assert!(one.wait().unwrap().success());
    }
    assert!(matches!(spool.status().unwrap(), Status::Ended(_)));
    assert_eq!(
        bench.output(json!({"command": "echo ran >>ledger"})).text,
        "(no output)"
    );
    assert_eq!(
        fs::read_to_string(bench.context.workspace.join("ledger")).unwrap(),
        "ran\n"
    );
}

#[test]
fn a_running_command_is_joined_and_not_repeated() {
    let bench = Bench::new();
    let (begun, gate) = (
        bench.context.workspace.join("begun"),
        bench.context.workspace.join("gate"),
    );
    make_pipe(&begun);
    make_pipe(&gate);
    let command = "echo once >>ledger; echo up >begun; cat gate";
    let spool = bench.spool();
    spool.request(&bench.request(command)).unwrap();
    // The pilot that started it dies with its supervisor running on.
    let mut starter = Command::new("sh")
        .args(["-c", "\"$0\" supervise \"$1\" & exit 0", PILOT])
        .arg(spool.folder())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    starter.wait().unwrap();
    assert_eq!(line_from(&begun), "up");
    assert_eq!(spool.status().unwrap(), Status::Running);
    let call = Bench::call(json!({"command": command}));
    assert_eq!(
        bench.tool.inspect(&call, &bench.facts(), &bench.context),
        Standing::Redo
    );
    let joined = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| bench.output(json!({"command": command})).text);
        fs::write(&gate, "through\n").unwrap();
        waiter.join().unwrap()
    });
    assert_eq!(joined, "through");
    assert_eq!(
        fs::read_to_string(bench.context.workspace.join("ledger")).unwrap(),
        "once\n"
    );
}

#[test]
fn a_stop_leaves_the_command_running_for_the_next_pilot() {
    let bench = Bench::new();
    let (begun, gate) = (
        bench.context.workspace.join("begun"),
        bench.context.workspace.join("gate"),
    );
    make_pipe(&begun);
    make_pipe(&gate);
    let call = Bench::call(json!({"command": "echo up >begun; cat gate"}));
    let facts = bench.tool.prepare(&call, &bench.context).unwrap();
    let first = std::thread::scope(|scope| {
        let running = scope.spawn(|| bench.tool.execute(&call, &facts, &bench.context));
        assert_eq!(line_from(&begun), "up");
        bench.context.cancel.cancel();
        running.join().unwrap()
    });
    assert_eq!(first, Execution::Interrupted);
    let next = ToolContext {
        cancel: Default::default(),
        ..bench.context.clone()
    };
    fs::write(&gate, "late\n").unwrap();
    let output = bench.tool.execute(&call, &facts, &next);
    assert_eq!(output, Execution::Ended(ToolOutput::ok("late")));
}

#[test]
fn a_killed_supervisor_means_unknown_and_leaves_no_orphan() {
    let bench = Bench::new();
    let begun = bench.context.workspace.join("begun");
    make_pipe(&begun);
    let command = "echo $$ >begun; exec sleep 1000";
    let spool = bench.spool();
    spool.request(&bench.request(command)).unwrap();
    let mut supervisor = Command::new(PILOT)
        .arg("supervise")
        .arg(spool.folder())
        .spawn()
        .unwrap();
    let shell = line_from(&begun);
    let pid = Pid::from_raw(i32::try_from(supervisor.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    supervisor.wait().unwrap();
    assert!(is_alive(&shell));
    let call = Bench::call(json!({"command": command}));
    let Standing::Unknown(text) = bench.tool.inspect(&call, &bench.facts(), &bench.context) else {
        panic!("known")
    };
    assert!(text.starts_with("the command was started"), "{text}");
    assert!(!is_alive(&shell), "orphan");
    // Executing says the same and runs nothing.
    let said = bench.output(json!({"command": command})).text;
    assert_eq!(said, format!("error: the outcome is unknown: {text}"));
}

#[test]
fn a_folder_that_is_gone_or_damaged_is_an_answer() {
    let bench = Bench::new();
    let call = Bench::call(json!({"command": "true"}));
    assert_eq!(
        bench.tool.inspect(&call, &bench.facts(), &bench.context),
        Standing::Redo
    );
    let spool = bench.spool();
    spool.request(&bench.request("true")).unwrap();
    fs::write(spool.folder().join("claim"), "{").unwrap();
    let standing = bench.tool.inspect(&call, &bench.facts(), &bench.context);
    assert!(matches!(standing, Standing::Unknown(_)), "{standing:?}");
    let nowhere = Command::new(PILOT)
        .arg("supervise")
        .arg(bench.root.path().join("no"))
        .status();
    assert!(!nowhere.unwrap().success());
}

#[test]
fn only_the_newest_folder_is_kept() {
    let mut bench = Bench::new();
    for _ in 0..3 {
        bench.run("true");
    }
    let left: Vec<_> = fs::read_dir(&bench.context.spool).unwrap().collect();
    assert_eq!(left.len(), 1);
    // A name that tries to lead elsewhere stays below the spool.
    let spool = Spool::new(&bench.context.spool, "../../x");
    assert_eq!(spool.folder().parent(), Some(bench.context.spool.as_path()));
}
