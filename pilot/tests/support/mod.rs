//! A scripted marathon in a temporary workspace, and what it leaves behind.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure here is a failed test"
)]

pub(crate) mod fault;
pub(crate) mod scripted;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use pilot::{
    brain::{BrainClient, BrainOptions},
    driver::{Driver, DriverError, Ending, NewRun, Parts, Resume, failpoint::FailPoints},
    journal::Journal,
    run::{
        entry::{Entry, Limits, RunId, SamplingChoice},
        event::{NoObserver, Observer, RunEvent, Totals},
        log::{self, AnswerLog},
        state::State,
    },
    tools::{Tool, Toolbox, append, bash, edit, finish, ls, read, write},
};
use scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

pub(crate) const NO_LIMITS: Limits = Limits {
    steps: 0,
    tokens: 0,
    active_ms: 0,
};

/// Every tool, every kind of result, a silent turn, an answer that is too long, a turn with two
/// calls, and enough text to compact the prompt.
pub(crate) fn script() -> Script {
    let silent = |text: &str| ScriptedTurn {
        content: text.to_owned(),
        ..ScriptedTurn::default()
    };
    let mut turns = vec![
        ScriptedTurn::call(
            "write",
            json!({"path": "report.txt", "content": "# Report"}),
        ),
        ScriptedTurn::call("ls", json!({"path": "."})),
        ScriptedTurn::call("read", json!({"path": "inbox/one.txt"})),
        ScriptedTurn::call(
            "append",
            json!({"path": "report.txt", "content": "one | Ann"}),
        ),
        ScriptedTurn::call(
            "edit",
            json!({"path": "inbox/one.txt", "old": "state: open", "new": "state: done"}),
        ),
        silent("I will now go on."),
        ScriptedTurn::call("read", json!({"path": "inbox/gone.txt"})),
        ScriptedTurn {
            rambles: true,
            ..ScriptedTurn::call(
                "append",
                json!({"path": "report.txt", "content": "gone | -"}),
            )
        },
        ScriptedTurn::call("fly", json!({"to": "the moon"})),
        ScriptedTurn::call("read", json!({"file": 7})),
        ScriptedTurn {
            calls: vec![
                (
                    "append".into(),
                    json!({"path": "report.txt", "content": "two"}).to_string(),
                ),
                (
                    "append".into(),
                    json!({"path": "report.txt", "content": "two"}).to_string(),
                ),
            ],
            ..ScriptedTurn::default()
        },
        ScriptedTurn::call(
            "bash",
            json!({"command": "echo once >> ledger.txt; wc -l ledger.txt"}),
        ),
    ];
    for number in 0..4 {
        let line = format!("line {number} of the long tail of this report");
        turns.push(ScriptedTurn::call(
            "append",
            json!({"path": "report.txt", "content": line}),
        ));
    }
    turns.push(ScriptedTurn::call("read", json!({"path": "report.txt"})));
    Script { turns }
}

/// A workspace, a spool, and the id of a run in them.
pub(crate) struct Scene {
    pub(crate) folder: TempDir,
    pub(crate) run: RunId,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let inbox = folder.path().join("workspace/inbox");
        fs::create_dir_all(&inbox).unwrap();
        fs::write(inbox.join("one.txt"), "owner: Ann\nstate: open\n").unwrap();
        let run = RunId::new("run-1").unwrap();
        Self { folder, run }
    }

    pub(crate) fn workspace(&self) -> PathBuf {
        self.folder.path().join("workspace")
    }

    pub(crate) fn new_run(&self) -> NewRun {
        NewRun {
            run: self.run.clone(),
            goal: "Write the report.".into(),
            system: "You are careful.".into(),
            workspace: self.workspace(),
            seed: 12,
            max_context: 1200,
            answer_reserve: 300,
            limits: NO_LIMITS,
            sampling: SamplingChoice::default(),
            allow_bash: true,
            constrain_calls: true,
        }
    }

    pub(crate) fn parts(&self, journal: Arc<dyn Journal>, brain: &ScriptedBrain) -> Parts {
        Parts {
            journal,
            brain: client(&brain.address()),
            tools: tools(),
            spool: self.folder.path().join("spool"),
            observer: Arc::new(NoObserver),
            fail: Arc::new(FailPoints::default()),
            cancel: CancellationToken::new(),
        }
    }

    /// Creates the run and drives it.
    pub(crate) async fn begin(
        &self,
        journal: Arc<dyn Journal>,
        brain: &ScriptedBrain,
    ) -> Result<Ending, DriverError> {
        let parts = self.parts(journal, brain);
        Driver::create(parts, self.new_run()).await?.run().await
    }

    /// Takes the run up again and drives it.
    pub(crate) async fn resume(
        &self,
        journal: Arc<dyn Journal>,
        brain: &ScriptedBrain,
    ) -> Result<Ending, DriverError> {
        self.resume_with(self.parts(journal, brain), Resume::default())
            .await
    }

    pub(crate) async fn resume_with(
        &self,
        parts: Parts,
        how: Resume,
    ) -> Result<Ending, DriverError> {
        Driver::open(parts, self.run.clone(), how)
            .await?
            .run()
            .await
    }

    /// Takes the run up again, or begins it if the crash came before its first entry.
    pub(crate) async fn go_on(
        &self,
        journal: Arc<dyn Journal>,
        brain: &ScriptedBrain,
    ) -> Result<Ending, DriverError> {
        if journal.head(&self.run).unwrap().next == 0 {
            self.begin(journal, brain).await
        } else {
            self.resume(journal, brain).await
        }
    }
}

