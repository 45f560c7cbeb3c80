//! Golden checkpoints rewritten in other weight forms, each with its dequantised twin.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses its own part"
)]

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::{
    forms::{self, Stored, Written, quantise},
    support::golden_folder,
};

/// A checkpoint in some forms, and one of plain fp32 numbers that are the same.
pub struct Pair {
    pub quantised: tempfile::TempDir,
    pub twin: tempfile::TempDir,
}

/// What is done with the tensors that are not quantised.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// They stay fp32, and so do activations.
    Plain,
    /// They become bf16, and so do activations.
    Bf16,
}

/// Rewrites golden `name`: `form` says what becomes of its `n`-th matrix, drafter's included.
pub fn pair(name: &str, rest: Rest, form: impl Fn(usize) -> Written) -> Pair {
    let pair = Pair {
        quantised: tempfile::tempdir().unwrap(),
        twin: tempfile::tempdir().unwrap(),
    };
    let from = golden_folder(name);
    rewrite(&from, &pair, Path::new(""), rest, &form);
    rewrite(&from, &pair, Path::new("assistant"), rest, &form);
    pair
}

fn rewrite(from: &Path, pair: &Pair, sub: &Path, rest: Rest, form: &dyn Fn(usize) -> Written) {
    let (from, to, twin) = (
        from.join(sub),
        pair.quantised.path().join(sub),
        pair.twin.path().join(sub),
    );
    for folder in [&to, &twin] {
        std::fs::create_dir_all(folder).unwrap();
        for file in ["config.json", "generation_config.json"] {
            if from.join(file).is_file() {
                std::fs::copy(from.join(file), folder.join(file)).unwrap();
            }
        }
    }
    let (mut quantised, mut plain) = (Vec::new(), Vec::new());
    let mut count = 0;
    for tensor in read_all(&from) {
        let Some(matrices) = matrices(&tensor) else {
            let tensor = match (rest, tensor.dtype) {
                (Rest::Bf16, Dtype::F32) => halved(&tensor),
                _ => tensor,
            };
            plain.push(tensor.clone());
            quantised.push(tensor);
            continue;
        };
        for (base, rows, cols, values) in matrices {
            let mut form = form(count);
            if cols % 2 == 1 && matches!(form, Written::Nvfp4 | Written::Nvfp4Packed) {
                form = Written::Fp8Row;
            }
            let matrix = quantise(&base, &values, rows, cols, form);
            plain.extend(quantise(&base, &matrix.values, rows, cols, Written::F32).tensors);
            quantised.extend(matrix.tensors);
            count += 1;
        }
    }
    for (folder, tensors) in [(to, quantised), (twin, plain)] {
        std::fs::write(folder.join("model.safetensors"), forms::file(&tensors)).unwrap();
    }
}

/// Every tensor of a folder's weight files.
fn read_all(folder: &Path) -> Vec<Stored> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| {
            p.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("model")
        })
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let bytes = std::fs::read(file).unwrap();
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        all.extend(parsed.tensors().into_iter().map(|(name, t)| Stored {
            name,
            dtype: t.dtype(),
            shape: t.shape().to_vec(),
            data: t.data().to_vec(),
        }));
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

fn numbers(tensor: &Stored) -> Vec<f32> {
    let bytes = tensor.data.chunks_exact(4);
    bytes
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn halved(tensor: &Stored) -> Stored {
    let words = numbers(tensor).into_iter();
    Stored {
        dtype: Dtype::BF16,
        data: words
            .flat_map(|x| half::bf16::from_f32(x).to_le_bytes())
            .collect(),
        ..tensor.clone()
    }
}

type Module = (String, usize, usize, Vec<f32>);

/// The projections that a tensor holds; stacks of experts are taken apart.
fn matrices(tensor: &Stored) -> Option<Vec<Module>> {
    let name = tensor.name.as_str();
    let values = || numbers(tensor);
    if let Some(base) = name.strip_suffix("_proj.weight") {
        let base = format!("{base}_proj");
        return Some(vec![(base, tensor.shape[0], tensor.shape[1], values())]);
    }
    let (base, gates) = match name.strip_suffix(".gate_up_proj") {
        Some(base) => (base, true),
        None => (
            name.strip_suffix("experts.down_proj")
                .map(|_| name.strip_suffix(".down_proj"))??,
            false,
        ),
    };
    let (experts, rows, cols) = (tensor.shape[0], tensor.shape[1], tensor.shape[2]);
    let values = values();
    let mut all = Vec::new();
    for e in 0..experts {
        let matrix = &values[e * rows * cols..(e + 1) * rows * cols];
        if gates {
            let (gate, up) = matrix.split_at(matrix.len() / 2);
            all.push((
                format!("{base}.{e}.gate_proj"),
                rows / 2,
                cols,
                gate.to_vec(),
            ));
            all.push((format!("{base}.{e}.up_proj"), rows / 2, cols, up.to_vec()));
        } else {
            all.push((format!("{base}.{e}.down_proj"), rows, cols, matrix.to_vec()));
        }
    }
    Some(all)
}
