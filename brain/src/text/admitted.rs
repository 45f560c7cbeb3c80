//! Which `tokenizer.json` is one of Gemma's: what it is made of, checked before a library that reads any
//! kind builds it.
//!
//! brain does a tokenizer's decoding itself ([`super::detok`]), and encodes pieces of a text one by one.
//! Both rest on what is checked here, and so does that tokens are a function of the text.

use std::collections::HashSet;

use serde::{
    Deserialize,
    de::{Deserializer, MapAccess, Visitor},
};
use serde_json::{Value, json};

#[derive(Deserialize)]
struct File {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    decoder: Option<Value>,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    byte_fallback: Option<bool>,
    vocab: Vocab,
}

/// Tokens by spelling, each once and each with an id of its own.
struct Vocab(HashSet<String>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tokens;
        impl<'de> Visitor<'de> for Tokens {
            type Value = Vocab;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a vocabulary: ids by token")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let (mut tokens, mut ids) = (HashSet::new(), HashSet::new());
                while let Some((token, id)) = map.next_entry::<String, u32>()? {
                    if !ids.insert(id) {
                        let message = format!("token id {id} stands for two tokens");
                        return Err(serde::de::Error::custom(message));
                    }
                    if tokens.contains(&token) {
                        let message = format!("token {token:?} has two ids");
                        return Err(serde::de::Error::custom(message));
                    }
                    tokens.insert(token);
                }
                Ok(Vocab(tokens))
            }
        }
        deserializer.deserialize_map(Tokens)
    }
}

/// Looks at a `tokenizer.json`.
///
/// # Errors
/// What is wrong with it, or is otherwise than Gemma's.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let model = &file.model;
    if model.kind.as_deref() != Some("BPE") {
        let kind = model.kind.as_deref().unwrap_or("unnamed");
        return Err(format!(
            "its model is of the kind {kind:.40}; Gemma's is BPE"
        ));
    }
    if model.dropout.is_some_and(|share| share != 0.0) {
        return Err(
            "its model has dropout: the same text would have other tokens each time".into(),
        );
    }
    for (name, text) in [
        (
            "continuing_subword_prefix",
            &model.continuing_subword_prefix,
        ),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if text.as_ref().is_some_and(|text| !text.is_empty()) {
            return Err(format!("its model has a {name}; Gemma's has none"));
        }
    }
    let missing = (0..=255).find(|byte| !model.vocab.0.contains(&format!("<0x{byte:02X}>")));
    match (model.byte_fallback, missing) {
        (Some(true), None) => {}
        (Some(true), Some(byte)) => return Err(format!("it has no token <0x{byte:02X}>")),
        _ => {
            return Err(
                "its model has no byte_fallback; Gemma's spells by bytes what it lacks".into(),
            );
        }
    }
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    if !steps(file.normalizer, "normalizers")
        .iter()
        .all(|s| *s == space)
    {
        return Err("its normalizer is another than Gemma's, which replaces \" \" by \"▁\"".into());
    }
    let splits = |step: &Value| step["type"] == "Split";
    if !steps(file.pre_tokenizer, "pretokenizers")
        .iter()
        .all(splits)
    {
        return Err("its pre_tokenizer is another than Gemma's, which splits".into());
    }
    for step in steps(file.decoder, "decoders") {
        match step["type"].as_str() {
            Some("ByteFallback" | "Fuse") => {}
            Some("Replace") if step["content"] == " " && step["pattern"]["String"] == "▁" => {}
            other => {
                return Err(format!(
                    "its decoder has the step {:.40}; Gemma's are Replace \"▁\" by \" \", ByteFallback \
                     and Fuse",
                    other.unwrap_or("(none)")
                ));
            }
        }
    }
    Ok(())
}

/// The steps of a part that is absent, a step, or a sequence of such.
fn steps(part: Option<Value>, list: &str) -> Vec<Value> {
    match part {
        None | Some(Value::Null) => Vec::new(),
        Some(mut part) if part["type"] == "Sequence" => match part[list].take() {
            Value::Array(steps) => steps,
            other => vec![other],
        },
        Some(part) => vec![part],
    }
}
