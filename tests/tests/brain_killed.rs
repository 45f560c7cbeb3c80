//! A brain is killed, replaced or left by its client; the tokens do not notice.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use marathon_proto::brain::{FinishReason, GenerationSpec};
use marathon_tests::{Brain, BrainOptions, fake_spec, generate, read_tokens};

const TOKENS: u32 = 3000;

/// What an undisturbed brain says.
async fn undisturbed(seed: u64) -> Vec<u32> {
    let brain = Brain::start(BrainOptions::fake(&[]));
    let whole = generate(
        &mut brain.client(),
        "whole",
        Some(fake_spec(seed, TOKENS)),
        0,
    )
    .await
    .unwrap();
    assert_eq!(whole.reason(), FinishReason::Length);
    assert_eq!(whole.ids.len(), TOKENS as usize);
    whole.ids
}

/// The same generation after its brain was lost: what the client has goes along.
fn continued(spec: GenerationSpec, received: &[u32]) -> GenerationSpec {
    GenerationSpec {
        received_tokens: received.to_vec(),
        ..spec
    }
}

#[tokio::test]
async fn a_stream_goes_on_after_sigkill_with_no_token_twice_or_missing() {
    let whole = undisturbed(7).await;
    for lost_after in [1, 40, 500] {
        let mut brain = Brain::start(BrainOptions::fake(&[]));
        let (before, stream) = read_tokens(
            &mut brain.client(),
            "run-1",
            fake_spec(7, TOKENS),
            lost_after,
        )
        .await
        .unwrap();
        brain.program.kill();
        drop(stream);

        let brain = Brain::start(BrainOptions::fake(&[]));
        let spec = continued(fake_spec(7, TOKENS), &before.ids);
        let from = before.ids.len() as u32;
        let after = generate(&mut brain.client(), "run-1", Some(spec), from)
            .await
            .unwrap();
        assert_eq!(after.started.fingerprint, before.started.fingerprint);
        assert_eq!(
            [before.ids, after.ids].concat(),
            whole,
            "killed after {lost_after}"
        );
        let usage = after.finished.unwrap().usage.unwrap();
        assert_eq!(
            usage.generated_tokens, TOKENS,
            "received tokens count as generated"
        );
    }
}

#[tokio::test]
async fn many_kills_in_one_generation_change_nothing() {
    let whole = undisturbed(8).await;
    let mut have: Vec<u32> = Vec::new();
    for _ in 0..6 {
        let mut brain = Brain::start(BrainOptions::fake(&[]));
        let spec = continued(fake_spec(8, TOKENS), &have);
        let (part, _stream) = read_tokens(&mut brain.client(), "run-2", spec, have.len() + 100)
            .await
            .unwrap();
        brain.program.kill();
        assert_eq!(
            part.ids[..have.len()],
            have,
            "the log begins with what was received"
        );
        have = part.ids;
    }
    let brain = Brain::start(BrainOptions::fake(&[]));
    let spec = continued(fake_spec(8, TOKENS), &have);
    let last = generate(&mut brain.client(), "run-2", Some(spec), have.len() as u32)
        .await
        .unwrap();
    assert_eq!([have, last.ids].concat(), whole);
}

#[tokio::test]
async fn a_brain_without_a_drafter_takes_over_from_one_that_drafts() {
    let whole = undisturbed(9).await;
    for (first, second) in [("4", "off"), ("off", "4"), ("1", "8")] {
        let mut brain = Brain::start(BrainOptions::fake(&["--draft-tokens", first]));
        let (before, _stream) =
            read_tokens(&mut brain.client(), "run-3", fake_spec(9, TOKENS), 700)
                .await
                .unwrap();
        brain.program.kill();
        let brain = Brain::start(BrainOptions::fake(&["--draft-tokens", second]));
        let spec = continued(fake_spec(9, TOKENS), &before.ids);
        let from = before.ids.len() as u32;
        let after = generate(&mut brain.client(), "run-3", Some(spec), from)
            .await
            .unwrap();
        assert_eq!(
            [before.ids, after.ids].concat(),
            whole,
            "{first} drafts, then {second}"
        );
    }
}

