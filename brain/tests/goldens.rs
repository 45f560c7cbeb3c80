//! The forward pass and the drafter against the reference implementation, on tiny random
//! checkpoints of every variant (see tests/goldens/make.py).

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use brain::{
    backend::{Executor, cpu::CpuExecutor},
    model,
};
use support::{
    Sequence,
    golden::{Golden, VARIANTS, golden},
    options, params,
};

const WINDOW: usize = 6;

fn executor(golden: &Golden) -> CpuExecutor {
    let model = model::load(&golden.folder, &model::LoadOptions::default()).unwrap();
    CpuExecutor::new(model, &options()).unwrap()
}

/// Natural logarithms of the probabilities that logits stand for.
fn logprobs(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f32 = logits.iter().map(|x| (x - most).exp()).sum();
    logits.iter().map(|x| x - most - total.ln()).collect()
}

/// Largest difference of logits and of log-probabilities after tokens fed in the given pieces.
fn difference(golden: &Golden, pieces: &[usize]) -> f32 {
    let mut executor = executor(golden);
    let mut sequence = Sequence::new(&executor, 0, params(0.0));
    let mut fed = 0;
    for (i, piece) in pieces.iter().enumerate() {
        let last = i + 1 == pieces.len();
        sequence.feed(&mut executor, &golden.tokens[fed..fed + piece], last);
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
