//! generation_config.json: how a checkpoint wants to be sampled and where it stops.

use serde_json::Value;

use super::{config::ConfigError, shown::shown_text};
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

/// What is wrong, and in which of the two files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Its name in the folder.
    pub file: &'static str,
    /// What is wrong with it.
    pub problem: ConfigError,
}

const OWN: &str = "generation_config.json";
const MODEL: &str = "config.json";

/// Reads the defaults; what generation_config.json leaves out comes from config.json.
pub fn parse(generation: Option<&[u8]>, config: &[u8]) -> Result<GenerationDefaults, Wrong> {
    let read = |file: &'static str, json: &[u8]| {
        serde_json::from_slice::<Value>(json).map_err(|error| Wrong {
            file,
            problem: ConfigError::Syntax(error.to_string()),
        })
    };
    let generation = generation.map(|json| read(OWN, json)).transpose()?;
    let generation = generation.unwrap_or(Value::Null);
    let config = read(MODEL, config)?;
    let text = config.get("text_config").cloned().unwrap_or(Value::Null);
    let tokens = |name: &str| {
        let places = [(OWN, &generation), (MODEL, &config), (MODEL, &text)];
        let mut given = places.into_iter().filter_map(|(file, v)| {
            let value = v.get(name).filter(|v| !v.is_null())?;
            Some((file, value))
        });
        match given.next() {
            None => Ok(Vec::new()),
            Some((file, v)) => token_list(v).ok_or_else(|| bad(file, name, v, "token ids")),
        }
    };
    let own = |name: &str| generation.get(name).filter(|v| !v.is_null());
    let number = |name: &str, default: f64, fits: fn(f64) -> bool, wanted: &str| match own(name) {
        None => Ok(default),
        Some(v) => (v.as_f64().filter(|n| fits(*n))).ok_or_else(|| bad(OWN, name, v, wanted)),
    };
    let samples = match own("do_sample") {
        None => false,
        Some(Value::Bool(samples)) => *samples,
        Some(v) => return Err(bad(OWN, "do_sample", v, "true or false")),
    };
    let finite = |n: f64| n.is_finite() && n >= 0.0;
    let whole = |n: f64| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&n);
    let share = |n: f64| n > 0.0 && n <= 1.0;
    let temperature = number("temperature", 1.0, finite, "a number from 0")?;
    Ok(GenerationDefaults {
        temperature: if samples { temperature as f32 } else { 0.0 },
        top_k: number("top_k", 0.0, whole, "a whole number from 0")? as u32,
        top_p: number("top_p", 1.0, share, "above 0 and at most 1")? as f32,
        eos: tokens("eos_token_id")?,
        bos: tokens("bos_token_id")?.first().copied(),
        pad: tokens("pad_token_id")?.first().copied(),
        suppressed: tokens("suppress_tokens")?,
        video: tokens("video_token_id")?.first().copied(),
    })
}

fn bad(file: &'static str, name: &str, value: &Value, wanted: &str) -> Wrong {
    let problem = format!("must be {wanted}, not {}", shown_text(&value.to_string()));
    Wrong {
        file,
        problem: ConfigError::Field {
            field: name.to_owned(),
            problem,
        },
    }
}

fn token_list(value: &Value) -> Option<Vec<TokenId>> {
    let one = |v: &Value| TokenId::try_from(v.as_u64()?).ok();
    match value {
        Value::Array(list) => list.iter().map(one).collect(),
        single => Some(vec![one(single)?]),
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
    fn nonsense_is_an_error_of_its_file() {
        for json in [
            r#"{"eos_token_id":"x"}"#,
            r#"{"eos_token_id":[-1]}"#,
            r#"{"top_k":-1}"#,
            r#"{"top_k":2.5}"#,
            r#"{"top_p":5}"#,
            r#"{"top_p":0}"#,
            r#"{"temperature":-1}"#,
            r#"{"do_sample":"yes"}"#,
            "{",
        ] {
            let wrong = parse(Some(json.as_bytes()), b"{}").unwrap_err();
            assert_eq!(wrong.file, "generation_config.json", "{json}");
        }
        for json in [
            r#"{"eos_token_id":"x"}"#,
            r#"{"text_config":{"bos_token_id":[{}]}}"#,
            "{",
        ] {
            let wrong = parse(Some(b"{}"), json.as_bytes()).unwrap_err();
            assert_eq!(wrong.file, "config.json", "{json}");
        }
    }
}
