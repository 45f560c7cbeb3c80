//! What goes on after brain was restarted and what does not, over the fake executor.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{fs, path::Path, sync::Arc, time::Duration};

use brain::{
    backend::{
        Limits,
        fake::{FakeExecutor, FakeOptions, Fault},
    },
    engine::{
        Cursor, Engine, EngineConfig, EngineError, Health, LogEvent, Storage, clock::SystemClock,
    },
    sched::{
        request::{FinishReason, Request},
        sequence::Outcome,
        types::{DraftDepth, Emitted, SamplingParams, TokenId},
    },
    snapshot::{Folder, Identity},
};

/// A token that a device does not survive.
const POISON: TokenId = 999;

fn config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.sched.chunk = 4;
    config
}

async fn engine(root: &Path, options: FakeOptions, config: EngineConfig) -> Engine {
    let identity = Identity::new("model", &options.limits);
    let folder = loop {
        // A predecessor that ended by itself lets go of it soon.
        match Folder::open(root, identity.clone()) {
            Ok(folder) => break folder,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    let storage = Storage {
        folder: Arc::new(folder),
        quota: u64::MAX,
        interval: Duration::from_millis(10),
        bandwidth: u64::MAX,
        revive: Box::new(|_, _| {}),
    };
    let executor = Box::new(FakeExecutor::new(options));
    let clock = Arc::new(SystemClock::start());
    Engine::start_with(executor, config, clock, Some(storage)).unwrap()
}

fn poisoned(fault: Fault) -> FakeOptions {
    FakeOptions {
        cursed: Some((POISON, fault)),
        ..FakeOptions::default()
    }
}

/// A request whose drafts are its own tokens.
fn request(prompt: &[TokenId], max_tokens: u32) -> Request {
    Request {
        draft: DraftDepth::Fixed(0),
        ..Request::new(prompt.to_vec(), SamplingParams::greedy(max_tokens))
    }
}

fn poison() -> Request {
    request(&[&[5; 10][..], &[POISON]].concat(), 40)
}

fn expected(prompt: &[TokenId], max_tokens: u32) -> Vec<Emitted> {
    let params = SamplingParams::greedy(max_tokens);
    FakeExecutor::new(FakeOptions::default()).expected(prompt, &params)
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

/// Reads a generation that is known.
async fn known(engine: &Engine, id: &str) -> (Vec<Emitted>, Outcome) {
    read(engine.generate(id, None, 0).unwrap().cursor).await
}

fn why(outcome: &Outcome) -> &str {
    match &outcome.reason {
        FinishReason::Failed(why) => why,
        reason => panic!("{reason:?}"),
    }
}

/// Names in a folder of the only model.
fn names(root: &Path, below: &str) -> Vec<String> {
    let model = fs::read_dir(root).unwrap().next().unwrap().unwrap().path();
    let entries = fs::read_dir(model.join(below)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

#[tokio::test]
async fn what_ends_brain_again_and_again_waits_for_its_client_in_the_end() {
    let root = tempfile::tempdir().unwrap();
    let good = expected(&[1, 2], 30);
    assert!(good.iter().all(|token| token.id != POISON));
    let start = || engine(root.path(), poisoned(Fault::Death), config());
    let first = start().await;
    drop(
        first
            .generate("good", Some(request(&[1, 2], 30)), 0)
            .unwrap(),
    );
    let bad = first.generate("bad", Some(poison()), 0).unwrap();
    let (_, outcome) = read(bad.cursor).await;
    assert!(
        why(&outcome).contains("its end was asked for"),
        "{outcome:?}"
    );
    drop(first);
    for _ in 0..EngineConfig::default().retries {
        let next = start().await;
        known(&next, "bad").await;
        assert!(matches!(next.health(), Health::Stopped(_)));
    }
    let last = start().await;
    let (tokens, outcome) = known(&last, "bad").await;
    assert!(tokens.is_empty());
    assert!(why(&outcome).contains("brain ended 3 times"), "{outcome:?}");
    assert_eq!(known(&last, "good").await.0, good);
    assert_eq!(last.health(), Health::Well);
    // Its client may ask for it; that costs one life and no more.
    let again = last.generate("bad", Some(poison()), 0).unwrap();
    read(again.cursor).await;
    drop(last);
    let after = start().await;
    let (_, outcome) = known(&after, "bad").await;
    assert!(why(&outcome).contains("brain ended 4 times"), "{outcome:?}");
    assert_eq!(after.health(), Health::Well);
    after.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn a_clean_end_is_no_attempt_that_failed() {
    let root = tempfile::tempdir().unwrap();
    let prompt: Vec<TokenId> = (0..3000).map(|at| at * at % 900).collect();
    let slow = || FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let first = engine(root.path(), slow(), config()).await;
    drop(first.generate("g", Some(request(&prompt, 20)), 0).unwrap());
    first.drain(Duration::ZERO).await;
    drop(first);
    for _ in 0..5 {
        // None of them has the time for a token.
        let next = engine(root.path(), slow(), config()).await;
        next.drain(Duration::ZERO).await;
    }
    let last = engine(root.path(), FakeOptions::default(), config()).await;
    let (tokens, outcome) = known(&last, "g").await;
    assert_eq!(outcome.reason, FinishReason::Length);
    assert_eq!(tokens, expected(&prompt, 20));
    last.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn what_failed_by_itself_is_not_computed_again_until_it_is_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(root.path(), poisoned(Fault::Error), config()).await;
    let bad = first.generate("bad", Some(poison()), 0).unwrap();
    let reason = read(bad.cursor).await.1.reason;
    first.drain(Duration::from_secs(60)).await;
    drop(first);
    let second = engine(root.path(), FakeOptions::default(), config()).await;
    let (tokens, outcome) = known(&second, "bad").await;
    assert_eq!((tokens, outcome.reason), (Vec::new(), reason));
    let again = second.generate("bad", Some(poison()), 0).unwrap();
    let (tokens, outcome) = read(again.cursor).await;
    assert_eq!(outcome.reason, FinishReason::Length);
    assert_eq!(tokens, expected(&poison().prompt, 40));
    second.drain(Duration::from_secs(60)).await;
    drop(second);
    let third = engine(root.path(), FakeOptions::default(), config()).await;
    assert_eq!(known(&third, "bad").await.0, tokens);
    third.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn what_a_predecessor_began_has_its_lease_whatever_the_quota_of_orphans() {
    let root = tempfile::tempdir().unwrap();
    let slow = FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let few = || EngineConfig {
        orphans: 1,
        ..config()
    };
    let first = engine(root.path(), slow, few()).await;
    let mut readers = Vec::new();
    for n in 0..5 {
        let asked = request(&[n, 3], 300);
        let reader = first.generate(&format!("g{n}"), Some(asked), 0);
        readers.push(reader.unwrap());
    }
    assert_eq!(first.drain(Duration::ZERO).await, 5);
    drop((readers, first));
    let second = engine(root.path(), FakeOptions::default(), few()).await;
    let all = async {
        while second.stats().sched.finished < 5 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all)
        .await
        .unwrap();
    for n in 0..5 {
        let (tokens, outcome) = known(&second, &format!("g{n}")).await;
        assert_eq!(outcome.reason, FinishReason::Length);
        assert_eq!(tokens, expected(&[n, 3], 300));
    }
    second.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn what_nobody_can_come_back_for_is_not_kept() {
    let root = tempfile::tempdir().unwrap();
    let first = engine(root.path(), FakeOptions::default(), config()).await;
    for (id, kept) in [("kept", true), ("not-kept", false)] {
        let asked = Request {
            kept,
            ..request(&[1, 2], 20)
        };
        read(first.generate(id, Some(asked), 0).unwrap().cursor).await;
    }
    first.drain(Duration::from_secs(60)).await;
    drop(first);
    assert_eq!(names(root.path(), "generations").len(), 1);
    let second = engine(root.path(), FakeOptions::default(), config()).await;
    assert_eq!(known(&second, "kept").await.0, expected(&[1, 2], 20));
    let gone = second.generate("not-kept", None, 0).unwrap_err();
    assert!(matches!(gone, EngineError::NotFound { .. }), "{gone}");
    second.drain(Duration::ZERO).await;
}

#[tokio::test]
async fn a_log_that_cannot_go_on_here_is_put_aside_and_one_that_has_no_room_stays() {
    let root = tempfile::tempdir().unwrap();
    let slow = FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let first = engine(root.path(), slow, config()).await;
    let readers: Vec<_> = [100, 200, 1000]
        .map(|length: u32| {
            let prompt: Vec<TokenId> = (0..length).map(|at| at % 900).collect();
            let id = format!("g{length}");
            first
                .generate(&id, Some(request(&prompt, 2000)), 0)
                .unwrap()
        })
        .into();
    first.drain(Duration::ZERO).await;
    drop((readers, first));
    let small = FakeOptions {
        limits: Limits {
            max_model_len: 500,
            ..FakeOptions::default().limits
        },
        // Who comes first is still at work when the others are looked at.
        step_time: Duration::from_millis(50),
        ..FakeOptions::default()
    };
    let one = || EngineConfig {
        live: 1,
        ..config()
    };
    for _ in 0..4 {
        let second = engine(root.path(), small.clone(), one()).await;
        assert_eq!(second.stats().generations, 1);
        assert_eq!(names(root.path(), "quarantine").len(), 1);
        assert_eq!(names(root.path(), "generations").len(), 2);
        second.drain(Duration::ZERO).await;
    }
    let third = engine(root.path(), FakeOptions::default(), config()).await;
    for id in ["g100", "g200"] {
        // To wait for room is no attempt.
        let (_, outcome) = known(&third, id).await;
        assert_eq!(outcome.reason, FinishReason::Length, "{id}");
    }
    third.drain(Duration::ZERO).await;
}
