use super::*;
use crate::{
    backend::cpu::{
        memory::Buf,
        panel::{Matrix, Words},
        product::{Mode, product},
    },
    model::{
        LoadOptions,
        checkpoint::{Checkpoint, Tensor},
        load,
        weights::Weight,
    },
    sched::math::round_bf16,
};

fn golden(name: &str) -> LoadedModel {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/goldens/");
    load(
        &std::path::Path::new(dir).join(name),
        &LoadOptions::default(),
    )
    .unwrap()
}

fn levels() -> impl Iterator<Item = Level> {
    Level::all().into_iter().filter(|l| l.is_available())
}

fn noise(i: usize) -> f32 {
    let x = (i as u32).wrapping_mul(2_654_435_761) >> 8;
    x as f32 / (1 << 23) as f32 - 1.0
}

fn weight(rows: usize, cols: usize, bf16: bool) -> Weight {
    let values = (0..rows * cols).map(|i| round_bf16(noise(i + 7)));
    let data: Vec<u8> = match bf16 {
        true => values
            .flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        false => values.flat_map(f32::to_le_bytes).collect(),
    };
    stored(rows, cols, if bf16 { "BF16" } else { "F32" }, &data)
}

fn stored(rows: usize, cols: usize, dtype: &str, data: &[u8]) -> Weight {
    let header = format!(
        r#"{{"w":{{"dtype":"{dtype}","shape":[{rows},{cols}],"data_offsets":[0,{}]}}}}"#,
        data.len()
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    let checkpoint = Checkpoint::embedded("test", Vec::leak(file)).unwrap();
    let tensors: Vec<Tensor> = checkpoint.tensors().cloned().collect();
    Weight::Float(tensors[0].clone())
}

/// The bf16 instruction takes subnormals for zero, and so does everybody else: there are none.
#[test]
fn subnormal_weights_are_zero_at_every_level() {
    let numbers = [1e-39f32, 3.0, -1e-40, f32::from_bits(0x007f_0000), -2.0];
    let data = numbers.iter().cycle().take(33 * 7);
    let file: Vec<u8> = data
        .clone()
        .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
        .collect();
    let weight = stored(33, 7, "BF16", &file);
    let matrix = Matrix::pack(&Pool::new(1).unwrap(), &[&weight], true);
    let mut x = Buf::new(1, 7);
    // Large enough to make a normal number of a subnormal one, were it taken as it is.
    x.row_mut(0).fill(2f32.powi(100));
    let normal = |x: &f32| if x.is_normal() { *x } else { 0.0 };
    let numbers: Vec<f32> = data.map(normal).collect();
    for level in levels() {
        let mode = Mode { level, round: true };
        let mut out = Buf::new(1, 33);
        let mut words = Words::new(1, 7);
        let pool = Pool::new(1).unwrap();
        product(&pool, mode, 1, &x, &matrix, &mut words, &mut out);
        for (n, row) in numbers.chunks(7).enumerate() {
            let sum: f32 = row.iter().sum();
            assert_eq!(out.row(0)[n], sum * 2f32.powi(100), "{level:?} {n}");
        }
    }
}

/// Every output is one chain of fused multiply-adds, whatever the shape, level or threads.
#[test]
fn a_product_is_its_definition() {
    for (outputs, inputs) in [(1, 1), (31, 7), (33, 48), (200, 129)] {
        for bf16 in [true, false] {
            let weight = weight(outputs, inputs, bf16);
            let matrix = Matrix::pack(&Pool::new(1).unwrap(), &[&weight], true);
            let plain = weight.to_vec();
            for rows in (1..=26).chain([97, 200]) {
                let mut x = Buf::new(rows, inputs);
                for i in 0..rows {
                    let row = x.row_mut(i).iter_mut().enumerate();
                    // bf16 matrices take bf16 rows.
                    row.for_each(|(k, x)| *x = round_bf16(noise(i * 1000 + k)));
                }
                let chain = |i: usize, n: usize| {
                    let w = &plain[n * inputs..(n + 1) * inputs];
                    x.row(i)
                        .iter()
                        .zip(w)
                        .fold(0.0f32, |sum, (x, w)| x.mul_add(*w, sum))
                };
                let expected: Vec<Vec<u32>> = (0..rows)
                    .map(|i| (0..outputs).map(|n| chain(i, n).to_bits()).collect())
                    .collect();
                for level in levels() {
                    for threads in [1, 3] {
                        let pool = Pool::new(threads).unwrap();
                        let mut out = Buf::new(rows, outputs);
                        let mode = Mode {
                            level,
                            round: false,
                        };
                        let mut words = Words::new(rows, inputs);
                        product(&pool, mode, rows, &x, &matrix, &mut words, &mut out);
                        for (i, expected) in expected.iter().enumerate() {
                            let got: Vec<u32> = out.row(i).iter().map(|x| x.to_bits()).collect();
                            assert_eq!(&got, expected, "{rows} rows, {level:?}, {threads}");
                        }
                    }
                }
            }
        }
    }
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
