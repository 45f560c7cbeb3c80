//! pilot is killed at every place where a kill could hurt; the workspace and the tokens do not
//! notice. The brain is a scripted stand-in behind real gRPC, so that every tool gets its turn.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{collections::BTreeMap, fs, os::unix::process::ExitStatusExt as _, process::Command};

use marathon_tests::{
    Program, command,
    scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn},
    snapshot,
};
use pilot::driver::failpoint;
use serde_json::json;
use tempfile::TempDir;

/// Every tool once, those with effects twice, and effects that show when they happen twice.
fn script() -> Script {
    let call = ScriptedTurn::call;
    Script {
        turns: vec![
            call("ls", json!({"path": "."})),
            call("read", json!({"path": "notes.txt"})),
            call("write", json!({"path": "report.txt", "content": "heading"})),
            call(
                "append",
                json!({"path": "report.txt", "content": "one line"}),
            ),
            call(
                "append",
                json!({"path": "report.txt", "content": "one line"}),
            ),
            call(
                "edit",
                json!({"path": "notes.txt", "old": "open", "new": "open and shut"}),
            ),
            call(
                "bash",
                json!({"command": "echo ran >> marks.txt; wc -l < marks.txt"}),
            ),
            call("bash", json!({"command": "echo ran >> marks.txt; exit 3"})),
            call("read", json!({"path": "absent.txt"})),
            call("write", json!({"path": "deep/er/file.txt", "content": "x"})),
            call("finish", json!({"summary": "done"})),
        ],
    }
}

const CALLS: u64 = 11;

/// Of these, calls of tools that change something, and so have a middle.
const EFFECTS: u64 = 7;

/// A workspace, a store and the brain they talk to.
struct Stage {
    dir: TempDir,
    brain: ScriptedBrain,
}

/// What must not depend on kills.
#[derive(Debug, PartialEq)]
struct Outcome {
    workspace: BTreeMap<String, Vec<u8>>,
    tokens: String,
}

impl Stage {
    fn new(options: ScriptedOptions) -> Self {
        let dir = TempDir::new().unwrap();
        let workspace = dir.path().join("workspace");
        fs::create_dir(&workspace).unwrap();
        fs::write(workspace.join("notes.txt"), "state: open\n").unwrap();
        Self {
            dir,
            brain: ScriptedBrain::start(script(), options).unwrap(),
        }
    }

    fn workspace(&self) -> std::path::PathBuf {
        self.dir.path().join("workspace")
    }

    /// `pilot SUBCOMMAND` on this store.
    fn pilot(&self, subcommand: &str) -> Command {
        let mut command = command("pilot");
        command
            .arg(subcommand)
            .arg("--store")
            .arg(self.dir.path().join("store"));
        command.env("HOME", self.dir.path());
        if ["run", "resume"].contains(&subcommand) {
            command.args(["--brain", &self.brain.address()]);
        }
        command
    }

    fn begin(&self, fail_at: &[&str]) -> Command {
        let mut command = self.pilot("run");
        command
            .args(["do it", "--seed", "11", "--allow-bash", "--workspace"])
            .arg(self.workspace());
        for point in fail_at {
            command.args(["--fail-at", point]);
        }
        command
    }

    fn outcome(&self) -> Outcome {
        let shown = Program::run(self.pilot("show").args([&self.newest(), "--tokens"]));
        assert_eq!(shown.code, Some(0), "{}", shown.stderr);
        Outcome {
            workspace: snapshot(&self.workspace()),
            tokens: shown.stdout,
        }
    }

    /// The id of the one run in this store.
    fn newest(&self) -> String {
        let listed = Program::run(self.pilot("list").arg("--json"));
        assert_eq!(listed.code, Some(0), "{}", listed.stderr);
        let first = listed.stdout.lines().next().expect("a run");
        let value: serde_json::Value = serde_json::from_str(first).unwrap();
        let run = if value.is_array() { &value[0] } else { &value };
        run["run"]
            .as_str()
            .unwrap_or_else(|| panic!("no run in {first}"))
            .to_owned()
    }

    /// Resumes until the run is over. Returns how often.
    fn resume_to_the_end(&self) -> u32 {
        for times in 1..10 {
            let end = Program::run(&mut self.pilot("resume"));
            if end.code == Some(0) {
                return times;
            }
            assert_eq!(end.code, None, "resume failed: {}", end.stderr);
        }
        panic!("the run does not end");
    }
}

fn undisturbed() -> Outcome {
    let stage = Stage::new(ScriptedOptions::default());
    let end = Program::run(&mut stage.begin(&[]));
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    let outcome = stage.outcome();
    let file = |name: &str| String::from_utf8(outcome.workspace[name].clone()).unwrap();
    assert_eq!(file("report.txt"), "heading\none line\none line\n");
    assert_eq!(file("notes.txt"), "state: open and shut\n");
    assert_eq!(file("marks.txt"), "ran\nran\n");
    assert!(outcome.tokens.len() > 100, "{}", outcome.tokens);
    outcome
}

