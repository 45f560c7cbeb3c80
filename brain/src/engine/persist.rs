//! Writes the logs of generations and the usage ledger to disk as they grow, beside the engine.
//!
//! The thread is woken after a step, waits a little, and appends whatever is new by then. It reads
//! the logs themselves, so that nothing queues up behind a slow disk; the wait makes one write of
//! several steps' tokens, and leaves the processor to those who deliver them.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::{generation::Generation, handle::Shared};
use crate::snapshot::{
    Folder,
    ledger::LedgerFile,
    log::{Begin, LogWriter, Record},
};

/// From a step to the writing of its tokens. A brain that is killed computes what was not written
/// again, in less time than that.
const WAIT: Duration = Duration::from_millis(50);

/// See the module's description.
pub(super) struct Persister {
    wake: SyncSender<End>,
    /// Dropped at the end: then nothing is waited for.
    working: Sender<Infallible>,
    thread: JoinHandle<()>,
}

/// What the thread is woken for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Something may have changed.
    NotYet,
    /// The engine ends; no generation is to blame for that.
    Sound,
}

impl Persister {
    /// Starts the thread, with the logs that a predecessor left and that are gone on with.
    pub(super) fn start(
        shared: Arc<Shared>,
        folder: Arc<Folder>,
        ledger: LedgerFile,
        taken_in: Vec<TakenIn>,
    ) -> io::Result<Self> {
        let (wake, woken) = sync_channel(1);
        let (working, ending) = channel();
        let mut logs = Logs::new(shared, folder, ledger);
        for taken_in in taken_in {
            let generation = &taken_in.generation;
            let name = (generation.owner.clone(), generation.id.clone());
            logs.written.insert(name, taken_in.written());
        }
        let thread = std::thread::Builder::new()
            .name("logs".into())
            .spawn(move || logs.run(&woken, &ending))?;
        Ok(Self {
            wake,
            working,
            thread,
        })
    }

    /// Something may have changed.
    pub(super) fn wake(&self) {
        // It is awake already when there is no room.
        let _ = self.wake.try_send(End::NotYet);
    }

    /// Waits until everything is written and durable. Where the engine was `sound`, no generation
    /// that had no token yet is to blame for its end.
    pub(super) fn finish(self, sound: bool) {
        drop(self.working);
        if sound {
            // A thread that is gone is noticed below.
            let _ = self.wake.send(End::Sound);
        }
        drop(self.wake);
        if self.thread.join().is_err() {
            tracing::error!("the thread that writes logs panicked");
        }
    }
}

/// A log that a predecessor left and that holds all tokens of its generation.
pub(super) struct TakenIn {
    pub(super) generation: Arc<Generation>,
    /// `None` when it cannot be gone on with.
    pub(super) log: Option<LogWriter>,
    /// Whether the log says how it ended.
    pub(super) ended: bool,
}

impl TakenIn {
    fn written(self) -> Written {
        Written {
            tokens: self.generation.tokens().len(),
            attempts: self.generation.attempts_so_far(),
            ended: self.ended,
            log: self.log,
            generation: self.generation,
        }
    }
}

struct Written {
    generation: Arc<Generation>,
    /// `None` when it could not be written.
    log: Option<LogWriter>,
    tokens: usize,
    /// As the log has it.
    attempts: u32,
    ended: bool,
}

struct Logs {
    shared: Arc<Shared>,
    folder: Arc<Folder>,
    written: HashMap<(Arc<str>, String), Written>,
    ledger: LedgerFile,
    /// Changes of the ledger that are written.
    ledger_changes: u64,
    /// The last pass that wrote anything failed to write something.
    failing: bool,
}

/// What a pass did.
#[derive(Default)]
struct Pass {
    wrote: bool,
    error: Option<io::Error>,
}

impl Pass {
    /// Takes a result in; true for one that wrote something.
    fn note(&mut self, result: io::Result<bool>) {
        match result {
            Ok(wrote) => self.wrote |= wrote,
            Err(error) => self.error = Some(error),
        }
    }
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

