//! What an engine leaves on disk and what its successor makes of it, over the fake executor, which
//! checks every slot that it reads.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use brain::{
    backend::{
        Executor,
        fake::{FakeExecutor, FakeOptions},
    },
    engine::{Cursor, Engine, EngineConfig, EngineError, LogEvent, Storage, clock::SystemClock},
    sched::{
        request::{FinishReason, Request, StopCheck},
        sequence::Outcome,
        types::{DraftDepth, Emitted, SamplingParams, TokenId},
    },
    snapshot::{Folder, Identity, SnapshotError},
};

fn options(model: u64) -> FakeOptions {
    FakeOptions {
        model,
        step_time: Duration::from_micros(200),
        ..FakeOptions::default()
    }
}

fn identity(model: u64) -> Identity {
    Identity::new(&format!("model {model}"), &options(model).limits)
}

fn storage(root: &Path, model: u64, quota: u64) -> Storage {
    Storage {
        folder: Arc::new(Folder::open(root, identity(model)).unwrap()),
        quota,
        interval: Duration::from_millis(5),
        bandwidth: u64::MAX,
        revive: Box::new(|request, _| {
            if let Some(&stop) = request.note.first() {
                request.stop_check = Some(Box::new(StopAt(stop.into())));
            }
        }),
    }
}

struct StopAt(TokenId);

impl StopCheck for StopAt {
    fn push(&mut self, token: TokenId) -> bool {
        token == self.0
    }
}

fn engine_of(root: &Path, model: u64, quota: u64) -> Engine {
    let mut config = EngineConfig::default();
    config.sched.fingerprint = format!("model {model}");
    let executor: Box<dyn Executor> = Box::new(FakeExecutor::new(options(model)));
    let clock = Arc::new(SystemClock::start());
    Engine::start_with(executor, config, clock, Some(storage(root, model, quota))).unwrap()
}

fn engine(root: &Path) -> Engine {
    engine_of(root, 0, u64::MAX)
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        logprobs: 2,
        temperature: 1.0,
        seed: 7,
        ..SamplingParams::greedy(max_tokens)
    }
}

fn request(prompt: &[TokenId], max_tokens: u32, run: &str) -> Request {
    Request {
        run_id: run.into(),
        ..Request::new(prompt.to_vec(), params(max_tokens))
    }
}

fn expected(prompt: &[TokenId], max_tokens: u32) -> Vec<Emitted> {
    FakeExecutor::new(FakeOptions::default()).expected(prompt, &params(max_tokens))
}

fn prompt(len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|at| 1 + at * at % 900).collect()
}

async fn read(mut cursor: Cursor) -> (Vec<Emitted>, Outcome) {
    let mut tokens = Vec::new();
    while let Some(event) = cursor.next().await {
        match event {
            LogEvent::Tokens { tokens: round, .. } => tokens.extend(round),
            LogEvent::Finished(outcome) => return (tokens, outcome),
        }
    }
    panic!("a log without an end");
}

async fn generate(engine: &Engine, id: &str, request: Request) -> (Vec<Emitted>, Outcome) {
    read(engine.generate(id, Some(request), 0).unwrap().cursor).await
}

/// A prompt that goes on from a generation.
fn follow(prompt: &[TokenId], tokens: &[Emitted]) -> Vec<TokenId> {
    let answer = tokens.iter().map(|token| token.id);
    prompt
        .iter()
        .copied()
        .chain(answer)
        .chain([5, 6, 7])
        .collect()
}

/// What a power cut or a SIGKILL would leave: the files as they are at this moment.
fn frozen(root: &Path) -> tempfile::TempDir {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let from = entry.unwrap().path();
            let to = to.join(from.file_name().unwrap());
            if from.is_dir() {
                copy(&from, &to);
            } else if let Ok(bytes) = fs::read(&from) {
                // One that is gone in the meantime was not there.
                fs::write(to, bytes).unwrap();
            }
        }
    }
    let to = tempfile::tempdir().unwrap();
    copy(root, to.path());
    to
}

