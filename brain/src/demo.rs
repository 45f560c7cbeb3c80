//! The demonstration checkpoint, built into the program.

use crate::model::EmbeddedCheckpoint;

/// `tokenizer.json`.
pub const TOKENIZER: &[u8] = include_bytes!("../assets/demo/tokenizer.json");
/// `chat_template.jinja`.
pub const TEMPLATE: &str = include_str!("../assets/demo/chat_template.jinja");
/// Weights and configuration of the target and its assistant.
pub const CHECKPOINT: Option<EmbeddedCheckpoint> = None;
