//! The checkpoint's chat template: messages and tools to token ids.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{Environment, Error, ErrorKind, value::Value as Jinja};
use serde_json::{Value, json};

use super::{
    bounds,
    conversation::{Conversation, ConversationError, Tool, check_name, message_value},
    guard::{Guard, NoMark},
    habits,
    schema::{Room, Schema, SchemaError},
    strftime,
    tokenizer::{Tokenizer, TokenizerError},
};
use crate::{
    model::{file, shown::shown_text},
    sched::types::TokenId,
};

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The file cannot be read.
    #[error("cannot read the chat template {path}: {reason}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// The template does not parse.
    #[error("the chat template is not valid: {0}")]
    Syntax(String),
    /// The template refused the conversation, or failed on it.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// With the model's turn opened, what stands before it is another text.
    #[error(
        "the chat template writes a conversation otherwise where it lets the model answer, so that \
         none can be continued: take chat_template.jinja from the checkpoint's own repository"
    )]
    NotExtending,
    /// Nothing lets the model answer.
    #[error(
        "the chat template opens no turn of the model where it is asked to \
         (add_generation_prompt changes nothing): take chat_template.jinja from the checkpoint's own \
         repository"
    )]
    NoPrompt,
    /// A tool's parameters.
    #[error("parameters of tool {tool:?}: {error}")]
    Schema {
        /// The tool.
        tool: String,
        /// What is wrong.
        error: SchemaError,
    },
    /// The messages themselves.
    #[error(transparent)]
    Conversation(#[from] ConversationError),
    /// The text cannot be protected.
    #[error(transparent)]
    Mark(#[from] NoMark),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A compiled chat template.
pub struct Template {
    env: Environment<'static>,
    hash: blake3::Hash,
}

const NAME: &str = "chat_template";
/// Work that one rendering may do; a conversation of a million characters takes a small part.
const FUEL: u64 = 50_000_000;

impl Template {
    /// Compiles a `chat_template.jinja`.
    pub fn from_file(path: &Path) -> Result<Self, TemplateError> {
        let unreadable = |reason: String| TemplateError::Read {
            path: path.display().to_string(),
            reason,
        };
        let bytes = file::read(path).map_err(|error| unreadable(file::why(&error)))?;
        let source = String::from_utf8(bytes).map_err(|error| unreadable(error.to_string()))?;
        Self::new(&source)
    }

    /// The template of a checkpoint folder: `chat_template.jinja`, or the one in
    /// `chat_template.json` or `tokenizer_config.json` of older checkpoints.
    pub fn from_checkpoint(dir: &Path) -> Result<Self, TemplateError> {
        let file = dir.join("chat_template.jinja");
        // What cannot be looked at is tried, so that the reason is told.
        if file::is_there(&file).unwrap_or(true) {
            return Self::from_file(&file);
        }
        let inside = ["chat_template.json", "tokenizer_config.json"]
            .iter()
            .find_map(|name| {
                let bytes = file::read(&dir.join(name)).ok()?;
                let config: Value = serde_json::from_slice(&bytes).ok()?;
                named(&config["chat_template"])
            });
        match inside {
            Some(source) => Self::new(&source),
            None => Err(TemplateError::Read {
                path: file.display().to_string(),
                reason: "it is not there, and tokenizer_config.json has no chat_template: \
                         take it from the repository of the instruction-tuned (-it) model"
                    .into(),
            }),
        }
    }

    /// Compiles template source.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_fuel(Some(FUEL));
        habits::add(&mut env);
        env.add_function("strftime_now", |pattern: String| {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default();
            strftime::format(&pattern, now.as_secs())
        });
        bounds::compile(&mut env, NAME, habits::without_generation_tags(source))
            .map_err(|error| TemplateError::Syntax(describe(&error)))?;
        Ok(Self {
            env,
            hash: blake3::hash(source.as_bytes()),
        })
    }

    /// Hash of the source.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Renders a conversation and encodes it. Spelled special tokens in messages stay text.
    pub fn encode(
        &self,
        conversation: &Conversation,
        generation_prompt: bool,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<TokenId>, TemplateError> {
        let inputs = inputs(conversation)?;
        let guard = Guard::new(&inputs, tokenizer.guarded_firsts())?;
        let text = self.render_value(
            &guard.protect_value(&inputs),
            conversation.thinking,
            generation_prompt,
        )?;
        Ok(tokenizer.encode_guarded(&text, &guard)?)
    }

    /// Renders a conversation to text, as the reference does: nothing is protected.
    pub fn render(
        &self,
        conversation: &Conversation,
        generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.render_value(
            &inputs(conversation)?,
            conversation.thinking,
            generation_prompt,
        )
    }

    fn render_value(
        &self,
        inputs: &Value,
        thinking: bool,
        generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let refused = |error: Error| TemplateError::Refused(describe(&error));
        let tools = match &inputs["tools"] {
            Value::Array(tools) if tools.is_empty() => Jinja::from(()),
            tools => Jinja::from_serialize(tools),
        };
        let mut page = bounds::Page::default();
        let template = self.env.get_template(NAME).map_err(refused)?;
        let rendered = template.render_captured_to(
            minijinja::context! {
                messages => Jinja::from_serialize(&inputs["messages"]),
                tools => tools,
                add_generation_prompt => generation_prompt,
                enable_thinking => thinking,
                preserve_thinking => false,
                bos_token => "<bos>",
                eos_token => "<eos>",
            },
            &mut page,
        );
        rendered.map_err(refused)?;
        Ok(page.text())
    }
}

/// The template itself, or the default one of several with names.
fn named(value: &Value) -> Option<String> {
    match value {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => named
            .iter()
            .find(|one| one["name"] == "default")
            .and_then(|one| one["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

/// The error with its cause, and the line when it is the template's.
///
/// Both may hold what the template or a message says.
fn describe(error: &Error) -> String {
    shown_text(&told(error))
}

fn told(error: &Error) -> String {
    if let (ErrorKind::WriteFailure, Some(cause)) = (error.kind(), std::error::Error::source(error))
    {
        return cause.to_string();
    }
    match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("{detail} (line {line})"),
        (Some(detail), None) => detail.to_owned(),
        (None, _) => error.to_string(),
    }
}

fn inputs(conversation: &Conversation) -> Result<Value, TemplateError> {
    if conversation.messages.is_empty() {
        return Err(ConversationError::Empty.into());
    }
    for call in conversation.messages.iter().flat_map(|m| &m.calls) {
        check_name("a tool call", &call.name)?;
    }
    let messages: Vec<Value> = conversation.messages.iter().map(message_value).collect();
    let mut room = Room::default();
    let tools = conversation
        .tools
        .iter()
        .map(|tool| tool_value(tool, &mut room))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(json!({ "messages": messages, "tools": tools }))
}

fn tool_value(tool: &Tool, room: &mut Room) -> Result<Value, TemplateError> {
    check_name("a tool", &tool.name)?;
    let mut function = json!({ "name": tool.name, "description": tool.description });
    if let Some(parameters) = tool.parameters.as_ref().filter(|map| !map.is_empty()) {
        let schema = Schema::parse(parameters, room).map_err(|error| TemplateError::Schema {
            tool: tool.name.clone(),
            error,
        })?;
        function["parameters"] = schema.to_template();
    }
    Ok(json!({ "type": "function", "function": function }))
}

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod tests;
