//! The demo on a scripted brain: the kills really happen, and the verdict can say no.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output, Stdio},
};

use pilot::demo::workspace::{FOLDER, Plan, REPORT, Record};
use rustix::{
    event::{PollFd, PollFlags},
    process::{Pid, PidfdFlags, Signal},
};
use serde_json::{Value, json};

const PILOT: &str = env!("CARGO_BIN_EXE_pilot");
const SEED: u64 = 5;
const FILES: usize = 16;

/// What a model that does the task right would say, worked out from the plan.
fn right_turns(plan: &Plan) -> Vec<Value> {
    let mut turns = vec![
        turn("write", json!({"path": REPORT, "content": plan.heading})),
        turn("ls", json!({"path": FOLDER})),
    ];
    let mut listing: Vec<(String, &str, &Record)> = plan
        .records
        .iter()
        .map(|(file, record)| {
            let slash = if *record == Record::Folder { "/" } else { "" };
            (format!("{file}{slash}"), file.as_str(), record)
        })
        .collect();
    listing.sort_by(|a, b| a.0.cmp(&b.0));
    for (_, file, record) in listing {
        let name = file.strip_suffix(".txt").unwrap();
        let path = format!("{FOLDER}/{file}");
        turns.push(turn("read", json!({"path": path})));
        let Record::Text(text) = record else {
            let line = format!("{name} | unreadable");
            turns.push(turn("append", json!({"path": REPORT, "content": line})));
            continue;
        };
        let value = |key: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(key))
                .unwrap()
        };
        let line = format!("{name} | {} | {}", value("owner: "), value("code: "));
        turns.push(turn("append", json!({"path": REPORT, "content": line})));
        turns.push(turn(
            "edit",
            json!({"path": path, "old": "state: open", "new": "state: done"}),
        ));
        if text.matches("state: open").count() > 1 {
            let lines: Vec<&str> = text.lines().collect();
            let at = lines
                .iter()
                .position(|line| *line == "state: open")
                .unwrap();
            let before = lines[at - 1];
            let (old, new) = (
                format!("{before}\nstate: open"),
                format!("{before}\nstate: done"),
            );
            turns.push(turn("edit", json!({"path": path, "old": old, "new": new})));
        }
    }
    turns.push(turn("bash", json!({"command": format!("wc -l {REPORT}")})));
    turns.push(turn("read", json!({"path": REPORT})));
    turns
}

fn turn(tool: &str, arguments: Value) -> Value {
    json!({"content": "", "calls": [[tool, arguments]]})
}

/// A program that is started like a brain and plays `turns`.
fn brain(folder: &Path, turns: &[Value]) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let stand_in = tests
        .parent()
        .unwrap()
        .with_file_name("examples/scripted_brain");
    assert!(stand_in.is_file(), "build it first: cargo build --examples");
    let script = folder.join("script.json");
    fs::write(&script, Value::from(turns.to_vec()).to_string()).unwrap();
    let program = folder.join("brain");
    let pid = folder.join("brain.pid");
    let text = format!(
        "#!/bin/sh\necho $$ >'{}'\nexec '{}' '{}' \"$@\"\n",
        pid.display(),
        stand_in.display(),
        script.display()
    );
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    program
}

fn demo_command(folder: &Path, brain: &Path, kills: u32) -> Command {
    let mut command = Command::new(PILOT);
    command
        .args([
            "demo",
            "--json",
            "--seed",
            &SEED.to_string(),
            "--files",
            &FILES.to_string(),
        ])
        .args(["--kills", &kills.to_string(), "--brain-program"])
        .arg(brain)
        .env("TMPDIR", folder)
        .env("PILOT_BRAIN", "http://wrong:1");
    command
}

fn demo(folder: &Path, brain: &Path, kills: u32) -> Output {
    demo_command(folder, brain, kills).output().unwrap()
}

fn summary(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_str(last).unwrap_or_else(|_| panic!("{last}\n{said}"))
}

