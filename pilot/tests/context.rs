//! What a run does when its context is too small for something, and when it gets another.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

mod support;

use std::sync::Arc;

use pilot::{
    driver::{Driver, DriverError, Ending, NewRun, Resume},
    journal::{Journal, memory::MemoryJournal},
    run::entry::{Entry, Limits, PauseReason},
};
use serde_json::json;
use support::{
    NO_LIMITS, Remains, Scene, brain, entries, script,
    scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn},
};

fn memory() -> Arc<MemoryJournal> {
    Arc::new(MemoryJournal::default())
}

fn paused(ending: Ending) -> PauseReason {
    match ending {
        Ending::Paused(reason) => reason,
        Ending::Finished(summary) => panic!("finished: {summary}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_that_is_too_small_is_raised_by_whoever_resumes() {
    let (scene, journal) = (Scene::new(), memory());
    let brain = brain();
    let driver = Driver::create(scene.parts(journal.clone(), &brain), scene.new_run());
    drop(driver.await.unwrap());
    let resume = |limit| {
        let how = Resume {
            max_context: Some(limit),
            ..Resume::default()
        };
        scene.resume_with(scene.parts(journal.clone(), &brain), how)
    };
    let small = paused(resume(301).await.unwrap());
    let PauseReason::ContextTooSmall { limit: 301, .. } = &small else {
        panic!("{small}");
    };
    assert!(small.to_string().contains("resume with more --max-context"));
    for impossible in [65_537, 300] {
        let error = resume(impossible).await.unwrap_err();
        assert!(matches!(error, DriverError::Impossible(_)), "{error}");
    }
    let ending = resume(1200).await.unwrap();
    assert_eq!(ending, Ending::Finished("all done".into()));
    // It is the run's from then on: who resumes need not say it again.
    let limits: Vec<u32> = entries(&scene, &*journal)
        .iter()
        .filter_map(|entry| match entry {
            Entry::ContextChanged { limit } => Some(*limit),
            _ => None,
        })
        .collect();
    assert_eq!(limits, [301, 1200]);
    let calm = (Scene::new(), memory());
    calm.0
        .begin(calm.1.clone(), &support::brain())
        .await
        .unwrap();
    assert_eq!(
        Remains::of(&scene, &*journal).files,
        Remains::of(&calm.0, &*calm.1).files
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_takes_less_than_the_one_before_gets_shorter_prompts() {
    let (scene, journal) = (Scene::new(), memory());
    let new = NewRun {
        limits: Limits {
            steps: 12,
            ..NO_LIMITS
        },
        max_context: 4000,
        ..scene.new_run()
    };
    let first = brain();
    let parts = scene.parts(journal.clone(), &first);
    let ending = Driver::create(parts, new).await.unwrap().run().await;
    assert_eq!(paused(ending.unwrap()), PauseReason::StepBudget);
    drop(first);
    let options = ScriptedOptions {
        fingerprint: "smaller".into(),
        max_model_len: 1200,
        ..ScriptedOptions::default()
    };
    let smaller = ScriptedBrain::start(script(), options).unwrap();
    let accept = Resume {
        limits: Some(NO_LIMITS),
        accept_new_fingerprint: true,
        ..Resume::default()
    };
    let parts = scene.parts(journal.clone(), &smaller);
    let ending = scene.resume_with(parts, accept).await.unwrap();
    assert_eq!(ending, Ending::Finished("all done".into()));
    assert!(Remains::of(&scene, &*journal).state.totals.prompts > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_fills_the_context_is_shortened_for_the_prompt_alone() {
    let scene = Scene::new();
    let long: String = (0..200).map(|line| format!("line {line}\n")).collect();
    std::fs::write(scene.workspace().join("long.txt"), &long).unwrap();
    let read = ScriptedTurn::call("read", json!({"path": "long.txt"}));
    let journal = memory();
    let ending = scene
        .begin(
            journal.clone(),
            &ScriptedBrain::start(Script { turns: vec![read] }, ScriptedOptions::default())
                .unwrap(),
        )
        .await
        .unwrap();
    assert_eq!(ending, Ending::Finished("all done".into()));
    let mut kept = 0;
    for entry in entries(&scene, &*journal) {
        match entry {
            Entry::ToolEnded(ended) if kept == 0 => kept = ended.output.text.len(),
            Entry::MessagesAppended { ids, .. } => assert!(ids.len() <= 600, "{}", ids.len()),
            _ => {}
        }
    }
    assert_eq!(kept, long.len() - 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goal_that_cannot_fit_makes_no_run_and_gives_the_numbers() {
    let (scene, journal) = (Scene::new(), memory());
    let mut new = scene.new_run();
    new.goal = "word ".repeat(300);
    let brain = brain();
    let parts = scene.parts(journal.clone(), &brain);
    let Err(DriverError::Impossible(text)) = Driver::create(parts, new).await else {
        panic!("such a run was made");
    };
    assert!(
        text.contains("1200") && text.contains("shorten the goal"),
        "{text}"
    );
    assert_eq!(journal.head(&scene.run).unwrap().next, 0);
}
