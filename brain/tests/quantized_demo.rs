//! The demonstration checkpoint in four and eight bits: it loads, its error is the reported one,
//! and its tokens are those of its twin, the same weights written out as plain numbers.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

mod support;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use brain::{
    backend::{Executor as _, cpu::CpuExecutor},
    demo,
    model::{LoadOptions, checkpoint::Checkpoint, drafter_of, load},
    quantize::{
        layout::{Format, Recipe},
        run::{Task, Watch, run},
    },
    sched::types::TokenId,
    text::tokenizer::Tokenizer,
};
use safetensors::{Dtype, tensor::TensorView};
use support::{Sequence, options, params};

const PROMPT: &str = "<bos><|turn>user\nRead the file inbox/bado.txt and append its owner to \
    report.txt.<turn|>\n<|turn>model\n";
const TOKENS: usize = 24;

struct Silent;

impl Watch for Silent {
    fn made(&self, _: &Path) {}
    fn look(&self, _: u64) {}
    fn begin(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn again(&self, _: &str) {}
    fn shard(&self, _: &str, _: usize, _: usize) {}
}

fn demo_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo")
}

/// The numbers of E2M1 that are not negative, by code.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => mantissa / 512.0,
        e => (1.0 + mantissa / 8.0) * 2f32.powi(e - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Writes the twin: every quantised matrix as fp32, by the formats' own definition.
fn write_twin(quantised: &Path, twin: &Path) {
    let checkpoint = Checkpoint::open(quantised).unwrap();
    let all: BTreeMap<&str, _> = checkpoint.tensors().map(|t| (t.name(), t)).collect();
    let mut plain: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, t) in &all {
        let scales = name
            .strip_suffix("weight")
            .and_then(|base| all.get(format!("{base}weight_scale").as_str()));
        let Some(scales) = scales else {
            if !name.contains("weight_scale") {
                let data = t.bytes().to_vec();
                plain.push(((*name).to_owned(), t.dtype(), t.shape().to_vec(), data));
            }
            continue;
        };
        let rows = t.shape()[0];
        let number = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
        let values: Vec<f32> = match t.dtype() {
            Dtype::U8 => {
                let factor = number(all[format!("{name}_scale_2").as_str()].bytes());
                let codes = t.bytes().iter().flat_map(|b| [b & 15, b >> 4]);
                codes
                    .enumerate()
                    .map(|(i, code)| {
                        let size = E2M1[usize::from(code & 7)];
                        let sign = if code > 7 { -1.0 } else { 1.0 };
                        sign * size * e4m3(scales.bytes()[i / 16]) * factor
                    })
                    .collect()
            }
            _ => {
                let cols = t.shape()[1];
                let scale = |i: usize| number(&scales.bytes()[i / cols * 4..][..4]);
                let codes = t.bytes().iter().enumerate();
                codes.map(|(i, code)| e4m3(*code) * scale(i)).collect()
            }
        };
        let shape = vec![rows, values.len() / rows];
        let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        plain.push(((*name).to_owned(), Dtype::F32, shape, data));
    }
    std::fs::copy(demo_folder().join("config.json"), twin.join("config.json")).unwrap();
    let views: Vec<_> = plain
        .iter()
        .map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
            (name.as_str(), view)
        })
        .collect();
    safetensors::serialize_to_file(views, None, &twin.join("model.safetensors")).unwrap();
}

/// Greedy tokens and their log-probabilities.
fn generate(dir: &Path) -> (Vec<TokenId>, Vec<f32>) {
    let drafter = drafter_of(dir);
    let model = load(dir, &LoadOptions { drafter }).unwrap();
    let mut options = options();
    options.max_model_len = 256;
    options.max_seqs = 1;
    let mut executor = CpuExecutor::new(model, &options).unwrap();
    let tokenizer = Tokenizer::from_bytes(demo::TOKENIZER, "demo").unwrap();
    let prompt = tokenizer.encode_with_specials(PROMPT).unwrap();
    assert!(prompt.len() + TOKENS < executor.limits().max_model_len);
    let mut params = params(0.0);
    params.logprobs = 1;
    let mut sequence = Sequence::new(&executor, 0, params);
    let tokens = sequence.generate(&mut executor, &prompt, TOKENS, 0);
    let chosen = sequence.emitted.iter().take(TOKENS);
    let chosen = chosen.map(|e| e.logprobs.as_ref().unwrap().chosen);
    (tokens, chosen.collect())
}

#[test]
fn the_demo_in_fewer_bits_says_what_its_twin_says() {
    for format in [Format::Nvfp4, Format::Fp8] {
        let dir = tempfile::tempdir().unwrap();
        let (quantised, twin) = (dir.path().join("q"), dir.path().join("twin"));
        std::fs::create_dir(&twin).unwrap();
        let task = Task {
            source: demo_folder(),
            target: quantised.clone(),
            recipe: Recipe {
                format,
                attention: true,
                shard_size: 4 << 20,
            },
            threads: 2,
        };
        let report = run(&task, &Silent).unwrap();
        let bound = if format == Format::Fp8 { 0.03 } else { 0.09 };
        assert!(report.total.relative_rms < bound, "{}", report.text());
        assert!(report.bytes < report.source_bytes);

        write_twin(&quantised, &twin);
        let (tokens, logprobs) = generate(&quantised);
        let (expected, expected_logprobs) = generate(&twin);
        assert_eq!(tokens, expected, "{format:?}");
        // The scale is applied after the product in one and before it in the other, so that an
        // activation now and then rounds to the neighbouring bf16. A wrong scale would show in
        // every token; a rounding shows in few.
        let apart: Vec<f32> = logprobs
            .iter()
            .zip(&expected_logprobs)
            .map(|(a, b)| (a - b).abs())
            .collect();
        let mean = apart.iter().sum::<f32>() / apart.len() as f32;
        let furthest = apart.iter().copied().fold(0.0, f32::max);
        assert!(
            mean < 0.03 && furthest < 0.5,
            "{format:?} {mean} {furthest}"
        );
    }
}