fn files(root: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in fs::read_dir(root).unwrap() {
        for entry in fs::read_dir(folder.unwrap().path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with(prefix) && name.ends_with(".kv") {
                found.push(path);
            }
        }
    }
    found
}

/// Whether the log of a generation is there.
fn logged(root: &Path) -> bool {
    let folder = fs::read_dir(root).unwrap().next().unwrap().unwrap().path();
    let mut logs = fs::read_dir(folder.join("generations")).unwrap();
    logs.any(|log| {
        log.unwrap()
            .path()
            .extension()
            .is_some_and(|kind| kind == "log")
    })
}

fn quarantined(root: &Path) -> usize {
    let folder = fs::read_dir(root).unwrap().next().unwrap().unwrap().path();
    fs::read_dir(folder.join("quarantine")).unwrap().count()
}

#[tokio::test]
async fn a_successor_goes_on_with_a_run_without_computing_its_prompt() {
    for length in [10, 100, 900, 3000] {
        let root = tempfile::tempdir().unwrap();
        let first = engine(root.path());
        let (tokens, _) = generate(&first, "turn-1", request(&prompt(length), 40, "run")).await;
        assert_eq!(first.drain(Duration::from_secs(60)).await, 0);
        drop(first);

        let second = engine(root.path());
        let next = follow(&prompt(length), &tokens);
        let (answer, outcome) = generate(&second, "turn-2", request(&next, 40, "run")).await;
        assert_eq!(answer, expected(&next, 40));
        assert_eq!(outcome.usage.cached, length + 40 - 1, "{length} tokens");
        second.drain(Duration::from_secs(60)).await;
    }
}

#[tokio::test]
async fn generations_are_known_again_and_go_on_where_they_stopped() {
    let root = tempfile::tempdir().unwrap();
    let engine_before = engine(root.path());
    let (done, _) = generate(&engine_before, "done", request(&prompt(50), 30, "a")).await;
    let mut stop = request(&prompt(60), 400, "b");
    let all = expected(&prompt(60), 400);
    let stop_at = all.iter().position(|token| (100..256).contains(&token.id));
    let stop_at = stop_at.filter(|&at| at > 20).unwrap_or_else(|| {
        // The text that stops it must lie behind what is read before the end of the first engine.
        (21..400)
            .find(|&at| (1..256).contains(&all[at].id))
            .unwrap()
    });
    let first = all
        .iter()
        .position(|token| token.id == all[stop_at].id)
        .unwrap();
    stop.note = [all[first].id as u8].into();
    stop.stop_check = Some(Box::new(StopAt(all[first].id)));
    let mut stopping = engine_before
        .generate("stopping", Some(stop), 0)
        .unwrap()
        .cursor;
    let long = request(&prompt(70), 3000, "c");
    let mut going = engine_before
        .generate("going", Some(long), 0)
        .unwrap()
        .cursor;
    let mine = engine_before.owned_by("someone");
    let other = request(&prompt(30), 20, "");
    generate(&mine, "done", other).await;
    let mut seen = 0;
    while seen < 40 {
        match going.next().await.unwrap() {
            LogEvent::Tokens { tokens, .. } => seen += tokens.len(),
            LogEvent::Finished(_) => panic!("it ended too soon"),
        }
    }
    stopping.next().await;
    assert!(engine_before.drain(Duration::ZERO).await > 0);
    drop((engine_before, mine));

    let successor = engine(root.path());
    let read_on = |id: &str, from: usize| successor.generate(id, None, from).unwrap().cursor;
    assert_eq!(read(read_on("done", 0)).await.0, done);
    assert_eq!(read(read_on("done", 12)).await.0, done[12..]);
    let (tokens, outcome) = read(read_on("stopping", 0)).await;
    assert_eq!(tokens, all[..=first]);
    assert_eq!(outcome.reason, FinishReason::StopString);
    let (tokens, outcome) = read(read_on("going", seen)).await;
    assert_eq!(tokens, expected(&prompt(70), 3000)[seen..]);
    assert_eq!(outcome.reason, FinishReason::Length);
    // Ids belong to their callers, before and after.
    let theirs = successor.owned_by("someone").generate("done", None, 0);
    assert_eq!(
        read(theirs.unwrap().cursor).await.0,
        expected(&prompt(30), 20)
    );
    let nobody = successor.owned_by("nobody").generate("done", None, 0);
    assert!(matches!(nobody, Err(EngineError::NotFound { .. })));
    successor.drain(Duration::from_secs(60)).await;
}

