//! The engine over the fake executor: logs, cursors, leases, faults, drain.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    time::Duration,
};

use brain::{
    backend::fake::{FakeExecutor, FakeOptions, Fault},
    engine::{
        Attached, Cursor, Engine, EngineConfig, EngineError, Health, LogEvent, MOST_AT_ONCE,
        clock::{Clock, ManualClock, SystemClock},
    },
    sched::{
        request::{FinishReason, Request, StopCheck},
        sequence::Outcome,
        types::{DraftDepth, Emitted, SamplingParams, TokenId},
    },
};

fn engine_with(options: FakeOptions, config: EngineConfig) -> Engine {
    let clock = Arc::new(SystemClock::start());
    Engine::start(Box::new(FakeExecutor::new(options)), config, clock).unwrap()
}

fn engine() -> Engine {
    engine_with(FakeOptions::default(), EngineConfig::default())
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        logprobs: 2,
        temperature: 1.0,
        seed: 7,
        ..SamplingParams::greedy(max_tokens)
    }
}

fn request(prompt: &[TokenId], max_tokens: u32) -> Request {
    Request::new(prompt.to_vec(), params(max_tokens))
}

fn expected(prompt: &[TokenId], max_tokens: u32) -> Vec<Emitted> {
    FakeExecutor::new(FakeOptions::default()).expected(prompt, &params(max_tokens))
}

fn ids(tokens: &[Emitted]) -> Vec<TokenId> {
    tokens.iter().map(|token| token.id).collect()
}

/// Reads to the end; checks that indices leave no gap.
async fn read(mut cursor: Cursor) -> (Vec<Emitted>, Outcome) {
    let mut tokens = Vec::new();
    let mut next = cursor.position();
    while let Some(event) = cursor.next().await {
        match event {
            LogEvent::Tokens {
                index,
                tokens: round,
                ..
            } => {
                assert_eq!(index, next);
                next += round.len();
                tokens.extend(round);
            }
            LogEvent::Finished(outcome) => {
                assert_eq!(cursor.next().await, None);
                return (tokens, outcome);
            }
        }
    }
    panic!("a log without an end");
}

#[tokio::test]
async fn a_generation_is_read_to_its_end() {
    let Attached { started, cursor } = engine()
        .generate("g", Some(request(&[1, 2, 3], 40)), 0)
        .unwrap();
    assert!(!started.attached);
    assert_eq!(&started.prompt[..], [1, 2, 3]);
    let (tokens, outcome) = read(cursor).await;
    // The last handle is gone and the log was cut, or it was quick enough.
    assert!(matches!(
        outcome.reason,
        FinishReason::Length | FinishReason::Failed(_)
    ));
    assert_eq!(tokens, expected(&[1, 2, 3], 40)[..tokens.len()]);
}

#[tokio::test]
async fn usage_counts_what_happened() {
    let engine = engine();
    let cursor = engine
        .generate("g", Some(request(&[1, 2, 3], 40)), 0)
        .unwrap()
        .cursor;
    let (tokens, outcome) = read(cursor).await;
    assert_eq!(tokens, expected(&[1, 2, 3], 40));
    assert_eq!(outcome.reason, FinishReason::Length);
    let usage = outcome.usage;
    assert_eq!((usage.prompt, usage.generated), (3, 40));
    assert_eq!(
        usage.accepted + usage.rounds,
        40,
        "a round emits its accepted drafts and one more"
    );
    assert!(usage.accepted <= usage.drafted);
    assert_eq!(engine.stats().sched.generated_tokens, 40);
}

#[tokio::test]
async fn every_index_can_be_read_again_while_it_grows_and_after() {
    let engine = engine();
    let all = expected(&[5, 6], 60);
    for from in (0..=60).step_by(7) {
        let first = engine
            .generate("g", Some(request(&[5, 6], 60)), from)
            .unwrap();
        assert_eq!(read(first.cursor).await.0, all[from..]);
    }
    for from in 0..=60 {
        let again = engine.generate("g", None, from).unwrap();
        assert!(again.started.attached);
        assert_eq!(read(again.cursor).await.0, all[from..]);
    }
    assert_eq!(engine.stats().sched.finished, 1, "it was computed once");
    let error = engine.generate("g", None, 61).unwrap_err();
    assert_eq!(
        error,
        EngineError::OutOfRange {
            id: "g".into(),
            from: 61,
            len: 60
        }
    );
}

