//! OpenAI's messages as the contract's.

use marathon_proto::brain as pb;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::super::{
    content::{Content, Part},
    error::ApiError,
    pairing::pair,
};

/// One message as clients send it.
#[derive(Debug, Deserialize)]
pub(in super::super) struct ChatMessage {
    role: String,
    content: Option<Content>,
    #[serde(default, deserialize_with = "or_empty")]
    tool_calls: Vec<ChatCall>,
    tool_call_id: Option<String>,
    name: Option<String>,
    reasoning: Option<Value>,
    reasoning_content: Option<String>,
    reasoning_text: Option<String>,
    refusal: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ChatCall {
    #[serde(default, deserialize_with = "or_empty")]
    id: String,
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<ChatFunction>,
}

#[derive(Debug, Deserialize)]
struct ChatFunction {
    name: String,
    arguments: Option<Value>,
}

/// Null is as good as nothing.
fn or_empty<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    input: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(input)?.unwrap_or_default())
}

/// The contract's messages.
///
/// # Errors
/// The path of what is wrong.
pub(in super::super) fn lower(messages: Vec<ChatMessage>) -> Result<Vec<pb::Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "`messages` is empty: give at least one",
        ));
    }
    let mut lowered = Vec::with_capacity(messages.len());
    for (index, message) in messages.into_iter().enumerate() {
        lowered.push(one(&format!("messages[{index}]"), message)?);
    }
    pair(&mut lowered, &|index| format!("messages[{index}]"))?;
    Ok(lowered)
}

fn one(at: &str, message: ChatMessage) -> Result<pb::Message, ApiError> {
    let role = message.role.as_str();
    if !matches!(role, "system" | "developer" | "user" | "assistant" | "tool") {
        let what =
            format!("`{at}.role` is {role:.60?}: use system, developer, user, assistant or tool");
        return Err(ApiError::invalid(format!("{at}.role"), what));
    }
    let assistant = role == "assistant";
    let reasoning = match message.reasoning {
        Some(Value::String(text)) => text,
        _ => message
            .reasoning_content
            .or(message.reasoning_text)
            .unwrap_or_default(),
    };
    let mut content = match message.content {
        None => String::new(),
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => join(at, role, parts)?,
    };
    if content.is_empty() && assistant {
        content = message.refusal.unwrap_or_default();
    }
    let mut calls = Vec::with_capacity(message.tool_calls.len());
    for (number, call) in message.tool_calls.into_iter().enumerate() {
        let at = format!("{at}.tool_calls[{number}]");
        if !assistant {
            return Err(ApiError::invalid(
                at,
                "only an assistant message makes tool calls",
            ));
        }
        calls.push(self::call(&at, call)?);
    }
    Ok(pb::Message {
        role: message.role,
        content,
        reasoning: if assistant { reasoning } else { String::new() },
        tool_calls: calls,
        tool_call_id: message.tool_call_id.unwrap_or_default(),
        name: message.name.unwrap_or_default(),
    })
}

/// The parts of a text, as the template joins them: each trimmed, one after the other, in a
/// system message with a space between.
fn join(at: &str, role: &str, parts: Vec<Part>) -> Result<String, ApiError> {
    let single = parts.len() == 1;
    let system = matches!(role, "system" | "developer");
    let mut joined = String::new();
    for (number, part) in parts.into_iter().enumerate() {
        let text = part.text(&format!("{at}.content[{number}]"), &[])?;
        if single {
            return Ok(text);
        }
        if system && number > 0 {
            joined.push(' ');
        }
        joined.push_str(text.trim());
    }
    Ok(joined)
}

fn call(at: &str, call: ChatCall) -> Result<pb::ToolCall, ApiError> {
    if let Some(kind) = call.kind.filter(|kind| kind != "function") {
        let what = format!("{kind:.60?} calls are not known, only functions are");
        return Err(ApiError::unsupported(format!("{at}.type"), &what));
    }
    let Some(function) = call.function else {
        let path = format!("{at}.function");
        let what = format!("`{path}` is missing");
        return Err(ApiError::invalid(path, what));
    };
    let path = || format!("{at}.function.arguments");
    let arguments_json = match function.arguments {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Object(map)) => Value::Object(map).to_string(),
        Some(_) => {
            return Err(ApiError::invalid(
                path(),
                "arguments are a JSON object, as text",
            ));
        }
    };
    crate::text::conversation::parse_object(&format!("`{}`", path()), &arguments_json)
        .map_err(|error| ApiError::invalid(path(), error.to_string()))?;
    Ok(pb::ToolCall {
        id: call.id,
        name: function.name,
        arguments_json,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lowered(messages: Value) -> Result<Vec<pb::Message>, ApiError> {
        lower(serde_json::from_value(messages).unwrap())
    }

    fn refused(messages: Value) -> String {
        lowered(messages).unwrap_err().param.unwrap()
    }

    #[test]
    fn what_agents_send_is_read() {
        let messages = lowered(json!([
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": [{"type": "text", "text": " Hi "}]},
            {"role": "assistant", "content": null, "reasoning_content": "hm",
             "tool_calls": [{"id": "a", "type": "function", "function": {"name": "ls", "arguments": "{\"path\":\".\"}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "x.txt"},
            {"role": "assistant", "content": "One file.", "tool_calls": null},
        ]))
        .unwrap();
        assert_eq!(messages[0].content, "Be brief.");
        assert_eq!(messages[1].content, " Hi ");
        assert_eq!(messages[2].reasoning, "hm");
        assert_eq!(messages[2].tool_calls[0].arguments_json, "{\"path\":\".\"}");
        assert_eq!(
            (&*messages[3].name, &*messages[3].tool_call_id),
            ("ls", "a")
        );
    }

    #[test]
    fn results_without_ids_answer_calls_in_order() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {}}});
        let messages = lowered(json!([
            {"role": "assistant", "tool_calls": [call("first"), call("second")]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]))
        .unwrap();
        assert_eq!(
            (&*messages[1].name, &*messages[2].name),
            ("first", "second")
        );
    }

    #[test]
    fn a_conversation_that_cannot_have_taken_place_is_refused_with_its_path() {
        let call = json!([{"id": "a", "function": {"name": "ls", "arguments": "{}"}}]);
        let cases = [
            (
                json!([{"role": "tool", "tool_call_id": "a", "content": "x"}]),
                "messages[0].tool_call_id",
            ),
            (
                json!([{"role": "assistant", "tool_calls": call}]),
                "messages[0].tool_calls[0]",
            ),
            (
                json!([{"role": "assistant", "tool_calls": call}, {"role": "user", "content": "x"}]),
                "messages[0].tool_calls[0]",
            ),
            (
                json!([{"role": "assistant", "tool_calls": call}, {"role": "tool", "tool_call_id": "b"}]),
                "messages[1].tool_call_id",
            ),
            (
                json!([{"role": "user", "tool_calls": call}]),
                "messages[0].tool_calls[0]",
            ),
            (
                json!([{"role": "function", "content": "x"}]),
                "messages[0].role",
            ),
            (json!([]), "messages"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "messages[0].content[0].type",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ];
        for (messages, path) in cases {
            assert_eq!(refused(messages), path);
        }
    }
}
