//! `append`: lines at the end of a file, which may be new.

use super::{
    Class, Declaration, Execution, Facts, FileFacts, FileImage, FileState, Standing, Tool,
    ToolCall, ToolContext, ToolOutput,
    beneath::{Parents, PathError, Spot, Workspace},
    change,
    declare::{Arguments, Declared, failed, known},
};

/// What the model is told.
pub const DECLARED: Declared = Declared {
    name: "append",
    description: "Add lines at the end of a file.",
    parameters: r#"{"type": "object", "properties": {"path": {"type": "string", "description": "File to extend."}, "content": {"type": "string", "description": "Lines to add."}}, "required": ["path", "content"]}"#,
};

/// The tool.
#[derive(Debug)]
pub struct Append;

impl Tool for Append {
    fn declaration(&self) -> Declaration {
        DECLARED.to_owned()
    }

    fn class(&self) -> Class {
        Class::Verifiable
    }

    fn prepare(&self, call: &ToolCall, context: &ToolContext) -> Result<Facts, ToolOutput> {
        let arguments = DECLARED.arguments(call)?;
        let path = arguments.text("path");
        let old = find(path, context).and_then(|spot| change::current(&spot));
        let mut content = old.map_err(|e| failed(path, e))?;
        let before = content.as_deref().map(FileImage::of);
        content
            .get_or_insert_default()
            .extend_from_slice(&arguments.lines("content"));
        let after = FileImage::of(&content.unwrap_or_default());
        Ok(Facts::File(FileFacts {
            path: path.to_owned(),
            before,
            after,
        }))
    }

    fn execute(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Execution {
        let done = DECLARED.arguments(call).and_then(|arguments| {
            let path = arguments.text("path");
            let (spot, state, _) = stand(&arguments, facts, context)?;
            let Facts::File(FileFacts { before, .. }) = facts else {
                return Err(changed(path));
            };
            let from = before.as_ref().map_or(0, |image| image.len);
            let written = match state {
                FileState::Before => {
                    change::append(&spot, from, &arguments.lines("content"), &context.fail)
                }
                FileState::After => spot.sync(),
                FileState::Torn | FileState::Other => return Err(changed(path)),
            };
            written.map_err(|e| failed(path, e))?;
            Ok(appended(path))
        });
        Execution::Ended(done.unwrap_or_else(|refusal| refusal))
    }

    fn inspect(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Standing {
        let looked = DECLARED.arguments(call).and_then(|arguments| {
            let (spot, state, _) = stand(&arguments, facts, context)?;
            Ok((arguments.text("path").to_owned(), spot, state))
        });
        match looked {
            Ok((_, _, FileState::Before)) => Standing::Redo,
            Ok((_, _, FileState::Torn)) => Standing::Torn,
            Ok((path, _, FileState::Other)) => Standing::Unknown(known(changed(&path))),
            // Written a moment before a crash, it may not be on the disk yet.
            Ok((path, spot, FileState::After)) => match spot.sync() {
                Ok(()) => Standing::Done(appended(&path)),
                Err(e) => Standing::Unknown(known(failed(&path, e))),
            },
            Err(refusal) => Standing::Unknown(known(refusal)),
        }
    }

    fn repair(
        &self,
        call: &ToolCall,
        facts: &Facts,
        context: &ToolContext,
    ) -> Result<(), ToolOutput> {
        let arguments = DECLARED.arguments(call)?;
        let path = arguments.text("path");
        let (spot, state, len) = stand(&arguments, facts, context)?;
        match (state, facts) {
            (FileState::Torn, Facts::File(FileFacts { before, .. })) => {
                let old_len = before.as_ref().map(|image| image.len);
                change::cut_back(&spot, len, old_len).map_err(|e| failed(path, e))
            }
            (FileState::Before, _) => Ok(()),
            _ => Err(changed(path)),
        }
    }
}

fn find(path: &str, context: &ToolContext) -> Result<Spot, PathError> {
    Workspace::open(&context.workspace)?.find(path, Parents::Expect)
}

/// The file's place, what became of it, and its length.
fn stand(
    arguments: &Arguments,
    facts: &Facts,
    context: &ToolContext,
) -> Result<(Spot, FileState, u64), ToolOutput> {
    let path = arguments.text("path");
    let Facts::File(facts) = facts else {
        return Err(changed(path));
    };
    let spot = find(path, context).map_err(|e| failed(path, e))?;
    let now = change::current_bytes(&spot).map_err(|e| failed(path, e))?;
    let state = facts.state_of(now.as_deref(), Some(&arguments.lines("content")));
    Ok((spot, state, now.map_or(0, |bytes| bytes.len() as u64)))
}

fn appended(path: &str) -> ToolOutput {
    ToolOutput::ok(format!("appended to {path}"))
}

fn changed(path: &str) -> ToolOutput {
    failed(path, PathError::Changed)
}
