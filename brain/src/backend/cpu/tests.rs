use super::*;
use crate::model::{LoadOptions, drafter_of, load};

fn golden(name: &str) -> LoadedModel {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/goldens/");
    let dir = std::path::Path::new(dir).join(name);
    let drafter = drafter_of(&dir);
    load(&dir, &LoadOptions { drafter }).unwrap()
}

#[test]
fn limits_follow_the_options() {
    let model = golden("e4b");
    let executor = CpuExecutor::new(
        model,
        &CpuOptions {
            threads: 1,
            ..Default::default()
        },
    )
    .unwrap();
    let limits = executor.limits();
    assert_eq!(
        (limits.max_model_len, limits.vocab_size, limits.window),
        (128, 96, 6)
    );
    assert_eq!(
        (limits.max_drafts, limits.max_seqs, limits.max_rows),
        (8, 8, 256)
    );
    assert_eq!(limits.full_blocks, 2 * 8 * 128 / limits.full_block_size);
    let fewer = CpuOptions {
        max_drafts: 3,
        max_model_len: 100,
        threads: 1,
        ..Default::default()
    };
    let executor = CpuExecutor::new(golden("e4b"), &fewer).unwrap();
    assert_eq!(
        (
            executor.limits().max_drafts,
            executor.limits().max_model_len
        ),
        (3, 100)
    );
}

#[test]
fn impossible_options_are_named() {
    let base = CpuOptions {
        threads: 1,
        ..Default::default()
    };
    for (options, name) in [
        (
            CpuOptions {
                kv_memory: 1000,
                ..base.clone()
            },
            "kv-cache-memory",
        ),
        (
            CpuOptions {
                max_model_len: 129,
                ..base.clone()
            },
            "max-model-len",
        ),
        (
            CpuOptions {
                max_seqs: 0,
                ..base.clone()
            },
            "max-num-seqs",
        ),
        (
            CpuOptions {
                max_rows: 8,
                ..base.clone()
            },
            "max-num-batched-tokens",
        ),
    ] {
        let message = CpuExecutor::new(golden("e4b"), &options)
            .err()
            .unwrap()
            .to_string();
        assert!(message.starts_with(name), "{message}");
    }
}

/// The smallest budget that is accepted holds one sequence of the full length.
#[test]
fn the_smallest_budget_holds_one_sequence() {
    let enough = |kv_memory: usize| {
        let options = CpuOptions {
            threads: 1,
            kv_memory,
            ..Default::default()
        };
        CpuExecutor::new(golden("31b"), &options)
    };
    let (mut low, mut high) = (0, 64 << 20);
    while low + 1 < high {
        let middle = (low + high) / 2;
        if enough(middle).is_ok() {
            high = middle
        } else {
            low = middle
        }
    }
    let executor = enough(high).unwrap();
    let limits = executor.limits();
    assert!(limits.full_blocks * limits.full_block_size >= limits.max_model_len);
    let rows = limits.window + limits.max_rows;
    assert!(limits.sliding_blocks * limits.sliding_block_size >= rows.min(limits.max_model_len));
}

#[test]
fn fingerprints_know_model_and_recipe() {
    let options = CpuOptions {
        threads: 1,
        ..Default::default()
    };
    let of = |name: &str, options: &CpuOptions| {
        CpuExecutor::new(golden(name), options)
            .unwrap()
            .fingerprint()
    };
    let one = of("e4b", &options);
    let other_options = CpuOptions {
        threads: 2,
        max_drafts: 0,
        max_rows: 16,
        ..options.clone()
    };
    assert_eq!(one, of("e4b", &other_options));
    assert_ne!(one, of("31b", &options));
    assert_eq!(one.to_string().len(), 64);
}