pub(crate) fn client(address: &str) -> BrainClient {
    client_with(address, Duration::from_secs(60))
}

/// A client that gives a link up after this long without a sign of life.
pub(crate) fn client_with(address: &str, silence: Duration) -> BrainClient {
    BrainClient::new(&BrainOptions {
        address: address.to_owned(),
        token_file: None,
        ca_file: None,
        silence,
    })
    .unwrap()
}

pub(crate) fn tools() -> Toolbox {
    let supervisor = PathBuf::from(env!("CARGO_BIN_EXE_pilot"));
    let tools: Vec<Arc<dyn Tool>> = vec![
        Arc::new(read::Read),
        Arc::new(write::Write),
        Arc::new(append::Append),
        Arc::new(edit::Edit),
        Arc::new(ls::Ls),
        Arc::new(bash::Bash::supervised_by(supervisor)),
        Arc::new(finish::Finish),
    ];
    Toolbox::new(tools)
}

pub(crate) fn brain() -> ScriptedBrain {
    ScriptedBrain::start(script(), ScriptedOptions::default()).unwrap()
}

/// What a run must leave behind, whatever happened on the way.
#[derive(Debug, PartialEq)]
pub(crate) struct Remains {
    pub(crate) answers: Vec<AnswerLog>,
    pub(crate) state: State,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
}

impl Remains {
    pub(crate) fn of(scene: &Scene, journal: &dyn Journal) -> Self {
        let entries = entries(scene, journal);
        let mut state = State::fold(&entries).unwrap();
        // How often and how long are not part of what.
        state.totals = Totals {
            resumes: 0,
            active_ms: 0,
            recovered: 0,
            ..state.totals
        };
        state.created.workspace = String::new();
        Self {
            answers: settled(log::answers(&entries)),
            state,
            files: snapshot(&scene.workspace()),
        }
    }
}

/// Answers as they ended; one that was asked for twice (a power cut took the first asking) counts
/// once.
fn settled(answers: Vec<AnswerLog>) -> Vec<AnswerLog> {
    answers
        .into_iter()
        .filter(|answer| answer.end.is_some())
        .collect()
}

pub(crate) fn entries(scene: &Scene, journal: &dyn Journal) -> Vec<Entry> {
    let records = journal.load(&scene.run).unwrap();
    records.into_iter().map(|record| record.entry).collect()
}

pub(crate) fn snapshot(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path
                    .strip_prefix(root)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// Keeps every event, and lets a test wait for one.
#[derive(Default)]
pub(crate) struct Events {
    seen: Mutex<Vec<RunEvent>>,
    more: Notify,
}

impl Events {
    pub(crate) fn all(&self) -> Vec<RunEvent> {
        self.seen.lock().unwrap().clone()
    }

    pub(crate) async fn wait_for(&self, enough: impl Fn(&[RunEvent]) -> bool) {
        loop {
            let more = self.more.notified();
            if enough(&self.all()) {
                return;
            }
            tokio::time::timeout(Duration::from_secs(60), more)
                .await
                .expect("nothing happens any more");
        }
    }
}

impl Observer for Events {
    fn observe(&self, event: &RunEvent) {
        self.seen.lock().unwrap().push(event.clone());
        self.more.notify_one();
    }
}
