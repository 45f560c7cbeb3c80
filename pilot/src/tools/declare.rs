//! What the model is told about the tools.

use serde_json::Value;

use super::{Declaration, ToolCall, ToolOutput};

/// A tool's name, what it does, and the JSON Schema of its arguments, as the model sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Declared {
    /// The name that a call uses.
    pub name: &'static str,
    /// One sentence.
    pub description: &'static str,
    /// JSON Schema of an object, as JSON text.
    pub parameters: &'static str,
}

impl Declared {
    /// The same, owned.
    pub fn to_owned(&self) -> Declaration {
        Declaration {
            name: self.name.to_owned(),
            description: self.description.to_owned(),
            parameters_json: self.parameters.to_owned(),
        }
    }

    /// The arguments of `call`: every required one is there, each has its declared type, and none
    /// is unknown.
    ///
    /// # Errors
    /// What is wrong, for the model to read.
    pub fn arguments(&self, call: &ToolCall) -> Result<Arguments, ToolOutput> {
        let values = serde_json::from_str(&call.arguments).unwrap_or_default();
        Arguments::check(self, values).map_err(ToolOutput::error)
    }
}

/// The arguments of one call, checked against the tool's declaration.
#[derive(Debug)]
pub struct Arguments {
    values: serde_json::Map<String, Value>,
}

impl Arguments {
    fn check(declaration: &Declared, arguments: Value) -> Result<Self, String> {
        let Value::Object(values) = arguments else {
            return Err(format!(
                "the arguments of {} must be a JSON object",
                declaration.name
            ));
        };
        // proof: a test parses every declaration; one that does not parse accepts no argument.
        let schema: Value = serde_json::from_str(declaration.parameters).unwrap_or_default();
        for (key, value) in &values {
            let kind = schema["properties"][key]["type"].as_str();
            let fits = match kind {
                Some("string") => value.is_string(),
                Some("integer") => value.is_u64(),
                Some(_) => false,
                None => {
                    let shown: String = key.chars().take(40).collect();
                    return Err(format!("{} has no argument {shown}", declaration.name));
                }
            };
            if !fits {
                let kind = if kind == Some("integer") {
                    "a whole number"
                } else {
                    "a string"
                };
                return Err(format!("argument {key} must be {kind}"));
            }
        }
        for key in schema["required"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
        {
            if !values.contains_key(key) {
                return Err(format!("argument {key} is missing"));
            }
        }
        Ok(Self { values })
    }

    /// A string argument; empty when it was left out.
    pub fn text(&self, key: &str) -> &str {
        self.values
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    /// A number, if it was given.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.values.get(key).and_then(Value::as_u64)
    }

    /// `content` with a newline at its end.
    pub fn lines(&self, key: &str) -> Vec<u8> {
        let mut bytes = self.text(key).as_bytes().to_vec();
        if bytes.last() != Some(&b'\n') {
            bytes.push(b'\n');
        }
        bytes
    }
}

/// The result of a call that could not use `path`.
pub fn failed(path: &str, why: impl std::fmt::Display) -> ToolOutput {
    let shown: String = path.chars().take(200).collect();
    ToolOutput::error(format_args!("{shown}: {why}"))
}

/// What a refusal knows, without the word that marks it as one.
pub fn known(refusal: ToolOutput) -> String {
    refusal.text.trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn declarations_are_those_the_demo_model_was_trained_on() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../brain/assets/demo/train/tools.json"
        );
        let trained: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let ours: Vec<Value> = super::super::toolbox(true)
            .declarations()
            .into_iter()
            .map(|d| {
                let parameters: Value = serde_json::from_str(&d.parameters_json).unwrap();
                json!({"type": "function", "function": {"name": d.name,
                    "description": d.description, "parameters": parameters}})
            })
            .collect();
        // As text, because the order of the keys is part of the prompt.
        assert_eq!(Value::from(ours).to_string(), trained.to_string());
    }

    #[test]
    fn hostile_arguments_are_answered_not_obeyed() {
        let check = |arguments: &str| {
            let call = ToolCall {
                id: String::new(),
                name: "read".into(),
                arguments: arguments.into(),
            };
            super::super::read::DECLARED
                .arguments(&call)
                .map(|_| ())
                .map_err(|e| e.text)
        };
        for (arguments, answer) in [
            ("", "error: the arguments of read must be a JSON object"),
            (
                "{\"path\":",
                "error: the arguments of read must be a JSON object",
            ),
            (
                "[\"inbox\"]",
                "error: the arguments of read must be a JSON object",
            ),
            ("{}", "error: argument path is missing"),
            (r#"{"path": 7}"#, "error: argument path must be a string"),
            (
                r#"{"path": "a", "limit": -1}"#,
                "error: argument limit must be a whole number",
            ),
            (
                r#"{"path": "a", "limit": "5"}"#,
                "error: argument limit must be a whole number",
            ),
            (
                r#"{"path": "a", "mode": "rw"}"#,
                "error: read has no argument mode",
            ),
        ] {
            assert_eq!(check(arguments).unwrap_err(), answer);
        }
        assert_eq!(
            check(&"[".repeat(100_000)).unwrap_err(),
            "error: the arguments of read must be a JSON object"
        );
        assert!(check(r#"{"path": "a", "offset": 3}"#).is_ok());
    }
}
