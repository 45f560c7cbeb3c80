//! A crash at every journal write leaves nothing behind: same tokens, same files, same state.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failure here is a failed test, which says how far it came"
)]

mod support;

use std::sync::Arc;

use pilot::{
    driver::{DriverError, Ending},
    journal::{JournalError, memory::MemoryJournal},
    run::entry::{Entry, ResultOrigin},
};
use support::{
    Remains, Scene, brain, entries,
    fault::{Fault, FaultJournal},
};

/// The run as it goes when nobody disturbs it.
async fn undisturbed() -> (Remains, u64) {
    let scene = Scene::new();
    let memory = Arc::new(MemoryJournal::default());
    // A fault that never comes: it counts the appends.
    let journal = Arc::new(FaultJournal::new(
        memory.clone(),
        u64::MAX,
        Fault::RefuseOnce,
    ));
    let ending = scene.begin(journal.clone(), &brain()).await.unwrap();
    assert_eq!(ending, Ending::Finished("all done".into()));
    (Remains::of(&scene, &*memory), journal.appends())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_undisturbed_run_meets_everything_that_the_others_are_to_survive() {
    let (remains, _) = undisturbed().await;
    assert_eq!(remains.files["ledger.txt"], b"once\n");
    assert_eq!(remains.files["inbox/one.txt"], b"owner: Ann\nstate: done\n");
    let report = String::from_utf8(remains.files["report.txt"].clone()).unwrap();
    assert!(
        report.starts_with("# Report\none | Ann\ngone | -\ntwo\ntwo\nline 0"),
        "{report}"
    );
    let totals = remains.state.totals;
    assert!(totals.prompts >= 2, "no compaction: {totals:?}");
    assert!(totals.errors >= 3, "{totals:?}");
    assert!(
        remains.answers.iter().any(|answer| answer.attempt > 0),
        "no dropped answer"
    );
}

/// Kills at each append in turn, in this way, and takes the run up again.
async fn crash_everywhere(fault: Fault, forget: bool) {
    let (expected, appends) = undisturbed().await;
    let mut crashes = 0;
    // A few more, since how tokens fall into entries depends on timing.
    for at in 0..appends + 5 {
        let scene = Scene::new();
        let brain = brain();
        let memory = Arc::new(MemoryJournal::default());
        let journal = Arc::new(FaultJournal::new(memory.clone(), at, fault));
        match scene.begin(journal, &brain).await {
            Err(DriverError::Journal(JournalError::Io { .. })) => crashes += 1,
            Ok(Ending::Finished(_)) => {}
            other => panic!("{fault:?} at {at}: {other:?}"),
        }
        if forget {
            brain.forget();
        }
        let ending = scene.go_on(memory.clone(), &brain).await.unwrap();
        assert_eq!(
            ending,
            Ending::Finished("all done".into()),
            "{fault:?} at {at}"
        );
        let remains = Remains::of(&scene, &*memory);
        assert_eq!(remains, expected, "{fault:?} at {at}");
    }
    assert!(
        crashes + 10 > appends,
        "only {crashes} crashes in {appends} appends"
    );
    println!("{fault:?}: {crashes} crashes, every one without a trace");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_before_any_append_leaves_no_trace() {
    crash_everywhere(Fault::CrashBefore, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_after_any_append_leaves_no_trace_even_if_the_brain_lost_its_generations() {
    crash_everywhere(Fault::CrashAfter, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_power_cut_before_any_append_leaves_no_trace() {
    crash_everywhere(Fault::PowerCutBefore, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_power_cut_after_any_append_leaves_no_trace() {
    crash_everywhere(Fault::PowerCutAfter, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_crashes_in_a_row_leave_no_trace() {
    let (expected, appends) = undisturbed().await;
    for at in (0..appends).step_by(3) {
        let scene = Scene::new();
        let brain = brain();
        let memory = Arc::new(MemoryJournal::default());
        for (at, fault) in [(at, Fault::CrashAfter), (1 + at % 3, Fault::PowerCutBefore)] {
            let journal = Arc::new(FaultJournal::new(memory.clone(), at, fault));
            let ended = scene.go_on(journal, &brain).await;
            assert!(matches!(
                ended,
                Err(DriverError::Journal(_)) | Ok(Ending::Finished(_))
            ));
        }
        scene.go_on(memory.clone(), &brain).await.unwrap();
        assert_eq!(
            Remains::of(&scene, &*memory),
            expected,
            "first crash at {at}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_ends_the_process_and_not_the_run() {
    let (expected, appends) = undisturbed().await;
    for at in (1..appends).step_by(4) {
        let scene = Scene::new();
        let brain = brain();
        let memory = Arc::new(MemoryJournal::default());
        let journal = Arc::new(FaultJournal::new(memory.clone(), at, Fault::RefuseOnce));
        let ended = scene.begin(journal.clone(), &brain).await;
        assert!(matches!(ended, Err(DriverError::Journal(_))), "{ended:?}");
        scene.resume(journal, &brain).await.unwrap();
        assert_eq!(Remains::of(&scene, &*memory), expected, "refused at {at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_in_doubt_says_how_it_was_settled() {
    let (_, appends) = undisturbed().await;
    let mut seen = Vec::new();
    for at in 0..appends {
        let scene = Scene::new();
        let brain = brain();
        let memory = Arc::new(MemoryJournal::default());
        for fault in [Fault::CrashBefore, Fault::CrashAfter] {
            let journal = Arc::new(FaultJournal::new(memory.clone(), at, fault));
            let _ = scene.go_on(journal, &brain).await;
        }
        scene.go_on(memory.clone(), &brain).await.unwrap();
        for entry in entries(&scene, &*memory) {
            if let Entry::ToolEnded(ended) = entry {
                seen.push(ended.origin);
            }
        }
    }
    for origin in [
        ResultOrigin::Executed,
        ResultOrigin::Refused,
        ResultOrigin::Reran,
        ResultOrigin::VerifiedMissing,
        ResultOrigin::VerifiedDone,
    ] {
        assert!(seen.contains(&origin), "{origin:?} never happened");
    }
    assert!(!seen.contains(&ResultOrigin::Unknown));
}
