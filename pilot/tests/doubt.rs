//! Calls in doubt that the scripted marathon cannot bring about: unsafe ones, torn ones, changed ones.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

mod support;

use std::{
    fs::{self, OpenOptions},
    io::Write,
    sync::Arc,
};

use pilot::{
    driver::{Driver, DriverError, Ending},
    journal::{
        Durability, Head, History, Journal, JournalError, Record, RunListing, memory::MemoryJournal,
    },
    run::entry::{Entry, ResultOrigin, RunId, ToolEnded},
    tools::{
        Class, Declaration, Execution, Facts, Standing, Tool, ToolCall, ToolContext, ToolOutput,
        Toolbox,
    },
};
use serde_json::json;
use support::{
    Scene, entries,
    scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn},
};

/// Writes a line to a ledger each time it is executed, and tells nobody what became of it.
struct Launch;

impl Tool for Launch {
    fn declaration(&self) -> Declaration {
        let parameters_json = json!({"type": "object", "properties": {}}).to_string();
        Declaration {
            name: "launch".into(),
            description: "Launch.".into(),
            parameters_json,
        }
    }

    fn class(&self) -> Class {
        Class::Unsafe
    }

    fn prepare(&self, _: &ToolCall, _: &ToolContext) -> Result<Facts, ToolOutput> {
        Ok(Facts::None)
    }

    fn execute(&self, _: &ToolCall, _: &Facts, context: &ToolContext) -> Execution {
        let ledger = context.workspace.join("ledger");
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(ledger)
            .unwrap();
        writeln!(file, "{}", context.call).unwrap();
        Execution::Ended(ToolOutput::ok("launched"))
    }

    fn inspect(&self, _: &ToolCall, _: &Facts, _: &ToolContext) -> Standing {
        Standing::Unknown("nobody saw it".into())
    }
}

/// Executing it breaks the tool itself.
struct Panics;

impl Tool for Panics {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "panic".into(),
            ..Launch.declaration()
        }
    }

    fn class(&self) -> Class {
        Class::Pure
    }

    fn prepare(&self, _: &ToolCall, _: &ToolContext) -> Result<Facts, ToolOutput> {
        Ok(Facts::None)
    }

    fn execute(&self, _: &ToolCall, _: &Facts, _: &ToolContext) -> Execution {
        panic!("a bug in a tool")
    }
}

/// A journal whose process dies when a tool's result comes.
struct DiesAtResult(Arc<MemoryJournal>);

impl History for DiesAtResult {
    fn runs(&self) -> Result<Vec<RunListing>, JournalError> {
        self.0.runs()
    }

    fn load(&self, run: &RunId) -> Result<Vec<Record>, JournalError> {
        self.0.load(run)
    }
}

impl Journal for DiesAtResult {
    fn head(&self, run: &RunId) -> Result<Head, JournalError> {
        self.0.head(run)
    }

    fn append(
        &self,
        run: &RunId,
        expected: Head,
        entries: &[Entry],
        durability: Durability,
    ) -> Result<Head, JournalError> {
        if entries
            .iter()
            .any(|entry| matches!(entry, Entry::ToolEnded(_)))
        {
            return Err(JournalError::io("appending", "killed"));
        }
        self.0.append(run, expected, entries, durability)
    }
}

struct Stage {
    scene: Scene,
    brain: ScriptedBrain,
    memory: Arc<MemoryJournal>,
    tools: Toolbox,
}

impl Stage {
    fn new(turns: Vec<ScriptedTurn>, tools: Toolbox) -> Self {
        Self {
            scene: Scene::new(),
            brain: ScriptedBrain::start(Script { turns }, ScriptedOptions::default()).unwrap(),
            memory: Arc::new(MemoryJournal::default()),
            tools,
        }
    }

    async fn drive(&self, journal: Arc<dyn Journal>) -> Result<Ending, DriverError> {
        let mut parts = self.scene.parts(journal.clone(), &self.brain);
        parts.tools = self.tools.clone();
        if journal.head(&self.scene.run).unwrap().next == 0 {
            Driver::create(parts, self.scene.new_run())
                .await?
                .run()
                .await
        } else {
            self.scene.resume_with(parts, Default::default()).await
        }
    }