#[tokio::test]
async fn what_a_run_took_is_known_to_every_successor() {
    let root = tempfile::tempdir().unwrap();
    let (mut prompts, mut answers, mut device) = (0, 0, 0);
    for life in 0..3 {
        let engine = engine(root.path()).owned_by("me");
        for turn in 1..4 {
            let id = format!("life {life} turn {turn}").replace(' ', "-");
            let (tokens, _) = generate(&engine, &id, request(&prompt(90 * turn), 25, "run")).await;
            prompts += 90 * turn as u64;
            answers += tokens.len() as u64;
        }
        // A run of somebody else, and a request of no run, are no part of it.
        generate(
            &engine.owned_by("them"),
            "x",
            request(&prompt(50), 5, "run"),
        )
        .await;
        generate(
            &engine,
            &format!("lone-{life}"),
            request(&prompt(40), 5, ""),
        )
        .await;
        engine.drain(Duration::from_secs(60)).await;
        let run = engine.usage_of("run").unwrap();
        assert_eq!(
            (run.prompt_tokens, run.generated_tokens),
            (prompts, answers)
        );
        assert_eq!(run.generations, 3 * (life + 1));
        assert!(run.cached_tokens < run.prompt_tokens && run.accepted_tokens <= run.drafted_tokens);
        assert!(run.device_micros > device, "time only grows");
        device = run.device_micros;
        let names: Vec<_> = engine.usage().into_iter().map(|(run, _)| run).collect();
        assert_eq!(
            names.iter().map(|name| &**name).collect::<Vec<_>>(),
            ["", "run"]
        );
        assert_eq!(engine.owned_by("nobody").usage(), []);
    }
}

#[tokio::test]
async fn whatever_moment_a_brain_dies_at_its_successor_gives_the_same_tokens() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(root.path());
    let all = expected(&prompt(500), 1200);
    // Undrafted, it takes its time.
    let slow = || Request {
        draft: DraftDepth::Fixed(0),
        ..request(&prompt(500), 1200, "run")
    };
    let wanted = slow();
    let mut cursor = first.generate("g", Some(wanted), 0).unwrap().cursor;
    let (mut seen, mut found, mut restored) = (0, 0, 0);
    for _ in 0..6 {
        while let Some(LogEvent::Tokens { index, tokens, .. }) = cursor.next().await {
            seen = index + tokens.len();
            if seen % 150 == 0 {
                break;
            }
        }
        while !logged(root.path()) {
            tokio::task::yield_now().await;
        }
        let moment = frozen(root.path());
        let second = engine(moment.path());
        // The client comes back with the index it wants, and with its request if it has to.
        let attached = second.generate("g", None, seen);
        found += usize::from(attached.is_ok());
        let again = attached.or_else(|_| second.generate("g", Some(slow()), seen));
        let again = again.unwrap();
        assert_eq!(read(again.cursor).await.0, all[seen..]);
        restored += second.stats().sched.prefix_hits;
        second.drain(Duration::from_secs(60)).await;
    }
    assert_eq!(found, 6);
    println!("{found} of 6 known, {restored} went on from saved blocks");
    first.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn damaged_files_are_put_aside_and_computed_again() {
    for kind in ["units", "anchor"] {
        for damage in ["cut", "flip", "empty"] {
            let root = tempfile::tempdir().unwrap();
            let first = engine(root.path());
            let (tokens, _) = generate(&first, "one", request(&prompt(300), 20, "run")).await;
            first.drain(Duration::from_secs(60)).await;
            drop(first);
            let damaged = files(root.path(), kind);
            assert!(!damaged.is_empty());
            for path in &damaged {
                let mut bytes = fs::read(path).unwrap();
                match damage {
                    "cut" => bytes.truncate(bytes.len() - 1),
                    "flip" => *bytes.last_mut().unwrap() ^= 4,
                    _ => bytes.clear(),
                }
                fs::write(path, bytes).unwrap();
            }
            let second = engine(root.path());
            let next = follow(&prompt(300), &tokens);
            let (answer, outcome) = generate(&second, "two", request(&next, 20, "run")).await;
            assert_eq!(answer, expected(&next, 20), "{kind}, {damage}");
            assert_eq!(outcome.usage.cached, 0, "{kind}, {damage}");
            assert!(quarantined(root.path()) > 0, "{kind}, {damage}");
            second.drain(Duration::from_secs(60)).await;
        }
    }
}

