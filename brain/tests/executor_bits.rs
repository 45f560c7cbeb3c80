//! The contract of an executor, bit for bit: tokens and log-probabilities of a sequence depend on
//! its own tokens, positions and parameters, and on nothing else.
//!
//! Every variant runs in bf16 and is compared with a lone run: prompt in one piece, no drafts, one
//! thread, the best instructions.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use std::path::Path;

use brain::{
    backend::{
        Executor,
        cpu::{CpuExecutor, CpuOptions, Level},
    },
    model,
    sched::types::{Emitted, SamplingParams, Step, TokenId},
};
use support::{Sequence, bf16_copy, options, params};

const VARIANTS: [&str; 6] = ["e2b", "e4b", "12b", "26b", "31b", "all"];
const COUNT: usize = 40;

fn executor(folder: &Path, options: &CpuOptions) -> CpuExecutor {
    let model = model::load(folder, &model::LoadOptions::default()).unwrap();
    CpuExecutor::new(model, options).unwrap()
}

fn prompt(number: usize) -> Vec<TokenId> {
    let mut x = 12345 + number as u64;
    let mut next = || {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as TokenId % 90 + 3
    };
    (0..37 + 11 * number).map(|_| next()).collect()
}

/// Requests that use the whole pipeline.
fn requests() -> Vec<SamplingParams> {
    let sampled = SamplingParams {
        top_k: 20,
        top_p: 0.95,
        logprobs: 4,
        ..params(1.0)
    };
    vec![
        SamplingParams {
            logprobs: 2,
            ..params(0.0)
        },
        sampled.clone(),
        SamplingParams {
            seed: 9,
            min_p: 0.02,
            repetition_penalty: 1.2,
            presence_penalty: 0.3,
            frequency_penalty: 0.1,
            logit_bias: [(5, 2.0), (7, -1.0)].into(),
            suppressed: vec![11, 12],
            stop_tokens: vec![40],
            min_tokens: 1000,
            ..sampled
        },
    ]
}

/// A token, the bits of its log-probability, and those of the likeliest tokens.
type Bits = (TokenId, u32, Vec<(TokenId, u32)>);

/// Ids and the bits of every log-probability.
fn bits(emitted: &[Emitted]) -> Vec<Bits> {
    let one = |e: &Emitted| {
        let l = e.logprobs.as_ref().unwrap();
        let top = l.top.iter().map(|(id, p)| (*id, p.to_bits())).collect();
        (e.id, l.chosen.to_bits(), top)
    };
    emitted.iter().take(COUNT).map(one).collect()
}

fn lone(executor: &mut CpuExecutor, params: &SamplingParams) -> Vec<Emitted> {
    drafted(executor, params, 0)
}

fn drafted(executor: &mut CpuExecutor, params: &SamplingParams, depth: usize) -> Vec<Emitted> {
    let mut s = Sequence::new(executor, 0, params.clone());
    s.generate(executor, &prompt(0), COUNT, depth);
    s.emitted
}

#[test]
fn threads_and_instructions_change_nothing() {
    let levels: Vec<Level> = Level::all()
        .into_iter()
        .filter(|l| l.is_available())
        .collect();
    println!("levels: {levels:?}");
    for name in VARIANTS {
        let folder = bf16_copy(name);
        for request in requests() {
            let expected = bits(&lone(&mut executor(folder.path(), &options()), &request));
            for threads in [1, 2, 5] {
                for level in &levels {
                    let options = CpuOptions {
                        threads,
                        level: Some(*level),
                        ..options()
                    };
                    let mut other = executor(folder.path(), &options);
                    let got = bits(&drafted(&mut other, &request, 2));
                    assert_eq!(got, expected, "{name}, {threads} threads, {level:?}");
                }
            }
        }
    }
}

#[test]
fn drafts_change_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        let mut executor = executor(folder.path(), &options());
        for request in requests() {
            let expected = bits(&lone(&mut executor, &request));
            for depth in 1..=8 {
                let got = bits(&drafted(&mut executor, &request, depth));
                assert_eq!(got, expected, "{name}, {depth} drafts");
            }
        }
    }
}

/// Drafts from elsewhere, all of them right, or right up to some place.
#[test]
fn foreign_drafts_change_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        let mut executor = executor(folder.path(), &options());
        for request in requests() {
            let plain = lone(&mut executor, &request);
            for wrong_every in [3, 5, usize::MAX] {
                let mut s = Sequence::new(&executor, 0, request.clone());
                s.generate(&mut executor, &prompt(0), 1, 0);
                while s.emitted.len() < COUNT {
                    let known = s.emitted.len();
                    let truth = plain.iter().skip(known).take(7.min(COUNT - 1 - known));
                    s.pending = truth
                        .enumerate()
                        .map(|(i, e)| {
                            if (known + i) % wrong_every == 1 {
                                3
                            } else {
                                e.id
                            }
                        })
                        .collect();
                    let (step, drafts) = s.round(8, COUNT - known);
                    let inputs = step.tokens.len();
                    let output = executor.run(&Step { seqs: vec![step] }).unwrap();
                    s.commit(inputs, &drafts, output.seqs.into_iter().next().unwrap());
                }
                assert_eq!(
                    bits(&s.emitted),
                    bits(&plain),
                    "{name}, wrong every {wrong_every}"
                );
                let accepted: usize = s.rounds.iter().map(|r| r.accepted).sum();
                assert!(accepted > COUNT / 3, "{name}: right drafts were refused");
            }
        }
    }
}