    /// Drives until the first tool has acted and its result is about to be journaled.
    async fn die_before_the_first_result(&self) {
        let dying = Arc::new(DiesAtResult(self.memory.clone()));
        self.drive(dying).await.unwrap_err();
        let last = entries(&self.scene, &*self.memory).pop();
        assert!(matches!(last, Some(Entry::ToolIntended(_))), "{last:?}");
    }

    /// Takes the run up again, to its end.
    async fn recover(&self) {
        let ending = self.drive(self.memory.clone()).await.unwrap();
        assert_eq!(ending, Ending::Finished("all done".into()));
    }

    fn results(&self) -> Vec<ToolEnded> {
        entries(&self.scene, &*self.memory)
            .into_iter()
            .filter_map(|entry| match entry {
                Entry::ToolEnded(ended) => Some(*ended),
                _ => None,
            })
            .collect()
    }
}

fn append_line() -> ScriptedTurn {
    ScriptedTurn::call(
        "append",
        json!({"path": "notes.txt", "content": "second line"}),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unsafe_call_is_never_run_twice_and_the_model_is_told_that_nobody_knows() {
    let mut tools: Vec<Arc<dyn Tool>> = vec![Arc::new(Launch)];
    tools.push(support::tools().find("finish").unwrap());
    let stage = Stage::new(
        vec![ScriptedTurn::call("launch", json!({}))],
        Toolbox::new(tools),
    );
    stage.die_before_the_first_result().await;
    stage.recover().await;
    assert_eq!(
        fs::read(stage.scene.workspace().join("ledger")).unwrap(),
        b"0\n"
    );
    let first = &stage.results()[0];
    assert_eq!(first.origin, ResultOrigin::Unknown);
    assert_eq!(
        first.output.text,
        "error: the outcome is unknown: nobody saw it"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_torn_append_is_cut_back_and_done_again() {
    for (torn, origin) in [
        ("first line\nsecond l", ResultOrigin::Repaired),
        ("first line\nsec\0\0\0\0", ResultOrigin::Repaired),
        ("first line\n", ResultOrigin::VerifiedMissing),
        ("first line\nsecond line\n", ResultOrigin::VerifiedDone),
    ] {
        let stage = Stage::new(vec![append_line()], support::tools());
        let notes = stage.scene.workspace().join("notes.txt");
        fs::write(&notes, "first line\n").unwrap();
        stage.die_before_the_first_result().await;
        fs::write(&notes, torn).unwrap();
        stage.recover().await;
        assert_eq!(
            fs::read_to_string(&notes).unwrap(),
            "first line\nsecond line\n",
            "{torn:?}"
        );
        assert_eq!(stage.results()[0].origin, origin, "{torn:?}");
        assert_eq!(stage.results()[0].output.text, "appended to notes.txt");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_else_wrote_meanwhile_is_kept_and_told() {
    let stage = Stage::new(vec![append_line()], support::tools());
    let notes = stage.scene.workspace().join("notes.txt");
    fs::write(&notes, "first line\n").unwrap();
    stage.die_before_the_first_result().await;
    fs::write(&notes, "somebody else's line\n").unwrap();
    stage.recover().await;
    assert_eq!(
        fs::read_to_string(&notes).unwrap(),
        "somebody else's line\n"
    );
    let first = &stage.results()[0];
    assert_eq!(first.origin, ResultOrigin::Unknown);
    assert!(
        first
            .output
            .text
            .starts_with("error: the outcome is unknown"),
        "{first:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_is_gone_leaves_its_call_unknown() {
    let mut stage = Stage::new(vec![append_line()], support::tools());
    stage.die_before_the_first_result().await;
    stage.tools = Toolbox::new(vec![support::tools().find("finish").unwrap()]);
    // The tools differ from those the run began with, which is said before anything is tried.
    let ending = stage.drive(stage.memory.clone()).await.unwrap();
    assert!(matches!(ending, Ending::Paused(reason) if reason.to_string().contains("tools")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_tool_is_an_error_for_the_model_and_the_run_goes_on() {
    let mut tools: Vec<Arc<dyn Tool>> = vec![Arc::new(Panics)];
    tools.push(support::tools().find("finish").unwrap());
    let stage = Stage::new(
        vec![ScriptedTurn::call("panic", json!({}))],
        Toolbox::new(tools),
    );
    stage.recover().await;
    let first = &stage.results()[0];
    assert!(first.output.error, "{first:?}");
    assert!(
        first.output.text.starts_with("error: the tool failed"),
        "{first:?}"
    );
}
