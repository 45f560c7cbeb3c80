//! The demonstration checkpoint, built into the program.

/// `tokenizer.json`.
pub const TOKENIZER: &[u8] = include_bytes!("../assets/demo/tokenizer.json");
/// `chat_template.jinja`.
pub const TEMPLATE: &str = include_str!("../assets/demo/chat_template.jinja");
