//! The tiers below the device's memory, over the fake executor, which checks every slot that it
//! reads: what does not fit goes down, what is needed again comes up, and no token changes.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{fs, path::Path, sync::Arc, time::Duration};

use brain::{
    backend::{
        Limits,
        fake::{FakeExecutor, FakeOptions},
    },
    engine::{Cursor, Engine, EngineConfig, LogEvent, Storage, clock::ManualClock},
    sched::{
        request::{FinishReason, Request},
        sequence::Outcome,
        types::{Emitted, SamplingParams, TokenId},
    },
    snapshot::{Folder, Identity},
};

const RUNS: u32 = 6;
const PROMPT: usize = 600;
const ANSWER: u32 = 24;

/// Room for one run and a half.
fn options() -> FakeOptions {
    let limits = FakeOptions::default().limits;
    FakeOptions {
        limits: Limits {
            full_blocks: 64,
            sliding_blocks: 24,
            ..limits
        },
        ..FakeOptions::default()
    }
}

fn engine(host_cache: u64, folder: Option<&Path>) -> Engine {
    engine_of(options(), host_cache, folder)
}

fn engine_of(options: FakeOptions, host_cache: u64, folder: Option<&Path>) -> Engine {
    let config = EngineConfig {
        host_cache,
        ..EngineConfig::default()
    };
    let storage = folder.map(|root| Storage {
        folder: Arc::new(Folder::open(root, Identity::new("model", &options.limits)).unwrap()),
        quota: u64::MAX,
        // What the cache gives up is saved all the same.
        interval: Duration::from_secs(3600),
        bandwidth: u64::MAX,
        revive: Box::new(|_, _| {}),
    });
    let executor = Box::new(FakeExecutor::new(options));
    // Time stands, so that nothing is known of what a way costs, and each is taken.
    let clock = Arc::new(ManualClock::default());
    Engine::start_with(executor, config, clock, storage).unwrap()
}

fn prompt(run: u32) -> Vec<TokenId> {
    let at = |at: u32| (run * 131 + at * at * 7 + at) % 1000;
    (0..PROMPT as u32).map(at).collect()
}

fn request(prompt: &[TokenId]) -> Request {
    Request::new(prompt.to_vec(), SamplingParams::greedy(ANSWER))
}

fn expected(prompt: &[TokenId]) -> Vec<Emitted> {
    FakeExecutor::new(options()).expected(prompt, &SamplingParams::greedy(ANSWER))
}

async fn read(mut cursor: Cursor) -> (Vec<Emitted>, Outcome) {
    let mut all = Vec::new();
    loop {
        match cursor.next().await.unwrap() {
            LogEvent::Tokens { tokens, .. } => all.extend(tokens),
            LogEvent::Finished(outcome) => return (all, outcome),
        }
    }
}

/// Answers a prompt as it must; returns the prompt of the next turn and how much was cached.
async fn turn(engine: &Engine, id: &str, prompt: &[TokenId]) -> (Vec<TokenId>, usize) {
    let started = engine.generate(id, Some(request(prompt)), 0).unwrap();
    let (tokens, outcome) = read(started.cursor).await;
    assert_eq!(outcome.reason, FinishReason::Length, "{id}");
    assert_eq!(tokens, expected(prompt), "{id}");
    let mut next = prompt.to_vec();
    next.extend(tokens.iter().map(|token| token.id));
    next.extend([3, 1, 4]);
    (next, outcome.usage.cached)
}

/// First turns of all runs, one after the other: each takes the blocks of those before.
async fn first_turns(engine: &Engine) -> Vec<Vec<TokenId>> {
    let mut next = Vec::new();
    for run in 0..RUNS {
        let id = format!("first-{run}");
        next.push(turn(engine, &id, &prompt(run)).await.0);
    }
    next
}

/// Second turns; how many found all that was known but its newest token.
async fn whole_hits(engine: &Engine, next: &[Vec<TokenId>], name: &str) -> usize {
    let known = PROMPT + ANSWER as usize;
    let mut whole = 0;
    for (run, prompt) in next.iter().enumerate() {
        let (_, cached) = turn(engine, &format!("{name}-{run}"), prompt).await;
        whole += usize::from(cached == known - 1);
    }
    whole
}

#[tokio::test]
async fn what_had_no_room_comes_back_from_the_hosts_memory() {
    let without = engine(0, None);
    let next = first_turns(&without).await;
    assert!(whole_hits(&without, &next, "second").await < 2);

    let with = engine(1 << 30, None);
    let next = first_turns(&with).await;
    assert!(with.stats().tiers.spilled_bytes > 0);
    assert_eq!(whole_hits(&with, &next, "second").await, RUNS as usize);
    let stats = with.stats();
    assert!(stats.sched.lifted >= u64::from(RUNS) - 1, "{stats:?}");
    assert!(stats.tiers.loaded_bytes > 0 && stats.tiers.host_bytes > 0);
}

