//! Writes the logs of generations and the usage ledger to disk as they grow, beside the engine.
//!
//! The thread is woken after every step and appends whatever is new. It reads the logs themselves,
//! so that nothing queues up behind a slow disk, and a step that emits costs at most one write per
//! generation.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

use super::{generation::Generation, handle::Shared};
use crate::{
    sched::request::FinishReason,
    snapshot::{
        Folder,
        ledger::LedgerFile,
        log::{Begin, LogWriter, Record},
    },
};

/// See the module's description.
pub(super) struct Persister {
    wake: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl Persister {
    /// Starts the thread.
    pub(super) fn start(
        shared: Arc<Shared>,
        folder: Arc<Folder>,
        ledger: LedgerFile,
    ) -> io::Result<Self> {
        let (wake, woken) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("logs".into())
            .spawn(move || Logs::new(shared, folder, ledger).run(&woken))?;
        Ok(Self { wake, thread })
    }

    /// Something may have changed.
    pub(super) fn wake(&self) {
        // It is awake already when there is no room.
        let _ = self.wake.try_send(());
    }

    /// Waits until everything is written and durable.
    pub(super) fn finish(self) {
        drop(self.wake);
        if self.thread.join().is_err() {
            tracing::error!("the thread that writes logs panicked");
        }
    }
}

struct Written {
    generation: Arc<Generation>,
    /// `None` when it could not be written.
    log: Option<LogWriter>,
    tokens: usize,
    ended: bool,
}

struct Logs {
    shared: Arc<Shared>,
    folder: Arc<Folder>,
    written: HashMap<(Arc<str>, String), Written>,
    ledger: LedgerFile,
    /// Changes of the ledger that are written.
    ledger_changes: u64,
    failing: bool,
}

impl Logs {
    fn new(shared: Arc<Shared>, folder: Arc<Folder>, ledger: LedgerFile) -> Self {
        Self {
            ledger,
            ledger_changes: 0,
            shared,
            folder,
            written: HashMap::new(),
            failing: false,
        }
    }

    fn run(mut self, woken: &Receiver<()>) {
        while woken.recv().is_ok() {
            self.pass();
        }
        self.pass();
        for log in self
            .written
            .values()
            .filter_map(|written| written.log.as_ref())
        {
            let synced = log.sync();
            self.failing = report(self.failing, synced);
        }
        self.failing = report(self.failing, self.ledger.sync());
    }

    fn pass(&mut self) {
        let known: Vec<_> = self.shared.registry().all().cloned().collect();
        for generation in &known {
            let name = (generation.owner.clone(), generation.id.clone());
            let same = |written: &Written| Arc::ptr_eq(&written.generation, generation);
            if !self.written.get(&name).is_some_and(same) {
                let written = self.begin(generation);
                self.written.insert(name.clone(), written);
            }
            if let Some(written) = self.written.get_mut(&name) {
                let appended = written.append();
                if appended.is_err() {
                    // A log with a hole is none: what comes next would be taken for what was lost.
                    written.log.take().into_iter().for_each(LogWriter::remove);
                }
                self.failing = report(self.failing, appended);
            }
        }
        if known.len() < self.written.len() {
            self.forget(&known);
        }
        let written = self.write_ledger();
        self.failing = report(self.failing, written);
    }

    fn write_ledger(&mut self) -> io::Result<()> {
        let all = self.ledger.wants_all();
        let since = if all { 0 } else { self.ledger_changes };
        let (sums, changes) = self.shared.ledger().changed_after(since);
        if sums.is_empty() {
            return Ok(());
        }
        match all {
            true => self.ledger.write_all(&sums)?,
            false => self.ledger.append(&sums)?,
        }
        self.ledger_changes = changes;
        Ok(())
    }

    /// Removes the logs of generations that are not known any more.
    fn forget(&mut self, known: &[Arc<Generation>]) {
        let known: HashMap<_, _> = known
            .iter()
            .map(|known| ((known.owner.clone(), known.id.clone()), ()))
            .collect();
        let gone = self
            .written
            .keys()
            .filter(|name| !known.contains_key(*name));
        let gone: Vec<_> = gone.cloned().collect();
        for name in gone {
            let log = self.written.remove(&name).and_then(|written| written.log);
            log.into_iter().for_each(LogWriter::remove);
        }
    }

    fn begin(&mut self, generation: &Arc<Generation>) -> Written {
        let started = &generation.started;
        let begin = Begin {
            owner: (*generation.owner).to_owned(),
            id: generation.id.clone(),
            run_id: (*started.run_id).to_owned(),
            priority: generation.priority,
            cache_salt: generation.cache_salt.clone(),
            prompt: started.prompt.to_vec(),
            params: (*started.params).clone(),
            draft: started.draft,
            stop_strings: started.stop_strings.to_vec(),
            grammar: (*generation.grammar).to_owned(),
            note: generation.note.to_vec(),
        };
        let tokens = generation.tokens();
        let count = tokens.len();
        let created = LogWriter::create(&self.folder.generations(), begin, tokens);
        let (log, result) = match created {
            Ok(log) => (Some(log), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.failing = report(self.failing, result);
        Written {
            generation: generation.clone(),
            log,
            tokens: count,
            ended: false,
        }
    }
}

impl Written {
    /// Appends what is new.
    fn append(&mut self) -> io::Result<()> {
        let Some(log) = self.log.as_mut().filter(|_| !self.ended) else {
            return Ok(());
        };
        let (tokens, outcome) = self.generation.since(self.tokens);
        if !tokens.is_empty() {
            self.tokens += tokens.len();
            log.append(&Record::Tokens(tokens))?;
        }
        // A failed one is continued by whoever comes next.
        let outcome = outcome.filter(|end| !matches!(end.reason, FinishReason::Failed(_)));
        if let Some(outcome) = outcome {
            log.append(&Record::End(outcome))?;
            log.sync()?;
            self.ended = true;
        }
        Ok(())
    }
}

/// Says once that logs cannot be written; returns whether that is still so.
fn report(failing: bool, result: io::Result<()>) -> bool {
    match result {
        Ok(()) => failing,
        Err(error) => {
            if !failing {
                tracing::warn!(
                    %error,
                    "a generation's log or the usage ledger could not be written; service goes on, \
                     but a restart will not know what was not written"
                );
            }
            true
        }
    }
}
