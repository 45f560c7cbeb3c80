//! What an answer must look like, as OpenAI's, vLLM's and Anthropic's clients ask for it.

use marathon_proto::brain::{self as pb, form::Answer};
use serde_json::Value;

use super::{body::Body, error::ApiError};

/// The form that a request asks for, and the field that describes it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Asked {
    pub(super) answer: Answer,
    /// The path of the schema, expression or texts in the request.
    pub(super) path: String,
}

/// Any JSON object.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// Reads every field that can ask for a form.
///
/// # Errors
/// The path of what is wrong or not offered; two fields that ask for different things.
pub(super) fn asked(body: &Body) -> Result<Option<Asked>, ApiError> {
    let mut all = Vec::new();
    if let Some(format) = body.get("response_format") {
        all.extend(response_format(
            format,
            "response_format",
            Some("json_schema"),
        )?);
    }
    if let Some(format) = body.get("output_format") {
        all.extend(response_format(format, "output_format", None)?);
    }
    if let Some(format) = body.get("text").and_then(|text| text.get("format")) {
        all.extend(response_format(format, "text.format", None)?);
    }
    if let Some(outputs) = body.get("structured_outputs") {
        all.extend(structured_outputs(outputs)?);
    }
    for (field, read) in [
        ("guided_json", json as Read),
        ("json_schema", json),
        ("guided_regex", regex),
        ("regex", regex),
        ("guided_choice", choice),
        ("guided_grammar", grammar),
    ] {
        if let Some(value) = body.get(field) {
            all.push(read(value, field)?);
        }
    }
    let mut all = all.into_iter();
    let first = all.next();
    match all.next() {
        None => Ok(first),
        Some(second) => {
            let what = "another field asks for a form as well: give one";
            Err(ApiError::invalid(second.path, what))
        }
    }
}

/// Reads a value at a path.
type Read = fn(&Value, &str) -> Result<Asked, ApiError>;

/// OpenAI's `response_format` and its relatives; `within` names the object around the schema.
fn response_format(
    format: &Value,
    path: &str,
    within: Option<&str>,
) -> Result<Option<Asked>, ApiError> {
    if format.is_null() {
        return Ok(None);
    }
    let kind_path = format!("{path}.type");
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => match format.get("schema").filter(|schema| !schema.is_null()) {
            Some(schema) => json(schema, &format!("{path}.schema")).map(Some),
            None => Ok(Some(Asked {
                answer: Answer::JsonSchema(ANY_OBJECT.into()),
                path: path.to_owned(),
            })),
        },
        Some("json_schema") => {
            let (holder, at) = match within.and_then(|name| Some((format.get(name)?, name))) {
                Some((inner, name)) => (inner, format!("{path}.{name}.schema")),
                None => (format, format!("{path}.schema")),
            };
            match holder.get("schema") {
                Some(schema) => json(schema, &at).map(Some),
                None => Err(ApiError::invalid(&at, format!("`{at}` is missing"))),
            }
        }
        Some(other) => {
            let why = format!("{other:.60?} is not known: give text, json_object or json_schema");
            Err(ApiError::unsupported(kind_path, &why))
        }
        None => Err(ApiError::invalid(
            &kind_path,
            format!("`{kind_path}` is missing"),
        )),
    }
}

/// vLLM's object with one form in it.
fn structured_outputs(outputs: &Value) -> Result<Option<Asked>, ApiError> {
    let path = "structured_outputs";
    let Some(object) = outputs.as_object() else {
        return Err(ApiError::invalid(path, format!("`{path}` is an object")));
    };
    let mut asked = None;
    for (field, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let at = format!("{path}.{field}");
        let read: Read = match field.as_str() {
            "json" => json,
            "regex" => regex,
            "choice" => choice,
            "grammar" => grammar,
            "json_object" if value == &Value::Bool(false) => continue,
            "json_object" => |_, at| {
                Ok(Asked {
                    answer: Answer::JsonSchema(ANY_OBJECT.into()),
                    path: at.to_owned(),
                })
            },
            "whitespace_pattern" | "structural_tag" => {
                return Err(ApiError::unsupported(at, "leave it out"));
            }
            // How vLLM goes about it is nothing that an answer shows.
            _ => continue,
        };
        let more = read(value, &at)?;
        if asked.replace(more).is_some() {
            return Err(ApiError::invalid(
                at,
                "`structured_outputs` has several forms: give one",
            ));
        }
    }
    Ok(asked)
}

/// A schema, as an object or as text.
fn json(value: &Value, path: &str) -> Result<Asked, ApiError> {
    let schema = match value {
        Value::Object(_) | Value::Bool(_) => value.to_string(),
        Value::String(text) => text.clone(),
        _ => {
            return Err(ApiError::invalid(
                path,
                format!("`{path}` is a JSON Schema"),
            ));
        }
    };
    Ok(Asked {
        answer: Answer::JsonSchema(schema),
        path: path.to_owned(),
    })
}

