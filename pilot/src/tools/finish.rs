//! `finish`: the model says that the task is done.

use super::{
    Class, Declaration, Execution, Facts, Tool, ToolCall, ToolContext, ToolOutput,
    declare::Declared,
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "finish",
    description: "End the run when the task is done.",
    parameters: r#"{"type": "object", "properties": {"summary": {"type": "string", "description": "What was done."}}, "required": ["summary"]}"#,
};

/// The tool.
#[derive(Debug)]
pub struct Finish;

impl Tool for Finish {
    fn declaration(&self) -> Declaration {
        DECLARED.to_owned()
    }

    fn class(&self) -> Class {
        Class::Pure
    }

    fn prepare(&self, call: &ToolCall, _: &ToolContext) -> Result<Facts, ToolOutput> {
        DECLARED.arguments(call).map(|_| Facts::None)
    }

    fn execute(&self, call: &ToolCall, _: &Facts, _: &ToolContext) -> Execution {
        let ended = DECLARED.arguments(call).map(|arguments| ToolOutput {
            finish: Some(arguments.text("summary").to_owned()),
            ..ToolOutput::ok("")
        });
        Execution::Ended(ended.unwrap_or_else(|refusal| refusal))
    }
}