#[tokio::test]
async fn a_reader_ahead_of_the_log_waits_for_its_index() {
    let options = FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let engine = engine_with(options, EngineConfig::default());
    let mut first = engine
        .generate("g", Some(request(&[5], 50)), 0)
        .unwrap()
        .cursor;
    let ahead = engine.generate("g", None, 48).unwrap().cursor;
    assert!(matches!(
        first.next().await,
        Some(LogEvent::Tokens { index: 0, .. })
    ));
    assert_eq!(read(ahead).await.0, expected(&[5], 50)[48..]);
    // The slow reader was never waited for, and misses nothing.
    let (rest, _) = read(first).await;
    let all = expected(&[5], 50);
    assert_eq!(rest, all[all.len() - rest.len()..]);
}

#[tokio::test]
async fn ids_and_requests_must_agree() {
    let engine = engine();
    let kept = engine.generate("g", Some(request(&[1], 5)), 0).unwrap();
    let conflict = engine.generate("g", Some(request(&[2], 5)), 0).unwrap_err();
    assert_eq!(conflict, EngineError::Conflict { id: "g".into() });
    let unknown = engine.generate("h", None, 0).unwrap_err();
    assert_eq!(unknown, EngineError::NotFound { id: "h".into() });
    for bad in ["", "a b", "ü", &"x".repeat(129)] {
        let error = engine.generate(bad, Some(request(&[1], 5)), 0).unwrap_err();
        assert!(matches!(error, EngineError::BadId(_)), "{bad}");
    }
    let refused = engine
        .generate("h", Some(request(&[1; 5000], 5)), 0)
        .unwrap_err();
    assert!(refused.to_string().contains("5000 tokens"), "{refused}");
    let other_drafts = Request {
        draft: DraftDepth::Fixed(0),
        ..request(&[1], 5)
    };
    assert!(
        engine
            .generate("g", Some(other_drafts), 0)
            .unwrap()
            .started
            .attached
    );
    assert_eq!(read(kept.cursor).await.0.len(), 5);
}

#[tokio::test]
async fn received_tokens_are_the_beginning_of_the_log() {
    let engine = engine();
    let all = expected(&[1, 2, 3], 30);
    for held in [1, 7, 29] {
        let id = format!("g{held}");
        let again = Request {
            received: ids(&all[..held]),
            ..request(&[1, 2, 3], 30)
        };
        let middle = held / 2;
        let (tokens, outcome) =
            read(engine.generate(&id, Some(again), middle).unwrap().cursor).await;
        assert_eq!(ids(&tokens), ids(&all[middle..]));
        assert_eq!(
            tokens[held - middle..],
            all[held..],
            "new tokens have their log-probabilities"
        );
        assert_eq!(outcome.usage.generated, 30);
    }
    let whole = Request {
        received: ids(&all),
        ..request(&[1, 2, 3], 30)
    };
    let (tokens, outcome) = read(engine.generate("whole", Some(whole), 0).unwrap().cursor).await;
    assert_eq!(
        (ids(&tokens), outcome.reason),
        (ids(&all), FinishReason::Length)
    );
}

/// Stops at a token, as if it completed a stop string.
struct StopAt(TokenId);

impl StopCheck for StopAt {
    fn push(&mut self, token: TokenId) -> bool {
        token == self.0
    }
}

#[tokio::test]
async fn stops_end_the_log_with_the_token_that_stopped_it() {
    let engine = engine();
    let all = ids(&expected(&[9], 30));
    let mut stop_token = params(30);
    stop_token.stop_tokens = vec![all[11]];
    let cursor = engine
        .generate("t", Some(Request::new(vec![9], stop_token)), 0)
        .unwrap()
        .cursor;
    let (tokens, outcome) = read(cursor).await;
    assert_eq!(ids(&tokens), all[..12]);
    assert_eq!(outcome.reason, FinishReason::StopToken(all[11]));
    let stop_string = Request {
        stop_strings: vec!["x".into()],
        stop_check: Some(Box::new(StopAt(all[17]))),
        ..request(&[9], 30)
    };
    let (tokens, outcome) = read(engine.generate("s", Some(stop_string), 0).unwrap().cursor).await;
    assert_eq!(ids(&tokens), all[..18]);
    assert_eq!(outcome.reason, FinishReason::StopString);
}

/// Panics at a token.
struct PanicAt(TokenId);

impl StopCheck for PanicAt {
    fn push(&mut self, token: TokenId) -> bool {
        assert_ne!(token, self.0, "a panic was asked for");
        false
    }
}

