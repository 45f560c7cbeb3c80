//! A checkpoint of the demo model's shape with random weights, written to a folder.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a bench")]

use std::path::Path;

use safetensors::{Dtype, tensor::TensorView};

const HIDDEN: usize = 256;
const FFN: usize = 1024;
const VOCAB: usize = 1024;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const PER_LAYER: usize = 32;
const KINDS: &str = "ssFssFsF";
const SHARED: usize = 2;

/// Bytes of the weights that a decode step reads: everything but the two tables.
pub fn step_bytes() -> usize {
    let mut weights = 0;
    tensors(|name, shape| {
        let table = name.contains("embed_tokens_per_layer");
        if !table {
            weights += shape.iter().product::<usize>();
        }
    });
    2 * weights
}

fn tensors(mut add: impl FnMut(&str, &[usize])) {
    let kinds: Vec<char> = KINDS.chars().collect();
    add("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
    add(
        "model.embed_tokens_per_layer.weight",
        &[VOCAB, kinds.len() * PER_LAYER],
    );
    add(
        "model.per_layer_model_projection.weight",
        &[kinds.len() * PER_LAYER, HIDDEN],
    );
    add("model.per_layer_projection_norm.weight", &[PER_LAYER]);
    add("model.norm.weight", &[HIDDEN]);
    for (i, kind) in kinds.iter().enumerate() {
        layer(
            &format!("model.layers.{i}"),
            *kind,
            i + SHARED < kinds.len(),
            HIDDEN,
            FFN,
            &mut add,
        );
        let mut part =
            |name: &str, shape: &[usize]| add(&format!("model.layers.{i}.{name}"), shape);
        part("per_layer_input_gate.weight", &[PER_LAYER, HIDDEN]);
        part("per_layer_projection.weight", &[HIDDEN, PER_LAYER]);
        part("post_per_layer_input_norm.weight", &[HIDDEN]);
    }
}

fn layer(
    prefix: &str,
    kind: char,
    owns: bool,
    hidden: usize,
    ffn: usize,
    add: &mut impl FnMut(&str, &[usize]),
) {
    let dim = if kind == 'F' { 128 } else { 64 };
    let mut part = |name: &str, shape: &[usize]| add(&format!("{prefix}.{name}"), shape);
    part("self_attn.q_proj.weight", &[HEADS * dim, hidden]);
    part("self_attn.o_proj.weight", &[hidden, HEADS * dim]);
    part("self_attn.q_norm.weight", &[dim]);
    if owns {
        part("self_attn.k_proj.weight", &[KV_HEADS * dim, hidden]);
        part("self_attn.v_proj.weight", &[KV_HEADS * dim, hidden]);
        part("self_attn.k_norm.weight", &[dim]);
    }
    part("mlp.gate_proj.weight", &[ffn, hidden]);
    part("mlp.up_proj.weight", &[ffn, hidden]);
    part("mlp.down_proj.weight", &[hidden, ffn]);
    for norm in [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ] {
        part(&format!("{norm}.weight"), &[hidden]);
    }
    part("layer_scalar", &[1]);
}

fn assistant_tensors(mut add: impl FnMut(&str, &[usize])) {
    let hidden = 128;
    add("pre_projection.weight", &[hidden, 2 * HIDDEN]);
    add("post_projection.weight", &[HIDDEN, hidden]);
    add("model.embed_tokens.weight", &[VOCAB, hidden]);
    add("model.norm.weight", &[hidden]);
    add("masked_embedding.centroids.weight", &[64, hidden]);
    for (i, kind) in "sssF".chars().enumerate() {
        layer(
            &format!("model.layers.{i}"),
            kind,
            false,
            hidden,
            256,
            &mut add,
        );
    }
}

fn random(name: &str, len: usize) -> Vec<u8> {
    let mut x = name
        .bytes()
        .fold(1u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
    let norm = name.contains("norm") || name.contains("scalar");
    let mut bytes = Vec::with_capacity(2 * len);
    for _ in 0..len {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let unit = (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let value = if norm { 1.0 + 0.1 * unit } else { 0.08 * unit };
        bytes.extend(half::bf16::from_f32(value).to_le_bytes());
    }
    bytes
}

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (
            name.as_str(),
            TensorView::new(*dtype, shape.clone(), data).unwrap(),
        )
    });
    safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, path).unwrap();
}

/// Writes target and assistant.
pub fn make(folder: &Path) {
    let text = serde_json::json!({
        "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": KINDS.len(),
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 64,
        "global_head_dim": 128, "sliding_window": 512, "max_position_embeddings": 4096,
        "layer_types": KINDS.chars().map(kind).collect::<Vec<_>>(),
        "num_kv_shared_layers": SHARED, "hidden_size_per_layer_input": PER_LAYER,
        "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0,
    });
    std::fs::write(folder.join("config.json"), text.to_string()).unwrap();
    let mut all = Tensors::new();
    tensors(|name, shape| {
        let data = random(name, shape.iter().product());
        all.push((name.to_owned(), Dtype::BF16, shape.to_vec(), data));
    });
    write(&folder.join("model.safetensors"), &all);

    let folder = folder.join("assistant");
    std::fs::create_dir_all(&folder).unwrap();
    let mut draft = text;
    draft["hidden_size"] = 128.into();
    draft["intermediate_size"] = 256.into();
    draft["num_hidden_layers"] = 4.into();
    draft["layer_types"] = "sssF".chars().map(kind).collect::<Vec<_>>().into();
    draft["num_kv_shared_layers"] = 4.into();
    draft["hidden_size_per_layer_input"] = 0.into();
    draft["final_logit_softcapping"] = serde_json::Value::Null;
    let config = serde_json::json!({
        "model_type": "gemma4_assistant", "backbone_hidden_size": HIDDEN,
        "use_ordered_embeddings": true, "num_centroids": 64,
        "centroid_intermediate_top_k": 16, "text_config": draft,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut all = Tensors::new();
    assistant_tensors(|name, shape| {
        let data = random(name, shape.iter().product());
        all.push((name.to_owned(), Dtype::BF16, shape.to_vec(), data));
    });
    let ordering = (0..VOCAB as i64).flat_map(i64::to_le_bytes).collect();
    all.push((
        "masked_embedding.token_ordering".into(),
        Dtype::I64,
        vec![VOCAB],
        ordering,
    ));
    write(&folder.join("model.safetensors"), &all);
}

fn kind(c: char) -> &'static str {
    if c == 'F' {
        "full_attention"
    } else {
        "sliding_attention"
    }
}
