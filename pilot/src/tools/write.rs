//! `write`: a whole file, created or replaced as one step.

use super::{
    Class, Declaration, Execution, Facts, Tool, ToolCall, ToolContext, ToolOutput,
    beneath::{Parents, PathError, Workspace},
    change,
    declare::{Arguments, Declared, failed},
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "write",
    description: "Create or replace a file.",
    parameters: r#"{"type": "object", "properties": {"path": {"type": "string", "description": "File to write."}, "content": {"type": "string", "description": "Whole new content."}}, "required": ["path", "content"]}"#,
};

/// The tool. Doing it twice is doing it once.
#[derive(Debug)]
pub struct Write;

impl Tool for Write {
    fn declaration(&self) -> Declaration {
        DECLARED.to_owned()
    }

    fn class(&self) -> Class {
        Class::Idempotent
    }

    fn prepare(&self, call: &ToolCall, _: &ToolContext) -> Result<Facts, ToolOutput> {
        DECLARED.arguments(call).map(|_| Facts::None)
    }

    fn execute(&self, call: &ToolCall, _: &Facts, context: &ToolContext) -> Execution {
        let done = DECLARED.arguments(call).and_then(|arguments| {
            let path = arguments.text("path");
            put(&arguments, context).map_err(|e| failed(path, e))?;
            Ok(ToolOutput::ok(format!("wrote {path}")))
        });
        Execution::Ended(done.unwrap_or_else(|refusal| refusal))
    }
}

/// Writes the content, with a newline at its end.
fn put(arguments: &Arguments, context: &ToolContext) -> Result<(), PathError> {
    let workspace = Workspace::open(&context.workspace)?;
    let spot = workspace.find(arguments.text("path"), Parents::Make)?;
    change::replace(&spot, &arguments.lines("content"), &context.fail)
}
