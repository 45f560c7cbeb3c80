//! What chat templates use of Python and of Jinja's own Python, beyond what minijinja has.
//!
//! Templates were written for Jinja in Python: they call methods of strings, expect values to
//! print as Python prints them, and use the filters and the tag that transformers adds.

use minijinja::{
    Environment, Error, ErrorKind, State, filters,
    value::{Kwargs, Rest, Value, ValueKind, from_args},
};

use super::{
    bounds,
    json::{Style, dumps},
    python,
};

/// Adds all of it to an environment.
pub(super) fn add(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, _state, value| out.write_str(&printed(value)?).map_err(Error::from));
    env.add_filter("string", |value: Value| match value.kind() {
        ValueKind::String => Ok(value),
        _ => printed(&value).map(Value::from),
    });
    env.add_filter("indent", indent);
    env.add_filter(
        "format",
        |state: &State<'_, '_>, text: Value, arguments: Rest<Value>| {
            bounds::format(text.as_str().unwrap_or_default())?;
            filters::format(state, &text, arguments)
        },
    );
    env.add_filter(
        "slice",
        |state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>| {
            filters::slice(state, value, bounds::width(count)?, fill)
        },
    );
    env.add_filter(
        "batch",
        |state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>| {
            filters::batch(state, value, bounds::width(count)?, fill)
        },
    );
    env.add_filter("join", join);
    env.add_filter("tojson", tojson);
    env.add_filter("e", escape);
    env.add_filter("escape", escape);
    // Python's strings and maps are sequences, and its booleans numbers.
    env.add_test("sequence", |value: Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String
        )
    });
    env.add_test("number", |value: Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
}

fn escape(value: Value) -> Result<Value, Error> {
    let mut out = String::new();
    for c in printed(&value)?.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    Ok(Value::from_safe_string(out))
}

fn printed(value: &Value) -> Result<String, Error> {
    bounds::printable(value)?;
    let mut text = String::new();
    python::display(value, &mut text);
    Ok(text)
}

/// Lines behind the first one moved to the right, as Jinja does it.
fn indent(
    text: String,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let margin = " ".repeat(bounds::width(width.or(options.get("width")?).unwrap_or(4))?);
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let lines = text.split('\n').enumerate().map(|(number, line)| {
        let moved = if number == 0 {
            first
        } else {
            blank || !line.is_empty()
        };
        format!("{}{line}", if moved { margin.as_str() } else { "" })
    });
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// The tag around what a model said, which only training reads, as a tag that changes nothing.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start + 2..].find("%}") else {
            break;
        };
        let end = start + 2 + length + 2;
        let inside = &rest[start + 2..end - 2];
        let tag = inside.trim_matches(['-', '+']).trim();
        let replaced = match tag {
            "generation" => inside.replace(tag, "if true"),
            "endgeneration" => inside.replace(tag, "endif"),
            _ => inside.to_owned(),
        };
        out.push_str(&rest[..start + 2]);
        out.push_str(&replaced);
        out.push_str("%}");
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

fn join(items: Value, between: Option<String>, options: Kwargs) -> Result<String, Error> {
    let attribute: Option<String> = options.get("attribute")?;
    options.assert_all_used()?;
    let mut parts = Vec::new();
    for item in items.try_iter()? {
        parts.push(match &attribute {
            Some(name) => printed(&item.get_attr(name)?)?,
            None => printed(&item)?,
        });
    }
    Ok(parts.join(&between.unwrap_or_default()))
}

fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let mut style = Style {
        indent: options
            .get::<Option<usize>>("indent")?
            .map(bounds::width)
            .transpose()?,
        ..Style::default()
    };
    bounds::printable(&value)?;
    if style.indent.is_some() {
        style.comma = ",".into();
    }
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")? {
        let [comma, colon] = separators.as_slice() else {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "separators are two: between items, and between key and value",
            ));
        };
        style.comma = comma.clone();
        style.colon = colon.clone();
    }
    style.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    style.ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    options.assert_all_used()?;
    let value = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(dumps(&value, &style)))
}

fn list(parts: &[&str]) -> Value {
    parts.iter().map(|part| Value::from(*part)).collect()
}

/// Methods that minijinja's own list of Python's lacks.
fn method(
    state: &State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match name {
            "partition" | "rpartition" => {
                let (between,): (&str,) = from_args(arguments)?;
                let found = match name {
                    "partition" => text.split_once(between),
                    _ => text.rsplit_once(between),
                };
                let parts = match (found, name) {
                    (Some((before, after)), _) => [before, between, after],
                    (None, "partition") => [text, "", ""],
                    (None, _) => ["", "", text],
                };
                return Ok(list(&parts));
            }
            "format" => bounds::format(text)?,
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(arguments)?;
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(arguments)?;
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            "rsplit" => {
                let (between, most): (Option<&str>, Option<i64>) = from_args(arguments)?;
                if let (Some(between), Some(most @ 0..)) = (between, most) {
                    let mut parts: Vec<&str> = text.rsplitn(most as usize + 1, between).collect();
                    parts.reverse();
                    return Ok(list(&parts));
                }
                return method(state, value, "split", arguments);
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_keep_their_spaces() {
        assert_eq!(
            without_generation_tags(
                "a{%- generation -%}{{ x }}{% endgeneration %}{% if y %}{% endif %}"
            ),
            "a{%- if true -%}{{ x }}{% endif %}{% if y %}{% endif %}"
        );
        for plain in [
            "",
            "{% generations %}",
            "{% open",
            "no tags",
            "{# {%} #}",
            "{{ '' if true else '{%}' }}",
            "{%}",
            "a{%b%}",
        ] {
            assert_eq!(without_generation_tags(plain), plain);
        }
    }
}
