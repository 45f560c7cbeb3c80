//! The program itself, killed with SIGKILL at every fail point, on a real store.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failure here is a failed test, which says how far it came"
)]

mod support;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    process::{Command, Output, Stdio},
    time::Duration,
};

use pilot::{
    driver::failpoint::NAMES,
    error::exit,
    journal::{Journal, sled::SledJournal},
    run::{entry::Entry, entry::ResultOrigin},
};
use support::{
    Remains, Scene, entries, script,
    scripted::{ScriptedBrain, ScriptedOptions},
};

const SIGKILL: i32 = 9;

struct Program {
    scene: Scene,
    brain: ScriptedBrain,
}

impl Program {
    fn new() -> Self {
        let options = ScriptedOptions {
            // Slow enough for an answer to have a middle.
            pace: Duration::from_micros(200),
            ..ScriptedOptions::default()
        };
        let brain = ScriptedBrain::start(script(), options).unwrap();
        Self {
            scene: Scene::new(),
            brain,
        }
    }

    fn store(&self) -> std::path::PathBuf {
        self.scene.folder.path().join("store")
    }

    fn command(&self, verb: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilot"));
        let new = self.scene.new_run();
        command.args(verb).args(["--brain", &self.brain.address()]);
        command.arg("--store").arg(self.store());
        if verb[0] == "run" {
            command.arg(&new.goal).arg("--workspace").arg(new.workspace);
            command.args(["--run", new.run.as_str(), "--or-resume", "--allow-bash"]);
            command.args(["--seed", &new.seed.to_string()]);
            command.args(["--max-context", &new.max_context.to_string()]);
            command.args(["--answer-reserve", &new.answer_reserve.to_string()]);
        }
        command.stdin(Stdio::null()).env_remove("PILOT_CONFIG");
        command
    }

    /// Begins the run or goes on with it.
    fn run(&self, fail_at: Option<&str>) -> Output {
        let mut command = self.command(&["run"]);
        if let Some(point) = fail_at {
            command.args(["--fail-at", point]);
        }
        command.output().unwrap()
    }

    fn finish(&self) {
        let ended = self.run(None);
        assert!(
            ended.status.success(),
            "{}",
            String::from_utf8_lossy(&ended.stderr)
        );
    }

    fn remains(&self) -> (Remains, Vec<Entry>) {
        let journal = SledJournal::open(&self.store()).unwrap();
        let mut remains = Remains::of(&self.scene, &journal);
        remains.state.created.system = String::new();
        (remains, entries(&self.scene, &journal as &dyn Journal))
    }
}

#[test]
fn a_kill_at_every_fail_point_leaves_no_trace() {
    let undisturbed = Program::new();
    undisturbed.finish();
    let (expected, _) = undisturbed.remains();
    let mut kills: BTreeMap<&str, u32> = BTreeMap::new();
    let mut in_doubt = 0;
    for name in NAMES {
        for count in [1, 2, 4, 7, 13] {
            let program = Program::new();
            let killed = program.run(Some(&format!("{name}:{count}")));
            if killed.status.signal() == Some(SIGKILL) {
                *kills.entry(name).or_default() += 1;
            } else {
                assert!(killed.status.success(), "{name}:{count}: {killed:?}");
            }
            if count % 2 == 0 {
                program.brain.forget();
            }
            program.finish();
            let (remains, entries) = program.remains();
            assert_eq!(remains, expected, "{name}:{count}");
            let doubted = |entry: &&Entry| match entry {
                Entry::ToolEnded(ended) => {
                    !matches!(ended.origin, ResultOrigin::Executed | ResultOrigin::Refused)
                }
                _ => false,
            };
            in_doubt += entries.iter().filter(doubted).count();
        }
    }
    println!("kills: {kills:?}; {in_doubt} calls were in doubt");
    for name in NAMES {
        assert!(kills.contains_key(name), "{name} never killed anything");
    }
    assert!(in_doubt >= 5, "only {in_doubt} calls were in doubt");
}

#[test]
fn a_run_that_is_killed_again_and_again_still_ends_the_same() {
    let undisturbed = Program::new();
    undisturbed.finish();
    let (expected, _) = undisturbed.remains();
    let program = Program::new();
    let mut kills = 0;
    for at in 0.. {
        let point = [
            "after-intent:2",
            "after-tool:2",
            "mid-answer:17",
            "after-result:3",
        ][at % 4];
        let ended = program.run(Some(point));
        if ended.status.success() {
            break;
        }
        assert_eq!(ended.status.signal(), Some(SIGKILL), "{ended:?}");
        kills += 1;
        assert!(kills < 100, "no progress");
    }
    let (remains, _) = program.remains();
    assert_eq!(remains, expected, "after {kills} kills");
    assert!(kills >= 8, "only {kills} kills");
}

#[test]
fn two_pilots_on_one_store_are_told_apart() {
    let program = Program::new();
    let journal = SledJournal::open_or_create(&program.store()).unwrap();
    let second = program.run(None);
    assert_eq!(second.status.code(), Some(i32::from(exit::STORE_LOCKED)));
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        text.contains(&format!("process {}", std::process::id())),
        "{text}"
    );
    drop(journal);
    program.finish();
}

#[test]
fn a_run_that_is_going_on_can_be_looked_at() {
    let options = ScriptedOptions {
        // So slow that the run outlasts the looking.
        pace: Duration::from_secs(3600),
        ..ScriptedOptions::default()
    };
    let program = Program {
        scene: Scene::new(),
        brain: ScriptedBrain::start(script(), options).unwrap(),
    };
    let name = program.scene.new_run().run.to_string();
    let mut running = program
        .command(&["run"])
        .arg("--json")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // From its first event on it holds its store, and answers for it.
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("opened"));
    let show = |verb: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pilot"));
        command.args(verb).arg("--json").arg("--store");
        command.arg(program.store()).env_remove("PILOT_CONFIG");
        command.output().unwrap()
    };
    let seen = show(&["show", &name]);
    assert!(seen.status.success(), "{seen:?}");
    assert!(String::from_utf8_lossy(&seen.stdout).contains(&name));
    let listed = show(&["list"]);
    assert!(listed.status.success(), "{listed:?}");
    assert!(String::from_utf8_lossy(&listed.stdout).contains(&name));
    assert_eq!(running.try_wait().unwrap(), None, "it should still run");
    running.kill().unwrap();
    running.wait().unwrap();
    let left = show(&["show", &name]);
    assert!(left.status.success(), "{left:?}");
}
