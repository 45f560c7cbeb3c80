//! Anthropic's messages and their blocks as the contract's messages.

use marathon_proto::brain as pb;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::{error::ApiError, pairing::pair};

#[derive(Debug, Deserialize)]
pub(super) struct Message {
    role: String,
    content: Content,
}

/// A text or blocks.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a text or a list of blocks")]
pub(super) enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Debug, Deserialize)]
pub(in super::super) struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<Content>,
}

/// Messages of the contract, each with its path in the request.
#[derive(Default)]
struct Lowered {
    messages: Vec<pb::Message>,
    paths: Vec<String>,
}

impl Lowered {
    fn push(&mut self, path: String, message: pb::Message) {
        self.messages.push(message);
        self.paths.push(path);
    }
}

/// The contract's messages.
///
/// # Errors
/// The path of what is wrong.
pub(super) fn lower(
    system: Option<Content>,
    messages: Vec<Message>,
) -> Result<Vec<pb::Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "`messages` is empty: give at least one",
        ));
    }
    let mut lowered = Lowered::default();
    if let Some(system) = system {
        let content = texts("system", system, "\n")?;
        if !content.is_empty() {
            lowered.push("system".into(), said("system", content));
        }
    }
    for (index, message) in messages.into_iter().enumerate() {
        let at = format!("messages[{index}]");
        match message.role.as_str() {
            "user" => user(&at, message.content, &mut lowered)?,
            "assistant" => assistant(&at, message.content, &mut lowered)?,
            "system" => {
                let content = texts(&at, message.content, "\n")?;
                lowered.push(at, said("system", content));
            }
            other => {
                let what = format!("`{at}.role` is {other:.60?}: use user or assistant");
                return Err(ApiError::invalid(format!("{at}.role"), what));
            }
        }
    }
    let paths = lowered.paths;
    pair(&mut lowered.messages, &|index| paths[index].clone()).map_err(|mut error| {
        // The same field under Anthropic's name.
        error.param = error
            .param
            .map(|path| path.replace(".tool_call_id", ".tool_use_id"));
        error
    })?;
    Ok(lowered.messages)
}

fn said(role: &str, content: String) -> pb::Message {
    pb::Message {
        role: role.into(),
        content,
        ..pb::Message::default()
    }
}

/// Tool results become messages of their own; what the user says follows them.
fn user(at: &str, content: Content, lowered: &mut Lowered) -> Result<(), ApiError> {
    let blocks = match content {
        Content::Text(text) => {
            lowered.push(at.into(), said("user", text));
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    let mut spoken: Vec<String> = Vec::new();
    let mut results = 0;
    for (number, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}.content[{number}]");
        match block.kind.as_str() {
            "tool_result" => {
                results += 1;
                let content = match block.content {
                    None => String::new(),
                    Some(content) => texts(&format!("{at}.content"), content, "\n")?,
                };
                let result = pb::Message {
                    tool_call_id: required(&at, "tool_use_id", block.tool_use_id)?,
                    ..said("tool", content)
                };
                lowered.push(at, result);
            }
            "text" => spoken.push(required(&at, "text", block.text)?),
            other => return Err(unread(&at, other)),
        }
    }
    if !spoken.is_empty() || results == 0 {
        lowered.push(at.into(), said("user", spoken.join("\n")));
    }
    Ok(())
}

fn assistant(at: &str, content: Content, lowered: &mut Lowered) -> Result<(), ApiError> {
    let mut message = said("assistant", String::new());
    match content {
        Content::Text(text) => message.content = text,
        Content::Blocks(blocks) => {
            for (number, block) in blocks.into_iter().enumerate() {
                let at = format!("{at}.content[{number}]");
                match block.kind.as_str() {
                    "text" => message.content += &required(&at, "text", block.text)?,
                    "thinking" => message.reasoning += &block.thinking.unwrap_or_default(),
                    // Another model's thought, which nobody here can read.
                    "redacted_thinking" => {}
                    "tool_use" => message.tool_calls.push(pb::ToolCall {
                        id: required(&at, "id", block.id)?,
                        name: required(&at, "name", block.name)?,
                        arguments_json: Value::Object(block.input.unwrap_or_default()).to_string(),
                    }),
                    other => return Err(unread(&at, other)),
                }
            }
        }
    }
    lowered.push(at.into(), message);
    Ok(())
}

/// Text blocks as one text.
fn texts(at: &str, content: Content, between: &str) -> Result<String, ApiError> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Blocks(blocks) => {
            let texts: Result<Vec<String>, ApiError> = blocks
                .into_iter()
                .enumerate()
                .map(|(number, block)| {
                    let at = format!("{at}[{number}]");
                    match block.kind.as_str() {
                        "text" => required(&at, "text", block.text),
                        other => Err(unread(&at, other)),
                    }
                })
                .collect();
            Ok(texts?.join(between))
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

fn unread(at: &str, kind: &str) -> ApiError {
    let what = format!("{kind:.60?} blocks are not read here: this model reads text alone");
    ApiError::unsupported(format!("{at}.type"), &what)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lowered(system: Value, messages: Value) -> Result<Vec<pb::Message>, ApiError> {
        lower(
            serde_json::from_value(system).unwrap(),
            serde_json::from_value(messages).unwrap(),
        )
    }

    #[test]
    fn results_come_before_what_the_user_says() {
        let messages = lowered(
            json!([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]),
            json!([
                {"role": "user", "content": "Go"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "a", "name": "ls", "input": {"path": "."}},
                ]},
                {"role": "user", "content": [
                    {"type": "text", "text": "and then"},
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x.txt"}]},
                ]},
            ]),
        )
        .unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| &*message.role).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
        assert_eq!(messages[2].reasoning, "hm");
        assert_eq!(messages[2].tool_calls[0].arguments_json, "{\"path\":\".\"}");
        assert_eq!((&*messages[3].name, &*messages[3].content), ("ls", "x.txt"));
        assert_eq!(messages[4].content, "and then");
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path() {
        let result = json!({"type": "tool_result", "tool_use_id": "a"});
        for (messages, path) in [
            (
                json!([{"role": "tool", "content": "x"}]),
                "messages[0].role",
            ),
            (
                json!([{"role": "user", "content": [result]}]),
                "messages[0].content[0].tool_use_id",
            ),
            (
                json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]),
                "messages[0].content[0].type",
            ),
            (
                json!([{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]),
                "messages[0].content[0].id",
            ),
            (json!([]), "messages"),
        ] {
            let error = lowered(Value::Null, messages).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path));
        }
    }
}
