//! The program as a user meets it: results, exit statuses, one line for each bad input.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "support/scripted.rs"]
mod scripted;

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal};
use scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn};
use serde_json::{Value, json};

const PILOT: &str = env!("CARGO_BIN_EXE_pilot");

struct Place {
    root: tempfile::TempDir,
    brain: ScriptedBrain,
}

impl Place {
    fn new(turns: Vec<ScriptedTurn>, pace: Duration) -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("workspace")).unwrap();
        let options = ScriptedOptions {
            pace,
            ..ScriptedOptions::default()
        };
        Self {
            root,
            brain: ScriptedBrain::start(Script { turns }, options).unwrap(),
        }
    }

    /// A run that writes a file in three steps.
    fn short() -> Self {
        let line = |text: &str| json!({"path": "notes.txt", "content": text});
        let turns = vec![
            ScriptedTurn::call("write", line("one")),
            ScriptedTurn::call("append", line("two")),
            ScriptedTurn::call("read", json!({"path": "gone.txt"})),
        ];
        Self::new(turns, Duration::ZERO)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(PILOT);
        command
            .args(line.split_whitespace())
            .current_dir(self.root.path().join("workspace"))
            .env("PILOT_STORE", self.root.path().join("store"))
            .env("PILOT_BRAIN", self.brain.address())
            .stdin(Stdio::null());
        command
    }

    fn pilot(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    fn notes(&self) -> String {
        fs::read_to_string(self.root.path().join("workspace/notes.txt")).unwrap()
    }
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn terminate(child: &Child) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
}

/// Reads events until one of this name comes.
fn wait_for(lines: &mut impl Iterator<Item = std::io::Result<String>>, name: &str) {
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if event["event"] == name {
            return;
        }
    }
    panic!("no {name}");
}

#[test]
fn a_run_from_beginning_to_end_and_in_the_records() {
    let place = Place::short();
    let ran = place.pilot("run Notes --run first --seed 7 --view plain");
    assert_eq!(code(&ran), 0, "{}", said(&ran));
    let text = out(&ran);
    assert!(text.starts_with("run first: Notes\n"), "{text}");
    assert!(
        text.contains("    1 append notes.txt\n      -> appended to notes.txt ("),
        "{text}"
    );
    assert!(text.contains("-> error: gone.txt: no such file"), "{text}");
    assert!(
        text.contains("finished: all done\n          4 answers, 4 tool calls"),
        "{text}"
    );
    assert_eq!(place.notes(), "one\ntwo\n");

    let list = out(&place.pilot("list"));
    assert!(
        list.lines()
            .nth(1)
            .unwrap()
            .starts_with("first  finished  now"),
        "{list}"
    );
    let row: Value = serde_json::from_str(&out(&place.pilot("list --json"))).unwrap();
    assert_eq!((&row["run"], &row["calls"]), (&json!("first"), &json!(4)));
    let shown = out(&place.pilot("show first"));
    assert!(
        shown.contains("status       finished\nsummary      all done\n"),
        "{shown}"
    );
    let shown: Value = serde_json::from_str(&out(&place.pilot("show first --json"))).unwrap();
    assert_eq!(
        (&shown["created"]["seed"], &shown["status"]),
        (&json!(7), &json!("finished"))
    );
    let tokens = out(&place.pilot("show first --tokens"));
    assert_eq!(tokens.lines().count(), 4);
    assert!(
        tokens.lines().all(|line| line.split(' ').count() > 10),
        "{tokens}"
    );
    let transcript = out(&place.pilot("show first --transcript"));
    assert!(transcript.starts_with("GOAL\nNotes\n"), "{transcript}");
    for wanted in [
        "\nCALL append {",
        "\nRESULT (",
        "\nappended to notes.txt\n",
        "\nFINISHED\nall done\n",
    ] {
        assert!(transcript.contains(wanted), "{wanted}{transcript}");
    }

    // Finished is finished.
    assert_eq!(code(&place.pilot("resume first")), 0);
    assert_eq!(place.notes(), "one\ntwo\n");
    assert_eq!(code(&place.pilot("resume")), 6);
    // The same seed again is the same run, token by token.
    let place = Place::short();
    assert_eq!(
        code(&place.pilot("run Notes --run other --seed 7 --view quiet")),
        0
    );
    let again = out(&place.pilot("show other --tokens"));
    assert_eq!(again, tokens);
}

