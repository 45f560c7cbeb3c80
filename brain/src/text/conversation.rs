//! Messages and tools as a client gives them, checked and typed.

use serde_json::{Map, Value, json};

/// What is wrong with a conversation.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConversationError {
    /// A role that no template knows.
    #[error(
        "message {index} has the role {role:?}; use system, developer, user, assistant or tool"
    )]
    Role {
        /// Number of the message, from 0.
        index: usize,
        /// What was given.
        role: String,
    },
    /// JSON that does not parse, or not an object.
    #[error("{what} must be a JSON object: {reason}")]
    Json {
        /// Which text.
        what: String,
        /// Why.
        reason: String,
    },
    /// A name that the call syntax cannot carry.
    #[error("{what} has the name {name:?}; use letters, digits and _ - . : /")]
    Name {
        /// Which thing.
        what: String,
        /// What was given.
        name: String,
    },
    /// No message at all.
    #[error("the conversation has no messages")]
    Empty,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, under OpenAI's newer name.
    Developer,
    /// The person or program that asks.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
}

impl Role {
    /// The role of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "system" => Self::System,
            "developer" => Self::Developer,
            "user" => Self::User,
            "assistant" => Self::Assistant,
            "tool" => Self::Tool,
            _ => return None,
        })
    }

    /// Its name in requests and templates.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A tool call that an assistant message made.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Names the call for its result; may be empty.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
    /// The model's thought; assistant only.
    pub reasoning: String,
    /// Assistant only.
    pub calls: Vec<Call>,
    /// Which call this answers; tool only.
    pub call_id: String,
    /// The tool's name; tool only.
    pub name: String,
}

impl Message {
    /// A message with nothing but content.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: String::new(),
            calls: Vec::new(),
            call_id: String::new(),
            name: String::new(),
        }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// What the model calls it by.
    pub name: String,
    /// What it does.
    pub description: String,
    /// JSON Schema of its arguments; `None` without parameters.
    pub parameters: Option<Map<String, Value>>,
}

/// What a template renders.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// In order.
    pub messages: Vec<Message>,
    /// In order.
    pub tools: Vec<Tool>,
    /// Let the model think before it answers.
    pub thinking: bool,
}

/// Parses a JSON object that a client sent as text; empty text is an empty object.
pub fn parse_object(what: &str, text: &str) -> Result<Map<String, Value>, ConversationError> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(text).map_err(|error| ConversationError::Json {
        what: what.to_owned(),
        reason: error.to_string(),
    })
}

/// Checks a tool's name against what the call syntax can carry.
pub fn check_name(what: &str, name: &str) -> Result<(), ConversationError> {
    let fits = !name.is_empty() && name.chars().all(is_name_char);
    if fits {
        Ok(())
    } else {
        Err(ConversationError::Name {
            what: what.to_owned(),
            name: name.to_owned(),
        })
    }
}

/// Whether a tool's name may hold this character.
pub fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/')
}

/// The message as templates read it.
pub(super) fn message_value(message: &Message) -> Value {
    let content = match message.role {
        Role::Assistant => without_thoughts(&message.content),
        _ => message.content.clone(),
    };
    let mut value = json!({ "role": message.role.name(), "content": content });
    if !message.reasoning.is_empty() {
        value["reasoning"] = json!(message.reasoning);
    }
    if !message.calls.is_empty() {
        let calls: Vec<Value> = message
            .calls
            .iter()
            .map(|call| {
                json!({ "id": call.id, "type": "function",
                        "function": { "name": call.name, "arguments": call.arguments } })
            })
            .collect();
        value["tool_calls"] = json!(calls);
    }
    if !message.call_id.is_empty() {
        value["tool_call_id"] = json!(message.call_id);
    }
    if !message.name.is_empty() {
        value["name"] = json!(message.name);
    }
    value
}

/// Removes `<|channel>…<channel|>` spans from an assistant text that a client sent back raw.
///
/// Templates do this too, but they get the text with spelled markers already broken.
fn without_thoughts(text: &str) -> String {
    text.split("<channel|>")
        .map(|part| part.split("<|channel>").next().unwrap_or_default())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_sent_back_raw_are_removed() {
        assert_eq!(without_thoughts("a<|channel>thought\nx<channel|>b"), "ab");
        assert_eq!(without_thoughts("plain"), "plain");
        assert_eq!(without_thoughts("open<|channel>thought"), "open");
    }

    #[test]
    fn arguments_must_be_objects() {
        assert!(parse_object("x", "").unwrap().is_empty());
        assert_eq!(parse_object("x", "{\"a\":1}").unwrap()["a"], 1);
        for bad in ["[1]", "3", "{", "\"s\""] {
            let error = parse_object("arguments of call 0", bad).unwrap_err();
            assert!(
                error
                    .to_string()
                    .starts_with("arguments of call 0 must be a JSON object")
            );
        }
    }

    #[test]
    fn names_fit_the_call_syntax() {
        for good in ["read", "ns:create", "a-b.c/d_1", "größe"] {
            assert_eq!(check_name("tool 0", good), Ok(()));
        }
        for bad in ["", "a b", "a{", "x(", "<|tool>"] {
            assert!(check_name("tool 0", bad).is_err(), "{bad}");
        }
    }
}
