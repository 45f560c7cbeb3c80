//! `pilot demo` as a user runs it, on a small folder: both programs, the built-in model, real kills.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use marathon_tests::{Program, command};
use serde_json::Value;
use tempfile::TempDir;

fn demo(arguments: &[&str]) -> (Option<i32>, Value) {
    let home = TempDir::new().unwrap();
    let mut command = command("pilot");
    command
        .args(["demo", "--json"])
        .args(arguments)
        .env("HOME", home.path());
    let end = Program::run(&mut command);
    let summary = end
        .stdout
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|line| line["event"] == "summary")
        .unwrap_or_else(|| panic!("no summary in\n{}{}", end.stdout, end.stderr));
    (end.code, summary)
}

#[test]
fn a_marathon_with_kills_equals_the_undisturbed_one() {
    let (code, summary) = demo(&["--seed", "4", "--files", "8", "--kills", "6"]);
    assert_eq!(code, Some(0), "{summary}");
    assert_eq!(summary["holds"], true, "{summary}");
    for what in ["tokens", "bytes", "oracle"] {
        assert_eq!(
            summary["differences"][what],
            serde_json::json!([]),
            "{summary}"
        );
    }
    assert_eq!(summary["kills"]["done"], 6, "{summary}");
    assert!(
        summary["kills"]["brain_in_answer"].as_u64().unwrap() >= 1,
        "{summary}"
    );
    assert!(
        summary["kills"]["between_intent_and_result"]
            .as_u64()
            .unwrap()
            >= 1,
        "{summary}"
    );
    let (with, without) = (&summary["with_kills"], &summary["undisturbed"]);
    assert!(with["tool_calls"].as_u64().unwrap() >= 20, "{summary}");
    assert!(
        with["errors"].as_u64().unwrap() >= 5,
        "errors to recover from: {summary}"
    );
    assert_eq!(with["tokens"], without["tokens"], "{summary}");
    // How deep is drafted follows from measured times; a busy machine drafts less.
    assert!(
        with["tokens_per_round"].as_f64().unwrap() > 1.0,
        "{summary}"
    );
    assert_eq!(without["tokens_per_round"], 1.0, "{summary}");
    assert!(
        with["brain_memory_bytes"].as_u64().unwrap() < 400 << 20,
        "{summary}"
    );
}

#[test]
fn another_seed_is_another_marathon() {
    let run = |seed| demo(&["--seed", seed, "--files", "2", "--kills", "0"]);
    let ((first, a), (second, b)) = (run("5"), run("6"));
    assert_eq!((first, second), (Some(0), Some(0)), "{a}\n{b}");
    assert_ne!(
        a["with_kills"]["tokens"], b["with_kills"]["tokens"],
        "{a}\n{b}"
    );
}