#[tokio::test]
async fn a_stop_check_that_panics_ends_its_own_request_alone() {
    let engine = engine();
    let all = expected(&[9], 30);
    let other = engine
        .generate("other", Some(request(&[3], 200)), 0)
        .unwrap()
        .cursor;
    let broken = |received: &[Emitted]| Request {
        stop_strings: vec!["x".into()],
        stop_check: Some(Box::new(PanicAt(all[11].id))),
        received: ids(received),
        ..request(&[9], 30)
    };
    let cursor = engine.generate("b", Some(broken(&[])), 0).unwrap().cursor;
    let (tokens, outcome) = read(cursor).await;
    assert_eq!(tokens, all[..12]);
    let FinishReason::Failed(reason) = outcome.reason else {
        panic!("{outcome:?}");
    };
    assert!(reason.contains("stop strings"), "{reason}");
    let refused = engine
        .generate("c", Some(broken(&all[..15])), 0)
        .unwrap_err();
    assert!(refused.to_string().contains("stop strings"), "{refused}");
    assert_eq!(read(other).await.0, expected(&[3], 200));
    assert_eq!(engine.health(), Health::Well);
}

#[tokio::test]
async fn cancelling_ends_the_log_and_is_idempotent() {
    let options = FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let engine = engine_with(options, EngineConfig::default());
    let mut cursor = engine
        .generate("g", Some(request(&[1], 4000)), 0)
        .unwrap()
        .cursor;
    assert!(matches!(cursor.next().await, Some(LogEvent::Tokens { .. })));
    assert!(engine.cancel("g"));
    let (_, outcome) = read(cursor).await;
    assert_eq!(outcome.reason, FinishReason::Cancelled);
    assert!(!engine.cancel("g"));
    assert!(!engine.cancel("unknown"));
    let (again, outcome) = read(engine.generate("g", None, 0).unwrap().cursor).await;
    assert_eq!(outcome.reason, FinishReason::Cancelled);
    assert_eq!(again, expected(&[1], 4000)[..again.len()]);
}

/// An engine on a clock that stands; a step takes long enough to be caught in the middle.
fn timed(config: EngineConfig) -> (Engine, Arc<ManualClock>) {
    let options = FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let clock = Arc::new(ManualClock::default());
    let shared: Arc<dyn Clock> = clock.clone();
    (
        Engine::start(Box::new(FakeExecutor::new(options)), config, shared).unwrap(),
        clock,
    )
}