fn regex(value: &Value, path: &str) -> Result<Asked, ApiError> {
    Ok(Asked {
        answer: Answer::Regex(text(value, path)?),
        path: path.to_owned(),
    })
}

fn grammar(value: &Value, path: &str) -> Result<Asked, ApiError> {
    let lark = text(value, path)?;
    if lark.contains("::=") {
        let why = "grammars are written in Lark here: `start: ...`, not `root ::= ...`";
        return Err(ApiError::unsupported(path, why));
    }
    Ok(Asked {
        answer: Answer::Lark(lark),
        path: path.to_owned(),
    })
}

fn choice(value: &Value, path: &str) -> Result<Asked, ApiError> {
    let texts: Option<Vec<String>> = value.as_array().and_then(|texts| {
        let texts = texts.iter().map(|text| text.as_str().map(String::from));
        texts.collect()
    });
    let Some(texts) = texts else {
        return Err(ApiError::invalid(
            path,
            format!("`{path}` is a list of texts"),
        ));
    };
    Ok(Asked {
        answer: Answer::Choice(pb::Choice { texts }),
        path: path.to_owned(),
    })
}

fn text(value: &Value, path: &str) -> Result<String, ApiError> {
    let text = value.as_str().map(String::from);
    text.ok_or_else(|| ApiError::invalid(path, format!("`{path}` is a text")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Option<Asked>, ApiError> {
        let Value::Object(map) = value else {
            panic!("an object")
        };
        asked(&map.into())
    }

    #[test]
    fn every_clients_way_of_asking_is_read() {
        let schema = json!({"type": "array"});
        let (object, array) = (ANY_OBJECT, "{\"type\":\"array\"}");
        for (body, expected, path) in [
            (
                json!({"response_format": {"type": "json_object"}}),
                object,
                "response_format",
            ),
            (
                json!({"response_format": {"type": "json_schema",
                       "json_schema": {"name": "n", "strict": true, "schema": schema}}}),
                array,
                "response_format.json_schema.schema",
            ),
            (
                json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}),
                array,
                "text.format.schema",
            ),
            (
                json!({"output_format": {"type": "json_schema", "schema": schema}}),
                array,
                "output_format.schema",
            ),
            (
                json!({"structured_outputs": {"json": schema}}),
                array,
                "structured_outputs.json",
            ),
            (
                json!({"structured_outputs": {"json_object": true, "regex": null}}),
                object,
                "structured_outputs.json_object",
            ),
            (
                json!({"guided_json": "{\"type\":\"array\"}"}),
                array,
                "guided_json",
            ),
        ] {
            let asked = read(body.clone()).unwrap().unwrap();
            assert_eq!(asked.answer, Answer::JsonSchema(expected.into()), "{body}");
            assert_eq!(asked.path, path);
        }
        let others = read(json!({"structured_outputs": {"choice": ["a", "b"]}}));
        let texts = vec!["a".into(), "b".into()];
        assert_eq!(
            others.unwrap().unwrap().answer,
            Answer::Choice(pb::Choice { texts })
        );
        let others = read(json!({"guided_regex": "a+"})).unwrap().unwrap();
        assert_eq!(others.answer, Answer::Regex("a+".into()));
        let others = read(json!({"guided_grammar": "start: \"a\""}))
            .unwrap()
            .unwrap();
        assert_eq!(others.answer, Answer::Lark("start: \"a\"".into()));
        for nothing in [
            json!({}),
            json!({"response_format": {"type": "text"}, "structured_outputs": {}}),
            json!({"text": {"verbosity": "low"}, "guided_json": null}),
        ] {
            assert_eq!(read(nothing).unwrap(), None);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, path) in [
            (
                json!({"response_format": {"type": "xml"}}),
                "response_format.type",
            ),
            (json!({"response_format": "json"}), "response_format.type"),
            (
                json!({"response_format": {"type": "json_schema"}}),
                "response_format.schema",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"structured_outputs": []}), "structured_outputs"),
            (
                json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}),
                "structured_outputs.choice",
            ),
            (
                json!({"structured_outputs": {"whitespace_pattern": " "}}),
                "structured_outputs.whitespace_pattern",
            ),
            (json!({"guided_choice": [1]}), "guided_choice"),
            (json!({"guided_regex": {}}), "guided_regex"),
            (json!({"guided_json": 5}), "guided_json"),
            (
                json!({"guided_grammar": "root ::= \"a\""}),
                "guided_grammar",
            ),
            (
                json!({"guided_regex": "a", "guided_json": {}}),
                "guided_regex",
            ),
        ] {
            let error = read(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path), "{body}");
        }
    }
}
