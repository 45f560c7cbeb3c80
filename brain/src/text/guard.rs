//! Keeps text of messages from spelling special tokens once a template has been rendered.
//!
//! Before rendering, a character that is in no input is put behind every character that could
//! begin a special token. What the template writes itself stays whole. After rendering the text
//! is split at the special tokens that are still spelled, and the mark is taken out of the rest:
//! the text in between is encoded as one piece, exactly as if it had never been marked.

use serde_json::{Map, Value};

/// Unicode noncharacters: never text of their own.
const CANDIDATES: std::ops::RangeInclusive<u32> = 0xFDD0..=0xFDEF;

/// The inputs use every character that could serve as the mark.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text contains all of U+FDD0 to U+FDEF; these are no characters, remove one of them")]
pub struct NoMark;

/// Breaks and restores spellings with one mark.
#[derive(Debug)]
pub struct Guard {
    mark: char,
    firsts: Vec<char>,
}

impl Guard {
    /// A guard for these inputs. `firsts`: the characters that special tokens begin with.
    pub fn new(inputs: &Value, firsts: Vec<char>) -> Result<Self, NoMark> {
        let mut used = 0u32;
        visit(inputs, &mut |text| {
            // All candidates share their first two UTF-8 bytes.
            if text.contains('\u{FDD0}') || text.as_bytes().windows(2).any(|w| w == [0xEF, 0xB7]) {
                for c in text.chars().filter(|c| CANDIDATES.contains(&(*c as u32))) {
                    used |= 1 << (c as u32 - CANDIDATES.start());
                }
            }
        });
        let mark = CANDIDATES
            .clone()
            .find(|c| used & (1 << (c - CANDIDATES.start())) == 0)
            .and_then(char::from_u32)
            .ok_or(NoMark)?;
        Ok(Self { mark, firsts })
    }

    /// Marks every string of `value`, the keys of maps included.
    pub fn protect_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.protect(text)),
            Value::Array(items) => items.iter().map(|item| self.protect_value(item)).collect(),
            Value::Object(map) => Value::Object(
                map.iter()
                    .map(|(key, item)| (self.protect(key), self.protect_value(item)))
                    .collect::<Map<_, _>>(),
            ),
            other => other.clone(),
        }
    }

    /// Marks a text.
    pub fn protect(&self, text: &str) -> String {
        let mut marked = String::with_capacity(text.len());
        for c in text.chars() {
            marked.push(c);
            if self.firsts.contains(&c) {
                marked.push(self.mark);
            }
        }
        marked
    }

    /// Takes the marks out again.
    pub fn release(&self, text: &str) -> String {
        text.replace(self.mark, "")
    }
}

fn visit(value: &Value, look: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => look(text),
        Value::Array(items) => items.iter().for_each(|item| visit(item, look)),
        Value::Object(map) => {
            for (key, item) in map {
                look(key);
                visit(item, look);
            }
        }
        _ => {}
    }
}
