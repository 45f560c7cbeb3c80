//! Many rows of a prompt at once, by the kernels that only they take.

use serde_json::Value;

use super::{
    support::scaled::{add_kv_scales, wide},
    *,
};

/// Positions of the models here: enough that a step of a prompt fills the card.
const POSITIONS: u64 = 2048;
/// Their window.
const LONG_WINDOW: u64 = 200;

fn set(config: &mut Value, key: &str, to: u64) {
    let Some(fields) = config.as_object_mut() else {
        return;
    };
    for (name, value) in fields {
        if name == key {
            *value = to.into();
        } else {
            set(value, key, to);
        }
    }
}

/// A checkpoint with heads of released sizes that takes long prompts.
fn long(name: &str) -> tempfile::TempDir {
    let folder = grown(name, 32);
    let path = folder.path().join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    set(&mut config, "max_position_embeddings", POSITIONS);
    set(&mut config, "sliding_window", LONG_WINDOW);
    std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    add_kv_scales(folder.path(), wide);
    folder
}

/// Pieces of a thousand rows, and of so few that none takes these kernels: values alone and keys
/// beside them, in bf16 and in FP8.
#[test]
#[ignore = "needs a card"]
fn runs_of_many_rows_have_the_bits_of_few() {
    let mut compared = 0;
    let tokens: Vec<TokenId> = (0..1400).map(|i| 5 + (i * i * 7 + i) % 89).collect();
    for name in ["31b", "26b", "e4b"] {
        let folder = long(name);
        let alone = model::LoadOptions::default();
        for kv_dtype in [KvChoice::Bf16, KvChoice::Fp8] {
            let options = CudaOptions {
                max_rows: 1200,
                kv_dtype,
                ..small()
            };
            let model = model::load(folder.path(), &alone).unwrap();
            let mut executor = CudaExecutor::new(Arc::new(model), &options).unwrap();
            let request = SamplingParams {
                logprobs: 4,
                ..params(0.8)
            };
            let mut run = |piece: usize| {
                let mut s = Sequence::new(&executor, 0, request.clone());
                for part in tokens[..tokens.len() - 1].chunks(piece) {
                    s.feed(&mut executor, part, false);
                }
                s.tokens = tokens.clone();
                s.go_on(&mut executor, tokens.len(), COUNT, 0);
                bits(&s.emitted)
            };
            let expected = run(40);
            for piece in [1200, 1001, 700, 65] {
                assert_eq!(run(piece), expected, "{name}, {kv_dtype:?}, {piece}");
                compared += 1;
            }
        }
    }
    println!("{compared} generations compared");
}
