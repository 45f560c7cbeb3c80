//! The forward pass and the drafter against the reference implementation, on tiny random
//! checkpoints of every variant (see tests/goldens/make.py).

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use brain::{
    backend::{
        Executor,
        cpu::{CpuExecutor, CpuOptions},
    },
    model::{self, kv_dtype::KvChoice},
};
use support::{
    Sequence,
    golden::{Golden, VARIANTS, golden, golden_fp8},
    golden_folder, options, params, plain_copy,
    scaled::add_kv_scales,
};

const WINDOW: usize = 6;

fn executor(golden: &Golden) -> CpuExecutor {
    with_cache(golden, KvChoice::Auto)
}

fn with_cache(golden: &Golden, kv_dtype: KvChoice) -> CpuExecutor {
    let drafter = model::drafter_of(&golden.folder);
    let model = model::load(&golden.folder, &model::LoadOptions { drafter }).unwrap();
    let options = CpuOptions {
        kv_dtype,
        ..options()
    };
    CpuExecutor::new(model, &options).unwrap()
}

/// Natural logarithms of the probabilities that logits stand for.
fn logprobs(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f32 = logits.iter().map(|x| (x - most).exp()).sum();
    logits.iter().map(|x| x - most - total.ln()).collect()
}

/// Largest difference of logits and of log-probabilities after tokens fed in the given pieces.
fn difference(golden: &Golden, pieces: &[usize]) -> f32 {
    difference_on(&mut executor(golden), golden, pieces)
}

fn difference_on(executor: &mut CpuExecutor, golden: &Golden, pieces: &[usize]) -> f32 {
    let mut sequence = Sequence::new(executor, 0, params(0.0));
    let mut fed = 0;
    for (i, piece) in pieces.iter().enumerate() {
        let last = i + 1 == pieces.len();
        sequence.feed(executor, &golden.tokens[fed..fed + piece], last);
        fed += piece;
    }
    let logits = executor.last_logits().last().unwrap();
    let expected = &golden.logits[fed - 1];
    let furthest = |a: &[f32], b: &[f32]| {
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        far.fold(0.0, f32::max)
    };
    furthest(logits, expected).max(furthest(&logprobs(logits), &logprobs(expected)))
}

#[test]
fn logits_agree_at_every_interesting_position() {
    for name in VARIANTS {
        let golden = golden(name);
        let mut worst: f32 = 0.0;
        for length in [
            1,
            2,
            WINDOW - 1,
            WINDOW,
            WINDOW + 1,
            4 * WINDOW,
            33,
            golden.tokens.len(),
        ] {
            worst = worst.max(difference(&golden, &[length]));
        }
        println!("{name}: {worst:.1e}");
        assert!(worst < 1e-4, "{name}: {worst}");
    }
}

#[test]
fn logits_agree_however_the_prompt_is_cut() {
    for name in VARIANTS {
        let golden = golden(name);
        let whole = golden.tokens.len();
        let ones = vec![1; whole];
        let sevens = [vec![7; whole / 7], vec![whole % 7]].concat();
        for pieces in [ones, sevens, vec![9, 1, whole - 10], vec![32, whole - 32]] {
            let worst = difference(&golden, &pieces);
            assert!(worst < 1e-4, "{name}: {worst} with pieces {pieces:?}");
        }
    }
}

#[test]
fn logits_agree_with_a_cache_in_fp8() {
    for name in VARIANTS {
        let (golden, scales) = golden_fp8(name);
        let copy = plain_copy(name);
        add_kv_scales(copy.path(), |layer| scales[layer]);
        let scaled = Golden {
            folder: copy.path().to_owned(),
            ..golden
        };
        let mut executor = with_cache(&scaled, KvChoice::Fp8);
        let whole = scaled.tokens.len();
        let mut worst: f32 = 0.0;
        for length in 1..=whole {
            worst = worst.max(difference_on(&mut executor, &scaled, &[length]));
        }
        let sevens = [vec![7; whole / 7], vec![whole % 7]].concat();
        for pieces in [vec![1; whole], sevens, vec![32, whole - 32]] {
            worst = worst.max(difference_on(&mut executor, &scaled, &pieces));
        }
        // Without scales, and without FP8, other logits come out.
        let unscaled = Golden {
            folder: golden_folder(name),
            ..scaled
        };
        let all = [whole];
        let by_one = difference_on(&mut with_cache(&unscaled, KvChoice::Fp8), &unscaled, &all);
        let plain = difference_on(&mut with_cache(&unscaled, KvChoice::Auto), &unscaled, &all);
        println!("{name}: {worst:.1e}; scales of 1 {by_one:.1e}, no FP8 {plain:.1e}");
        assert!(worst < 1e-4, "{name}: {worst}");
        assert!(by_one > 1e-2 && plain > 1e-2, "{name}: {by_one}, {plain}");
    }
}

#[test]
fn greedy_tokens_agree() {
    for name in VARIANTS {
        let golden = golden(name);
        let mut executor = executor(&golden);
        let mut sequence = Sequence::new(&executor, 0, params(0.0));
        let (prompt, expected) = golden.tokens.split_at(golden.prompt);
        let tokens = sequence.generate(&mut executor, prompt, expected.len(), 0);
        assert_eq!(tokens, expected, "{name}");
    }
}

#[test]
fn drafts_and_accept_counts_agree() {
    for name in VARIANTS {
        let golden = golden(name);
        let mut executor = executor(&golden);
        assert!(executor.limits().max_drafts > 0, "{name} has a drafter");
        let mut sequence = Sequence::new(&executor, 0, params(0.0));
        let width = golden.rounds[0].len() - 2;
        sequence.generate(&mut executor, &golden.tokens[..golden.prompt], 24, width);
        let wanted: Vec<_> = golden
            .rounds
            .iter()
            .map(|r| (r[0], r[1], r[2..].to_vec()))
            .collect();
        let rounds: Vec<_> = sequence
            .rounds
            .iter()
            .map(|r| {
                (
                    r.committed,
                    r.accepted,
                    r.drafts.iter().map(|d| *d as usize).collect(),
                )
            })
            .take(wanted.len())
            .collect::<Vec<(usize, usize, Vec<usize>)>>();
        assert_eq!(rounds, wanted, "{name}");
    }
}
