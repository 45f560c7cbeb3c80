//! What a load leaves in memory: the mapped weights, and no copy beside them.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first surprise"
)]

#[path = "support/forms.rs"]
mod forms;
mod support;

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
};

use brain::{
    backend::cpu::{CpuExecutor, CpuOptions},
    model::{self, LoadOptions},
};
use forms::{Stored, Written, quantise};
use safetensors::Dtype;

const HIDDEN: usize = 512;
const WIDE: usize = 4096;
const LAYERS: usize = 2;
const VOCAB: usize = 4096;

/// Writes a model of 32 MB in bf16, its projections in `form`; returns the file's size.
fn write_checkpoint(dir: &Path, form: Written) -> u64 {
    let config = serde_json::json!({
        "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 64, "sliding_window": 64,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let noise = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 4096.0 - 0.5;
    let mut tensors: Vec<Stored> = Vec::new();
    let mut add = |module: &str, rows: usize, cols: usize, form| {
        // One block of rows, repeated: quantising is slow here, and numbers do not matter.
        let block: Vec<f32> = (0..128 * cols).map(noise).collect();
        let matrix = quantise(&format!("model.{module}"), &block, 128, cols, form);
        for mut t in matrix.tensors {
            if t.name.ends_with("weight_shape") {
                t.data[..8].copy_from_slice(&(rows as u64).to_le_bytes());
            } else if t.shape.first() == Some(&128) {
                t.shape[0] = rows;
                t.data = t.data.repeat(rows / 128);
            }
            tensors.push(t);
        }
    };
    add("embed_tokens", VOCAB, HIDDEN, Written::Bf16);
    for i in 0..LAYERS {
        let at = |name: &str| format!("layers.{i}.{name}");
        add(&at("self_attn.q_proj"), 256, HIDDEN, form);
        add(&at("self_attn.k_proj"), 128, HIDDEN, form);
        add(&at("self_attn.v_proj"), 128, HIDDEN, form);
        add(&at("self_attn.o_proj"), HIDDEN, 256, form);
        add(&at("mlp.gate_proj"), WIDE, HIDDEN, form);
        add(&at("mlp.up_proj"), WIDE, HIDDEN, form);
        add(&at("mlp.down_proj"), HIDDEN, WIDE, form);
    }
    let mut vector = |name: String, length: usize| {
        tensors.push(Stored {
            name: format!("model.{name}"),
            dtype: Dtype::BF16,
            shape: vec![length],
            data: half::bf16::from_f32(1.0).to_le_bytes().repeat(length),
        });
    };
    vector("norm.weight".into(), HIDDEN);
    for i in 0..LAYERS {
        for name in [
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "pre_feedforward_layernorm.weight",
            "post_feedforward_layernorm.weight",
        ] {
            vector(format!("layers.{i}.{name}"), HIDDEN);
        }
        vector(format!("layers.{i}.self_attn.q_norm.weight"), 64);
        vector(format!("layers.{i}.self_attn.k_norm.weight"), 64);
        vector(format!("layers.{i}.layer_scalar"), 1);
    }
    let file = forms::file(&tensors);
    std::fs::write(dir.join("model.safetensors"), &file).unwrap();
    file.len() as u64
}

/// Bytes of this process that are in memory now.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .unwrap();
    let kib: u64 = line
        .trim()
        .strip_suffix("kB")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    kib << 10
}

/// Buffers of a step, pages of code, the allocator's slack.
const BESIDE: u64 = 4 << 20;

/// Tests of one process take turns, or they would measure one another.
static TURN: Mutex<()> = Mutex::new(());

fn load_and_measure(form: Written) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let size = write_checkpoint(dir.path(), form);
    let before = resident();
    let model = model::load(dir.path(), &LoadOptions::default()).unwrap();
    let options = CpuOptions {
        threads: 1,
        kv_memory: 8 << 20,
        max_rows: 16,
        max_seqs: 1,
        ..CpuOptions::default()
    };
    let executor = CpuExecutor::new(model, &options).unwrap();
    let grown = resident().saturating_sub(before);
    println!("{form:?}: file {size}, resident {grown}");
    assert!(
        grown <= size + size / 10 + BESIDE,
        "{form:?}: {grown} of {size}"
    );
    drop(executor);
}

#[test]
fn bf16_is_there_once() {
    load_and_measure(Written::Bf16);
}

#[test]
fn fp16_is_there_once() {
    load_and_measure(Written::F16);
}

#[test]
fn fp8_is_there_once() {
    load_and_measure(Written::Fp8Row);
}

#[test]
fn nvfp4_is_there_once() {
    load_and_measure(Written::Nvfp4);
}

#[test]
fn int4_is_there_once() {
    load_and_measure(Written::Int4(32));
}
