//! Random bf16 checkpoints in the shape of the goldens, a few times as wide: heads of the sizes that
//! real models have.

use std::path::Path;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

/// Sizes in config.json that grow.
const SIZES: [&str; 7] = [
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "moe_intermediate_size",
    "backbone_hidden_size",
];
/// Tensors whose rows are tokens, experts, clusters or scalars.
const FIXED_ROWS: [&str; 7] = [
    "embed_tokens",
    "router.proj",
    "per_expert_scale",
    "centroids",
    "token_ordering",
    "layer_scalar",
    "experts.",
];

/// A checkpoint `factor` times as wide as the golden of this name, with its assistant.
pub fn grown(name: &str, factor: usize) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    grow(&super::golden_folder(name), copy.path(), factor);
    copy
}

fn grow(from: &Path, to: &Path, factor: usize) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            std::fs::create_dir(&target).unwrap();
            grow(&path, &target, factor);
        } else if name == "config.json" {
            let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            widen(&mut config, factor);
            std::fs::write(target, serde_json::to_vec(&config).unwrap()).unwrap();
        } else if name.starts_with("model") && name.ends_with(".safetensors") {
            fill(&path, &target, factor);
        } else if name != "golden.safetensors" {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

fn widen(config: &mut Value, factor: usize) {
    let Some(fields) = config.as_object_mut() else {
        return;
    };
    for (key, value) in fields {
        match value.as_u64() {
            Some(size) if SIZES.contains(&key.as_str()) => {
                *value = (size * factor as u64).into();
            }
            _ => widen(value, factor),
        }
    }
}

/// Normal numbers, the same on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A sum of uniforms: near enough.
    fn normal(&mut self) -> f32 {
        ((0..6).map(|_| self.uniform()).sum::<f64>() - 3.0) as f32 * std::f32::consts::SQRT_2
    }
}

fn fill(from: &Path, to: &Path, factor: usize) {
    let bytes = std::fs::read(from).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let made: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, t)| {
            if t.dtype() != Dtype::F32 {
                return (name, t.dtype(), t.shape().to_vec(), t.data().to_vec());
            }
            let fixed = FIXED_ROWS.iter().any(|part| name.contains(part));
            let grow = |(i, size): (usize, &usize)| match i == 0 && fixed {
                true => *size,
                false => size * factor,
            };
            let shape: Vec<usize> = t.shape().iter().enumerate().map(grow).collect();
            let seed = name
                .bytes()
                .fold(7, |h: u64, b| h.wrapping_mul(131).wrapping_add(b.into()));
            let data = numbers(&name, &shape, &mut Random(seed));
            (name, Dtype::BF16, shape, data)
        })
        .collect();
    let views: Vec<(&str, TensorView<'_>)> = made
        .iter()
        .map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
            (name.as_str(), view)
        })
        .collect();
    safetensors::serialize_to_file(views, None, to).unwrap();
}

/// Vectors near one, matrices that keep a row's size, embeddings that make logits of a few units.
fn numbers(name: &str, shape: &[usize], random: &mut Random) -> Vec<u8> {
    let count: usize = shape.iter().product();
    let (center, spread) = match shape {
        [_] => (1.0, 0.1),
        [.., cols] if name.contains("embed_tokens") => (0.0, 3.0 / (*cols as f32).sqrt()),
        [.., cols] => (0.0, 1.0 / (*cols as f32).sqrt()),
        [] => (1.0, 0.0),
    };
    (0..count)
        .flat_map(|_| half::bf16::from_f32(center + spread * random.normal()).to_le_bytes())
        .collect()
}