/// Waits until the engine, told to look at its clock, has forgotten all but `left` generations.
async fn until_known(engine: &Engine, left: usize) {
    while engine.stats().generations != left {
        engine.tick();
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_unread_generation_lives_for_its_lease_and_no_longer() {
    let (engine, clock) = timed(EngineConfig::default());
    let lease = engine.config().lease;
    drop(engine.generate("g", Some(request(&[1], 4000)), 0).unwrap());
    let read_on = engine
        .generate("read", Some(request(&[2], 4000)), 0)
        .unwrap()
        .cursor;
    clock.advance(lease - Duration::from_secs(1));
    engine.tick();
    let back = engine.generate("g", None, 0).unwrap();
    assert!(back.started.attached);
    drop(back);
    // The lease runs from when the last reader left.
    clock.advance(lease - Duration::from_secs(1));
    engine.tick();
    drop(engine.generate("g", None, 0).unwrap());
    clock.advance(lease);
    until_known(&engine, 1).await;
    assert!(matches!(
        engine.generate("g", None, 0),
        Err(EngineError::NotFound { .. })
    ));
    assert!(engine.cancel("read"), "what is read goes on");
    assert_eq!(read(read_on).await.1.reason, FinishReason::Cancelled);
    // An ended log is kept for a lease after its last reader too.
    clock.advance(lease - Duration::from_secs(1));
    engine.tick();
    assert!(engine.generate("read", None, 0).is_ok());
    clock.advance(lease);
    until_known(&engine, 0).await;
}

#[tokio::test]
async fn orphans_have_a_quota_and_known_logs_too() {
    let config = EngineConfig {
        orphans: 2,
        known: 4,
        live: 3,
        ..EngineConfig::default()
    };
    let (engine, clock) = timed(config);
    for n in 0..3 {
        drop(
            engine
                .generate(&format!("g{n}"), Some(request(&[n], 4000)), 0)
                .unwrap(),
        );
        clock.advance(Duration::from_secs(1));
    }
    until_known(&engine, 2).await;
    assert!(matches!(
        engine.generate("g0", None, 0),
        Err(EngineError::NotFound { .. })
    ));
    let reader = engine.generate("g1", None, 0).unwrap();
    let other = engine
        .generate("more", Some(request(&[8], 4000)), 0)
        .unwrap();
    let busy = engine
        .generate("most", Some(request(&[9], 5)), 0)
        .unwrap_err();
    assert!(matches!(busy, EngineError::Busy { there: 3, .. }), "{busy}");
    engine.cancel("g1");
    read(reader.cursor).await;
    let next = engine.generate("next", Some(request(&[9], 5)), 0).unwrap();
    read(next.cursor).await;
    assert_eq!(engine.stats().generations, 4);
    let last = engine.generate("last", Some(request(&[9], 5)), 0).unwrap();
    assert_eq!(engine.stats().generations, 4, "an ended log made room");
    drop((other, last));
}

/// Says that it is asked, and answers when it may.
struct Slow(mpsc::Sender<()>, mpsc::Receiver<()>);

impl StopCheck for Slow {
    fn push(&mut self, _: TokenId) -> bool {
        self.0.send(()).unwrap();
        let may = self.1.recv_timeout(Duration::from_secs(60));
        assert!(may.is_ok(), "nobody else got on in the meantime");
        false
    }
}

#[tokio::test]
async fn nobody_waits_while_what_a_client_received_is_looked_at() {
    let engine = engine();
    let (asked, is_asked) = mpsc::channel();
    let (go_on, may) = mpsc::channel();
    let slow = Request {
        received: ids(&expected(&[1, 2], 1)),
        stop_check: Some(Box::new(Slow(asked, may))),
        ..request(&[1, 2], 2)
    };
    let other = engine.clone();
    let waiting = std::thread::spawn(move || other.generate("slow", Some(slow), 0));
    is_asked.recv().unwrap();
    let quick = engine
        .generate("quick", Some(request(&[3], 20)), 0)
        .unwrap();
    assert_eq!(read(quick.cursor).await.0, expected(&[3], 20));
    assert_eq!(engine.stats().generations, 1);
    // One more for the token that is computed.
    go_on.send(()).unwrap();
    go_on.send(()).unwrap();
    let slow = waiting.join().unwrap().unwrap();
    assert_eq!(read(slow.cursor).await.0.len(), 2);
}

#[tokio::test]
async fn what_a_client_brought_is_read_in_parts() {
    let engine = engine();
    let all = expected(&[1, 2], 3000);
    let long = Request {
        received: ids(&all[..2900]),
        ..request(&[1, 2], 3000)
    };
    let mut cursor = engine.generate("long", Some(long), 0).unwrap().cursor;
    let mut read = Vec::new();
    while let Some(LogEvent::Tokens { index, tokens, .. }) = cursor.next().await {
        assert!(index == read.len() && tokens.len() <= MOST_AT_ONCE);
        read.extend(tokens);
    }
    assert_eq!(ids(&read), ids(&all));
    let mut late = engine.generate("long", None, 1500).unwrap().cursor;
    let Some(LogEvent::Tokens { index, tokens, .. }) = late.next().await else {
        panic!("no tokens")
    };
    assert_eq!((index, tokens.len()), (1500, MOST_AT_ONCE));
}

#[tokio::test]
async fn a_failed_step_is_run_again_and_nobody_notices() {
    for fault in [Fault::Error, Fault::Panic, Fault::Nonsense] {
        let faults = BTreeMap::from([(0, fault), (3, fault), (4, fault), (9, fault)]);
        let options = FakeOptions {
            faults,
            ..FakeOptions::default()
        };
        let engine = engine_with(options, EngineConfig::default());
        let one = engine
            .generate("one", Some(request(&[1, 2], 40)), 0)
            .unwrap()
            .cursor;
        let two = engine
            .generate("two", Some(request(&[3], 40)), 0)
            .unwrap()
            .cursor;
        assert_eq!(read(one).await.0, expected(&[1, 2], 40), "{fault:?}");
        assert_eq!(read(two).await.0, expected(&[3], 40), "{fault:?}");
        assert_eq!(engine.health(), Health::Well);
    }
}

#[tokio::test]
async fn a_sequence_that_always_fails_takes_no_other_with_it() {
    for fault in [Fault::Error, Fault::Panic, Fault::Nonsense] {
        let options = FakeOptions {
            cursed: Some((999, fault)),
            ..FakeOptions::default()
        };
        let mut config = EngineConfig::default();
        config.sched.chunk = 4;
        let engine = engine_with(options, config);
        // A draft may be any token; its own are known.
        let mut undrafted = request(&[1, 2], 300);
        undrafted.draft = DraftDepth::Fixed(0);
        let good = engine.generate("good", Some(undrafted), 0).unwrap().cursor;
        let mut prompt = vec![5; 10];
        prompt.push(999);
        let bad = engine
            .generate("bad", Some(request(&prompt, 40)), 0)
            .unwrap()
            .cursor;
        let (tokens, outcome) = read(bad).await;
        assert!(tokens.is_empty());
        assert!(
            matches!(outcome.reason, FinishReason::Failed(_)),
            "{outcome:?}"
        );
        let (tokens, outcome) = read(good).await;
        // 999 may turn up among the good one's own tokens; until then nothing disturbs it.
        assert_eq!(tokens, expected(&[1, 2], 300)[..tokens.len()], "{fault:?}");
        assert!(outcome.reason == FinishReason::Length || tokens.last().unwrap().id == 999);
        assert_eq!(engine.health(), Health::Well);
    }
}

#[tokio::test]
async fn a_dead_device_stops_the_engine_and_tells_everybody() {
    let faults = (2..1000).map(|step| (step, Fault::Panic)).collect();
    let engine = engine_with(
        FakeOptions {
            faults,
            ..FakeOptions::default()
        },
        EngineConfig {
            give_up_after: 6,
            retries: 100,
            ..EngineConfig::default()
        },
    );
    let cursor = engine
        .generate("g", Some(request(&[1], 500)), 0)
        .unwrap()
        .cursor;
    let (tokens, outcome) = read(cursor).await;
    assert!(!tokens.is_empty());
    assert!(matches!(outcome.reason, FinishReason::Failed(_)));
    assert!(matches!(engine.health(), Health::Stopped(_)));
    let error = engine.generate("h", Some(request(&[1], 5)), 0).unwrap_err();
    assert!(matches!(error, EngineError::Unhealthy(_)), "{error}");
    assert_eq!(
        read(engine.generate("g", None, 0).unwrap().cursor).await.0,
        tokens
    );
}

#[tokio::test]
async fn a_device_that_is_gone_is_not_asked_again() {
    let options = FakeOptions {
        faults: BTreeMap::from([(6, Fault::Death)]),
        ..FakeOptions::default()
    };
    let engine = engine_with(options, EngineConfig::default());
    let cursor = engine
        .generate("g", Some(request(&[1], 500)), 0)
        .unwrap()
        .cursor;
    let (tokens, outcome) = read(cursor).await;
    assert!(!tokens.is_empty());
    let FinishReason::Failed(why) = outcome.reason else {
        panic!("{outcome:?}")
    };
    assert!(why.contains("its end was asked for"), "{why}");
    assert_eq!(engine.health(), Health::Stopped(why));
}

#[tokio::test]
async fn a_failed_generation_goes_on_when_asked_again() {
    let faults = (4..9).map(|step| (step, Fault::Error)).collect();
    let config = EngineConfig {
        retries: 1,
        ..EngineConfig::default()
    };
    let engine = engine_with(
        FakeOptions {
            faults,
            ..FakeOptions::default()
        },
        config,
    );
    let (before, outcome) = read(
        engine
            .generate("g", Some(request(&[1], 50)), 0)
            .unwrap()
            .cursor,
    )
    .await;
    assert!(
        matches!(outcome.reason, FinishReason::Failed(_)),
        "{outcome:?}"
    );
    assert!(!before.is_empty() && before.len() < 50);
    let again = loop {
        let again = engine.generate("g", Some(request(&[1], 50)), 0).unwrap();
        let (tokens, outcome) = read(again.cursor).await;
        assert_eq!(tokens[..before.len()], before);
        if outcome.reason == FinishReason::Length {
            break tokens;
        }
    };
    assert_eq!(again, expected(&[1], 50));
}

#[tokio::test]
async fn a_drain_lets_the_running_end_within_its_deadline() {
    let engine = engine();
    let short = engine
        .generate("short", Some(request(&[1], 30)), 0)
        .unwrap()
        .cursor;
    assert_eq!(engine.drain(Duration::from_secs(60)).await, 0);
    assert_eq!(read(short).await.0, expected(&[1], 30));
    let refused = engine
        .generate("new", Some(request(&[1], 30)), 0)
        .unwrap_err();
    assert_eq!(refused, EngineError::Draining);
    assert!(
        engine.generate("short", None, 30).is_ok(),
        "logs stay readable"
    );

    let options = FakeOptions {
        step_time: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let engine = engine_with(options, EngineConfig::default());
    let mut long = engine
        .generate("long", Some(request(&[1], 4000)), 0)
        .unwrap()
        .cursor;
    assert!(long.next().await.is_some());
    assert_eq!(engine.drain(Duration::ZERO).await, 1);
    let (_, outcome) = read(long).await;
    assert_eq!(
        outcome.reason,
        FinishReason::Failed("brain is shutting down".into())
    );
}