fn assert_killed(program: Program, place: &str) {
    let mut program = program;
    let status = program.wait();
    assert_eq!(
        status.signal(),
        Some(9),
        "{place} was not reached{}",
        program.printed()
    );
}

/// SIGKILL at every named place around every call of every tool.
#[test]
fn a_kill_between_intent_and_result_of_any_tool_changes_nothing() {
    let wanted = undisturbed();
    let (mut kills, mut middles) = (0, 0);
    for name in [
        "before-intent",
        "after-intent",
        "mid-tool",
        "after-tool",
        "after-result",
    ] {
        for call in 1..=CALLS {
            let place = format!("{name}:{call}");
            let stage = Stage::new(ScriptedOptions::default());
            let mut run = Program::start(&mut stage.begin(&[&place]));
            if run.wait().success() {
                // Only writing tools have a middle.
                assert_eq!(name, "mid-tool", "{place} was not reached");
                continue;
            }
            assert_killed(run, &place);
            kills += 1;
            middles += u64::from(name == "mid-tool");
            assert_eq!(stage.resume_to_the_end(), 1);
            assert_eq!(stage.outcome(), wanted, "killed at {place}");
        }
    }
    assert_eq!(middles, EFFECTS);
    assert_eq!(kills, 4 * CALLS + EFFECTS);
    println!("{kills} kills between a tool's intent and its result");
}

#[test]
fn a_kill_around_an_answer_changes_nothing() {
    let wanted = undisturbed();
    for name in failpoint::NAMES
        .iter()
        .filter(|name| name.contains("answer") || name.contains("ask"))
    {
        for answer in [1, 4, CALLS] {
            let place = format!("{name}:{answer}");
            let stage = Stage::new(ScriptedOptions::default());
            assert_killed(Program::start(&mut stage.begin(&[&place])), &place);
            stage.resume_to_the_end();
            assert_eq!(stage.outcome(), wanted, "killed at {place}");
        }
    }
}

#[test]
fn brain_and_pilot_killed_at_once_change_nothing() {
    let wanted = undisturbed();
    for place in [
        "mid-answer:2",
        "mid-answer:9",
        "after-intent:6",
        "after-tool:7",
    ] {
        let mut stage = Stage::new(ScriptedOptions::default());
        assert_killed(Program::start(&mut stage.begin(&[place])), place);
        // The new brain knows none of the generations.
        stage.brain = ScriptedBrain::start(script(), ScriptedOptions::default()).unwrap();
        stage.resume_to_the_end();
        assert_eq!(stage.outcome(), wanted, "both killed at {place}");
    }
}

#[test]
fn streams_that_break_change_nothing() {
    let wanted = undisturbed();
    let stage = Stage::new(ScriptedOptions {
        break_after: 2,
        ..ScriptedOptions::default()
    });
    let end = Program::run(&mut stage.begin(&[]));
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    assert!(
        stage.brain.opened() > stage.brain.begun(),
        "no stream was opened again"
    );
    assert_eq!(stage.outcome(), wanted);
}

#[test]
fn sigterm_pauses_a_run_that_can_be_resumed() {
    let wanted = undisturbed();
    let slow = ScriptedOptions {
        pace: std::time::Duration::from_millis(20),
        ..ScriptedOptions::default()
    };
    let stage = Stage::new(slow);
    let mut run = Program::start(&mut stage.begin(&[]));
    run.wait_for("a line about a tool", |line| {
        line.contains("write").then_some(())
    });
    run.terminate();
    let end = run.finish();
    assert_eq!(end.code, Some(10), "{}", end.stderr);
    stage.resume_to_the_end();
    assert_eq!(stage.outcome(), wanted);
}

#[test]
fn a_second_pilot_keeps_out_of_a_locked_store() {
    let slow = ScriptedOptions {
        pace: std::time::Duration::from_millis(20),
        ..ScriptedOptions::default()
    };
    let stage = Stage::new(slow);
    let mut first = Program::start(&mut stage.begin(&[]));
    first.wait_for("a line about a tool", |line| {
        line.contains("ls").then_some(())
    });
    let second = Program::run(&mut stage.pilot("resume"));
    assert_eq!(second.code, Some(4), "{}", second.stderr);
    assert_eq!(second.stderr.lines().count(), 1, "{}", second.stderr);
    assert!(
        second.stderr.contains(&first.pid().to_string()),
        "names the holder: {}",
        second.stderr
    );
    assert!(first.wait().success(), "the first is not disturbed");
}
