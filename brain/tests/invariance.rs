//! Promise P1 over the whole engine: tokens and log-probabilities are a function of the request.
//!
//! Real checkpoints (tiny, random; fp32 as stored, and rounded to bf16) on the CPU: with and
//! without the drafter, at every draft depth, alone and among others, with every chunk size,
//! under block pressure, after an anchor, after a restart: the same ids and the same bits.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use brain::{
    backend::cpu::{CpuExecutor, CpuOptions},
    engine::{
        Cursor, Engine, EngineConfig, LogEvent,
        clock::{Clock, ManualClock, SystemClock},
    },
    model::{LoadOptions, drafter_of, kv_dtype::KvChoice, load},
    sched::{
        request::{FinishReason, Request},
        sequence::{Outcome, Usage},
        types::{DraftDepth, Emitted, SamplingParams, TokenId},
    },
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use support::golden_folder;

const VARIANTS: [&str; 6] = ["e2b", "e4b", "12b", "26b", "31b", "all"];
const ANSWER: u32 = 40;
/// Longer than a block and than the window, and no multiple of either.
const PROMPT: usize = 70;

/// A copy of a checkpoint with its weights rounded to bf16.
fn in_bf16(name: &str, to: &Path) -> PathBuf {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let from = entry.unwrap().path();
            let to = to.join(from.file_name().unwrap());
            if from.is_dir() {
                copy(&from, &to);
            } else if from.extension().is_some_and(|kind| kind == "safetensors") {
                fs::write(to, rounded(&fs::read(from).unwrap())).unwrap();
            } else {
                fs::copy(from, to).unwrap();
            }
        }
    }
    let folder = to.join(name);
    copy(&golden_folder(name), &folder);
    folder
}

fn rounded(file: &[u8]) -> Vec<u8> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let round = |bytes: &[u8]| -> Vec<u8> {
        let floats = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        floats
            .flat_map(|x| half::bf16::from_f32(x).to_le_bytes())
            .collect()
    };
    let converted: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tensors
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let shape = tensor.shape().to_vec();
            match tensor.dtype() {
                Dtype::F32 => (name, Dtype::BF16, shape, round(tensor.data())),
                other => (name, other, shape, tensor.data().to_vec()),
            }
        })
        .collect();
    let views = converted.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// How an engine is set up; none of it may show.
#[derive(Clone, Debug)]
struct Setup {
    drafter: bool,
    /// How keys and values are stored: this one does show, and is the same in what is compared.
    kv: KvChoice,
    chunk: usize,
    threads: usize,
    /// KV blocks for one sequence and little more.
    cramped: bool,
    /// Bytes of the tier below the device's memory.
    host: u64,
}

const PLAIN: Setup = Setup {
    drafter: true,
    kv: KvChoice::Auto,
    chunk: usize::MAX,
    threads: 1,
    cramped: false,
    host: 0,
};

fn executor(folder: &Path, setup: &Setup) -> CpuExecutor {
    let options = LoadOptions {
        drafter: drafter_of(folder).filter(|_| setup.drafter),
    };
    let with = |kv_memory| {
        let cpu = CpuOptions {
            threads: setup.threads,
            kv_memory,
            kv_dtype: setup.kv,
            ..support::options()
        };
        CpuExecutor::new(load(folder, &options).unwrap(), &cpu)
    };
    if !setup.cramped {
        return with(8 << 20).unwrap();
    }
    // The least memory that is accepted, within a few per cent.
    let sizes = std::iter::successors(Some(1 << 12), |size| Some(size + size / 16));
    sizes
        .take_while(|&size| size < 8 << 20)
        .find_map(|size| with(size).ok())
        .unwrap()
}

fn engine(folder: &Path, setup: &Setup) -> Engine {
    let mut config = EngineConfig {
        host_cache: setup.host,
        ..EngineConfig::default()
    };
    config.sched.chunk = setup.chunk;
    let clock: Arc<dyn Clock> = match setup.host {
        0 => Arc::new(SystemClock::start()),
        // Time stands: what a way costs is not known, and it is taken.
        _ => Arc::new(ManualClock::default()),
    };
    Engine::start(Box::new(executor(folder, setup)), config, clock).unwrap()
}

fn prompt(kind: u32) -> Vec<TokenId> {
    (0..PROMPT as u32)
        .map(|i| 3 + (i * i * (kind + 3) + 11 * kind + i) % 90)
        .collect()
}

