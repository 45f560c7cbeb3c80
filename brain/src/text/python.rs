//! Values printed as Python prints them: chat templates were written for it.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};

/// `str(value)` of Python for what a template may print.
pub(super) fn display(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(value, out),
    }
}

fn repr(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => float(number, out),
            Err(_) => display_native(value, out),
        },
        ValueKind::String => string(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(&item, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(&key, out);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => display_native(value, out),
    }
}

fn display_native(value: &Value, out: &mut String) {
    // proof: writing to a String cannot fail.
    let _ = write!(out, "{value}");
}

/// `repr(float)`: shortest digits that read back, an exponent from 1e16 on and below 1e-4.
pub(super) fn float(number: f64, out: &mut String) {
    if number.is_nan() {
        return out.push_str("nan");
    }
    if number.is_infinite() {
        return out.push_str(if number > 0.0 { "inf" } else { "-inf" });
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let written = if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(out, "{digits}e{sign}{:02}", exponent.abs())
    } else {
        write!(out, "{number:?}")
    };
    // proof: writing to a String cannot fail.
    let _ = written;
}

fn string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(value: serde_json::Value) -> String {
        let mut out = String::new();
        display(&Value::from_serialize(value), &mut out);
        out
    }

    #[test]
    fn numbers_as_python_prints_them() {
        for (number, text) in [
            (1e20, "1e+20"),
            (0.1, "0.1"),
            (1.0, "1.0"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (-0.0, "-0.0"),
            (-2.5e300, "-2.5e+300"),
        ] {
            assert_eq!(printed(serde_json::json!(number)), text);
        }
        assert_eq!(printed(serde_json::json!(3)), "3");
        assert_eq!(printed(serde_json::json!(u64::MAX)), u64::MAX.to_string());
    }

    #[test]
    fn containers_as_python_prints_them() {
        assert_eq!(
            printed(serde_json::json!(["STRING", "NULL", 1.0, true, null, {"a": "it's"}])),
            "['STRING', 'NULL', 1.0, True, None, {'a': \"it's\"}]"
        );
        assert_eq!(printed(serde_json::json!(null)), "None");
        assert_eq!(printed(serde_json::json!("plain")), "plain");
    }
}
