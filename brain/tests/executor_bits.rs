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
    sched::types::Step,
};
use support::{
    Sequence, bf16_copy,
    bits::{bits, company, drafted, foreign_drafts, lone, own_drafts, pieces, prompt, requests},
    golden::VARIANTS,
    options, params,
};

fn executor(folder: &Path, options: &CpuOptions) -> CpuExecutor {
    let model = model::load(folder, &model::LoadOptions::default()).unwrap();
    CpuExecutor::new(model, options).unwrap()
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
        own_drafts(name, &mut executor(folder.path(), &options()));
    }
}

#[test]
fn foreign_drafts_change_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        foreign_drafts(name, &mut executor(folder.path(), &options()));
    }
}

#[test]
fn cutting_the_prompt_changes_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        let mut executor = executor(folder.path(), &options());
        pieces(name, &mut executor, &[1, 2, 7, 16, 31, 36]);
    }
}

#[test]
fn company_changes_nothing() {
    for name in VARIANTS {
        let folder = bf16_copy(name);
        let options = CpuOptions {
            threads: 2,
            ..options()
        };
        company(name, &mut executor(folder.path(), &options), 4);
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