/// Kinds of sampling, each with log-probabilities; every third uses the history.
fn params(kind: u32) -> SamplingParams {
    let greedy = SamplingParams {
        logprobs: 4,
        ..SamplingParams::greedy(ANSWER)
    };
    match kind % 3 {
        0 => greedy,
        1 => SamplingParams {
            temperature: 0.8,
            top_k: 20,
            top_p: 0.95,
            seed: 11,
            ..greedy
        },
        _ => SamplingParams {
            temperature: 1.0,
            min_p: 0.02,
            seed: 5,
            repetition_penalty: 1.1,
            frequency_penalty: 0.3,
            ..greedy
        },
    }
}

fn request(kind: u32, draft: DraftDepth) -> Request {
    Request {
        draft,
        ..Request::new(prompt(kind), params(kind))
    }
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

/// Generates alone; returns the tokens and what they took.
async fn generate(engine: &Engine, id: &str, request: Request) -> (Vec<Emitted>, Usage) {
    let (tokens, outcome) = read(engine.generate(id, Some(request), 0).unwrap().cursor).await;
    assert_eq!(outcome.reason, FinishReason::Length);
    (tokens, outcome.usage)
}

/// Every bit: floats are compared as what they are stored as.
fn assert_same(got: &[Emitted], expected: &[Emitted], what: &str) {
    let bits = |tokens: &[Emitted]| -> Vec<_> {
        tokens
            .iter()
            .map(|token| {
                let logprobs = token.logprobs.as_ref().unwrap();
                let top: Vec<_> = logprobs
                    .top
                    .iter()
                    .map(|(id, x)| (*id, x.to_bits()))
                    .collect();
                (token.id, logprobs.chosen.to_bits(), top)
            })
            .collect()
    };
    assert_eq!(bits(got), bits(expected), "{what}");
}

/// Runs the whole table for one checkpoint; returns how many runs were compared, and drafts that
/// were accepted.
async fn check(folder: &Path, name: &str, kv: KvChoice) -> (usize, usize) {
    let lone = engine(
        folder,
        &Setup {
            drafter: false,
            kv,
            ..PLAIN
        },
    );
    let mut expected = Vec::new();
    for kind in 0..4 {
        let request = request(kind, DraftDepth::Fixed(0));
        expected.push(generate(&lone, &format!("{kind}"), request).await.0);
    }
    let (mut compared, mut accepted) = (0, 0);
    for (chunk, threads) in [(16, 1), (64, 2), (usize::MAX, 1)] {
        let setup = Setup {
            chunk,
            threads,
            kv,
            ..PLAIN
        };
        let engine = engine(folder, &setup);
        let fixed = (0..=8).map(DraftDepth::Fixed);
        for draft in fixed.chain([DraftDepth::Auto]) {
            let what = format!("{name}, {setup:?}, {draft:?}");
            let (tokens, usage) = generate(
                &engine,
                &format!("alone {draft:?}").replace([' ', '(', ')'], "."),
                request(0, draft),
            )
            .await;
            assert_same(&tokens, &expected[0], &what);
            accepted += usage.accepted;
            let company: Vec<_> = (0..4)
                .map(|kind| {
                    let id = format!("{kind}.{draft:?}").replace(['(', ')'], ".");
                    engine
                        .generate(&id, Some(request(kind, draft)), 0)
                        .unwrap()
                        .cursor
                })
                .collect();
            for (cursor, expected) in company.into_iter().zip(&expected) {
                let (tokens, outcome) = read(cursor).await;
                assert_same(&tokens, expected, &format!("{what}, in company"));
                accepted += outcome.usage.accepted;
                compared += 1;
            }
            compared += 1;
        }
    }
    (compared, accepted)
}

#[tokio::test]
async fn drafts_company_and_chunks_change_no_bit() {
    let scratch = tempfile::tempdir().unwrap();
    let (mut compared, mut accepted) = (0, 0);
    let mut in_fp8 = 0;
    for name in VARIANTS {
        let bf16 = in_bf16(name, scratch.path());
        for (folder, kv) in [
            (golden_folder(name), KvChoice::Auto),
            (golden_folder(name), KvChoice::Fp8),
            (bf16.clone(), KvChoice::Auto),
            (bf16, KvChoice::Fp8),
        ] {
            let (more, right) = check(&folder, &folder.display().to_string(), kv).await;
            (compared, accepted) = (compared + more, accepted + right);
            in_fp8 += if kv == KvChoice::Fp8 { more } else { 0 };
        }
    }
    println!(
        "{compared} generations compared, {in_fp8} of them with a cache in FP8, \
         {accepted} drafts accepted"
    );
    assert!(
        accepted > compared,
        "hardly a draft was right: verification was not tried"
    );
}

#[tokio::test]
async fn preemption_changes_no_bit() {
    let scratch = tempfile::tempdir().unwrap();
    let places = [("e2b", 0), ("all", 0), ("e2b", 1 << 20), ("all", 1 << 20)];
    let forms = [KvChoice::Auto, KvChoice::Fp8];
    for ((name, host), kv) in places.iter().flat_map(|at| forms.map(|kv| (*at, kv))) {
        let folder = in_bf16(name, scratch.path());
        let roomy = engine(&folder, &Setup { kv, ..PLAIN });
        let cramped = engine(
            &folder,
            &Setup {
                cramped: true,
                chunk: 16,
                host,
                kv,
                ..PLAIN
            },
        );
        // Short prompts, so that several are let in, and answers that outgrow the room.
        let request = |kind: u32| {
            let params = SamplingParams {
                max_tokens: 90,
                ..params(kind)
            };
            let draft = DraftDepth::Fixed(3);
            Request {
                draft,
                ..Request::new(prompt(kind)[..10].to_vec(), params)
            }
        };
        let ids = ["0", "1", "2", "3"];
        let cursors = [0, 1, 2, 3].map(|kind| {
            cramped
                .generate(ids[kind as usize], Some(request(kind)), 0)
                .unwrap()
                .cursor
        });
        for (kind, cursor) in cursors.into_iter().enumerate() {
            let expected = generate(&roomy, ids[kind], request(kind as u32)).await.0;
            assert_same(
                &read(cursor).await.0,
                &expected,
                &format!("{name}, request {kind}"),
            );
        }
        let stats = cramped.stats().sched;
        println!(
            "{name}, {kv:?}: {} preemptions, {} blocks, {} times back from {host} bytes below",
            stats.preemptions, stats.full_blocks, stats.lifted
        );
        assert_eq!(stats.lifted > 0, host > 0, "{name}: {stats:?}");
        assert!(
            stats.preemptions > 0,
            "{name}: there was room for all: {stats:?}"
        );
    }
}

#[tokio::test]
async fn an_anchor_changes_no_bit() {
    let scratch = tempfile::tempdir().unwrap();
    for (name, kv) in [
        ("e4b", KvChoice::Auto),
        ("12b", KvChoice::Auto),
        ("12b", KvChoice::Fp8),
        ("all", KvChoice::Auto),
        ("all", KvChoice::Fp8),
    ] {
        let folder = in_bf16(name, scratch.path());
        let setup = Setup { kv, ..PLAIN };
        for depth in [0, 2, 5] {
            let draft = DraftDepth::Fixed(depth);
            let warm = engine(&folder, &setup);
            let mut tokens = prompt(1)[..20].to_vec();
            for turn in 0..3 {
                let request = || Request {
                    draft,
                    run_id: "run".into(),
                    ..Request::new(
                        tokens.clone(),
                        SamplingParams {
                            max_tokens: 20,
                            ..params(turn + 1)
                        },
                    )
                };
                let id = format!("{turn}");
                let (answer, usage) = generate(&warm, &id, request()).await;
                let lone = Request {
                    run_id: String::new(),
                    ..request()
                };
                // A model that was never asked the turns before has nothing to take over.
                let fresh = engine(&folder, &setup);
                let expected = generate(&fresh, &id, lone).await.0;
                assert_same(
                    &answer,
                    &expected,
                    &format!("{name}, depth {depth}, turn {turn}"),
                );
                assert_eq!(usage.cached, if turn == 0 { 0 } else { tokens.len() - 4 });
                tokens.extend(answer.iter().map(|token| token.id));
                tokens.extend([7, 8, 9]);
            }
        }
    }
}

#[tokio::test]
async fn a_restart_changes_no_bit() {
    let scratch = tempfile::tempdir().unwrap();
    for (name, kv) in [
        ("e2b", KvChoice::Auto),
        ("26b", KvChoice::Auto),
        ("26b", KvChoice::Fp8),
        ("31b", KvChoice::Auto),
        ("31b", KvChoice::Fp8),
    ] {
        let folder = in_bf16(name, scratch.path());
        for kind in 0..3 {
            let first = engine(&folder, &Setup { kv, ..PLAIN });
            let expected = generate(&first, "g", request(kind, DraftDepth::Fixed(4)))
                .await
                .0;
            for held in [1, 6, 17, ANSWER as usize - 1] {
                // Another brain, which has no drafter and knows nothing of the first one.
                let other = engine(
                    &folder,
                    &Setup {
                        drafter: false,
                        chunk: 16,
                        kv,
                        ..PLAIN
                    },
                );
                let request = Request {
                    received: expected[..held].iter().map(|token| token.id).collect(),
                    ..request(kind, DraftDepth::Auto)
                };
                let cursor = other.generate("g", Some(request), held).unwrap().cursor;
                let rest = read(cursor).await.0;
                assert_same(
                    &rest,
                    &expected[held..],
                    &format!("{name}, {kind}, from {held}"),
                );
            }
        }
    }
}
