//! Bare values of tool arguments to JSON: by the declared type, else by their look.

use serde_json::Value;

use super::schema::{Kind, Schema};

/// `text` as JSON. Declared types other than string are tried first; what fits none is a string.
pub(super) fn bare(text: &str, schema: Option<&Schema>) -> String {
    let text = text.trim();
    let declared = schema.filter(|s| !s.kinds.is_empty() || s.nullable);
    let Some(schema) = declared else {
        return boolean(text)
            .or_else(|| null(text))
            .or_else(|| number(text))
            .unwrap_or_else(|| string(text));
    };
    if schema.nullable
        && let Some(null) = null(text)
    {
        return null;
    }
    let typed = schema.kinds.iter().find_map(|kind| match kind {
        Kind::String => None,
        Kind::Integer => integer(text),
        Kind::Number => number(text),
        Kind::Boolean => boolean(text),
        Kind::Object => json(text).filter(|json| json.starts_with('{')),
        Kind::Array => json(text).filter(|json| json.starts_with('[')),
    });
    typed.unwrap_or_else(|| string(text))
}

/// Whether a delimited string may be passed on as it grows: its declared type is string, or none.
pub(super) fn is_text(schema: Option<&Schema>) -> bool {
    schema.is_none_or(|s| s.kinds.is_empty() || s.kinds.contains(&Kind::String))
}

/// `text` as a JSON string.
pub(super) fn string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    escape(text, &mut out);
    out.push('"');
    out
}

/// Appends the characters of `text` as they stand inside a JSON string.
pub(super) fn escape(text: &str, out: &mut String) {
    let is_plain = |byte: u8| byte >= 0x20 && byte != b'"' && byte != b'\\';
    let mut rest = text;
    // What has to be escaped is ASCII, so it never is a part of another character.
    while let Some(at) = rest.bytes().position(|byte| !is_plain(byte)) {
        let (plain, special) = rest.split_at(at);
        out.push_str(plain);
        match special.as_bytes()[0] {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            control => out.push_str(&format!("\\u{control:04x}")),
        }
        rest = &special[1..];
    }
    out.push_str(rest);
}

fn boolean(text: &str) -> Option<String> {
    match text {
        "true" | "True" => Some("true".to_owned()),
        "false" | "False" => Some("false".to_owned()),
        _ => None,
    }
}

fn null(text: &str) -> Option<String> {
    matches!(text, "null" | "None").then(|| "null".to_owned())
}

/// A number in JSON's own form that a double can hold.
fn number(text: &str) -> Option<String> {
    let fits = text.len() < 400
        && text.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        && serde_json::from_str::<serde_json::Number>(text).is_ok();
    fits.then(|| text.to_owned())
}

fn integer(text: &str) -> Option<String> {
    let text = number(text)?;
    if text.bytes().all(|b| b.is_ascii_digit() || b == b'-') {
        return Some(text);
    }
    // "3.0" or "1e3": a whole number all the same, as long as a double holds it exactly.
    let value: f64 = text.parse().ok()?;
    (value.fract() == 0.0 && value.abs() < 9e15).then(|| format!("{value:.0}"))
}

fn json(text: &str) -> Option<String> {
    let value: Value = serde_json::from_str(text).ok()?;
    serde_json::to_string(&value).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::schema::Room;

    fn schema(value: Value) -> Schema {
        let Value::Object(map) = value else {
            panic!("a schema is an object")
        };
        Schema::parse(&map, &mut Room::default()).unwrap()
    }

    #[test]
    fn without_a_schema_literals_are_typed() {
        for (text, expected) in [
            ("12", "12"),
            ("-0.5e3", "-0.5e3"),
            ("true", "true"),
            ("False", "false"),
            ("None", "null"),
            ("007", "\"007\""),
            ("1.", "\"1.\""),
            ("1e999", "\"1e999\""),
            ("nan", "\"nan\""),
            ("", "\"\""),
            (" a\"b\u{1} ", "\"a\\\"b\\u0001\""),
        ] {
            assert_eq!(bare(text, None), expected, "{text}");
        }
    }

    #[test]
    fn the_declared_type_wins() {
        for (text, declared, expected) in [
            ("123", json!({"type": "string"}), "\"123\""),
            ("null", json!({"type": "string"}), "\"null\""),
            ("null", json!({"type": ["string", "null"]}), "null"),
            ("3.0", json!({"type": "integer"}), "3"),
            ("3.5", json!({"type": "integer"}), "\"3.5\""),
            ("3.5", json!({"type": "number"}), "3.5"),
            ("yes", json!({"type": "boolean"}), "\"yes\""),
            (
                "5",
                json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
                "5",
            ),
            ("[1, 2]", json!({"type": "array"}), "[1,2]"),
            ("{\"a\": 1}", json!({"type": "object"}), "{\"a\":1}"),
            ("x", json!({"description": "any"}), "\"x\""),
        ] {
            assert_eq!(bare(text, Some(&schema(declared))), expected, "{text}");
        }
    }
}
