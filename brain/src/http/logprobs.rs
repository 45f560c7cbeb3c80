//! Log-probabilities in OpenAI's shapes.

use serde_json::{Value, json};

use crate::{
    sched::types::{Emitted, TokenId},
    text::tokenizer::{TokenText, Tokenizer},
};

/// A token's text and bytes; a special token's spelling.
fn spelled(tokenizer: &Tokenizer, id: TokenId) -> (String, Vec<u8>) {
    match tokenizer.token(id) {
        TokenText::Bytes(bytes) => (String::from_utf8_lossy(bytes).into_owned(), bytes.to_vec()),
        TokenText::Special(text) => (text.to_owned(), text.as_bytes().to_vec()),
        TokenText::Unknown => (String::new(), Vec::new()),
    }
}

/// A token's text as a completion shows it.
fn text(tokenizer: &Tokenizer, id: TokenId) -> String {
    spelled(tokenizer, id).0
}

/// `logprobs` of a chat choice, for these tokens.
pub(super) fn chat<'a>(tokenizer: &Tokenizer, tokens: impl Iterator<Item = &'a Emitted>) -> Value {
    let entry = |id: TokenId, logprob: f32| {
        let (token, bytes) = spelled(tokenizer, id);
        json!({ "token": token, "logprob": logprob, "bytes": bytes })
    };
    let content: Vec<Value> = tokens
        .filter_map(|token| {
            let logprobs = token.logprobs.as_ref()?;
            let mut shown = entry(token.id, logprobs.chosen);
            shown["top_logprobs"] = logprobs
                .top
                .iter()
                .map(|&(id, logprob)| entry(id, logprob))
                .collect();
            Some(shown)
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

/// `logprobs` of a completion choice, for these tokens; `offset` is where their text begins,
/// and ends behind it.
pub(super) fn completion<'a>(
    tokenizer: &Tokenizer,
    tokens: impl Iterator<Item = &'a Emitted>,
    offset: &mut usize,
) -> Value {
    let mut shown: Vec<String> = Vec::new();
    let (mut chosen, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    for token in tokens {
        let Some(logprobs) = token.logprobs.as_ref() else {
            continue;
        };
        let spelling = text(tokenizer, token.id);
        offsets.push(*offset);
        *offset += spelling.chars().count();
        shown.push(spelling);
        chosen.push(logprobs.chosen);
        let top: serde_json::Map<String, Value> = logprobs
            .top
            .iter()
            .map(|&(id, logprob)| (text(tokenizer, id), json!(logprob)))
            .collect();
        tops.push(Value::Object(top));
    }
    json!({
        "tokens": shown,
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}
