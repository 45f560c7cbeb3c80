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