#[test]
fn a_marathon_killed_twelve_times_does_the_same_as_one_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let turns = right_turns(&Plan::new(SEED, FILES));
    let output = demo(folder.path(), &brain(folder.path(), &turns), 12);
    let told = summary(&output);
    assert_eq!(output.status.code(), Some(0), "{told:#}");
    assert_eq!(told["holds"], true);
    let calls = turns.len() as u64 + 1;
    assert_eq!(told["with_kills"]["tool_calls"], calls, "{told:#}");
    assert_eq!(told["undisturbed"]["tool_calls"], calls);
    assert_eq!(told["with_kills"]["tokens"], told["undisturbed"]["tokens"]);
    let kills = &told["kills"];
    assert_eq!(kills["done"], 12, "{told:#}");
    assert!(
        kills["between_intent_and_result"].as_u64() >= Some(3),
        "{told:#}"
    );
    assert!(kills["brain_in_answer"].as_u64() >= Some(3), "{told:#}");
    assert_eq!(kills["both_at_once"], 1);
    assert!(told["with_kills"]["errors"].as_u64() >= Some(5), "{told:#}");
    // Nothing is left behind.
    let left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("pilot-demo"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_model_that_copies_one_digit_wrong_fails_the_oracle() {
    let folder = tempfile::tempdir().unwrap();
    let mut turns = right_turns(&Plan::new(SEED, FILES));
    let wrong = turns
        .iter_mut()
        .filter_map(|turn| turn["calls"][0][1].get_mut("content"))
        .find(|content| {
            content
                .as_str()
                .is_some_and(|text| text.ends_with(char::is_numeric))
        })
        .unwrap();
    let line = wrong.as_str().unwrap();
    let last = line.chars().last().unwrap();
    let other = if last == '0' { '1' } else { '0' };
    *wrong = json!(format!("{}{other}", &line[..line.len() - 1]));
    let output = demo(folder.path(), &brain(folder.path(), &turns), 0);
    let told = summary(&output);
    assert_eq!(output.status.code(), Some(1), "{told:#}");
    assert_eq!(told["holds"], false);
    assert_eq!(
        told["differences"]["oracle"].as_array().unwrap().len(),
        2,
        "{told:#}"
    );
    assert_eq!(told["differences"]["tokens"], json!([]));
    // It is kept for whoever wants to look.
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("kept: "), "{said}");
}

#[test]
fn a_brain_that_cannot_start_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("brain");
    fs::write(&program, "#!/bin/sh\necho 'no such model' >&2\nexit 3\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    let output = demo(folder.path(), &program, 2);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("no such model") && said.lines().count() == 1,
        "{said}"
    );
    let missing = demo(folder.path(), &folder.path().join("none"), 2);
    assert_eq!(missing.status.code(), Some(2));
}

/// Starts a demo, waits for its first tool call, ends it with `signal`, and returns once its
/// brain and its pilot are gone.
fn ended_by(signal: Signal) -> (tempfile::TempDir, ExitStatus) {
    let folder = tempfile::tempdir().unwrap();
    let turns = right_turns(&Plan::new(SEED, FILES));
    let program = brain(folder.path(), &turns);
    let mut child = demo_command(folder.path(), &program, 0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(r#""event":"tool_ended""#)));
    let brain: i32 = fs::read_to_string(folder.path().join("brain.pid"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let brain = Pid::from_raw(brain).unwrap();
    let brain = rustix::process::pidfd_open(brain, PidfdFlags::empty()).unwrap();
    let demo = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(demo, signal).unwrap();
    let status = child.wait().unwrap();
    // The end of a process is told by its handle; a brain that lives on would hang the test here.
    rustix::event::poll(&mut [PollFd::new(&brain, PollFlags::IN)], None).unwrap();
    (folder, status)
}

#[test]
fn a_demo_that_is_stopped_leaves_nothing() {
    let (folder, status) = ended_by(Signal::TERM);
    assert_eq!(status.code(), Some(130));
    let left = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name());
    let left: Vec<_> = left
        .filter(|n| n.to_string_lossy().starts_with("pilot-demo"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_demo_that_is_killed_takes_its_programs_with_it() {
    let (_folder, status) = ended_by(Signal::KILL);
    assert_eq!(status.code(), None);
}
