//! How a run behaves when the brain, the model or the user does not: breaks, swaps, loops, stops.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

mod support;

use std::{sync::Arc, time::Duration};

use pilot::{
    driver::{Driver, DriverError, Ending, NewRun, Resume},
    journal::{Durability, History, Journal, JournalError, memory::MemoryJournal},
    run::{
        entry::{AnswerEnd, Entry, Limits, PauseReason, RunId},
        event::RunEvent,
        log::AnswerLog,
    },
};
use serde_json::json;
use support::{
    Events, NO_LIMITS, Remains, Scene, brain, entries, script,
    scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn},
};

fn memory() -> Arc<MemoryJournal> {
    Arc::new(MemoryJournal::default())
}

fn scripted(turns: Vec<ScriptedTurn>) -> ScriptedBrain {
    ScriptedBrain::start(Script { turns }, ScriptedOptions::default()).unwrap()
}

fn paused(ending: Ending) -> PauseReason {
    match ending {
        Ending::Paused(reason) => reason,
        Ending::Finished(summary) => panic!("finished: {summary}"),
    }
}

async fn undisturbed() -> Remains {
    let (scene, journal) = (Scene::new(), memory());
    scene.begin(journal.clone(), &brain()).await.unwrap();
    Remains::of(&scene, &*journal)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_kept_to_the_tools_from_the_first_answer_to_the_last_or_never() {
    let tools: Vec<String> = support::tools()
        .declarations()
        .into_iter()
        .map(|tool| tool.name)
        .collect();
    let mut tokens = Vec::new();
    for constrain_calls in [true, false] {
        let (scene, journal, brain) = (Scene::new(), memory(), brain());
        let new = NewRun {
            constrain_calls,
            limits: Limits {
                steps: 5,
                ..NO_LIMITS
            },
            ..scene.new_run()
        };
        let parts = scene.parts(journal.clone(), &brain);
        let ending = Driver::create(parts, new).await.unwrap().run().await;
        assert_eq!(paused(ending.unwrap()), PauseReason::StepBudget);
        // Who takes the run up says nothing of it: the journal does.
        let on = Resume {
            limits: Some(NO_LIMITS),
            ..Resume::default()
        };
        let parts = scene.parts(journal.clone(), &brain);
        scene.resume_with(parts, on).await.unwrap();
        let expected = match constrain_calls {
            true => vec![tools.clone(); brain.begun() as usize],
            false => Vec::new(),
        };
        assert_eq!(brain.kept_to(), expected);
        let entries = entries(&scene, &*journal);
        assert_eq!(
            entries.get(1) == Some(&Entry::CallsConstrained),
            constrain_calls
        );
        assert_eq!(
            entries
                .iter()
                .filter(|entry| **entry == Entry::CallsConstrained)
                .count(),
            usize::from(constrain_calls)
        );
        let answers = pilot::run::log::answers(&entries);
        tokens.push(
            answers
                .into_iter()
                .map(|answer| answer.ids)
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(
        tokens[0], tokens[1],
        "this model keeps to the tools by itself"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_break_after_every_round_change_nothing() {
    let expected = undisturbed().await;
    let (scene, journal) = (Scene::new(), memory());
    let options = ScriptedOptions {
        break_after: 7,
        ..ScriptedOptions::default()
    };
    let brain = ScriptedBrain::start(script(), options).unwrap();
    scene.begin(journal.clone(), &brain).await.unwrap();
    assert_eq!(Remains::of(&scene, &*journal), expected);
    assert!(
        brain.opened() > brain.begun() * 2,
        "{} streams",
        brain.opened()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_brain_that_dies_is_waited_for_and_continued_where_the_tokens_ended() {
    let expected = undisturbed().await;
    let (scene, journal) = (Scene::new(), memory());
    let options = ScriptedOptions {
        pace: Duration::from_millis(2),
        ..ScriptedOptions::default()
    };
    let mut brain = ScriptedBrain::start(script(), options.clone()).unwrap();
    let address = brain.address();
    let events = Arc::new(Events::default());
    let mut parts = scene.parts(journal.clone(), &brain);
    parts.observer = events.clone();
    let driver = Driver::create(parts, scene.new_run()).await.unwrap();
    let running = tokio::spawn(driver.run());
    let away = |events: &Events| {
        events
            .all()
            .iter()
            .filter(|event| matches!(event, RunEvent::BrainAway { .. }))
            .count()
    };
    for kill in 1..=5 {
        events
            .wait_for(|all| all.iter().filter(|event| is_tokens(event)).count() > kill * 12)
            .await;
        let before = away(&events);
        drop(brain);
        events.wait_for(|_| away(&events) > before).await;
        brain = come_back(&address, &options).await;
    }
    assert_eq!(
        running.await.unwrap().unwrap(),
        Ending::Finished("all done".into())
    );
    assert_eq!(Remains::of(&scene, &*journal), expected);
    let continued = |event: &RunEvent| match event {
        RunEvent::AnswerStarted { continued_from, .. } => *continued_from > 0,
        _ => false,
    };
    assert!(
        events.all().iter().any(continued),
        "every answer began anew"
    );
    assert_tokens_once(&events.all());
}

fn is_tokens(event: &RunEvent) -> bool {
    matches!(event, RunEvent::Tokens { .. })
}

/// Tokens of an answer are shown in index order, each once.
fn assert_tokens_once(events: &[RunEvent]) {
    let mut next = 0;
    for event in events {
        match event {
            RunEvent::AnswerEnded { .. } => next = 0,
            RunEvent::Tokens { index, ids, .. } => {
                assert_eq!(*index as usize, next);
                next += ids.len();
            }
            _ => {}
        }
    }
}

/// The port is free as soon as the old brain's threads are gone.
async fn come_back(address: &str, options: &ScriptedOptions) -> ScriptedBrain {
    loop {
        match ScriptedBrain::start_on(address, script(), options.clone()) {
            Ok(brain) => return brain,
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_begins_only_with_a_brain() {
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    let parts = scene.parts(journal.clone(), &brain);
    drop(brain);
    let error = Driver::create(parts, scene.new_run()).await.err().unwrap();
    assert!(matches!(error, DriverError::Brain(_)), "{error}");
    assert!(error.to_string().contains("brain serve"), "{error}");
    assert!(journal.runs().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_pauses_the_run_until_it_is_accepted() {
    let (scene, journal) = (Scene::new(), memory());
    let mut new = scene.new_run();
    new.limits = Limits {
        steps: 5,
        ..NO_LIMITS
    };
    let first = brain();
    let parts = scene.parts(journal.clone(), &first);
    let ending = Driver::create(parts, new)
        .await
        .unwrap()
        .run()
        .await
        .unwrap();
    assert_eq!(paused(ending), PauseReason::StepBudget);
    drop(first);

    let options = ScriptedOptions {
        fingerprint: "other-2".into(),
        ..ScriptedOptions::default()
    };
    let other = ScriptedBrain::start(script(), options.clone()).unwrap();
    let more = Resume {
        limits: Some(NO_LIMITS),
        ..Resume::default()
    };
    let ending = scene
        .resume_with(scene.parts(journal.clone(), &other), more)
        .await
        .unwrap();
    let expected = PauseReason::OtherModel {
        expected: "scripted-1".into(),
        found: "other-2".into(),
    };
    assert_eq!(paused(ending), expected);
    assert!(expected.to_string().contains("--accept-new-fingerprint"));

    let accept = Resume {
        limits: Some(NO_LIMITS),
        accept_new_fingerprint: true,
        ..Resume::default()
    };
    let parts = scene.parts(journal.clone(), &other);
    let ending = scene.resume_with(parts, accept.clone()).await.unwrap();
    assert_eq!(ending, Ending::Finished("all done".into()));
    let accepted = |entry: &Entry| matches!(entry, Entry::Resumed { model: Some(_), .. });
    assert_eq!(
        entries(&scene, &*journal)
            .iter()
            .filter(|entry| accepted(entry))
            .count(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn another_template_is_never_accepted_since_the_tokens_would_mean_something_else() {
    let (scene, journal) = (Scene::new(), memory());
    let first = brain();
    let parts = scene.parts(journal.clone(), &first);
    drop(Driver::create(parts, scene.new_run()).await.unwrap());
    let options = ScriptedOptions {
        fingerprint: "other-2".into(),
        template_hash: "other-template".into(),
        ..ScriptedOptions::default()
    };
    let other = ScriptedBrain::start(script(), options).unwrap();
    let accept = Resume {
        accept_new_fingerprint: true,
        ..Resume::default()
    };
    let error = scene
        .resume_with(scene.parts(journal, &other), accept)
        .await
        .unwrap_err();
    assert!(matches!(error, DriverError::Impossible(_)), "{error}");
    assert!(error.to_string().contains("template"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_never_calls_a_tool_is_nudged_and_then_paused() {
    let silent = ScriptedTurn {
        content: "I am thinking.".into(),
        ..ScriptedTurn::default()
    };
    let brain = scripted(vec![silent; 20]);
    let (scene, journal) = (Scene::new(), memory());
    let ending = scene.begin(journal.clone(), &brain).await.unwrap();
    assert!(matches!(paused(ending), PauseReason::NoToolCall(words) if words.contains("thinking")));
    let nudge = |entry: &&Entry| matches!(entry, Entry::MessagesAppended { nudge: true, .. });
    assert_eq!(entries(&scene, &*journal).iter().filter(nudge).count(), 3);
    // Whoever resumes gives it another chance, and only one.
    let ending = scene.resume(journal.clone(), &brain).await.unwrap();
    assert!(matches!(paused(ending), PauseReason::NoToolCall(_)));
    assert_eq!(entries(&scene, &*journal).iter().filter(nudge).count(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_goes_round_in_circles_is_paused() {
    let circle = [
        ScriptedTurn::call("ls", json!({"path": "."})),
        ScriptedTurn::call("read", json!({"path": "inbox/one.txt"})),
    ];
    let brain = scripted(circle.iter().cycle().take(100).cloned().collect());
    let (scene, journal) = (Scene::new(), memory());
    let ending = scene.begin(journal.clone(), &brain).await.unwrap();
    assert!(matches!(paused(ending), PauseReason::Repetition(call) if call.contains("one.txt")));
    let ended = |entry: &&Entry| matches!(entry, Entry::ToolEnded(_));
    assert_eq!(entries(&scene, &*journal).iter().filter(ended).count(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_never_end_are_tried_with_other_seeds_and_then_paused() {
    // Ten thousand characters do not fit, whatever the seed says.
    let long = ScriptedTurn {
        content: "x".repeat(10_000),
        ..ScriptedTurn::default()
    };
    let (scene, journal) = (Scene::new(), memory());
    let ending = scene
        .begin(journal.clone(), &scripted(vec![long]))
        .await
        .unwrap();
    assert_eq!(paused(ending), PauseReason::AnswersTooLong);
    let mut seeds: Vec<u64> = entries(&scene, &*journal)
        .iter()
        .filter_map(|entry| match entry {
            Entry::AnswerAsked { seed, .. } => Some(*seed),
            _ => None,
        })
        .collect();
    let asked = seeds.len();
    seeds.dedup();
    assert_eq!((asked, seeds.len()), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_garbled_turn_is_asked_for_again_before_any_of_its_calls_is_made() {
    let garbled = |line: &str| ScriptedTurn {
        garbled: true,
        ..ScriptedTurn::call("append", json!({"path": "report.txt", "content": line}))
    };
    let lines = ["a", "b", "c", "d", "e", "f"];
    let (scene, journal) = (Scene::new(), memory());
    let brain = scripted(lines.iter().map(|line| garbled(line)).collect());
    let mut ending = scene.begin(journal.clone(), &brain).await.unwrap();
    // A seed that says so three times in a row pauses; whoever resumes tries other seeds.
    while let Ending::Paused(reason) = &ending {
        assert_eq!(*reason, PauseReason::AnswersMalformed);
        ending = scene.resume(journal.clone(), &brain).await.unwrap();
    }
    let remains = Remains::of(&scene, &*journal);
    assert_eq!(remains.files["report.txt"], b"a\nb\nc\nd\ne\nf\n");
    let malformed = |answer: &&AnswerLog| answer.end == Some(AnswerEnd::Malformed);
    assert!(remains.answers.iter().filter(malformed).count() > 0);
    assert_eq!(remains.state.totals.calls, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_budget_pauses_and_more_of_it_goes_on() {
    let expected = undisturbed().await;
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    let mut new = scene.new_run();
    new.limits = Limits {
        steps: 4,
        ..NO_LIMITS
    };
    let parts = scene.parts(journal.clone(), &brain);
    let ending = Driver::create(parts, new)
        .await
        .unwrap()
        .run()
        .await
        .unwrap();
    assert_eq!(paused(ending), PauseReason::StepBudget);
    let resume = |limits| {
        let how = Resume {
            limits: Some(limits),
            ..Resume::default()
        };
        scene.resume_with(scene.parts(journal.clone(), &brain), how)
    };
    let tokens = Limits {
        tokens: 400,
        ..NO_LIMITS
    };
    assert_eq!(
        paused(resume(tokens).await.unwrap()),
        PauseReason::TokenBudget
    );
    let time = Limits {
        active_ms: 1,
        ..NO_LIMITS
    };
    assert_eq!(paused(resume(time).await.unwrap()), PauseReason::TimeBudget);
    assert_eq!(
        resume(NO_LIMITS).await.unwrap(),
        Ending::Finished("all done".into())
    );
    let remains = Remains::of(&scene, &*journal);
    assert_eq!(remains.files, expected.files);
    assert_eq!(remains.answers, expected.answers);
}

/// Waiting for a brain is no work.
#[tokio::test(flavor = "multi_thread")]
async fn a_brain_that_is_away_costs_no_time_of_the_run() {
    let (scene, journal) = (Scene::new(), memory());
    let options = ScriptedOptions {
        pace: Duration::from_millis(1),
        ..ScriptedOptions::default()
    };
    let brain = ScriptedBrain::start(script(), options.clone()).unwrap();
    let address = brain.address();
    let events = Arc::new(Events::default());
    let mut parts = scene.parts(journal.clone(), &brain);
    parts.observer = events.clone();
    let driver = Driver::create(parts, scene.new_run()).await.unwrap();
    let running = tokio::spawn(driver.run());
    events.wait_for(|all| all.iter().any(is_tokens)).await;
    drop(brain);
    let waited = |all: &[RunEvent]| -> u64 {
        all.iter()
            .map(|event| match event {
                RunEvent::BrainAway { wait_ms, .. } => *wait_ms,
                _ => 0,
            })
            .sum()
    };
    // The last wait may still go on; those before it are over.
    let away = |all: &[RunEvent]| {
        all.iter()
            .filter(|event| matches!(event, RunEvent::BrainAway { .. }))
            .count()
    };
    events.wait_for(|all| away(all) > 5).await;
    let _brain = come_back(&address, &options).await;
    events
        .wait_for(|all| {
            all.iter()
                .any(|event| matches!(event, RunEvent::AnswerEnded { .. }))
        })
        .await;
    let first = entries(&scene, &*journal)
        .into_iter()
        .find_map(|entry| match entry {
            Entry::AnswerEnded(ended) => Some(ended.elapsed_ms),
            _ => None,
        });
    let waited = waited(&events.all());
    assert!(first.unwrap() < waited, "{first:?} of {waited}");
    running.await.unwrap().unwrap();
}

/// It is the link that is watched: a brain with a long prompt to read is silent for longer.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_brain_on_a_live_link_is_waited_for() {
    let (scene, journal) = (Scene::new(), memory());
    let options = ScriptedOptions {
        pace: Duration::from_millis(400),
        ..ScriptedOptions::default()
    };
    let brain = ScriptedBrain::start(script(), options).unwrap();
    let events = Arc::new(Events::default());
    let mut parts = scene.parts(journal.clone(), &brain);
    parts.brain = support::client_with(&brain.address(), Duration::from_millis(200));
    parts.observer = events.clone();
    let cancel = parts.cancel.clone();
    let driver = Driver::create(parts, scene.new_run()).await.unwrap();
    let running = tokio::spawn(driver.run());
    events
        .wait_for(|all| all.iter().filter(|event| is_tokens(event)).count() > 2)
        .await;
    cancel.cancel();
    running.await.unwrap().unwrap();
    assert_eq!((brain.begun(), brain.opened()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_in_the_middle_of_an_answer_keeps_its_tokens() {
    let expected = undisturbed().await;
    let (scene, journal) = (Scene::new(), memory());
    let options = ScriptedOptions {
        pace: Duration::from_millis(2),
        ..ScriptedOptions::default()
    };
    let slow = ScriptedBrain::start(script(), options).unwrap();
    let events = Arc::new(Events::default());
    let mut parts = scene.parts(journal.clone(), &slow);
    parts.observer = events.clone();
    let cancel = parts.cancel.clone();
    let driver = Driver::create(parts, scene.new_run()).await.unwrap();
    let running = tokio::spawn(driver.run());
    events
        .wait_for(|all| all.iter().filter(|event| is_tokens(event)).count() > 30)
        .await;
    cancel.cancel();
    assert_eq!(
        paused(running.await.unwrap().unwrap()),
        PauseReason::Stopped
    );
    slow.forget();
    scene.resume(journal.clone(), &slow).await.unwrap();
    assert_eq!(Remains::of(&scene, &*journal), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_the_brain_is_away_is_obeyed() {
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    let events = Arc::new(Events::default());
    let mut parts = scene.parts(journal.clone(), &brain);
    parts.observer = events.clone();
    let cancel = parts.cancel.clone();
    let driver = Driver::create(parts, scene.new_run()).await.unwrap();
    drop(brain);
    let running = tokio::spawn(driver.run());
    events
        .wait_for(|all| {
            all.iter()
                .any(|event| matches!(event, RunEvent::BrainAway { .. }))
        })
        .await;
    cancel.cancel();
    assert_eq!(
        paused(running.await.unwrap().unwrap()),
        PauseReason::Stopped
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_run_stays_as_it_is() {
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    scene.begin(journal.clone(), &brain).await.unwrap();
    let head = journal.head(&scene.run).unwrap();
    let ending = scene.resume(journal.clone(), &brain).await.unwrap();
    assert_eq!(ending, Ending::Finished("all done".into()));
    assert_eq!(journal.head(&scene.run).unwrap(), head);
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_journals_are_errors_and_not_panics() {
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    let unknown = scene.resume(journal.clone(), &brain).await.unwrap_err();
    assert!(
        matches!(unknown, DriverError::Journal(JournalError::UnknownRun(_))),
        "{unknown}"
    );
    scene.begin(journal.clone(), &brain).await.unwrap();
    // The same entries in another order, whole and well chained: not a history of any run.
    let mut all = entries(&scene, &*journal);
    let other = memory();
    all.swap(2, 3);
    other
        .append(
            &scene.run,
            other.head(&scene.run).unwrap(),
            &all,
            Durability::Synced,
        )
        .unwrap();
    let error = scene.resume(other, &brain).await.unwrap_err();
    assert!(matches!(error, DriverError::History { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_cannot_be_are_refused_before_anything_is_written() {
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    for (context, reserve) in [(1_000_000, 0), (1000, 1000)] {
        let mut new = scene.new_run();
        new.run = RunId::new("never").unwrap();
        (new.max_context, new.answer_reserve) = (context, reserve);
        let error = Driver::create(scene.parts(journal.clone(), &brain), new)
            .await
            .err()
            .unwrap();
        assert!(matches!(error, DriverError::Impossible(_)), "{error}");
    }
    assert!(journal.runs().unwrap().is_empty());
}
