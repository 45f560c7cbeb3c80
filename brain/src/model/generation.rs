//! generation_config.json: how a checkpoint wants to be sampled and where it stops.

use serde_json::Value;

use super::config::ConfigError;
use crate::sched::types::TokenId;

/// Defaults of a checkpoint for requests that leave them out.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// 0 where the checkpoint does not sample.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// Tokens that end a generation.
    pub eos: Vec<TokenId>,
    /// Begins a prompt.
    pub bos: Option<TokenId>,
    /// Fills up.
    pub pad: Option<TokenId>,
    /// Never emitted.
    pub suppressed: Vec<TokenId>,
    /// Stands for a video, in models that see. Only the target's tokenizer knows it.
    pub video: Option<TokenId>,
}

/// Reads the defaults; what generation_config.json leaves out comes from config.json.
pub fn parse(generation: Option<&[u8]>, config: &[u8]) -> Result<GenerationDefaults, ConfigError> {
    let read = |json: &[u8]| {
        serde_json::from_slice::<Value>(json).map_err(|e| ConfigError::Syntax(e.to_string()))
    };
    let generation = generation.map(read).transpose()?.unwrap_or(Value::Null);
    let config = read(config)?;
    let text = config.get("text_config").cloned().unwrap_or(Value::Null);
    let find = |name: &str| {
        [&generation, &config, &text]
            .into_iter()
            .find_map(|v| v.get(name).filter(|v| !v.is_null()))
    };
    let tokens = |name: &str| find(name).map_or(Ok(Vec::new()), |v| token_list(name, v));
    let number = |name: &str, default: f64| match generation.get(name).filter(|v| !v.is_null()) {
        None => Ok(default),
        Some(v) => v
            .as_f64()
            .filter(|n| n.is_finite() && *n >= 0.0)
            .ok_or_else(|| bad(name, v)),
    };
    let samples = generation
        .get("do_sample")
        .and_then(Value::as_bool)
        .unwrap_or(false);
    let temperature = number("temperature", 1.0)?;
    Ok(GenerationDefaults {
        temperature: if samples { temperature as f32 } else { 0.0 },
        top_k: number("top_k", 0.0)?.min(f64::from(u32::MAX)) as u32,
        top_p: number("top_p", 1.0)?.min(1.0) as f32,
        eos: tokens("eos_token_id")?,
        bos: tokens("bos_token_id")?.first().copied(),
        pad: tokens("pad_token_id")?.first().copied(),
        suppressed: tokens("suppress_tokens")?,
        video: tokens("video_token_id")?.first().copied(),
    })
}

fn bad(name: &str, value: &Value) -> ConfigError {
    ConfigError::Field {
        field: name.to_owned(),
        problem: format!("{value} makes no sense"),
    }
}

fn token_list(name: &str, value: &Value) -> Result<Vec<TokenId>, ConfigError> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|t| TokenId::try_from(t).ok())
            .ok_or_else(|| bad(name, value))
    };
    match value {
        Value::Array(list) => list.iter().map(one).collect(),
        single => Ok(vec![one(single)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_config_wins_and_config_fills_in() {
        let generation = br#"{"do_sample":true,"temperature":1.0,"top_k":64,"top_p":0.95,
            "eos_token_id":[1,106,50],"suppress_tokens":[258883,258882]}"#;
        let config =
            br#"{"eos_token_id":[1,106],"video_token_id":258884,"text_config":{"bos_token_id":2,"pad_token_id":0}}"#;
        let d = parse(Some(generation), config).unwrap();
        assert_eq!((d.temperature, d.top_k, d.top_p), (1.0, 64, 0.95));
        assert_eq!((d.eos, d.bos, d.pad), (vec![1, 106, 50], Some(2), Some(0)));
        assert_eq!(d.suppressed, [258_883, 258_882]);
        assert_eq!(d.video, Some(258_884));
        let plain = parse(None, config).unwrap();
        assert_eq!((plain.temperature, plain.eos), (0.0, vec![1, 106]));
        let single = parse(Some(br#"{"eos_token_id":1}"#), config).unwrap();
        assert_eq!(single.eos, [1]);
    }

    #[test]
    fn nonsense_is_an_error() {
        for json in [
            r#"{"eos_token_id":"x"}"#,
            r#"{"top_k":-1}"#,
            r#"{"eos_token_id":[-1]}"#,
            "{",
        ] {
            assert!(parse(Some(json.as_bytes()), b"{}").is_err(), "{json}");
        }
    }
}
