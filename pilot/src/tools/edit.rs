//! `edit`: one piece of text in a file, replaced.

use super::{
    Class, Declaration, Execution, Facts, FileFacts, FileImage, FileState, Standing, Tool,
    ToolCall, ToolContext, ToolOutput,
    beneath::{Parents, PathError, Spot, Workspace},
    change,
    declare::{Arguments, Declared, failed, known},
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "edit",
    description: "Replace text that occurs exactly once in a file.",
    parameters: r#"{"type": "object", "properties": {"path": {"type": "string", "description": "File to change."}, "old": {"type": "string", "description": "Text to replace."}, "new": {"type": "string", "description": "Replacement."}}, "required": ["path", "old", "new"]}"#,
};

/// The tool. The file is replaced as a whole, so a crash leaves the old or the new one.
#[derive(Debug)]
pub struct Edit;

impl Tool for Edit {
    fn declaration(&self) -> Declaration {
        DECLARED.to_owned()
    }

    fn class(&self) -> Class {
        Class::Verifiable
    }

    fn prepare(&self, call: &ToolCall, context: &ToolContext) -> Result<Facts, ToolOutput> {
        let arguments = DECLARED.arguments(call)?;
        let path = arguments.text("path");
        let look = || -> Result<Vec<u8>, PathError> {
            change::current(&find(path, context)?)?.ok_or(PathError::Missing)
        };
        let old = look().map_err(|e| failed(path, e))?;
        let new = replaced(&old, &arguments)?;
        let (before, after) = (Some(FileImage::of(&old)), FileImage::of(&new));
        Ok(Facts::File(FileFacts {
            path: path.to_owned(),
            before,
            after,
        }))
    }

    fn execute(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Execution {
        let done = DECLARED.arguments(call).and_then(|arguments| {
            let path = arguments.text("path");
            let (spot, content, state) = stand(path, facts, context)?;
            let written = match state {
                FileState::Before => {
                    let new = replaced(&content, &arguments)?;
                    change::replace(&spot, &new, &context.fail)
                }
                FileState::After => spot.sync_folder(),
                FileState::Torn | FileState::Other => return Err(changed(path)),
            };
            written.map_err(|e| failed(path, e))?;
            Ok(edited(path))
        });
        Execution::Ended(done.unwrap_or_else(|refusal| refusal))
    }

    fn inspect(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Standing {
        let looked = DECLARED.arguments(call).and_then(|arguments| {
            let path = arguments.text("path").to_owned();
            let (spot, _, state) = stand(&path, facts, context)?;
            Ok((path, spot, state))
        });
        match looked {
            Ok((_, _, FileState::Before)) => Standing::Redo,
            // The new name may not be on the disk yet.
            Ok((path, spot, FileState::After)) => match spot.sync_folder() {
                Ok(()) => Standing::Done(edited(&path)),
                Err(e) => Standing::Unknown(known(failed(&path, e))),
            },
            Ok((path, _, FileState::Torn | FileState::Other)) => {
                Standing::Unknown(known(changed(&path)))
            }
            Err(refusal) => Standing::Unknown(known(refusal)),
        }
    }
}

fn find(path: &str, context: &ToolContext) -> Result<Spot, PathError> {
    Workspace::open(&context.workspace)?.find(path, Parents::Expect)
}

fn stand(
    path: &str,
    facts: &Facts,
    context: &ToolContext,
) -> Result<(Spot, Vec<u8>, FileState), ToolOutput> {
    let Facts::File(facts) = facts else {
        return Err(changed(path));
    };
    let spot = find(path, context).map_err(|e| failed(path, e))?;
    let now = change::current_bytes(&spot).map_err(|e| failed(path, e))?;
    let state = facts.state_of(now.as_deref(), None);
    Ok((spot, now.unwrap_or_default(), state))
}

fn replaced(bytes: &[u8], arguments: &Arguments) -> Result<Vec<u8>, ToolOutput> {
    let path = arguments.text("path");
    let (old, new) = (arguments.text("old"), arguments.text("new"));
    let text = std::str::from_utf8(bytes).map_err(|_| failed(path, PathError::NotText))?;
    let times = if old.is_empty() {
        0
    } else {
        text.matches(old).count()
    };
    match times {
        0 => Err(failed(path, "text not found")),
        1 => Ok(text.replacen(old, new, 1).into_bytes()),
        _ => Err(failed(
            path,
            format_args!("text occurs {times} times; make it unique"),
        )),
    }
}

fn edited(path: &str) -> ToolOutput {
    ToolOutput::ok(format!("edited {path}"))
}

fn changed(path: &str) -> ToolOutput {
    failed(path, PathError::Changed)
}
