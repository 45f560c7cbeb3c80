//! The card with keys and values in FP8: against the reference, the processor and itself.

use tempfile::TempDir;

use super::{
    support::{
        golden::golden_fp8,
        plain_copy,
        scaled::{add_kv_scales, wide},
    },
    *,
};

/// With keys and values in FP8.
fn fp8() -> CudaOptions {
    CudaOptions {
        kv_dtype: KvChoice::Fp8,
        ..small()
    }
}

/// A checkpoint for the fast kernels with scales for a cache in FP8.
fn grown_with_scales(name: &str) -> TempDir {
    let folder = grown(name, factor(name));
    add_kv_scales(folder.path(), wide);
    folder
}

/// Logits with keys and values in FP8, as the reference has them.
fn reference_in_fp8(name: &str) {
    let (golden, scales) = golden_fp8(name);
    let copy = plain_copy(name);
    add_kv_scales(copy.path(), |layer| scales[layer]);
    let mut executor = card(copy.path(), &fp8());
    let whole = golden.tokens.len();
    let sevens = [vec![7; whole / 7], vec![whole % 7]].concat();
    let cuts = [vec![1; 4 * WINDOW], sevens, vec![WINDOW + 1], vec![whole]];
    let worst = cuts
        .iter()
        .map(|cut| difference(&golden, &mut executor, cut))
        .fold(0.0, f32::max);
    println!("{name}, cache in FP8: logits within {worst:.1e} of the reference");
    assert!(worst < 1e-4, "{name}: {worst}");
}

/// Keys and values in FP8: what the reference has, near the processor, and the same bits in any
/// company, in pieces, with any drafts, after a restart and from saved blocks.
#[test]
#[ignore = "needs a card"]
fn a_cache_in_fp8_keeps_every_promise() {
    VARIANTS.into_iter().for_each(reference_in_fp8);
    let mut compared = 0;
    for name in VARIANTS {
        let folder = grown_with_scales(name);
        let label = format!("{name}, cache in FP8");
        let model = || loaded(folder.path());
        near_with(KvChoice::Fp8, &label, &model, &prompt(4), 1.0);
        let mut first = card(folder.path(), &fp8());
        let bf16 = card(folder.path(), &small());
        assert_ne!(first.fingerprint(), bf16.fingerprint());
        let halves =
            |e: &CudaExecutor| [e.limits().full_block_bytes, e.limits().sliding_block_bytes];
        assert_eq!(halves(&bf16), halves(&first).map(|bytes| 2 * bytes));
        drop(bf16);
        compared += every_invariance(&label, &mut first, &[1, 2, 7, 31, 33]);
        let single = CudaOptions {
            graphs: false,
            max_rows: 57,
            max_seqs: 3,
            ..fp8()
        };
        let mut second = card(folder.path(), &single);
        for request in requests() {
            let expected = bits(&lone(&mut first, &request));
            assert_eq!(bits(&lone(&mut second, &request)), expected, "{label}");
            compared += 1;
        }
        drop(second);
        compared += goes_on_elsewhere(&label, folder.path(), &fp8());
        let mut plain = card(&support::golden_folder(name), &fp8());
        compared += every_invariance(&label, &mut plain, &[1, 7, 33]);
    }
    println!("{compared} generations compared with a cache in FP8");
}

/// Step times of released sizes with keys and values in FP8, and without, in one run.
#[test]
#[ignore = "needs a card and measures"]
fn step_times_with_a_cache_in_fp8() {
    for name in ["e4b", "31b"] {
        for kv in [KvChoice::Auto, KvChoice::Fp8] {
            step_times(name, kv, &[1024, 16_384, 50_000]);
        }
    }
}

/// What an emulated card gets through.
pub(super) fn small_parts() {
    reference_in_fp8("12b");
    let scaled = grown_with_scales("e4b");
    let model = || loaded(scaled.path());
    near_with(
        KvChoice::Fp8,
        "e4b, cache in FP8",
        &model,
        &prompt(0)[..20],
        1.0,
    );
}
