//! `brain quantize` and `brain inspect` as a user runs them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{path::Path, process::Command};

use marathon_tests::{Program, command, repository_root, snapshot};
use serde_json::Value;

fn quantize(source: &Path, target: &Path) -> Command {
    let mut command = command("brain");
    command
        .arg("quantize")
        .args([source, target])
        .args(["--format", "nvfp4", "--attention", "quantize"])
        .args(["--shard-size", "1MiB", "--json"]);
    command
}

fn inspect(path: &Path, flags: &[&str]) -> (Option<i32>, String, String) {
    let mut command = command("brain");
    command.arg("inspect").arg(path).args(flags);
    let end = Program::run(&mut command);
    (end.code, end.stdout, end.stderr)
}

#[test]
fn a_killed_run_goes_on_to_the_same_checkpoint_which_loads() {
    let demo = repository_root().join("brain/assets/demo");
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    let end = Program::run(&mut quantize(&demo, &whole));
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    let report: Value = serde_json::from_str(&end.stdout).unwrap();
    assert_eq!(report["algorithm"], "W4A16_NVFP4");
    let error = report["total"]["relative_rms"].as_f64().unwrap();
    assert!(error > 0.0 && error < 0.09, "{error}");

    // A quick machine may be done before the signal comes: then another try.
    let killed = (0..50)
        .map(|n| dir.path().join(format!("killed-{n}")))
        .find(|killed| {
            let mut program = Program::start(&mut quantize(&demo, killed));
            program.wait_for("finished file", |line| {
                line.contains("is done").then_some(())
            });
            program.kill();
            // Half a checkpoint is none, and says so.
            inspect(killed, &[]).0 == Some(3)
        })
        .expect("a run killed half way");
    let end = Program::run(&mut quantize(&demo, &killed));
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    assert!(end.stderr.contains("going on where"), "{}", end.stderr);
    let (left, right) = (snapshot(&killed), snapshot(&whole));
    let names =
        |all: &std::collections::BTreeMap<String, Vec<u8>>| all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&left), names(&right));
    assert!(left == right, "the bytes differ");

    let (code, text, said) = inspect(&killed, &["--json", "--gpu-memory", "1GiB"]);
    assert_eq!(code, Some(0), "{said}{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["quantization"], "modelopt W4A16_NVFP4");
    assert_eq!(report["drafter"]["fits"], true);
    assert_eq!(report["problems"], serde_json::json!([]));
    assert_eq!(report["notes"], serde_json::json!([]));
    assert!(report["memory"]["fits"][0]["sequences"].as_u64().unwrap() > 1);

    let mut ask = command("brain");
    ask.args(["generate", "--prompt", "Say hello.", "--max-tokens", "8"])
        .args(["--temperature", "0", "--model"])
        .arg(&killed);
    let end = Program::run(&mut ask);
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    assert!(!end.stdout.trim().is_empty());
}

#[test]
fn what_is_there_already_is_left_alone() {
    let demo = repository_root().join("brain/assets/demo");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("notes"), "mine").unwrap();
    let before = snapshot(dir.path());
    let end = Program::run(&mut quantize(&demo, dir.path()));
    assert_eq!(end.code, Some(2), "{}", end.stderr);
    assert!(end.stderr.contains("is there already"), "{}", end.stderr);
    assert_eq!(snapshot(dir.path()), before);

    let end = Program::run(&mut quantize(&demo, Path::new("/proc/nowhere/q")));
    assert_eq!(end.code, Some(6), "{}", end.stderr);
    assert!(end.stderr.contains("cannot make"), "{}", end.stderr);
    let end = Program::run(&mut quantize(dir.path(), &dir.path().join("q")));
    assert_eq!(end.code, Some(3), "{}", end.stderr);
    assert!(end.stderr.contains("config.json"), "{}", end.stderr);
}

#[test]
fn inspect_shows_the_demo_as_it_is() {
    let demo = repository_root().join("brain/assets/demo");
    let (code, text, said) = inspect(&demo, &[]);
    assert_eq!(code, Some(0), "{said}{text}");
    for expected in [
        "a model",
        "per-layer input of width 32",
        "fits",
        "no problem found",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let (code, text, _) = inspect(&demo.join("model.safetensors"), &["--tensors"]);
    assert_eq!(code, Some(0));
    assert!(
        text.contains("model.layers.0.mlp.down_proj.weight"),
        "{text}"
    );
    let (code, text, said) = inspect(&demo.join("train"), &[]);
    assert_eq!(code, Some(3));
    assert!(text.contains("config.json: is not there"), "{text}");
    assert!(said.contains("problems were found"), "{said}");
    let (code, _, said) = inspect(&demo.join("nothing"), &[]);
    assert_eq!(code, Some(3));
    assert!(said.contains("give a checkpoint folder"), "{said}");
}
