//! Input items of a response as the contract's messages.
//!
//! What the model said is several items there and one message here: a thought, a text and calls
//! that follow one another belong to the same turn.

use marathon_proto::brain as pb;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::{content::Content, error::ApiError, pairing::pair};

/// Kinds of parts that thoughts are given in.
const THOUGHTS: [&str; 2] = ["reasoning_text", "summary_text"];

#[derive(Debug, Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

/// `input` as a list of items.
///
/// # Errors
/// It is neither a text nor a list.
pub(super) fn list(input: Option<&Value>) -> Result<Vec<Value>, ApiError> {
    match input {
        Some(Value::String(text)) => Ok(vec![
            json!({ "type": "message", "role": "user", "content": text }),
        ]),
        Some(Value::Array(items)) => Ok(items.clone()),
        Some(_) => Err(ApiError::invalid(
            "input",
            "`input` is a text or a list of items",
        )),
        None => Err(ApiError::invalid("input", "`input` is missing")),
    }
}

/// The contract's messages. `before` of the items are those of earlier responses, so that paths
/// are those of the request's own.
///
/// # Errors
/// The path of what is wrong.
pub(super) fn lower(
    instructions: Option<String>,
    items: &[Value],
    before: usize,
) -> Result<Vec<pb::Message>, ApiError> {
    if items.is_empty() {
        return Err(ApiError::invalid(
            "input",
            "`input` is empty: give at least one item",
        ));
    }
    let path = |index: usize| match index.checked_sub(before) {
        Some(index) => format!("input[{index}]"),
        None => "previous_response_id".to_owned(),
    };
    let mut lowered = Lowered::default();
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        lowered.push("instructions".into(), said("system", text));
    }
    for (index, item) in items.iter().enumerate() {
        let at = path(index);
        let item: Item = serde_path_to_error::deserialize(item).map_err(|error| {
            let inner = error.path().to_string();
            let path = if inner == "." {
                at.clone()
            } else {
                format!("{at}.{inner}")
            };
            let what = format!("`{path}`: {}", error.inner());
            ApiError::invalid(path, what)
        })?;
        one(at, item, &mut lowered)?;
    }
    let paths = lowered.paths;
    pair(&mut lowered.messages, &|index| paths[index].clone())?;
    Ok(lowered.messages)
}

#[derive(Default)]
struct Lowered {
    messages: Vec<pb::Message>,
    paths: Vec<String>,
    /// The last message is the model's and may be continued.
    open: bool,
}

impl Lowered {
    fn push(&mut self, path: String, message: pb::Message) {
        self.open = message.role == "assistant";
        self.messages.push(message);
        self.paths.push(path);
    }

    /// The model's message that goes on.
    fn turn(&mut self, path: String) -> &mut pb::Message {
        if !self.open {
            self.push(path, said("assistant", String::new()));
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

fn said(role: &str, content: String) -> pb::Message {
    pb::Message {
        role: role.into(),
        content,
        ..pb::Message::default()
    }
}

fn one(at: String, item: Item, lowered: &mut Lowered) -> Result<(), ApiError> {
    match item.kind.as_deref().unwrap_or("message") {
        "message" => {
            let content = texts(&format!("{at}.content"), item.content)?;
            match item.role.as_deref() {
                Some("assistant") => lowered.turn(at).content += &content,
                Some(role @ ("system" | "developer" | "user")) => {
                    lowered.push(at, said(role, content));
                }
                role => {
                    let what = format!(
                        "`{at}.role` is {:.60?}: use system, developer, user or assistant",
                        role.unwrap_or_default()
                    );
                    return Err(ApiError::invalid(format!("{at}.role"), what));
                }
            }
        }
        "reasoning" => {
            let thought = match item.content {
                None => String::new(),
                content => texts(&format!("{at}.content"), content)?,
            };
            lowered.turn(at).reasoning += &thought;
        }
        "function_call" => {
            let arguments_json = item.arguments.unwrap_or_default();
            let path = format!("{at}.arguments");
            crate::text::conversation::parse_object(&format!("`{path}`"), &arguments_json)
                .map_err(|error| ApiError::invalid(path, error.to_string()))?;
            let call = pb::ToolCall {
                id: required(&at, "call_id", item.call_id)?,
                name: required(&at, "name", item.name)?,
                arguments_json,
            };
            lowered.turn(at).tool_calls.push(call);
        }
        "function_call_output" => {
            let content = texts(&format!("{at}.output"), item.output)?;
            let result = pb::Message {
                tool_call_id: required(&at, "call_id", item.call_id)?,
                ..said("tool", content)
            };
            lowered.push(at, result);
        }
        other => {
            let why = format!("{other:.60?} items are not read here");
            return Err(ApiError::unsupported(format!("{at}.type"), &why));
        }
    }
    Ok(())
}

fn texts(at: &str, content: Option<Content>) -> Result<String, ApiError> {
    match content {
        None => Err(ApiError::invalid(at, format!("`{at}` is missing"))),
        Some(Content::Text(text)) => Ok(text),
        Some(Content::Parts(parts)) => {
            let mut joined = String::new();
            for (number, part) in parts.into_iter().enumerate() {
                joined += &part.text(&format!("{at}[{number}]"), &THOUGHTS)?;
            }
            Ok(joined)
        }
    }
}

fn required(at: &str, field: &str, value: Option<String>) -> Result<String, ApiError> {
    value.ok_or_else(|| {
        let path = format!("{at}.{field}");
        let what = format!("`{path}` is missing");
        ApiError::invalid(path, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_one_turn_become_one_message() {
        let items = [
            json!({"role": "developer", "content": [{"type": "input_text", "text": "Rules"}]}),
            json!({"type": "message", "role": "user", "content": "Go"}),
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}),
            json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]}),
            json!({"type": "function_call", "call_id": "a", "name": "ls", "arguments": "{}"}),
            json!({"type": "function_call", "call_id": "b", "name": "now", "arguments": ""}),
            json!({"type": "function_call_output", "call_id": "b", "output": "noon"}),
            json!({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]}),
            json!({"type": "message", "role": "assistant", "content": "Done."}),
        ];
        let messages = lower(Some("Be brief.".into()), &items, 0).unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| &*message.role).collect();
        assert_eq!(
            roles,
            [
                "system",
                "developer",
                "user",
                "assistant",
                "tool",
                "tool",
                "assistant"
            ]
        );
        let turn = &messages[3];
        assert_eq!((&*turn.reasoning, &*turn.content), ("hm", "Looking."));
        assert_eq!(turn.tool_calls.len(), 2);
        assert_eq!(messages[4].name, "now");
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path() {
        for (item, path) in [
            (
                json!({"type": "item_reference", "id": "x"}),
                "input[0].type",
            ),
            (json!({"role": "king", "content": "x"}), "input[0].role"),
            (json!({"role": "user"}), "input[0].content"),
            (
                json!({"role": "user", "content": [{"type": "input_image"}]}),
                "input[0].content[0].type",
            ),
            (
                json!({"type": "function_call", "name": "f"}),
                "input[0].call_id",
            ),
            (
                json!({"type": "function_call_output", "call_id": "a", "output": "x"}),
                "input[0].tool_call_id",
            ),
            (json!({"role": 5}), "input[0].role"),
        ] {
            let error = lower(None, &[item], 0).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path));
        }
        let old = json!({"type": "function_call", "call_id": "a", "name": "f"});
        let new = json!({"role": "user", "content": "x"});
        let error = lower(None, &[old, new], 1).unwrap_err();
        assert_eq!(
            error.param.as_deref(),
            Some("previous_response_id.tool_calls[0]")
        );
    }
}