    fn run(mut self, woken: &Receiver<End>, ending: &Receiver<Infallible>) {
        let mut sound = false;
        while let Ok(end) = woken.recv() {
            sound = end == End::Sound;
            // Nothing is ever sent: it is the wait or the end.
            let _ = ending.recv_timeout(WAIT);
            let pass = self.pass();
            self.report(pass);
        }
        let mut pass = self.pass();
        for written in self.written.values_mut() {
            pass.note(written.close(sound));
        }
        pass.note(self.ledger.sync().map(|()| false));
        self.report(pass);
    }

    fn pass(&mut self) -> Pass {
        let mut pass = Pass::default();
        let registry = self.shared.registry();
        let kept = registry.all().filter(|generation| generation.kept);
        let known: Vec<_> = kept.cloned().collect();
        drop(registry);
        for generation in &known {
            let name = (generation.owner.clone(), generation.id.clone());
            let same = |written: &Written| Arc::ptr_eq(&written.generation, generation);
            if !self.written.get(&name).is_some_and(same) {
                let written = self.begin(generation, &mut pass);
                self.written.insert(name.clone(), written);
            }
            if let Some(written) = self.written.get_mut(&name) {
                let appended = written.append();
                if appended.is_err() {
                    // A log with a hole is none: what comes next would be taken for what was lost.
                    written.log.take().into_iter().for_each(LogWriter::remove);
                }
                pass.note(appended);
            }
        }
        if known.len() < self.written.len() {
            self.forget(&known);
        }
        pass.note(self.write_ledger());
        pass
    }

    /// Says when logs can no longer be written, and when they can again.
    fn report(&mut self, pass: Pass) {
        match pass.error {
            Some(error) if !self.failing => {
                self.failing = true;
                tracing::warn!(
                    %error,
                    "a generation's log or the usage ledger could not be written; service goes on, \
                     but a restart will not know what was not written"
                );
            }
            Some(_) => {}
            None if self.failing && pass.wrote => {
                self.failing = false;
                tracing::info!("logs and the usage ledger are written again");
            }
            None => {}
        }
    }

    fn write_ledger(&mut self) -> io::Result<bool> {
        let all = self.ledger.wants_all();
        let since = if all { 0 } else { self.ledger_changes };
        let (sums, changes) = self.shared.ledger().changed_after(since);
        if sums.is_empty() {
            return Ok(false);
        }
        match all {
            true => self.ledger.write_all(&sums)?,
            false => self.ledger.append(&sums)?,
        }
        self.ledger_changes = changes;
        Ok(true)
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

    fn begin(&self, generation: &Arc<Generation>, pass: &mut Pass) -> Written {
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
        let (tokens, attempts) = (generation.tokens(), generation.attempts_so_far());
        let count = tokens.len();
        let folder = self.folder.generations();
        let log = match LogWriter::create(&folder, begin, tokens, attempts) {
            Ok(log) => {
                pass.note(Ok(true));
                Some(log)
            }
            Err(error) => {
                pass.note(Err(error));
                None
            }
        };
        Written {
            generation: generation.clone(),
            log,
            tokens: count,
            attempts,
            ended: false,
        }
    }
}

impl Written {
    /// Appends what is new; whether there was anything.
    fn append(&mut self) -> io::Result<bool> {
        let Some(log) = self.log.as_mut().filter(|_| !self.ended) else {
            return Ok(false);
        };
        let (tokens, outcome) = self.generation.since(self.tokens);
        let new = !tokens.is_empty() || outcome.is_some();
        if !tokens.is_empty() {
            self.tokens += tokens.len();
            self.attempts = 0;
            log.append(&Record::Tokens(tokens))?;
        }
        if let Some(outcome) = outcome {
            log.end(outcome)?;
            self.ended = true;
        }
        Ok(new)
    }

    /// Makes it durable. A `sound` end is no attempt that failed.
    fn close(&mut self, sound: bool) -> io::Result<bool> {
        let Some(log) = self.log.as_mut() else {
            return Ok(false);
        };
        let blameless = sound && !self.ended && self.attempts > 0;
        if blameless {
            self.attempts -= 1;
            log.append(&Record::Attempts(self.attempts))?;
        }
        log.sync()?;
        Ok(blameless)
    }
}
