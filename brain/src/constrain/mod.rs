//! Answers of a form: JSON of a schema, a regular expression, a choice, a grammar, or tool calls as
//! the model was trained to write them.
//!
//! A [`Form`] is what a request asks for, a [`Grammar`] is that form compiled for this vocabulary,
//! and a [`Matcher`] is a grammar in step with one answer: the scheduler asks it which tokens may
//! come next. Compiling is bounded in time and memory, and so is every step of a matcher: whoever
//! sends a hostile schema gets an error that names its keyword, or an answer that ends with one.

mod calls;
mod compile;
mod matcher;
mod schema;
mod terminals;
mod vocabulary;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use compile::{Grammar, Grammars};
pub use matcher::Matcher;

/// What an answer must look like. Its JSON is part of a request's identity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Form {
    /// JSON that a JSON Schema describes.
    JsonSchema(Value),
    /// Text that a regular expression (Rust's syntax) matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's dialect of Lark.
    Lark(String),
    /// Tool calls in the model's own notation.
    Calls(Calls),
    /// JSON of a schema, or else calls.
    JsonOrCalls(Value, Calls),
}

/// Which calls an answer may or must have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    /// What may be called.
    pub tools: Vec<CallTool>,
    /// Nothing but calls, at least one. Else there may be text, or text alone.
    pub required: bool,
    /// One call at most.
    pub single: bool,
}

/// A tool as its calls need it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallTool {
    /// By which it is called.
    pub name: String,
    /// JSON Schema of its arguments, an object; `None`: it takes none.
    pub parameters: Option<Value>,
    /// Every keyword of the schema holds, or the form is refused. Else those that this notation
    /// cannot keep are passed over; names, types, choices and what is required always hold.
    pub strict: bool,
    /// Where the request has these parameters, for errors.
    #[serde(skip)]
    pub path: String,
}

impl Form {
    /// As it is kept with a request.
    pub fn to_text(&self) -> Arc<str> {
        // proof: it has text keys alone, and no number that JSON does not have.
        serde_json::to_string(self).unwrap_or_default().into()
    }

    /// Reads what [`Form::to_text`] wrote; `None` where another version wrote it.
    pub fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

/// A form that cannot be kept to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FormError {
    /// Where in the form, as a path; empty for the form itself.
    pub path: String,
    /// What is wrong there, and what to do.
    pub message: String,
}

impl FormError {
    fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            message: message.into(),
        }
    }
}

/// A path one step further down.
fn below(path: &str, step: &str) -> String {
    match path.is_empty() {
        true => step.to_owned(),
        false => format!("{path}.{step}"),
    }
}