#[test]
fn a_signal_pauses_and_resume_goes_on() {
    let line = |n: u32| json!({"path": "notes.txt", "content": n.to_string()});
    let turns = (0..40)
        .map(|n| ScriptedTurn::call("append", line(n)))
        .collect();
    let place = Place::new(turns, Duration::from_millis(2));
    let mut child = place
        .command("run Notes --run long --json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    wait_for(&mut lines, "tool_ended");
    terminate(&child);
    wait_for(&mut lines, "paused");
    assert_eq!(child.wait().unwrap().code(), Some(10));
    let list = out(&place.pilot("list"));
    assert!(list.contains("long  paused "), "{list}");
    let resumed = place.pilot("resume --view plain");
    assert_eq!(code(&resumed), 0, "{}", said(&resumed));
    assert!(
        out(&resumed).starts_with("run long taken up again: "),
        "{}",
        out(&resumed)
    );
    let wanted: String = (0..40).map(|n| format!("{n}\n")).collect();
    assert_eq!(place.notes(), wanted);
}

#[test]
fn a_reader_that_leaves_does_not_end_the_run() {
    let place = Place::short();
    let mut child = place
        .command("run Notes --run piped --json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut one = [0];
    child.stdout.take().unwrap().read_exact(&mut one).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(place.notes(), "one\ntwo\n");
}

/// The run does not wait for its reader; the end of the view does, until somebody insists.
#[test]
fn a_reader_that_never_reads_cannot_keep_pilot_alive() {
    // More events than a pipe holds.
    let long = ScriptedTurn {
        content: "x".repeat(9_000),
        ..ScriptedTurn::call("ls", json!({"path": "."}))
    };
    let place = Place::new(vec![long; 2], Duration::ZERO);
    let mut child = place
        .command("run Notes --run stuck --json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The pilot that is stuck holds the store, and answers for it.
    let finished = || {
        let shown = place.pilot("show stuck --json");
        code(&shown) == 0 && out(&shown).contains(r#""status":"finished""#)
    };
    while !finished() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended");
        std::thread::yield_now();
    }
    assert_eq!(child.try_wait().unwrap(), None, "everything was read");
    // One signal is heard and changes nothing; any further one is the second.
    while child.try_wait().unwrap().is_none() {
        terminate(&child);
        std::thread::yield_now();
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_run_is_removed_when_it_is_finished_or_somebody_insists() {
    let place = Place::short();
    for (run, steps) in [("whole", 100), ("half", 1)] {
        place.pilot(&format!(
            "run Notes --run {run} --max-steps {steps} --view quiet"
        ));
    }
    assert_eq!(code(&place.pilot("remove none")), 6);
    let refused = place.pilot("remove half");
    assert_eq!(code(&refused), 2);
    assert!(
        said(&refused).contains("--unfinished"),
        "{}",
        said(&refused)
    );
    for line in ["remove whole", "remove half --unfinished"] {
        let removed = place.pilot(line);
        assert_eq!(code(&removed), 0, "{line}: {}", said(&removed));
        assert!(out(&removed).starts_with("removed run "));
    }
    assert_eq!(code(&place.pilot("show whole")), 6);
    assert!(out(&place.pilot("list")).starts_with("no runs in this store"));
    // The name is free for another run.
    let again = place.pilot("run Notes --run whole --view quiet");
    assert_eq!(code(&again), 0, "{}", said(&again));
}

#[test]
fn a_resume_minds_where_the_store_is_and_takes_a_larger_context() {
    let place = Place::short();
    let begun = place.pilot("run Notes --run first --max-steps 1 --view quiet");
    assert_eq!(code(&begun), 10, "{}", said(&begun));
    let inside = place.root.path().join("workspace/inside");
    fs::rename(place.root.path().join("store"), &inside).unwrap();
    let link = place.root.path().join("store");
    std::os::unix::fs::symlink(&inside, &link).unwrap();
    let refused = place.pilot("resume first --max-steps 100");
    assert_eq!(code(&refused), 2, "{}", said(&refused));
    assert!(said(&refused).contains("in the workspace"));
    fs::remove_file(&link).unwrap();
    fs::rename(&inside, &link).unwrap();
    let refused = place.pilot("resume first --max-context 999999");
    assert_eq!(code(&refused), 2, "{}", said(&refused));
    let line = "resume first --max-steps 100 --max-context 50000 --view quiet";
    let resumed = place.pilot(line);
    assert_eq!(code(&resumed), 0, "{}", said(&resumed));
    let shown = out(&place.pilot("show first"));
    assert!(shown.contains("50000 tokens at most"), "{shown}");
}

#[test]
fn a_budget_pauses_and_more_of_it_goes_on() {
    let place = Place::short();
    let ran = place.pilot("run Notes --run small --max-steps 3 --view plain");
    assert_eq!(code(&ran), 10);
    assert!(
        out(&ran).contains("paused: the step budget is used up"),
        "{}",
        out(&ran)
    );
    assert!(
        said(&ran).contains("`pilot resume small` goes on"),
        "{}",
        said(&ran)
    );
    let again = place.pilot("run Notes --run small --or-resume --max-steps 100 --view quiet");
    assert_eq!(code(&again), 0, "{}", said(&again));
    assert_eq!(place.notes(), "one\ntwo\n");
}

#[test]
fn each_bad_input_is_one_line_a_status_and_nothing_else() {
    let place = Place::short();
    let away = "run Notes --brain 127.0.0.1:1";
    for (line, status, words) in [
        (away, 3, "cannot be reached"),
        ("run Notes --brain nonsense", 2, "nonsense"),
        ("run Notes --token-file nowhere", 2, "nowhere"),
        (
            "run Notes --workspace nowhere",
            7,
            "workspace nowhere: is not there",
        ),
        ("run Notes --store inside", 2, "lies in the workspace"),
        ("run Notes --temperature nan", 2, "--temperature must be"),
        ("run Notes --temperature 2.5", 2, "--temperature must be"),
        ("run Notes --top-p 7", 2, "--top-p must be"),
        ("run Notes --max-context 300", 2, "shorten the goal"),
        ("run Notes --config nowhere.toml", 2, "nowhere.toml"),
        ("run Notes --log-format xml", 2, "xml"),
        ("run Notes --run Capital", 2, "is no run id"),
        ("run", 2, "no goal"),
        ("resume", 6, "no store at"),
        ("resume first", 6, "no store at"),
        ("show first", 6, "no store at"),
    ] {
        let output = place.pilot(line);
        assert_eq!(code(&output), status, "{line}: {}", said(&output));
        let told = said(&output);
        assert!(
            told.starts_with("pilot: ") && told.contains(words),
            "{line}: {told}"
        );
        assert_eq!(told.lines().count(), 1, "{line}: {told}");
        let left = fs::read_dir(place.root.path()).unwrap().count();
        let inside = fs::read_dir(place.root.path().join("workspace"))
            .unwrap()
            .count();
        assert_eq!((left, inside), (1, 0), "{line} left something behind");
    }
    assert_eq!(code(&place.pilot("list")), 0);
    assert!(!place.root.path().join("store").exists());
    assert_eq!(code(&place.pilot("run Notes --max-steps many")), 2);
    assert_eq!(code(&place.pilot("nothing")), 2);
}

#[test]
fn bad_input_leaves_a_store_with_runs_as_it_was() {
    let place = Place::short();
    assert_eq!(code(&place.pilot("run Notes --run first --view quiet")), 0);
    let before = out(&place.pilot("list --json"));
    for (line, status) in [
        ("run Notes --run first", 2),
        ("run Notes --brain 127.0.0.1:1", 3),
        ("resume second", 6),
        ("show ../first", 6),
        ("show second", 6),
    ] {
        let output = place.pilot(line);
        assert_eq!(code(&output), status, "{line}: {}", said(&output));
        assert_eq!(said(&output).lines().count(), 1);
    }
    assert_eq!(out(&place.pilot("list --json")), before);
}

#[test]
fn two_runs_of_one_name_on_one_brain_do_not_meet() {
    let place = Place::short();
    let one = place.pilot("run Notes --run nightly --seed 1 --max-steps 1 --view quiet");
    assert_eq!(code(&one), 10, "{}", said(&one));
    let other = place.root.path().join("other");
    let two = place
        .command("run Others --run nightly --seed 1 --view quiet")
        .env("PILOT_STORE", &other)
        .output()
        .unwrap();
    assert_eq!(code(&two), 0, "{}", said(&two));
    let went_on = place.pilot("resume nightly --max-steps 100 --view quiet");
    assert_eq!(code(&went_on), 0, "{}", said(&went_on));
}

#[test]
fn a_store_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::short();
    assert_eq!(code(&place.pilot("run Notes --view quiet")), 0);
    let mode = fs::metadata(place.root.path().join("store"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_store_in_use_names_its_user() {
    let turns = vec![ScriptedTurn::call("ls", json!({"path": "."}))];
    let place = Place::new(turns, Duration::from_millis(50));
    let mut child = place
        .command("run Notes --run busy --json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    wait_for(&mut lines, "opened");
    // Whoever holds the store answers for it.
    for line in ["list", "show busy"] {
        let output = place.pilot(line);
        assert_eq!(code(&output), 0, "{line}: {}", said(&output));
        assert!(String::from_utf8_lossy(&output.stdout).contains("busy"));
    }
    for line in ["resume busy", "run Notes"] {
        let output = place.pilot(line);
        assert_eq!(code(&output), 4, "{line}: {}", said(&output));
        let told = said(&output);
        assert!(
            told.contains(&child.id().to_string()) && told.lines().count() == 1,
            "{told}"
        );
    }
    terminate(&child);
    child.wait().unwrap();
}

#[test]
fn settings_come_from_flag_then_environment_then_file() {
    let place = Place::short();
    let file = place.root.path().join("pilot.toml");
    fs::write(&file, "max_steps = 1\nmax_tokens = 2\nmax_time = 3\n").unwrap();
    let line = format!(
        "run --print-config --max-steps 30 --config {}",
        file.display()
    );
    let printed = place
        .command(&line)
        .env("PILOT_MAX_TOKENS", "20")
        .output()
        .unwrap();
    let text = out(&printed);
    let setting = |name: &str| {
        text.lines()
            .find(|l| l.starts_with(name))
            .unwrap()
            .to_owned()
    };
    assert_eq!(setting("max_steps ="), "max_steps = 30  # command line");
    assert!(
        setting("max_tokens =").starts_with("max_tokens = 20  # "),
        "{text}"
    );
    assert!(
        setting("max_time =").starts_with("max_time = 3  # "),
        "{text}"
    );
    assert!(setting("max_time =").contains("pilot.toml"), "{text}");
    assert_eq!(setting("link_timeout ="), "link_timeout = 20  # default");
    assert!(!Path::new(&place.root.path().join("store")).exists());
}
