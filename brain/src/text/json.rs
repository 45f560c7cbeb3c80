//! JSON text as Python's `json.dumps` writes it, for the `tojson` filter.

use serde_json::Value;

use super::python;

/// What a template may ask of `tojson`; the defaults are the ones of chat templates.
#[derive(Clone, Debug)]
pub(super) struct Style {
    /// Spaces per level, each item on a line of its own.
    pub(super) indent: Option<usize>,
    /// Between items.
    pub(super) comma: String,
    /// Between key and value.
    pub(super) colon: String,
    /// Keys in order.
    pub(super) sort_keys: bool,
    /// Everything beyond ASCII as `\u` escapes.
    pub(super) ascii: bool,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            indent: None,
            comma: ", ".into(),
            colon: ": ".into(),
            sort_keys: false,
            ascii: false,
        }
    }
}

/// `value` as JSON text in this style.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    write(value, style, 0, &mut out);
    out
}

fn write(value: &Value, style: &Style, level: usize, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(float) => python::float(float, out),
            None => out.push_str(&number.to_string()),
        },
        Value::String(text) => string(text, style, out),
        Value::Array(items) => {
            container(['[', ']'], items.len(), style, level, out, |at, out| {
                write(&items[at], style, level + 1, out);
            });
        }
        Value::Object(map) => {
            let mut pairs: Vec<(&String, &Value)> = map.iter().collect();
            if style.sort_keys {
                pairs.sort_by_key(|(key, _)| *key);
            }
            container(['{', '}'], pairs.len(), style, level, out, |at, out| {
                string(pairs[at].0, style, out);
                out.push_str(&style.colon);
                write(pairs[at].1, style, level + 1, out);
            });
        }
    }
}

fn container(
    [open, close]: [char; 2],
    items: usize,
    style: &Style,
    level: usize,
    out: &mut String,
    mut item: impl FnMut(usize, &mut String),
) {
    let line = |level: usize, out: &mut String| {
        if let Some(indent) = style.indent.filter(|_| items > 0) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    };
    out.push(open);
    for at in 0..items {
        if at > 0 {
            out.push_str(&style.comma);
        }
        line(level + 1, out);
        item(at, out);
    }
    line(level, out);
    out.push(close);
}

fn string(text: &str, style: &Style, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (style.ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn separators_and_letters_as_python_writes_them() {
        let value = json!({"a": [1, "é<"], "b": {}});
        assert_eq!(
            dumps(&value, &Style::default()),
            r#"{"a": [1, "é<"], "b": {}}"#
        );
        let numbers = json!([1.0, 1e20, 1e-7, u64::MAX, -3, true, null]);
        assert_eq!(
            dumps(&numbers, &Style::default()),
            "[1.0, 1e+20, 1e-07, 18446744073709551615, -3, true, null]"
        );
    }

    #[test]
    fn a_style_changes_only_the_look() {
        let style = Style {
            indent: Some(1),
            comma: ",".into(),
            sort_keys: true,
            ascii: true,
            ..Style::default()
        };
        assert_eq!(
            dumps(&json!({"b": [], "a": ["😊\u{1}"]}), &style),
            "{\n \"a\": [\n  \"\\ud83d\\ude0a\\u0001\"\n ],\n \"b\": []\n}"
        );
    }
}
