//! Every weight form from file to token: tiny checkpoints of every variant are quantised, and must
//! compute what a checkpoint of the dequantised numbers does.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first surprise"
)]

#[path = "support/forms.rs"]
mod forms;
#[path = "support/quantised.rs"]
mod quantised;
mod support;

use brain::{
    backend::{
        Executor,
        cpu::{CpuExecutor, CpuOptions, Level},
    },
    model::{self, LoadOptions},
    sched::types::TokenId,
};
use forms::{ALL, Written};
use quantised::{Rest, pair};
use support::{Sequence, options, params};

fn executor(dir: &std::path::Path, options: &CpuOptions) -> CpuExecutor {
    let drafter = model::drafter_of(dir);
    let model = model::load(dir, &LoadOptions { drafter }).unwrap();
    CpuExecutor::new(model, options).unwrap()
}

fn prompt() -> Vec<TokenId> {
    (0..33).map(|i| i * 7 % 90 + 3).collect()
}

/// Log-probabilities after the prompt, fed in pieces.
fn logprobs(executor: &mut CpuExecutor, pieces: &[usize]) -> Vec<f32> {
    let tokens = prompt();
    let mut sequence = Sequence::new(executor, 0, params(0.0));
    let mut fed = 0;
    for (i, piece) in pieces.iter().enumerate() {
        let last = i + 1 == pieces.len();
        sequence.feed(executor, &tokens[fed..fed + piece], last);
        fed += piece;
    }
    let logits = executor.last_logits().last().unwrap();
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f32 = logits.iter().map(|x| (x - most).exp()).sum();
    logits.iter().map(|x| x - most - total.ln()).collect()
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// Greedy tokens, drafted two at a time.
fn generated(executor: &mut CpuExecutor) -> Vec<TokenId> {
    Sequence::new(executor, 1, params(0.0)).generate(executor, &prompt(), 16, 2)
}

fn compare(name: &str, what: &str, form: impl Fn(usize) -> Written) {
    let pair = pair(name, Rest::Plain, form);
    let mut quantised = executor(pair.quantised.path(), &options());
    let mut twin = executor(pair.twin.path(), &options());
    assert_ne!(quantised.fingerprint(), twin.fingerprint(), "{name} {what}");
    let whole = [prompt().len()];
    let worst = furthest(
        &logprobs(&mut quantised, &whole),
        &logprobs(&mut twin, &whole),
    );
    println!("{name:4} {what:12} {worst:.1e}");
    assert!(worst < 1e-4, "{name} {what}: {worst}");
    assert_eq!(
        generated(&mut quantised),
        generated(&mut twin),
        "{name} {what}"
    );
}

/// The list of every form, run end to end. The twin's sums are rounded elsewhere (each weight once,
/// instead of each scaled sum), hence a tolerance: the one that the goldens have.
#[test]
fn every_form_computes_what_its_dequantised_twin_does() {
    for form in ALL {
        for name in ["e2b", "26b", "31b"] {
            if form != Written::F32 {
                compare(name, &format!("{form:?}"), |_| form);
            }
        }
    }
}

/// Files of mixed precision: each matrix in a form of its own, so that fused ones differ in parts.
#[test]
fn mixed_files_are_decided_matrix_by_matrix() {
    for name in ["e2b", "e4b", "12b", "26b", "31b", "all"] {
        compare(name, "mixed", |n| ALL[n * 5 % ALL.len()]);
    }
}

/// In bf16, as real checkpoints are: neither pieces, nor drafts, nor threads, nor vector
/// instructions change a bit.
#[test]
fn quantised_rows_do_not_know_their_neighbours() {
    for name in ["26b", "all"] {
        let pair = pair(name, Rest::Bf16, |n| ALL[n * 5 % ALL.len()]);
        let dir = pair.quantised.path();
        let mut one = executor(dir, &options());
        let bits = |all: Vec<f32>| -> Vec<u32> { all.iter().map(|x| x.to_bits()).collect() };
        let expected = bits(logprobs(&mut one, &[33]));
        let tokens = generated(&mut one);
        for level in Level::all().into_iter().filter(|l| l.is_available()) {
            let options = CpuOptions {
                level: Some(level),
                threads: 2,
                ..options()
            };
            let mut other = executor(dir, &options);
            for pieces in [vec![33], vec![1; 33], vec![20, 7, 6]] {
                let got = bits(logprobs(&mut other, &pieces));
                assert!(got == expected, "{name} {level:?} {pieces:?}");
            }
            assert_eq!(generated(&mut other), tokens, "{name} {level:?}");
        }
        let undrafted = CpuOptions {
            max_drafts: 0,
            ..options()
        };
        let mut other = executor(dir, &undrafted);
        assert_eq!(other.limits().max_drafts, 0);
        let mut sequence = Sequence::new(&other, 0, params(0.0));
        assert_eq!(
            sequence.generate(&mut other, &prompt(), 16, 0),
            tokens,
            "{name}"
        );
    }
}

/// One bit of a scale or of a code is another model.
#[test]
fn the_fingerprint_covers_codes_and_scales() {
    let pair = pair("31b", Rest::Plain, |_| Written::Nvfp4);
    let path = pair.quantised.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let text: serde_json::Value = serde_json::from_slice(&whole[8..8 + header]).unwrap();
    let of = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        executor(pair.quantised.path(), &options()).fingerprint()
    };
    let original = of(&whole);
    for tensor in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
        let place = &text[format!("model.layers.1.mlp.up_proj.{tensor}")]["data_offsets"][0];
        let mut bytes = whole.clone();
        let byte = &mut bytes[8 + header + place.as_u64().unwrap() as usize];
        // Not to an E4M3 that is no number.
        *byte ^= if *byte & 0x7e == 0x7e { 2 } else { 1 };
        assert_ne!(of(&bytes), original, "{tensor}");
    }
    assert_eq!(of(&whole), original);
}
