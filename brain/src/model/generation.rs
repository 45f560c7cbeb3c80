//! generation_config.json: how a checkpoint wants to be sampled and where it stops.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

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

/// Reads the defaults; what generation_config.json leaves out comes from config.json. `vocab`: tokens
/// of the model, which all that are named must be among.
pub fn parse(
    generation: Option<&[u8]>,
    config: &[u8],
    vocab: usize,
) -> Result<GenerationDefaults, Wrong> {
    let read = |file: &'static str, json: &[u8]| {
        serde_json::from_slice::<Map<String, Value>>(json).map_err(|error| Wrong {
            file,
            problem: ConfigError::Syntax(shown_text(&error.to_string())),
        })
    };
    let generation = generation.map(|json| read(OWN, json)).transpose()?;
    let generation = generation.unwrap_or_default();
    let config = read(MODEL, config)?;
    let text = match config.get("text_config") {
        Some(Value::Object(text)) => text.clone(),
        _ => Map::new(),
    };
    let tokens = |name: &str| {
        let places = [(OWN, &generation), (MODEL, &config), (MODEL, &text)];
        let mut given = places.into_iter().filter_map(|(file, v)| {
            let value = v.get(name).filter(|v| !v.is_null())?;
            Some((file, value))
        });
        match given.next() {
            None => Ok((MODEL, Vec::new())),
            Some((file, v)) => match token_list(v) {
                Some(tokens) => Ok((file, tokens)),
                None => Err(bad(file, name, v, "token ids")),
            },
        }
    };
    let known = |name: &str| {
        let (file, found) = tokens(name)?;
        match found.iter().find(|id| **id as usize >= vocab) {
            None => Ok(found),
            Some(id) => Err(Wrong::field(
                file,
                name,
                format!("names token {id}, and the model has {vocab}"),
            )),
        }
    };
    let own = |name: &str| generation.get(name).filter(|v| !v.is_null());
    let number = |name: &str, default: f32, fits: fn(f32) -> bool, wanted: &str| match own(name) {
        None => Ok(default),
        Some(v) => (v.as_f64().and_then(single))
            .filter(|n| fits(*n))
            .ok_or_else(|| bad(OWN, name, v, wanted)),
    };
    let samples = match own("do_sample") {
        None => false,
        Some(Value::Bool(samples)) => *samples,
        Some(v) => return Err(bad(OWN, "do_sample", v, "true or false")),
    };
    let top_k = match own("top_k") {
        None => 0,
        Some(v) => whole(v).ok_or_else(|| bad(OWN, "top_k", v, "a whole number from 0"))?,
    };
    let temperature = number("temperature", 1.0, |n| n >= 0.0, "0 or a positive number")?;
    let suppressed = known("suppress_tokens")?;
    let distinct: BTreeSet<TokenId> = suppressed.iter().copied().collect();
    if distinct.len() >= vocab {
        let problem = "names every token of the model, so that it could say nothing";
        let (file, _) = tokens("suppress_tokens")?;
        return Err(Wrong::field(file, "suppress_tokens", problem.to_owned()));
    }
    let share = |n: f32| n > 0.0 && n <= 1.0;
    Ok(GenerationDefaults {
        temperature: if samples { temperature } else { 0.0 },
        top_k,
        top_p: number("top_p", 1.0, share, "above 0 and at most 1")?,
        eos: known("eos_token_id")?,
        bos: known("bos_token_id")?.first().copied(),
        pad: known("pad_token_id")?.first().copied(),
        suppressed,
        // What only marks a place for pictures need not be a token of the text.
        video: tokens("video_token_id")?.1.first().copied(),
    })
}

/// A number as it is computed with, unless it is nothing or without end as such.
fn single(n: f64) -> Option<f32> {
    let single = n as f32;
    (n == 0.0 || single.is_normal()).then_some(single)
}

fn whole(value: &Value) -> Option<u32> {
    let n = value.as_f64().filter(|n| n.fract() == 0.0)?;
    (0.0..=f64::from(u32::MAX)).contains(&n).then_some(n as u32)
}

impl Wrong {
    fn field(file: &'static str, name: &str, problem: String) -> Self {
        let field = name.to_owned();
        Self {
            file,
            problem: ConfigError::Field { field, problem },
        }
    }
}

fn bad(file: &'static str, name: &str, value: &Value, wanted: &str) -> Wrong {
    let problem = format!("must be {wanted}, not {}", shown_text(&value.to_string()));
    Wrong::field(file, name, problem)
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

    /// As many tokens as the released models have.
    const VOCAB: usize = 262_144;

    fn parse(generation: Option<&[u8]>, config: &[u8]) -> Result<GenerationDefaults, Wrong> {
        super::parse(generation, config, VOCAB)
    }

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
            "[]",
            r#""x""#,
            "null",
            r#"{"top_k":-1}"#,
            r#"{"top_k":2.5}"#,
            r#"{"top_p":5}"#,
            r#"{"top_p":0}"#,
            r#"{"temperature":-1}"#,
            r#"{"temperature":1e-60}"#,
            r#"{"temperature":1e300}"#,
            r#"{"top_p":1e-60}"#,
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

    #[test]
    fn tokens_that_the_model_has_not_are_an_error_of_their_file() {
        for (generation, config, file) in [
            (r#"{"eos_token_id":[1,262144]}"#, "{}", OWN),
            (r#"{"suppress_tokens":[4294967295]}"#, "{}", OWN),
            ("{}", r#"{"eos_token_id":300000}"#, MODEL),
            ("{}", r#"{"text_config":{"bos_token_id":262144}}"#, MODEL),
        ] {
            let wrong = parse(Some(generation.as_bytes()), config.as_bytes()).unwrap_err();
            assert_eq!(wrong.file, file, "{generation} {config}");
            let problem = wrong.problem.to_string();
            assert!(problem.contains("and the model has 262144"), "{problem}");
        }
        let all = br#"{"suppress_tokens":[2,0,1,1]}"#;
        assert_eq!(super::parse(Some(all), b"{}", 3).unwrap_err().file, OWN);
        assert!(super::parse(Some(all), b"{}", 4).is_ok());
        let last = parse(Some(br#"{"eos_token_id":262143}"#), b"{}").unwrap();
        assert_eq!(last.eos, [262_143]);
    }
}
