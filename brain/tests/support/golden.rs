//! What the reference implementation computed.

use std::path::PathBuf;

use brain::sched::types::TokenId;

/// Every variant.
pub const VARIANTS: [&str; 7] = ["e2b", "e4b", "12b", "26b", "31b", "groups", "all"];

/// A checkpoint and the reference's results on it.
pub struct Golden {
    pub folder: PathBuf,
    pub tokens: Vec<TokenId>,
    pub logits: Vec<Vec<f32>>,
    pub prompt: usize,
    pub rounds: Vec<Vec<usize>>,
}

/// Reads a variant's results.
pub fn golden(name: &str) -> Golden {
    let folder = super::golden_folder(name);
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ints = |name: &str| -> Vec<i64> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    let logits = file.tensor("logits").unwrap();
    let numbers: Vec<f32> = logits
        .data()
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    let width = file.tensor("rounds").unwrap().shape()[1];
    Golden {
        folder,
        tokens: ints("tokens").into_iter().map(|t| t as TokenId).collect(),
        logits: numbers
            .chunks(logits.shape()[1])
            .map(<[f32]>::to_vec)
            .collect(),
        prompt: ints("prompt")[0] as usize,
        rounds: ints("rounds")
            .chunks(width)
            .map(|r| r.iter().map(|x| *x as usize).collect())
            .collect(),
    }
}

/// The same with keys and values stored in FP8 (see tests/goldens/fp8.py), and the scales of keys
/// and of values by layer; those of keys are 0 where a layer stores none.
pub fn golden_fp8(name: &str) -> (Golden, Vec<(f32, f32)>) {
    let plain = golden(name);
    let bytes = std::fs::read(plain.folder.join("golden_fp8.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    let logits = floats("logits");
    let width = file.tensor("logits").unwrap().shape()[1];
    let golden = Golden {
        logits: logits.chunks(width).map(<[f32]>::to_vec).collect(),
        ..plain
    };
    let scales = floats("k_scale").into_iter().zip(floats("v_scale"));
    (golden, scales.collect())
}
