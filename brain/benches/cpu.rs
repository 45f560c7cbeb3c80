//! The CPU back end: single products, small and beyond all caches, attention, and whole steps of
//! the demo model.
//!
//! `cargo bench -p brain --bench cpu`. Compare a step with its floor: the bytes of the weights
//! over the memory (or cache) bandwidth, printed first.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a bench"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use brain::{
    backend::{
        Executor,
        cpu::{
            CpuExecutor, CpuOptions, Level,
            probe::{AttentionProbe, ProductProbe},
        },
        ops::HeadShape,
    },
    model::{self, LoadOptions, checkpoint::Checkpoint, kv_dtype::KvDtype, plan::Kind},
    sched::types::{SamplingParams, Step, TokenId},
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use support::{Sequence, params};

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes per second that all threads read together from a buffer of the model's size.
fn read_bandwidth(bytes: usize) -> f64 {
    let data = vec![1u64; bytes / 8];
    let part = data.len() / threads();
    let mut best = f64::MAX;
    for _ in 0..50 {
        let start = std::time::Instant::now();
        std::thread::scope(|scope| {
            for piece in data.chunks(part) {
                scope.spawn(move || std::hint::black_box(piece.iter().fold(0, |a, b| a ^ b)));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    bytes as f64 / best
}

fn products(c: &mut Criterion, dir: &std::path::Path) {
    let model = model::load(dir, &LoadOptions::default()).unwrap();
    let mut group = c.benchmark_group("product");
    for (name, weight) in [
        ("640x256", &model.weights.layers[0].gate),
        ("256x640", &model.weights.layers[0].down),
    ] {
        for rows in [1, 5, 64] {
            let mut probe = ProductProbe::new(weight, rows, 1, Level::detect()).unwrap();
            group.throughput(Throughput::Elements((rows * 256 * 640) as u64));
            group.bench_function(BenchmarkId::new(name, rows), |b| b.iter(|| probe.run()));
        }
    }
    group.finish();
}

/// A file with one matrix of random numbers, in every form that is compared.
fn random_matrix(form: &str, [rows, cols]: [usize; 2], path: &std::path::Path) {
    let mut state = 1u32;
    let mut random = |count: usize, byte: &dyn Fn(u32) -> u8| -> Vec<u8> {
        let next = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *state >> 16
        };
        (0..count).map(|_| byte(next(&mut state))).collect()
    };
    // Numbers around 1, and no NaN.
    let e4m3 = |x: u32| (x as u8 & 0x8f) | 0x30;
    let tensors: Vec<(&str, &str, Vec<usize>, Vec<u8>)> = match form {
        "bf16" => {
            let low = random(rows * cols, &|x| x as u8);
            let both = low.iter().flat_map(|x| [*x, 0x3f | x & 0x80]).collect();
            vec![("weight", "BF16", vec![rows, cols], both)]
        }
        "fp8" => vec![
            (
                "weight",
                "F8_E4M3",
                vec![rows, cols],
                random(rows * cols, &e4m3),
            ),
            (
                "weight_scale",
                "F32",
                vec![rows],
                1f32.to_le_bytes().repeat(rows),
            ),
        ],
        _ => {
            let codes = random(rows * cols / 2, &|x| x as u8);
            let scales = random(rows * cols / 16, &|x| x as u8 & 0x0f | 0x30);
            vec![
                ("weight", "U8", vec![rows, cols / 2], codes),
                ("weight_scale", "F8_E4M3", vec![rows, cols / 16], scales),
                ("weight_scale_2", "F32", vec![], 1f32.to_le_bytes().to_vec()),
            ]
        }
    };
    let mut at = 0;
    let listed: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            let from = at;
            at += bytes.len();
            format!(
                r#""m.{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{at}]}}"#
            )
        })
        .collect();
    let header = format!("{{{}}}", listed.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    tensors.iter().for_each(|t| file.extend(&t.3));
    std::fs::write(path, file).unwrap();
}

/// Matrices that no cache holds: what counts is how fast their bytes are read.
fn streams(c: &mut Criterion) {
    const SHAPE: [usize; 2] = [16384, 8192];
    let bandwidth = read_bandwidth(256 << 20);
    println!(
        "floor of a stream: {:.1} GiB/s on {} threads",
        bandwidth / (1u64 << 30) as f64,
        threads()
    );
    let mut group = c.benchmark_group("stream");
    for form in ["bf16", "fp8", "nvfp4"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        random_matrix(form, SHAPE, &path);
        let bytes = std::fs::metadata(&path).unwrap().len();
        let checkpoint = Checkpoint::of_files(&[path]).unwrap();
        group.throughput(Throughput::Bytes(bytes));
        for rows in [1, 5, 64] {
            let mut probe =
                ProductProbe::of_checkpoint(&checkpoint, "m", SHAPE, rows, threads()).unwrap();
            group.bench_function(BenchmarkId::new(form, rows), |b| b.iter(|| probe.run()));
        }
    }
    group.finish();
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    for (kind, head_dim) in [(Kind::Sliding, 64), (Kind::Full, 128)] {
        let shape = HeadShape {
            heads: 4,
            kv_heads: 2,
            head_dim,
            kind,
        };
        for (kv, rows) in [KvDtype::Bf16, KvDtype::Fp8]
            .into_iter()
            .flat_map(|kv| [1, 5, 64].map(|rows| (kv, rows)))
        {
            let level = Level::detect();
            let mut probe = AttentionProbe::new(shape, rows, 2048, kv, 1, level).unwrap();
            let id = BenchmarkId::new(format!("{kind:?} {head_dim} {kv}"), rows);
            group.bench_function(id, |b| b.iter(|| probe.run()));
        }
    }
    group.finish();
}

/// A sequence with `context` tokens in the cache.
fn warm(executor: &mut CpuExecutor, context: usize, params: SamplingParams) -> Sequence {
    let prompt: Vec<TokenId> = (0..context as TokenId).map(|i| i * 7 % 1000 + 3).collect();
    let mut s = Sequence::new(executor, 0, params);
    for piece in prompt.chunks(256) {
        s.feed(executor, piece, false);
    }
    s
}

fn steps(c: &mut Criterion, dir: &std::path::Path) {
    let mut group = c.benchmark_group("step");
    let sampled = SamplingParams {
        top_k: 64,
        top_p: 0.95,
        ..params(1.0)
    };
    let options = CpuOptions {
        max_seqs: 4,
        ..CpuOptions::default()
    };
    let drafter = model::drafter_of(dir);
    let model = model::load(dir, &LoadOptions { drafter }).unwrap();
    let mut executor = CpuExecutor::new(model, &options).unwrap();
    for context in [512, 2048] {
        let mut s = warm(&mut executor, context, sampled.clone());
        for rows in [1, 5, 9] {
            let inputs = vec![5; rows];
            let step = Step {
                seqs: vec![s.step(&inputs, Some(s.sample(rows - 1, 0)))],
            };
            let id = BenchmarkId::new(format!("verify at {context}"), rows);
            group.bench_function(id, |b| b.iter(|| executor.run(&step).unwrap()));
        }
        for drafts in [1, 4, 8] {
            let step = Step {
                seqs: vec![s.step(&[5], Some(s.sample(0, drafts)))],
            };
            let id = BenchmarkId::new(format!("decode and draft at {context}"), drafts);
            group.bench_function(id, |b| b.iter(|| executor.run(&step).unwrap()));
        }
        let inputs = vec![5; 256];
        let step = Step {
            seqs: vec![s.step(&inputs, None)],
        };
        group.throughput(Throughput::Elements(256));
        let id = BenchmarkId::new("prefill 256 at", context);
        group.bench_function(id, |b| b.iter(|| executor.run(&step).unwrap()));
    }
    group.finish();
}

fn all(c: &mut Criterion) {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    // The table of per-layer embeddings is read by the row; all else is read whole.
    let file = std::fs::metadata(dir.join("model.safetensors"))
        .unwrap()
        .len() as usize;
    let bytes = file - 1024 * 8 * 32 * 2;
    let bandwidth = read_bandwidth(bytes);
    println!(
        "floor of a step: {:.2} MB / {:.1} GB/s on {} threads = {:.0} us",
        bytes as f64 / 1e6,
        bandwidth / 1e9,
        threads(),
        bytes as f64 / bandwidth * 1e6
    );
    products(c, &dir);
    streams(c);
    attention(c);
    steps(c, &dir);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1))
        .sample_size(20);
    targets = all
}
criterion_main!(benches);
