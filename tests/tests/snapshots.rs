//! A brain with a snapshot folder, ended in every way: its successor goes on where it stopped, and
//! no client can tell, to the last bit of a log-probability.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{fs, path::Path, time::Duration};

use marathon_proto::brain::{GenerationSpec, Sampling, TokenIds, generation_spec::Prompt};
use marathon_tests::{Brain, BrainOptions, Generation, generate, read_tokens};

const PROMPT: u32 = 400;
const TOKENS: u32 = 48;

fn demo(folder: Option<&Path>, flags: &[&str]) -> Brain {
    let folder = folder.map(|folder| folder.to_str().unwrap());
    let snapshots = folder.map(|folder| ["--snapshot-dir", folder]);
    Brain::start(BrainOptions {
        flags: ["--device", "cpu", "--snapshot-interval", "50ms"]
            .into_iter()
            .chain(snapshots.into_iter().flatten())
            .chain(flags.iter().copied())
            .map(str::to_owned)
            .collect(),
        ..BrainOptions::default()
    })
}

fn spec(prompt: Vec<u32>, seed: u64) -> GenerationSpec {
    GenerationSpec {
        prompt: Some(Prompt::PromptTokens(TokenIds { ids: prompt })),
        sampling: Some(Sampling {
            temperature: Some(2.0),
            top_k: Some(64),
            top_p: Some(0.95),
            seed: Some(seed),
            max_tokens: Some(TOKENS),
            ignore_eos: Some(true),
            ..Sampling::default()
        }),
        run_id: "run".into(),
        logprobs: 3,
        ..GenerationSpec::default()
    }
}

fn prompt() -> Vec<u32> {
    let scattered = |at: u32| 200 + at.wrapping_mul(2_654_435_761) % 700;
    (0..PROMPT).map(scattered).collect()
}

/// The prompt that goes on from a generation.
fn follow(first: &Generation) -> GenerationSpec {
    let answer = first.ids.iter().copied();
    spec(
        prompt()
            .into_iter()
            .chain(answer)
            .chain([205, 206])
            .collect(),
        6,
    )
}

/// Ids, and every bit of every log-probability.
fn bits(generation: &Generation) -> (Vec<u32>, Vec<Vec<(u32, u32)>>) {
    let all = generation.logprobs.iter().map(|logprob| {
        let top = logprob.top.iter();
        let top = top.map(|top| (top.id, top.logprob.to_bits()));
        std::iter::once((0, logprob.logprob.to_bits()))
            .chain(top)
            .collect()
    });
    (generation.ids.clone(), all.collect())
}

fn cached(generation: &Generation) -> u32 {
    let usage = generation.finished.as_ref().unwrap().usage.unwrap();
    usage.cached_tokens
}

/// Files below the folder whose names look like that.
fn count(folder: &Path, begins: &str, ends: &str) -> usize {
    let mut found = 0;
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match path.is_dir() {
            true => found += count(&path, begins, ends),
            false => found += usize::from(name.starts_with(begins) && name.ends_with(ends)),
        }
    }
    found
}

async fn until(what: &str, there: impl Fn() -> bool) {
    let waiting = async {
        while !there() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(120), waiting).await;
    assert!(waited.is_ok(), "{what} never came");
}

#[tokio::test]
async fn the_next_turn_after_a_restart_comes_from_the_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let fresh = demo(None, &["--drafter", "none"]);
    let wanted_first = generate(&mut fresh.client(), "1", Some(spec(prompt(), 5)), 0).await;
    let wanted_first = wanted_first.unwrap();
    let wanted_next = generate(&mut fresh.client(), "x", Some(follow(&wanted_first)), 0).await;
    let wanted_next = wanted_next.unwrap();

    let mut brain = demo(Some(folder.path()), &[]);
    let first = generate(&mut brain.client(), "1", Some(spec(prompt(), 5)), 0)
        .await
        .unwrap();
    assert_eq!(bits(&first), bits(&wanted_first));
    brain.program.terminate();
    assert!(brain.program.wait().success());

    let mut brain = demo(Some(folder.path()), &["--drafter", "none"]);
    let again = generate(&mut brain.client(), "1", None, 0).await.unwrap();
    assert_eq!(
        bits(&again),
        bits(&wanted_first),
        "the log itself is known again"
    );
    let next = generate(&mut brain.client(), "2", Some(follow(&first)), 0)
        .await
        .unwrap();
    assert_eq!(bits(&next), bits(&wanted_next));
    assert_eq!(
        cached(&next),
        PROMPT + TOKENS - 1,
        "all but the newest token"
    );

    // The same with no time to say goodbye: what was saved beside the work is enough.
    until("the second turn's blocks", || {
        count(folder.path(), "anchor-", ".kv") >= 4
    })
    .await;
    brain.program.kill();
    let brain = demo(Some(folder.path()), &[]);
    let next = generate(&mut brain.client(), "3", Some(follow(&first)), 0)
        .await
        .unwrap();
    assert_eq!(bits(&next), bits(&wanted_next));
    assert!(cached(&next) >= PROMPT + TOKENS - 32, "{}", cached(&next));
}

#[tokio::test]
async fn a_stream_goes_on_by_id_and_index_after_a_kill() {
    let fresh = demo(None, &["--drafter", "none"]);
    let wanted = generate(&mut fresh.client(), "g", Some(spec(prompt(), 5)), 0)
        .await
        .unwrap();
    for (first, second) in [("4", "off"), ("off", "8")] {
        let folder = tempfile::tempdir().unwrap();
        let mut brain = demo(Some(folder.path()), &["--draft-tokens", first]);
        let mut client = brain.client();
        let (before, stream) = read_tokens(&mut client, "g", spec(prompt(), 5), 9)
            .await
            .unwrap();
        until("the log", || count(folder.path(), "", ".log") == 1).await;
        brain.program.kill();
        drop(stream);
        // No request any more: the id and the index are all that the client says.
        let brain = demo(Some(folder.path()), &["--draft-tokens", second]);
        let from = before.ids.len() as u32;
        let after = generate(&mut brain.client(), "g", None, from)
            .await
            .unwrap();
        let (ids, logprobs) = bits(&wanted);
        assert_eq!([before.ids.clone(), after.ids.clone()].concat(), ids);
        assert_eq!(bits(&before).1, logprobs[..before.ids.len()]);
        assert_eq!(bits(&after).1, logprobs[before.ids.len()..]);
    }
}