#[test]
fn cutting_the_prompt_changes_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        let mut executor = executor(folder.path(), &options());
        for request in requests() {
            let expected = bits(&lone(&mut executor, &request));
            for chunk in [1, 2, 7, 16, 31, 36] {
                let mut s = Sequence::new(&executor, 0, request.clone());
                let tokens = prompt(0);
                for piece in tokens.chunks(chunk) {
                    let step = s.step(piece, None);
                    executor.run(&Step { seqs: vec![step] }).unwrap();
                    s.cached += piece.len();
                    if s.cached + chunk >= tokens.len() {
                        break;
                    }
                }
                s.generate(&mut executor, &tokens, COUNT, 3);
                assert_eq!(bits(&s.emitted), expected, "{name}, pieces of {chunk}");
            }
        }
    }
}

/// Four sequences of different lengths in common steps: chunks of prefill beside rounds.
#[test]
fn company_changes_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        let options = CpuOptions {
            threads: 2,
            ..options()
        };
        let mut executor = executor(folder.path(), &options);
        let requests = requests();
        let request = |n: usize| requests[n % requests.len()].clone();
        let expected: Vec<_> = (0..4)
            .map(|n| {
                let mut s = Sequence::new(&executor, n, request(n));
                s.generate(&mut executor, &prompt(n), COUNT, 0);
                bits(&s.emitted)
            })
            .collect();
        let mut sequences: Vec<Sequence> = (0..4)
            .map(|n| Sequence::new(&executor, n, request(n)).with_prompt(&prompt(n)))
            .collect();
        while sequences.iter().any(|s| s.emitted.len() < COUNT) {
            let mut seqs = Vec::new();
            let mut parts = Vec::new();
            for (n, s) in sequences.iter_mut().enumerate() {
                let missing = s.tokens.len() - s.cached;
                if s.emitted.len() >= COUNT {
                    continue;
                }
                if missing > 9 + n {
                    let piece = s.tokens[s.cached..s.cached + 9 + n].to_vec();
                    seqs.push(s.step(&piece, None));
                    parts.push((n, piece.len(), Vec::new()));
                } else {
                    let (step, drafts) = s.round(n + 1, COUNT - s.emitted.len());
                    parts.push((n, step.tokens.len(), drafts));
                    seqs.push(step);
                }
            }
            let output = executor.run(&Step { seqs }).unwrap();
            for ((n, inputs, drafts), output) in parts.into_iter().zip(output.seqs) {
                sequences[n].commit(inputs, &drafts, output);
            }
        }
        for (n, s) in sequences.iter().enumerate() {
            assert_eq!(bits(&s.emitted), expected[n], "{name}, sequence {n}");
        }
    }
}

/// What an earlier owner left in a page, infinities and NaNs included, is never seen.
#[test]
fn dead_slots_are_not_read() {
    for name in ["e2b", "31b"] {
        let folder = bf16_copy(name);
        let mut fresh = executor(folder.path(), &options());
        let request = requests().swap_remove(1);
        let expected = bits(&lone(&mut fresh, &request));
        let mut used = executor(folder.path(), &options());
        used.poison_pages();
        assert_eq!(bits(&lone(&mut used, &request)), expected, "{name}");
    }
}

#[test]
fn bad_steps_are_refused() {
    let folder = bf16_copy("e4b");
    let mut executor = executor(folder.path(), &options());
    let mut s = Sequence::new(&executor, 0, params(0.0)).with_prompt(&prompt(0));
    let (good, _) = s.round(0, 10);
    let limits = executor.limits().clone();
    type Damage = Box<dyn Fn(&mut Step)>;
    let cases: Vec<(&str, Damage)> = vec![
        (
            "outside the vocabulary",
            Box::new(|s| s.seqs[0].tokens[3] = 96),
        ),
        ("no rows", Box::new(|s| s.seqs[0].tokens.clear())),
        (
            "reaches position",
            Box::new(move |s| s.seqs[0].start = limits.max_model_len),
        ),
        (
            "full blocks",
            Box::new(|s| s.seqs[0].tables.full.truncate(1)),
        ),
        (
            "sliding blocks",
            Box::new(|s| s.seqs[0].tables.sliding.truncate(1)),
        ),
        (
            "full block",
            Box::new(|s| s.seqs[0].tables.full[0].0 = u32::MAX),
        ),
        (
            "sliding block",
            Box::new(|s| s.seqs[0].tables.sliding[0].0 = u32::MAX),
        ),
        (
            "drafts",
            Box::new(|s| s.seqs[0].sample.as_mut().unwrap().drafts = 37),
        ),
        (
            "drafts wanted",
            Box::new(|s| s.seqs[0].sample.as_mut().unwrap().next_drafts = 9),
        ),
        (
            "sequences",
            Box::new(|s| s.seqs = vec![s.seqs[0].clone(); 9]),
        ),
        ("rows", Box::new(|s| s.seqs = vec![s.seqs[0].clone(); 4])),
    ];
    for (words, damage) in cases {
        let mut step = Step {
            seqs: vec![good.clone()],
        };
        damage(&mut step);
        let error = executor.run(&step).unwrap_err();
        assert!(error.reason.contains(words), "{words}: {error}");
    }
    executor.run(&Step { seqs: vec![good] }).unwrap();
    assert!(executor.run(&Step::default()).unwrap().seqs.is_empty());
}
