//! `read`: the text of a file, or some of its lines.

use super::{
    Class, Declaration, Execution, Facts, Tool, ToolCall, ToolContext, ToolOutput,
    beneath::{self, PathError, Workspace},
    declare::{Arguments, Declared, failed},
    limit,
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "read",
    description: "Read a text file.",
    parameters: r#"{"type": "object", "properties": {"path": {"type": "string", "description": "File to read."}, "offset": {"type": "integer", "description": "First line, from 1."}, "limit": {"type": "integer", "description": "Number of lines."}}, "required": ["path"]}"#,
};

/// The tool.
#[derive(Debug)]
pub struct Read;

impl Tool for Read {
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
        let shown = DECLARED
            .arguments(call)
            .and_then(|arguments| show(&arguments, context));
        Execution::Ended(shown.unwrap_or_else(|refusal| refusal))
    }
}

/// The text without its last newline.
fn show(arguments: &Arguments, context: &ToolContext) -> Result<ToolOutput, ToolOutput> {
    let path = arguments.text("path");
    let text = load(context, path).map_err(|e| failed(path, e))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let (first, count) = (arguments.number("offset"), arguments.number("limit"));
    if first.is_none() && count.is_none() {
        let shown = limit::cap(text, "read it in parts with offset and limit");
        return Ok(ToolOutput::ok(shown));
    }
    let skip = usize::try_from(first.unwrap_or(1).saturating_sub(1)).unwrap_or(usize::MAX);
    let take = count.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let lines = text.split('\n').count();
    if skip >= lines {
        return Err(failed(path, format_args!("has {lines} lines")));
    }
    let wanted: Vec<&str> = text.split('\n').skip(skip).take(take).collect();
    Ok(ToolOutput::ok(limit::cap(
        &wanted.join("\n"),
        "ask for fewer lines",
    )))
}

fn load(context: &ToolContext, path: &str) -> Result<String, PathError> {
    let mut file = Workspace::open(&context.workspace)?.open_file(path)?;
    beneath::text(beneath::load(&mut file)?)
}
