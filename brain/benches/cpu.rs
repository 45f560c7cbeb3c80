//! The CPU back end: single products, attention, and whole steps of the demo model.
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
    model::{self, LoadOptions, plan::Kind},
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

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    for (kind, head_dim) in [(Kind::Sliding, 64), (Kind::Full, 128)] {
        let shape = HeadShape {
            heads: 4,
            kv_heads: 2,
            head_dim,
            kind,
        };
        for rows in [1, 5, 64] {
            let mut probe = AttentionProbe::new(shape, rows, 2048, 1, Level::detect()).unwrap();
            let id = BenchmarkId::new(format!("{kind:?} {head_dim}"), rows);
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
    let model = model::load(dir, &LoadOptions::default()).unwrap();
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
