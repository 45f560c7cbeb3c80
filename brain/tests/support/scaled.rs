//! Golden checkpoints with scales of an FP8 cache beside their projections, as ModelOpt writes them.

use std::path::Path;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Writes scales into the files of a checkpoint: of keys and of values, by layer; 0 leaves one out.
pub fn add_kv_scales(folder: &Path, scales: impl Fn(usize) -> (f32, f32)) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            rewrite(&path, &scales);
        }
    }
}

/// Scales that no power of two is: what random keys and values of the goldens fit.
pub fn uneven(layer: usize) -> (f32, f32) {
    let more = layer as f32;
    (0.0093 + 0.0017 * more, 0.0101 + 0.0013 * more)
}

/// The same for heads of up to 512 elements, whose values reach the root of that.
pub fn wide(layer: usize) -> (f32, f32) {
    let more = layer as f32;
    (0.031 + 0.0017 * more, 0.0521 + 0.0013 * more)
}

fn rewrite(path: &Path, scales: &impl Fn(usize) -> (f32, f32)) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut added = Vec::new();
    for name in file.names() {
        let Some(attention) = name.strip_suffix(".k_proj.weight") else {
            continue;
        };
        let layer = attention.split("layers.").nth(1).unwrap();
        let layer: usize = layer.split('.').next().unwrap().parse().unwrap();
        let (key, value) = scales(layer);
        if key > 0.0 {
            added.push((format!("{attention}.k_proj.k_scale"), key.to_le_bytes()));
        }
        if value > 0.0 {
            added.push((format!("{attention}.v_proj.v_scale"), value.to_le_bytes()));
        }
    }
    let mut views: Vec<(String, TensorView<'_>)> = file.tensors();
    for (name, scale) in &added {
        let view = TensorView::new(Dtype::F32, vec![1], scale).unwrap();
        views.push((name.clone(), view));
    }
    let rewritten = safetensors::serialize(views, None).unwrap();
    std::fs::write(path, rewritten).unwrap();
    let index = path.with_file_name("model.safetensors.index.json");
    if !index.exists() {
        return;
    }
    let text = std::fs::read(&index).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    for (name, _) in added {
        json["weight_map"][name] = path.file_name().unwrap().to_str().unwrap().into();
    }
    std::fs::write(&index, json.to_string()).unwrap();
}