#[tokio::test]
async fn another_model_finds_nothing_and_harms_nothing() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(root.path());
    let (tokens, _) = generate(&first, "one", request(&prompt(300), 20, "run")).await;
    first.drain(Duration::from_secs(60)).await;
    drop(first);
    let other = engine_of(root.path(), 1, u64::MAX);
    assert!(matches!(
        other.generate("one", None, 0),
        Err(EngineError::NotFound { .. })
    ));
    let (_, outcome) = generate(&other, "two", request(&prompt(300), 20, "run")).await;
    assert_eq!(outcome.usage.cached, 0);
    other.drain(Duration::from_secs(60)).await;
    drop(other);
    let again = engine(root.path());
    let next = follow(&prompt(300), &tokens);
    let (_, outcome) = generate(&again, "three", request(&next, 20, "run")).await;
    assert_eq!(outcome.usage.cached, 300 + 20 - 1);
}

#[tokio::test]
async fn the_quota_keeps_the_newest() {
    let root = tempfile::tempdir().unwrap();
    // Room for about two runs of 700 tokens: 24 bytes a slot, in both groups.
    let quota = 2 * 700 * 24 + 4 * 128 * 24;
    let first = engine_of(root.path(), 0, quota);
    let mut logs = Vec::new();
    for run in 0..5u32 {
        let mut own = prompt(700);
        own[0] = 950 + run;
        let name = format!("run-{run}");
        let (tokens, _) = generate(&first, &name, request(&own, 20, &name)).await;
        logs.push(follow(&own, &tokens));
    }
    first.drain(Duration::from_secs(60)).await;
    drop(first);
    let kept: Vec<PathBuf> = [files(root.path(), "units"), files(root.path(), "anchor")].concat();
    let bytes: u64 = kept
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .sum();
    assert!(0 < bytes && bytes <= quota, "{bytes} of {quota}");
    let second = engine_of(root.path(), 0, quota);
    let mut hits = 0;
    for (run, next) in logs.iter().enumerate() {
        let name = format!("again-{run}");
        let (answer, outcome) = generate(&second, &name, request(next, 20, "")).await;
        assert_eq!(answer, expected(next, 20));
        hits += usize::from(outcome.usage.cached > 700);
    }
    assert!((1..5).contains(&hits), "{hits} of 5 runs were kept");
}

#[tokio::test]
async fn a_folder_has_one_brain() {
    let root = tempfile::tempdir().unwrap();
    let first = Folder::open(root.path(), identity(0)).unwrap();
    let second = Folder::open(root.path(), identity(0)).unwrap_err();
    assert!(matches!(second, SnapshotError::InUse { .. }), "{second}");
    assert!(second.to_string().contains("another brain"));
    drop(first);
    assert!(Folder::open(root.path(), identity(0)).is_ok());
    let file = root.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = Folder::open(&file, identity(0)).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
}

#[tokio::test]
async fn a_disk_that_takes_nothing_costs_only_the_snapshots() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("there");
    let first = engine(&folder);
    generate(&first, "before", request(&prompt(100), 20, "run")).await;
    // The folder goes away under it: every write fails from now on.
    fs::rename(&folder, root.path().join("gone")).unwrap();
    for turn in 0..4 {
        let own = prompt(100 + turn);
        let id = format!("after-{turn}");
        let (tokens, _) = generate(&first, &id, request(&own, 50, "run")).await;
        assert_eq!(tokens, expected(&own, 50));
    }
    assert_eq!(first.drain(Duration::from_secs(60)).await, 0);
}
