//! The words of a grammar: literals, special tokens, numbers and patterns, as Lark writes them.

use serde_json::{Map, Value, json};

/// A text as Lark writes it.
pub(super) fn literal(text: &str) -> String {
    let quoted = Value::String(text.to_owned()).to_string();
    quoted.replace('\u{7f}', "\\u007f")
}

/// A special token as Lark writes it.
pub(super) fn token(id: u32) -> String {
    format!("<[{id}]>")
}

/// A number, in its bounds if it has any.
pub(super) fn number(name: &str, object: &Map<String, Value>) -> String {
    const BOUNDS: [&str; 5] = [
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ];
    let mut bounded = Map::new();
    for (keyword, value) in object {
        if BOUNDS.contains(&keyword.as_str()) && value.is_number() {
            bounded.insert(keyword.clone(), value.clone());
        }
    }
    if bounded.is_empty() {
        let terminal = if name == "integer" {
            "INTEGER"
        } else {
            "NUMBER"
        };
        return terminal.to_owned();
    }
    bounded.insert("type".into(), name.into());
    bounded.insert("x-guidance".into(), json!({"whitespace_flexible": false}));
    format!("%json {}", Value::Object(bounded))
}

/// A schema's pattern, which may match anywhere in a text, as one that matches all of it.
pub(super) fn anywhere(pattern: &str) -> Result<String, String> {
    regex::Regex::new(pattern).map_err(|error| {
        let text = error.to_string();
        text.lines().last().unwrap_or_default().trim().to_owned()
    })?;
    if (pattern.starts_with('^') || pattern.ends_with('$')) && alternates(pattern) {
        return Err("give ^(?:a|b)$ instead of ^a|b$".into());
    }
    let (before, rest) = match pattern.strip_prefix('^') {
        Some(rest) => ("", rest),
        None => ("(?s:.*)", pattern),
    };
    let (after, body) = match rest.strip_suffix('$') {
        Some(body) if !body.ends_with('\\') => ("", body),
        _ => ("(?s:.*)", rest),
    };
    let body = llguidance::regex_to_lark(body, "dw");
    Ok(format!("{before}(?:{body}){after}"))
}

/// Whether a pattern has alternatives that no group holds.
fn alternates(pattern: &str) -> bool {
    let (mut depth, mut class, mut escaped) = (0usize, false, false);
    pattern.chars().any(|c| {
        match c {
            _ if escaped => {
                escaped = false;
                return false;
            }
            '\\' => escaped = true,
            '[' => class = true,
            ']' => class = false,
            '(' if !class => depth += 1,
            ')' if !class => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == '|' && depth == 0 && !class
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_quoted_as_lark_reads_them() {
        assert_eq!(literal("a\"\n\\\u{7f}é"), r#""a\"\n\\\u007fé""#);
    }

    #[test]
    fn a_pattern_matches_anywhere_unless_it_says_where() {
        for (pattern, whole) in [
            ("a/b", "(?s:.*)(?:a\\/b)(?s:.*)"),
            ("^a", "(?:a)(?s:.*)"),
            ("a$", "(?s:.*)(?:a)"),
            ("^(a|b)$", "(?:(a|b))"),
            ("a\\$", "(?s:.*)(?:a\\$)(?s:.*)"),
            ("[|^]|x", "(?s:.*)(?:[|^]|x)(?s:.*)"),
        ] {
            assert_eq!(anywhere(pattern).as_deref(), Ok(whole), "{pattern}");
        }
        for pattern in ["^a|b", "(", "a(?=b)", "[|]|x$"] {
            anywhere(pattern).unwrap_err();
        }
    }
}
