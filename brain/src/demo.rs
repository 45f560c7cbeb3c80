//! The demonstration checkpoint, built into the program.

use crate::model::{EmbeddedCheckpoint, EmbeddedFiles};

/// `tokenizer.json`.
pub const TOKENIZER: &[u8] = include_bytes!("../assets/demo/tokenizer.json");
/// `chat_template.jinja`.
pub const TEMPLATE: &str = include_str!("../assets/demo/chat_template.jinja");
/// Weights and configuration of the target and its assistant.
pub const CHECKPOINT: EmbeddedCheckpoint = EmbeddedCheckpoint {
    label: "demo",
    target: EmbeddedFiles {
        config: include_bytes!("../assets/demo/config.json"),
        generation_config: Some(include_bytes!("../assets/demo/generation_config.json")),
        weights: include_bytes!("../assets/demo/model.safetensors"),
    },
    assistant: Some(EmbeddedFiles {
        config: include_bytes!("../assets/demo/assistant/config.json"),
        generation_config: Some(include_bytes!(
            "../assets/demo/assistant/generation_config.json"
        )),
        weights: include_bytes!("../assets/demo/assistant/model.safetensors"),
    }),
};
