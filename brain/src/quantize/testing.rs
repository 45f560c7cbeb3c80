//! Weights, checkpoints and patterns for tests.

use std::path::Path;

use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use crate::model::{
    config::parse_target,
    inventory::{Inventory, Storage},
};

/// Normally distributed around 0 with a deviation of 0.02, the same for the same seed.
pub(crate) fn gaussian(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = move || {
        // SplitMix64: every state gives another number.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let normal = |_| {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), uniform());
        (radius * (std::f64::consts::TAU * angle).cos() * 0.02) as f32
    };
    (0..n).map(normal).collect()
}

/// Whether a shell pattern, in which `*` stands for anything, matches a name.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[test]
fn patterns_are_the_shells() {
    for (pattern, name, expected) in [
        ("lm_head", "lm_head", true),
        ("lm_head", "lm_head.x", false),
        ("a.self_attn*", "a.self_attn.q_proj", true),
        ("a.self_attn*", "b.self_attn.q_proj", false),
        ("*.router", "x.router", true),
        ("*.router", "x.router.proj", false),
        ("a*b*c", "a1b2c", true),
        ("a*b*c", "a1c", false),
    ] {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }
}

/// Writes a checkpoint in bf16 whose sizes all divide into blocks, with experts in every layer.
/// `value` makes weight `i` of a tensor from a normally distributed one.
pub(crate) fn mixture(dir: &Path, value: impl Fn(usize, f32) -> f32) {
    mixture_spelled(dir, str::to_owned, value);
}

/// The same with other names of tensors.
pub(crate) fn mixture_spelled(
    dir: &Path,
    spell: impl Fn(&str) -> String,
    value: impl Fn(usize, f32) -> f32,
) {
    let config = json!({
        "model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
        "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": true, "sliding_window": 8,
        "max_position_embeddings": 128, "enable_moe_block": true, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 32,
    });
    let text = config.to_string();
    let plan = parse_target(text.as_bytes()).unwrap();
    let slots = Inventory::target(&plan).slots;
    let mut tensors: Vec<(String, Vec<usize>)> = Vec::new();
    for slot in slots.into_iter().filter(|s| !s.optional) {
        match slot.storage {
            Storage::Matrix => tensors.push((format!("{}.weight", slot.name), slot.shape)),
            Storage::Experts(m) => {
                let wide = vec![m.experts, 2 * m.intermediate, plan.hidden];
                tensors.push((format!("{}.gate_up_proj", slot.name), wide));
                tensors.push((format!("{}.down_proj", slot.name), slot.shape));
            }
            _ => tensors.push((slot.name, slot.shape)),
        }
    }
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .enumerate()
        .map(|(seed, (_, shape))| {
            let weights = gaussian(shape.iter().product(), seed as u64);
            let weights = weights.iter().enumerate().map(|(i, w)| value(i, *w));
            weights
                .flat_map(|w| half::bf16::from_f32(w).to_le_bytes())
                .collect()
        })
        .collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), data).unwrap();
        (format!("model.language_model.{}", spell(name)), view)
    });
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), text).unwrap();
    let views: Vec<_> = views.collect();
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}
