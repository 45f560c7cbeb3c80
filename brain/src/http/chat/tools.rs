//! Tools and whether the model may call them.

use marathon_proto::brain as pb;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::{error::ApiError, turn::Calls};

/// Tools of one request, at most.
const MAX_TOOLS: usize = 1024;

#[derive(Debug, Deserialize)]
pub(in super::super) struct ChatTool {
    #[serde(rename = "type")]
    kind: String,
    function: Option<Function>,
}

/// A function that the model may call.
#[derive(Debug, Deserialize)]
pub(in super::super) struct Function {
    pub(in super::super) name: String,
    pub(in super::super) description: Option<String>,
    pub(in super::super) parameters: Option<Map<String, Value>>,
    pub(in super::super) strict: Option<bool>,
}

/// Whether calls are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum ToolChoice {
    /// As the model thinks fit.
    Auto,
    /// Not at all.
    None,
    /// At least one call.
    Required,
    /// One call of this tool.
    Named(String),
}

impl ToolChoice {
    /// Reads `tool_choice`.
    pub(in super::super) fn parse(value: Option<&Value>) -> Result<Self, ApiError> {
        match value {
            None => Ok(Self::Auto),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(Self::Auto),
                "none" => Ok(Self::None),
                "required" | "any" => Ok(Self::Required),
                other => {
                    let what = format!(
                        "`tool_choice` is {other:.60?}: give auto, none, required or a function"
                    );
                    Err(ApiError::invalid("tool_choice", what))
                }
            },
            Some(choice) => {
                let function = choice.get("type").is_some_and(|kind| kind == "function");
                // Responses have the name beside the type, chat completions in an object.
                let name = choice.pointer("/function/name").or(choice.get("name"));
                match name.and_then(Value::as_str) {
                    Some(name) if function => Ok(Self::Named(name.to_owned())),
                    _ => {
                        let why = "give auto, none, required or a function";
                        Err(ApiError::unsupported("tool_choice", why))
                    }
                }
            }
        }
    }

    /// The calls that a turn may have; `parallel`: several at a time.
    pub(in super::super) fn calls(self, parallel: bool) -> Calls {
        match self {
            Self::None => Calls::None,
            Self::Auto if parallel => Calls::Any,
            Self::Auto => Calls::One,
            Self::Required => Calls::Required { single: !parallel },
            Self::Named(name) => Calls::Named(name),
        }
    }
}

/// The contract's tools.
pub(in super::super) fn lower(tools: Vec<ChatTool>) -> Result<Vec<pb::Tool>, ApiError> {
    if tools.len() > MAX_TOOLS {
        let message = format!(
            "`tools` has {} entries, at most {MAX_TOOLS} are taken",
            tools.len()
        );
        return Err(ApiError::invalid("tools", message));
    }
    tools
        .into_iter()
        .enumerate()
        .map(|(index, tool)| {
            let at = format!("tools[{index}]");
            match (tool.kind.as_str(), tool.function) {
                ("function", Some(function)) => self::function(&format!("{at}.function"), function),
                ("function", None) => {
                    let path = format!("{at}.function");
                    let what = format!("`{path}` is missing");
                    Err(ApiError::invalid(path, what))
                }
                (other, _) => {
                    let what = format!("{other:.60?} tools are not known, only functions are");
                    Err(ApiError::unsupported(format!("{at}.type"), &what))
                }
            }
        })
        .collect()
}

/// One function as a tool of the contract; `at` is its path.
pub(in super::super) fn function(at: &str, function: Function) -> Result<pb::Tool, ApiError> {
    crate::text::conversation::check_name(&format!("`{at}`"), &function.name)
        .map_err(|error| ApiError::invalid(format!("{at}.name"), error.to_string()))?;
    let parameters_json = function
        .parameters
        .filter(|parameters| !parameters.is_empty())
        .map(|parameters| Value::Object(parameters).to_string())
        .unwrap_or_default();
    Ok(pb::Tool {
        name: function.name,
        description: function.description.unwrap_or_default(),
        parameters_json,
        strict: function.strict.unwrap_or(false),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lowered(tools: Value) -> Result<Vec<pb::Tool>, ApiError> {
        lower(serde_json::from_value(tools).unwrap())
    }

    #[test]
    fn functions_become_tools() {
        let tools = lowered(json!([
            {"type": "function", "function": {"name": "ls", "description": "Lists", "strict": false,
             "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}},
            {"type": "function", "function": {"name": "now", "parameters": {}}},
        ]))
        .unwrap();
        assert_eq!(tools[0].name, "ls");
        assert!(tools[0].parameters_json.starts_with("{\"type\":\"object\""));
        assert_eq!(tools[1].parameters_json, "");
    }

    #[test]
    fn what_cannot_be_promised_is_refused_with_its_path() {
        for (tools, path) in [
            (json!([{"type": "web_search"}]), "tools[0].type"),
            (json!([{"type": "function"}]), "tools[0].function"),
            (
                json!([{"type": "function", "function": {"name": "a b"}}]),
                "tools[0].function.name",
            ),
        ] {
            assert_eq!(lowered(tools).unwrap_err().param.as_deref(), Some(path));
        }
        for choice in [
            json!("x"),
            json!({"type": "allowed_tools"}),
            json!({"type": "function"}),
        ] {
            let error = ToolChoice::parse(Some(&choice)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"));
        }
        assert_eq!(
            ToolChoice::parse(Some(&json!("none"))),
            Ok(ToolChoice::None)
        );
        assert_eq!(ToolChoice::parse(None), Ok(ToolChoice::Auto));
        for named in [
            json!({"type": "function", "function": {"name": "f"}}),
            json!({"type": "function", "name": "f"}),
        ] {
            let choice = ToolChoice::parse(Some(&named)).unwrap();
            assert_eq!(choice.calls(true), Calls::Named("f".into()));
        }
        let required = ToolChoice::parse(Some(&json!("required"))).unwrap();
        assert_eq!(required.calls(false), Calls::Required { single: true });
    }
}
