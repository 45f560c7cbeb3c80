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
    model::{self, kv_dtype::KvChoice},
    sched::types::Step,
};
use support::{
    Sequence, bf16_copy,
    bits::{bits, company, drafted, foreign_drafts, lone, own_drafts, pieces, prompt, requests},
    golden::VARIANTS,
    options, params,
    scaled::{add_kv_scales, uneven},
};
use tempfile::TempDir;

/// Every variant with its cache as the model computes, and in FP8 with scales.
fn checkpoints() -> Vec<(String, TempDir, CpuOptions)> {
    let forms = [KvChoice::Auto, KvChoice::Fp8];
    let both = VARIANTS.iter().flat_map(|name| forms.map(|kv| (*name, kv)));
    both.map(|(name, kv)| checkpoint(name, kv)).collect()
}

fn checkpoint(name: &str, kv_dtype: KvChoice) -> (String, TempDir, CpuOptions) {
    let folder = bf16_copy(name);
    add_kv_scales(folder.path(), uneven);
    let options = CpuOptions {
        kv_dtype,
        ..options()
    };
    (format!("{name}, cache {kv_dtype:?}"), folder, options)
}

fn executor(folder: &Path, options: &CpuOptions) -> CpuExecutor {
    let drafter = model::drafter_of(folder);
    let model = model::load(folder, &model::LoadOptions { drafter }).unwrap();
    CpuExecutor::new(model, options).unwrap()
}

#[test]
fn threads_and_instructions_change_nothing() {
    let levels: Vec<Level> = Level::all()
        .into_iter()
        .filter(|l| l.is_available())
        .collect();
    println!("levels: {levels:?}");
    for (name, folder, options) in checkpoints() {
        for request in requests() {
            let expected = bits(&lone(&mut executor(folder.path(), &options), &request));
            for threads in [1, 2, 5] {
                for level in &levels {
                    let options = CpuOptions {
                        threads,
                        level: Some(*level),
                        ..options.clone()
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
    for (name, folder, options) in checkpoints() {
        own_drafts(&name, &mut executor(folder.path(), &options));
    }
}

#[test]
fn foreign_drafts_change_nothing() {
    for (name, folder, options) in checkpoints() {
        foreign_drafts(&name, &mut executor(folder.path(), &options));
    }
}

#[test]
fn cutting_the_prompt_changes_nothing() {
    for (name, folder, options) in checkpoints() {
        let mut executor = executor(folder.path(), &options);
        pieces(&name, &mut executor, &[1, 2, 7, 16, 31, 36]);
    }
}

#[test]
fn company_changes_nothing() {
    for (name, folder, options) in checkpoints() {
        let options = CpuOptions {
            threads: 2,
            ..options
        };
        company(&name, &mut executor(folder.path(), &options), 4);
    }
}

/// What an earlier owner left in a page, infinities and NaNs included, is never seen.
#[test]
fn dead_slots_are_not_read() {
    let cases = ["e2b", "31b"].map(|name| [KvChoice::Auto, KvChoice::Fp8].map(|kv| (name, kv)));
    for (name, kv) in cases.into_iter().flatten() {
        let (name, folder, options) = checkpoint(name, kv);
        let mut fresh = executor(folder.path(), &options);
        let request = requests().swap_remove(1);
        let expected = bits(&lone(&mut fresh, &request));
        let mut used = executor(folder.path(), &options);
        used.poison_pages();
        assert_eq!(bits(&lone(&mut used, &request)), expected, "{name}");
    }
}

/// A cache in FP8 is a model of its own, of half the bytes.
#[test]
fn a_cache_in_fp8_has_its_own_fingerprint_and_half_the_bytes() {
    for name in ["e2b", "31b"] {
        let [plain, fp8] = [KvChoice::Auto, KvChoice::Fp8].map(|kv| {
            let (_, folder, options) = checkpoint(name, kv);
            executor(folder.path(), &options)
        });
        assert_ne!(plain.fingerprint(), fp8.fingerprint());
        let sizes = |e: &CpuExecutor| {
            let limits = e.limits();
            [limits.full_block_bytes, limits.sliding_block_bytes]
        };
        assert_eq!(sizes(&plain), sizes(&fp8).map(|bytes| 2 * bytes), "{name}");
    }
}

/// What a configuration asks for is what auto is, and bf16 overrules it.
#[test]
fn a_configuration_may_ask_for_a_cache_in_fp8() {
    let folder = bf16_copy("e2b");
    let asks = r#"{"quantization":{"kv_cache_quant_algo":"FP8"}}"#;
    let prints = |kv_dtype| {
        let options = CpuOptions {
            kv_dtype,
            ..options()
        };
        executor(folder.path(), &options).fingerprint()
    };
    let all = [KvChoice::Auto, KvChoice::Bf16, KvChoice::Fp8];
    let [auto, bf16, fp8] = all.map(prints);
    assert_eq!(auto, bf16);
    std::fs::write(folder.path().join("hf_quant_config.json"), asks).unwrap();
    assert_eq!(all.map(prints), [fp8, bf16, fp8]);
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
