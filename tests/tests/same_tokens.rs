//! The real model on the CPU: whatever a brain does besides, a generation has the same tokens and
//! the same bits of its log-probabilities.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use marathon_proto::brain::{GenerationSpec, Sampling, TokenIds, generation_spec::Prompt};
use marathon_tests::{Brain, BrainOptions, Generation, generate, read_tokens, repository_root};

const TOKENS: u32 = 48;

fn demo(flags: &[&str]) -> Brain {
    let model = repository_root().join("brain/assets/demo");
    let demo = ["--model", model.to_str().unwrap(), "--device", "cpu"];
    Brain::start(BrainOptions {
        flags: demo
            .iter()
            .chain(flags)
            .map(|flag| (*flag).to_owned())
            .collect(),
        ..BrainOptions::default()
    })
}

/// A prompt unlike anything the model knows, sampled hot: it is sure of nothing, so that noise and
/// the last bit of every logit decide.
fn spec(seed: u64) -> GenerationSpec {
    let ids = (0..400_u32)
        .map(|at| 200 + at.wrapping_mul(2_654_435_761) % 700)
        .collect();
    GenerationSpec {
        prompt: Some(Prompt::PromptTokens(TokenIds { ids })),
        sampling: Some(Sampling {
            temperature: Some(2.0),
            top_k: Some(64),
            top_p: Some(0.95),
            seed: Some(seed),
            max_tokens: Some(TOKENS),
            ignore_eos: Some(true),
            ..Sampling::default()
        }),
        logprobs: 3,
        ..GenerationSpec::default()
    }
}

/// Ids, and every bit of every log-probability.
fn bits(generation: &Generation) -> (Vec<u32>, Vec<Vec<(u32, u32)>>) {
    let logprobs = generation
        .logprobs
        .iter()
        .zip(&generation.ids)
        .map(|(logprob, &id)| {
            let own = (id, logprob.logprob.to_bits());
            let top = logprob
                .top
                .iter()
                .map(|top| (top.id, top.logprob.to_bits()));
            std::iter::once(own).chain(top).collect()
        });
    (generation.ids.clone(), logprobs.collect())
}

async fn alone(brain: &Brain, id: &str) -> Generation {
    generate(&mut brain.client(), id, Some(spec(5)), 0)
        .await
        .unwrap()
}

async fn reference() -> (Vec<u32>, Vec<Vec<(u32, u32)>>) {
    let wanted = alone(&demo(&["--drafter", "none"]), "reference").await;
    assert_eq!(wanted.ids.len(), TOKENS as usize);
    assert_eq!(wanted.logprobs.len(), TOKENS as usize);
    let (ids, logprobs) = bits(&wanted);
    assert!(
        logprobs.iter().any(|all| all[0].1 != all[1].1),
        "sampling never mattered"
    );
    (ids, logprobs)
}

#[tokio::test]
async fn any_number_of_drafts_alone_or_in_company() {
    let wanted = reference().await;
    let brain = demo(&["--draft-tokens", "8"]);
    for drafts in 0..=8 {
        let mut spec = spec(5);
        spec.sampling.as_mut().unwrap().draft_tokens = Some(drafts);
        let got = generate(
            &mut brain.client(),
            &format!("alone-{drafts}"),
            Some(spec.clone()),
            0,
        )
        .await
        .unwrap();
        assert_eq!(bits(&got), wanted, "{drafts} drafts, alone");
        let usage = got.finished.unwrap().usage.unwrap();
        assert_eq!(usage.drafted_tokens > 0, drafts > 0, "{usage:?}");

        // Three others are in the middle of theirs when this one begins.
        let mut company = Vec::new();
        for other in 0..3 {
            let mut noise = self::spec(100 + other);
            noise.sampling.as_mut().unwrap().max_tokens = Some(400);
            let id = format!("noise-{drafts}-{other}");
            company.push(
                read_tokens(&mut brain.client(), &id, noise, 3)
                    .await
                    .unwrap(),
            );
        }
        let got = generate(
            &mut brain.client(),
            &format!("among-{drafts}"),
            Some(spec),
            0,
        )
        .await
        .unwrap();
        assert_eq!(bits(&got), wanted, "{drafts} drafts, among three others");
        for other in 0..3 {
            let generation_id = format!("noise-{drafts}-{other}");
            let cancel = marathon_proto::brain::CancelRequest { generation_id };
            let live = brain
                .client()
                .cancel(cancel)
                .await
                .unwrap()
                .into_inner()
                .cancelled;
            assert!(
                live,
                "other {other} was done before, so this was not in company"
            );
        }
        drop(company);
    }
}

#[tokio::test]
async fn any_prefill_chunk_and_any_number_of_threads() {
    let wanted = reference().await;
    for flags in [
        ["--max-num-batched-tokens", "16"],
        ["--max-num-batched-tokens", "64"],
        ["--max-num-batched-tokens", "4096"],
        ["--threads", "1"],
        ["--threads", "2"],
    ] {
        let got = alone(&demo(&flags), "chunks").await;
        assert_eq!(bits(&got), wanted, "{flags:?}");
    }
}

#[tokio::test]
async fn a_restart_in_between_and_another_drafter_after_it() {
    let (wanted_ids, wanted_logprobs) = reference().await;
    for (first, second) in [("4", "4"), ("8", "off"), ("off", "2")] {
        let mut brain = demo(&["--draft-tokens", first]);
        let (before, _stream) = read_tokens(&mut brain.client(), "restart", spec(5), 11)
            .await
            .unwrap();
        brain.program.kill();
        let brain = demo(&["--draft-tokens", second]);
        let mut spec = spec(5);
        spec.received_tokens = before.ids.clone();
        let from = before.ids.len();
        let after = generate(&mut brain.client(), "restart", Some(spec), from as u32)
            .await
            .unwrap();
        let ids = [before.ids.clone(), after.ids.clone()].concat();
        assert_eq!(ids, wanted_ids, "{first} drafts, then {second}");
        assert_eq!(bits(&before).1, wanted_logprobs[..from], "before the kill");
        assert_eq!(bits(&after).1, wanted_logprobs[from..], "after the kill");
    }
}

#[tokio::test]
async fn a_prefix_from_the_cache_and_a_prefix_computed() {
    let brain = demo(&[]);
    let first = generate(&mut brain.client(), "turn-1", Some(spec(5)), 0)
        .await
        .unwrap();
    let extended = |run: &str| {
        let Some(Prompt::PromptTokens(mut ids)) = spec(5).prompt else {
            panic!("token ids")
        };
        ids.ids.extend(&first.ids);
        ids.ids.extend([105, 106, 107]);
        let mut next = spec(6);
        next.prompt = Some(Prompt::PromptTokens(ids));
        next.run_id = run.to_owned();
        next
    };
    let cached = generate(&mut brain.client(), "turn-2", Some(extended("")), 0)
        .await
        .unwrap();
    let fresh = demo(&[]);
    let computed = generate(&mut fresh.client(), "turn-2", Some(extended("")), 0)
        .await
        .unwrap();
    let from_cache = |generation: &Generation| {
        generation
            .finished
            .as_ref()
            .unwrap()
            .usage
            .unwrap()
            .cached_tokens
    };
    assert!(from_cache(&cached) > 0, "nothing came from the cache");
    assert_eq!(from_cache(&computed), 0);
    assert_eq!(bits(&cached), bits(&computed));
}
