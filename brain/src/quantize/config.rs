//! How the result says what it is: `quantization_config` in config.json and hf_quant_config.json,
//! in the layout of NVIDIA's ModelOpt, which other engines read too.
//!
//! No activations were seen, so no scales of activations are written: the recipes are those that
//! need none. NVFP4 is weight-only (`W4A16_NVFP4`), FP8 has a scale per row and lets an engine scale
//! activations token by token (`FP8_PER_CHANNEL_PER_TOKEN`).

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::layout::{Format, Layout};

/// Why a configuration cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("config.json is no JSON object: {0}")]
pub struct NoObject(String);

/// ModelOpt's name of a format.
pub fn algorithm(format: Format) -> &'static str {
    match format {
        Format::Nvfp4 => "W4A16_NVFP4",
        Format::Fp8 => "FP8_PER_CHANNEL_PER_TOKEN",
    }
}

/// config.json of the source with the recipe in it.
pub fn config(source: &[u8], format: Format, exclude: &[String]) -> Result<Value, NoObject> {
    let mut config: Map<String, Value> =
        serde_json::from_slice(source).map_err(|error| NoObject(error.to_string()))?;
    let weights = match format {
        Format::Nvfp4 => {
            json!({"num_bits": 4, "type": "float", "dynamic": false, "group_size": 16})
        }
        Format::Fp8 => json!({"num_bits": 8, "type": "float", "dynamic": false,
            "strategy": "channel"}),
    };
    let mut group = json!({"weights": weights, "targets": ["Linear"]});
    if format == Format::Fp8 {
        group["input_activations"] = json!({"num_bits": 8, "type": "float", "dynamic": true,
            "strategy": "token"});
    }
    let mut recipe = json!({
        "quant_method": "modelopt",
        "quant_algo": algorithm(format),
        "config_groups": {"group_0": group},
        "ignore": exclude,
        "producer": producer(),
    });
    if format == Format::Nvfp4 {
        recipe["group_size"] = json!(16);
    }
    config.insert("quantization_config".into(), recipe);
    Ok(Value::Object(config))
}

/// hf_quant_config.json.
pub fn beside(format: Format, exclude: &[String]) -> Value {
    let mut recipe = json!({
        "quant_algo": algorithm(format),
        "kv_cache_quant_algo": null,
        "exclude_modules": exclude,
    });
    if format == Format::Nvfp4 {
        recipe["group_size"] = json!(16);
    }
    json!({"producer": producer(), "quantization": recipe})
}

/// Readers know the layout by this name.
fn producer() -> Value {
    let version = format!("layout written by brain {}", env!("CARGO_PKG_VERSION"));
    json!({"name": "modelopt", "version": version})
}

/// Modules that are not quantised, as shell patterns: exactly these and none of the others.
pub fn exclude(layout: &Layout, towers: &BTreeSet<String>) -> Vec<String> {
    let mut patterns: BTreeSet<String> = towers.iter().map(|t| format!("{t}*")).collect();
    // The head is the embedding where there is no tensor of its own.
    patterns.insert("lm_head".into());
    for module in &layout.kept {
        patterns.insert(widest(module, &layout.encoded));
    }
    patterns.into_iter().collect()
}

/// The block around a module if nothing in it is encoded, else the module itself. Engines that
/// join query, key and value ask for the joined name, which only a block's pattern matches.
fn widest(module: &str, encoded: &BTreeSet<String>) -> String {
    let block = ["self_attn", "router", "experts"]
        .into_iter()
        .find_map(|block| {
            let end = module.find(&format!(".{block}."))? + 1 + block.len();
            Some(&module[..end])
        });
    match block {
        Some(block) if !encoded.iter().any(|e| e.starts_with(block)) => format!("{block}*"),
        _ => module.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_keeps_what_it_had() {
        let exclude = ["lm_head".to_owned()];
        let made = config(
            br#"{"a": 1, "text_config": {"b": 2}}"#,
            Format::Nvfp4,
            &exclude,
        );
        let made = made.unwrap();
        assert_eq!(
            (&made["a"], &made["text_config"]["b"]),
            (&json!(1), &json!(2))
        );
        let recipe = &made["quantization_config"];
        assert_eq!(recipe["quant_algo"], "W4A16_NVFP4");
        assert_eq!(recipe["ignore"], json!(["lm_head"]));
        assert!(config(b"[]", Format::Fp8, &exclude).is_err());
        let beside = beside(Format::Fp8, &exclude);
        assert_eq!(
            beside["quantization"]["exclude_modules"],
            json!(["lm_head"])
        );
        assert!(beside["quantization"].get("group_size").is_none());
    }
}