#[tokio::test]
async fn a_client_that_comes_back_reads_on_where_it_was() {
    let whole = undisturbed(10).await;
    let brain = Brain::start(BrainOptions::fake(&[]));
    let (before, stream) = read_tokens(&mut brain.client(), "run-4", fake_spec(10, TOKENS), 200)
        .await
        .unwrap();
    drop(stream);
    let from = before.ids.len() as u32;
    // By id alone, then with the specification again, then all of it.
    let after = generate(&mut brain.client(), "run-4", None, from)
        .await
        .unwrap();
    assert!(after.started.attached);
    assert_eq!([before.ids.clone(), after.ids].concat(), whole);
    let again = generate(
        &mut brain.client(),
        "run-4",
        Some(fake_spec(10, TOKENS)),
        from,
    )
    .await
    .unwrap();
    assert_eq!([before.ids, again.ids].concat(), whole);
    let all = generate(&mut brain.client(), "run-4", None, 0)
        .await
        .unwrap();
    assert_eq!(all.ids, whole);
}

#[tokio::test]
async fn the_number_of_drafts_changes_no_token() {
    let whole = undisturbed(11).await;
    for drafts in 0..=8 {
        let brain = Brain::start(BrainOptions::fake(&["--draft-tokens", "8"]));
        let mut spec = fake_spec(11, TOKENS);
        spec.sampling.as_mut().unwrap().draft_tokens = Some(drafts);
        let got = generate(&mut brain.client(), "drafts", Some(spec), 0)
            .await
            .unwrap();
        assert_eq!(got.ids, whole, "{drafts} drafts a round");
        let usage = got.finished.unwrap().usage.unwrap();
        assert_eq!(
            usage.drafted_tokens > 0,
            drafts > 0,
            "{drafts} drafts a round: {usage:?}"
        );
    }
}

/// A device that breaks ends its brain with an exit status that says so; the next brain goes on
/// where the stream broke off.
async fn a_broken_device_costs_no_token(flags: &[&str], tokens: u32) {
    let options = |more: &[&str]| BrainOptions {
        flags: [flags, more]
            .concat()
            .into_iter()
            .map(String::from)
            .collect(),
        ..BrainOptions::default()
    };
    let whole = generate(
        &mut Brain::start(options(&[])).client(),
        "run-5",
        Some(fake_spec(12, tokens)),
        0,
    )
    .await
    .unwrap();
    assert_eq!(whole.ids.len(), tokens as usize);
    let mut have: Vec<u32> = Vec::new();
    for broken_after in ["3", "7", "12"] {
        let brain = Brain::start(options(&["--device-fault-after", broken_after]));
        let spec = continued(fake_spec(12, tokens), &have);
        let part = generate(&mut brain.client(), "run-5", Some(spec), have.len() as u32)
            .await
            .unwrap();
        assert_eq!(part.reason(), FinishReason::Error, "{:?}", part.finished);
        assert!(!part.ids.is_empty(), "nothing came before the fault");
        have.extend(part.ids);
        let end = brain.program.finish();
        assert_eq!(end.code, Some(6), "{}", end.stderr);
        assert!(
            end.stderr.contains("the engine has stopped"),
            "{}",
            end.stderr
        );
    }
    let brain = Brain::start(options(&[]));
    let spec = continued(fake_spec(12, tokens), &have);
    let last = generate(&mut brain.client(), "run-5", Some(spec), have.len() as u32)
        .await
        .unwrap();
    assert_eq!(last.reason(), FinishReason::Length);
    assert_eq!([have, last.ids].concat(), whole.ids);
}

#[tokio::test]
async fn a_device_that_breaks_ends_its_brain_and_the_next_one_goes_on() {
    a_broken_device_costs_no_token(&["--device", "fake"], TOKENS).await;
}

#[tokio::test]
#[ignore = "needs a card"]
async fn a_card_that_traps_ends_its_brain_and_the_next_one_goes_on() {
    a_broken_device_costs_no_token(&["--device", "cuda"], 300).await;
}
