//! What the agent can do to its workspace.
//!
//! A call goes through three stages, and a crash may fall between any two:
//!
//! 1. [`Tool::prepare`] looks, changes nothing, and says what will be true before and after
//!    ([`Facts`]). The driver journals them: the *intent*.
//! 2. [`Tool::execute`] acts. Its result text is journaled.
//! 3. After a crash between the two, the driver asks the tool's [`Class`] and, where that leaves
//!    it open, [`Tool::inspect`] what became of the call.
//!
//! Result texts never hold an absolute path, a time or a process id: the same run on another
//! machine must read the same.

pub mod append;
pub mod bash;
pub mod beneath;
pub mod change;
pub mod declare;
pub mod edit;
pub mod facts;
pub mod finish;
pub mod limit;
pub mod ls;
pub mod place;
pub mod process;
pub mod read;
pub mod spool;
pub mod supervisor;
pub mod write;

use std::{fmt, path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::driver::failpoint::FailPoints;

pub use facts::{Facts, FileFacts, FileImage, FileState};

/// What may be done with a call whose intent is durable and whose result is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    /// Changes nothing (read, ls): run again.
    Pure,
    /// Doing it twice is doing it once (write of a whole file): run again.
    Idempotent,
    /// The facts tell whether it happened (append, edit): look, then run or accept.
    Verifiable,
    /// Never run again behind the user's back (bash): ask its spool, else the outcome is unknown.
    Unsafe,
}

/// A call as the model wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The brain's id of the call inside its turn, for the template.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// A JSON object, unchecked.
    pub arguments: String,
}

/// What a tool hands back for the model to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolOutput {
    /// The text, capped by the tool. Starts with `error: ` when `error` is set.
    pub text: String,
    /// The call did not do what was asked.
    pub error: bool,
    /// Set by `finish` alone: the run ends with this summary.
    pub finish: Option<String>,
}

impl ToolOutput {
    /// A good result.
    pub fn ok(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            error: false,
            finish: None,
        }
    }

    /// A failed call; `error: ` is put in front.
    pub fn error(reason: impl fmt::Display) -> Self {
        Self {
            text: format!("error: {reason}"),
            error: true,
            finish: None,
        }
    }
}

/// How an execution came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Execution {
    /// It ended; the output is what the model reads.
    Ended(ToolOutput),
    /// `context.cancel` fired first. What runs goes on running; a later [`Tool::inspect`] and
    /// [`Tool::execute`] with the same facts join it.
    Interrupted,
}

/// What became of a call that was intended before a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Executing with the same facts is right: nothing happened, or what still runs is joined.
    Redo,
    /// It happened in part; [`Tool::repair`] puts the state before it back, then it is executed.
    Torn,
    /// It happened; this is its result.
    Done(ToolOutput),
    /// It may have happened, in whole or in part. The text tells the model what is known.
    Unknown(String),
}

/// What a call may touch.
#[derive(Clone)]
pub struct ToolContext {
    /// Root of the workspace; nothing outside it is reachable by file tools.
    pub workspace: PathBuf,
    /// Folder of this run beside the store, for output of supervised commands.
    pub spool: PathBuf,
    /// Number of the call in its run, from 0. Stays the same when the call is recovered.
    pub call: u64,
    /// Fires when pilot is asked to stop.
    pub cancel: CancellationToken,
    /// Named places where a test makes pilot kill itself.
    pub fail: Arc<FailPoints>,
}

/// A tool as the model is told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declaration {
    /// Name.
    pub name: String,
    /// One sentence.
    pub description: String,
    /// JSON Schema of the arguments, an object.
    pub parameters_json: String,
}

/// One tool. Methods block; the driver calls them on a thread of their own.
pub trait Tool: Send + Sync {
    /// What the model is told.
    fn declaration(&self) -> Declaration;

    /// How a doubtful call is treated.
    fn class(&self) -> Class;

    /// Checks the arguments and looks at what is there, changing nothing. `Err` is the result that
    /// the model gets; then no intent is journaled and nothing is executed.
    fn prepare(&self, call: &ToolCall, context: &ToolContext) -> Result<Facts, ToolOutput>;

    /// Acts. `facts` are those of the journaled intent. Returns only when the effect is on disk.
    fn execute(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Execution;

    /// What became of the call. Asked only of `Verifiable` and `Unsafe` tools.
    fn inspect(&self, call: &ToolCall, facts: &Facts, context: &ToolContext) -> Standing {
        let _ = (call, facts, context);
        Standing::Redo
    }

    /// Undoes a torn effect (see [`Standing::Torn`]).
    fn repair(
        &self,
        call: &ToolCall,
        facts: &Facts,
        context: &ToolContext,
    ) -> Result<(), ToolOutput> {
        let _ = (call, facts, context);
        Ok(())
    }
}

/// The tools of a run, in the order the model sees them.
#[derive(Clone, Default)]
pub struct Toolbox {
    tools: Vec<Arc<dyn Tool>>,
}

impl Toolbox {
    /// A box of these tools.
    pub fn new(tools: Vec<Arc<dyn Tool>>) -> Self {
        Self { tools }
    }

    /// The tool of that name.
    pub fn find(&self, name: &str) -> Option<Arc<dyn Tool>> {
        self.tools
            .iter()
            .find(|tool| tool.declaration().name == name)
            .cloned()
    }

    /// What the model is told, in order.
    pub fn declarations(&self) -> Vec<Declaration> {
        self.tools.iter().map(|tool| tool.declaration()).collect()
    }

    /// Names in order, for an error message.
    pub fn names(&self) -> Vec<String> {
        self.declarations()
            .into_iter()
            .map(|declaration| declaration.name)
            .collect()
    }
}

/// pilot's own tools. Without `allow_bash` the model is not told of `bash`.
pub fn toolbox(allow_bash: bool) -> Toolbox {
    let mut tools: Vec<Arc<dyn Tool>> = vec![
        Arc::new(read::Read),
        Arc::new(write::Write),
        Arc::new(append::Append),
        Arc::new(edit::Edit),
        Arc::new(ls::Ls),
    ];
    if allow_bash {
        tools.push(Arc::new(bash::Bash::of_this_program()));
    }
    tools.push(Arc::new(finish::Finish));
    Toolbox::new(tools)
}
