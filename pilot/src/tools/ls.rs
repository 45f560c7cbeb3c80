//! `ls`: the names in a folder.

use super::{
    Class, Declaration, Execution, Facts, Tool, ToolCall, ToolContext, ToolOutput,
    beneath::{PathError, Workspace},
    declare::{Declared, failed},
    limit,
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "ls",
    description: "List a folder.",
    parameters: r#"{"type": "object", "properties": {"path": {"type": "string", "description": "Folder to list."}}, "required": ["path"]}"#,
};

/// The tool.
#[derive(Debug)]
pub struct Ls;

impl Tool for Ls {
    fn declaration(&self) -> Declaration {
        DECLARED.to_owned()
    }

    fn class(&self) -> Class {
        Class::Pure
    }

    fn prepare(&self, call: &ToolCall, _: &ToolContext) -> Result<Facts, ToolOutput> {
        DECLARED.arguments(call).map(|_| Facts::None)
    }

    fn execute(&self, call: &ToolCall, _: &Facts, context: &ToolContext) -> Execution {
        let shown = DECLARED.arguments(call).and_then(|arguments| {
            let path = arguments.text("path");
            let names = names(path, context).map_err(|e| failed(path, e))?;
            Ok(ToolOutput::ok(if names.is_empty() {
                "(empty)".to_owned()
            } else {
                names
            }))
        });
        Execution::Ended(shown.unwrap_or_else(|refusal| refusal))
    }
}

/// Sorted bytewise, one a line, folders with a trailing `/`.
fn names(path: &str, context: &ToolContext) -> Result<String, PathError> {
    let names = Workspace::open(&context.workspace)?.list(path)?;
    Ok(limit::cap(
        &names.join("\n"),
        "the folder has too many names to show",
    ))
}