#[tokio::test]
async fn the_hosts_memory_keeps_its_limit_and_the_newest() {
    // Room for about two runs: 24 bytes a slot in both groups.
    let limit = 2 * (700 + 100) * 24;
    let small = engine(limit, None);
    let next = first_turns(&small).await;
    assert!(small.stats().tiers.host_bytes <= limit);
    let newest_first: Vec<_> = next.into_iter().rev().collect();
    let whole = whole_hits(&small, &newest_first[..3], "second").await;
    assert!((1..=3).contains(&whole), "{whole}");
    assert!(small.stats().tiers.host_bytes <= limit);
}

#[tokio::test]
async fn what_was_not_saved_when_it_went_is_on_disk_and_comes_back_on_demand() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(0, Some(root.path()));
    let next = first_turns(&engine).await;
    // The newest is on the device; those before it are written as they went.
    until(|| is_saved(&engine)).await;
    let whole = whole_hits(&engine, &next, "second").await;
    assert!(whole >= RUNS as usize - 1, "{whole} of {RUNS}");
    let stats = engine.stats();
    assert!(
        stats.tiers.fetched_bytes > 0 && stats.sched.lifted > 0,
        "{stats:?}"
    );
    engine.drain(Duration::from_secs(60)).await;
}

#[tokio::test]
async fn what_was_read_for_a_request_that_was_given_up_does_not_stay_in_memory() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(0, Some(root.path()));
    let next = first_turns(&first).await;
    until(|| is_saved(&first)).await;
    first.drain(Duration::from_secs(60)).await;
    drop(first);
    let slow = FakeOptions {
        step_time: Duration::from_millis(5),
        ..options()
    };
    let engine = engine_of(slow, 0, Some(root.path()));
    let long = Request::new(vec![9], SamplingParams::greedy(400));
    let mut busy = engine.generate("busy", Some(long), 0).unwrap().cursor;
    busy.next().await.unwrap();
    // Both are heard after the step that is being computed now.
    let given_up = engine.generate("given-up", Some(request(&next[0])), 0);
    engine.cancel("given-up");
    drop(given_up.unwrap());
    until(|| {
        engine.tick();
        let tiers = engine.stats().tiers;
        tiers.fetched_bytes > 0 && tiers.host_bytes == 0
    })
    .await;
    engine.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn a_damaged_file_costs_a_prefill_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let engine = engine(0, Some(root.path()));
    let next = first_turns(&engine).await;
    until(|| is_saved(&engine)).await;
    for path in files(root.path()) {
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    // The last ones are on the device.
    let whole = whole_hits(&engine, &next[..RUNS as usize - 2], "second").await;
    assert_eq!(whole, 0);
    assert_eq!(engine.stats().tiers.fetched_bytes, 0);
    engine.drain(Duration::from_secs(60)).await;
}

#[tokio::test]
async fn who_is_preempted_goes_on_without_computing_again() {
    let engine = engine(1 << 30, None);
    // Two at a time do not fit; each asks for more blocks as its answer grows.
    let long = |run: u32| {
        let params = SamplingParams::greedy(380);
        Request::new(prompt(run)[..100].to_vec(), params)
    };
    let cursors: Vec<_> = (0..4)
        .map(|run| {
            let started = engine.generate(&format!("long-{run}"), Some(long(run)), 0);
            started.unwrap().cursor
        })
        .collect();
    for (run, cursor) in cursors.into_iter().enumerate() {
        let (tokens, outcome) = read(cursor).await;
        assert_eq!(outcome.reason, FinishReason::Length);
        let alone = FakeExecutor::new(options())
            .expected(&prompt(run as u32)[..100], &SamplingParams::greedy(380));
        assert_eq!(tokens, alone, "run {run}");
    }
    let stats = engine.stats().sched;
    assert!(stats.preemptions > 0, "{stats:?}");
    assert!(stats.prefix_hits > 0, "{stats:?}");
    // Every prompt and every token once; drafts, and what a preemption costs at most, besides.
    let once = 4 * (100 + 380);
    let rows = stats.rows - (stats.drafted_tokens - stats.accepted_tokens);
    let again = rows.saturating_sub(once);
    assert!(
        again <= 40 * stats.preemptions,
        "{again} rows again: {stats:?}"
    );
}

fn files(root: &Path) -> Vec<std::path::PathBuf> {
    let folders = fs::read_dir(root).into_iter().flatten().flatten();
    folders
        .flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "kv"))
        .collect()
}

/// Whether everything that was given up has been written.
fn is_saved(engine: &Engine) -> bool {
    engine.tick();
    engine.stats().tiers.saving == 0
}

async fn until(there: impl Fn() -> bool) {
    let waiting = async {
        while !there() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(waited.is_ok(), "it never came");
}
