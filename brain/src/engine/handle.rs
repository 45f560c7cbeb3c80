//! The handle that front ends hold: cheap to clone, never blocks on the device.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    clock::Clock,
    error::Health,
    ledger::Ledger,
    observer::Observer,
    persist::Persister,
    registry::Registry,
    saver::{Saver, Storage},
    thread::{Command, EngineThread},
    tiers::{TierStats, Tiers},
    watchdog::Pulse,
};
use crate::{
    backend::{Executor, Limits},
    sched::{
        scheduler::{LimitsError, SchedConfig, Scheduler},
        stats::Stats,
    },
    snapshot::ledger::{LedgerFile, RunUsage},
};

/// Settings of the engine. None of them can change a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Of the scheduler.
    pub sched: SchedConfig,
    /// Bytes of this machine's memory for blocks that the device has no room for.
    pub host_cache: u64,
    /// How long a generation that nobody reads is computed on, and an ended one stays readable.
    pub lease: Duration,
    /// Generations computed without a reader, at most; the longest unread is given up first.
    pub orphans: usize,
    /// Generations computed or waiting, at most.
    pub live: usize,
    /// Generations known, ended ones included, at most.
    pub known: usize,
    /// How often a failed step is run again before its sequences are tried one by one.
    pub retries: u32,
    /// Failed runs without a good one in between after which the engine gives the device up.
    pub give_up_after: u32,
    /// A step that takes longer is suspicious.
    pub patience: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            sched: SchedConfig::default(),
            host_cache: 0,
            lease: Duration::from_secs(15 * 60),
            orphans: 64,
            live: 256,
            known: 1024,
            retries: 2,
            give_up_after: 32,
            patience: Duration::from_secs(120),
        }
    }
}

/// What the engine did and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// The scheduler's counters.
    pub sched: Stats,
    /// Of the tiers below the device's memory.
    pub tiers: TierStats,
    /// Generations known, ended ones included.
    pub generations: usize,
    /// Time since the engine's clock began.
    pub uptime: Duration,
}

/// What the handles and the thread share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: EngineConfig,
    pub(super) clock: Arc<dyn Clock>,
    registry: Mutex<Registry>,
    stats: Mutex<(Stats, TierStats)>,
    ledger: Mutex<Ledger>,
    pub(super) pulse: Pulse,
    pub(super) draining: AtomicBool,
    observer: OnceLock<Arc<dyn Observer>>,
}

impl Shared {
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who hears what the engine does, if anybody does.
    pub(super) fn observer(&self) -> Option<&dyn Observer> {
        self.observer.get().map(|observer| &**observer)
    }

    pub(super) fn set_stats(&self, stats: Stats, tiers: TierStats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = (stats, tiers);
    }
}

/// Generates tokens. A clone is another handle of the same engine; when the last one is dropped,
/// the engine ends.
#[derive(Clone, Debug)]
pub struct Engine {
    /// Whose handle it is: ids belong to callers.
    pub(super) owner: Arc<str>,
    pub(super) shared: Arc<Shared>,
    pub(super) commands: mpsc::Sender<Command>,
    limits: Limits,
    max_len: usize,
}

impl Engine {
    /// Starts the engine's thread over an executor.
    pub fn start(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StartError> {
        Self::start_with(executor, config, clock, None)
    }

    /// The same, with a folder in which a successor finds what this engine knew. What a
    /// predecessor left there is taken in: generations that had not ended go on.
    pub fn start_with(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        clock: Arc<dyn Clock>,
        storage: Option<Storage>,
    ) -> Result<Self, StartError> {
        let limits = executor.limits().clone();
        let mut sched = config.sched.clone();
        sched.cache.spill = config.host_cache > 0 || storage.is_some();
        let scheduler = Scheduler::new(limits.clone(), sched)?;
        let max_len = scheduler.max_len();
        let shared = Arc::new(Shared {
            config,
            clock,
            registry: Mutex::default(),
            stats: Mutex::new((scheduler.stats(), TierStats::default())),
            ledger: Mutex::default(),
            pulse: Pulse::new(),
            draining: AtomicBool::new(false),
            observer: OnceLock::new(),
        });
        let (commands, inbox) = mpsc::channel();
        let engine = Self {
            owner: "".into(),
            shared: shared.clone(),
            commands,
            limits,
            max_len,
        };
        let thread_failed = |error: std::io::Error| StartError::Thread(error.to_string());
        let (mut saver, mut persister) = (None, None);
        if let Some(storage) = storage {
            let taken_in = engine.take_in(&storage);
            let folder = storage.folder.clone();
            let (ledger, sums) = LedgerFile::open(folder.path());
            shared.ledger().take_in(sums);
            let started = Persister::start(shared.clone(), folder, ledger, taken_in);
            persister = Some(started.map_err(thread_failed)?);
            saver = Some(Saver::start(storage).map_err(thread_failed)?);
        }
        let host = shared.config.host_cache;
        let tiers = Tiers::new(host, saver, shared.clock.clone(), &scheduler);
        let tiers = tiers.map_err(thread_failed)?;
        let thread = EngineThread::new(shared, scheduler, executor, inbox, tiers, persister);
        std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || thread.run())
            .map_err(thread_failed)?;
        Ok(engine)
    }

    /// A handle for one caller. Ids, runs and cached prefixes of one caller are out of reach of
    /// every other.
    pub fn owned_by(&self, owner: &str) -> Self {
        Self {
            owner: owner.into(),
            ..self.clone()
        }
    }

    /// Ends a generation. Idempotent; false when it had ended or is not known. Its log stays
    /// readable for the lease.
    pub fn cancel(&self, id: &str) -> bool {
        let generation = self.shared.registry().get(&self.owner, id).cloned();
        let Some(generation) = generation else {
            return false;
        };
        let live = !generation.attendance().0;
        live && self.commands.send(Command::Cancel(generation)).is_ok()
    }

    /// Counters.
    pub fn stats(&self) -> EngineStats {
        let (sched, tiers) = *self
            .shared
            .stats
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        EngineStats {
            sched,
            tiers,
            generations: self.shared.registry().len(),
            uptime: self.shared.clock.now(),
        }
    }

    /// What the caller's runs took, by name; the nameless one is all requests without a run.
    pub fn usage(&self) -> Vec<(Arc<str>, RunUsage)> {
        self.shared.ledger().of(&self.owner)
    }

    /// What one of the caller's runs took; `None` when it is not known.
    pub fn usage_of(&self, run: &str) -> Option<RunUsage> {
        self.shared.ledger().of_run(&self.owner, run)
    }

    /// Lets somebody hear of rounds and ends from now on; only the first one that asks.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        // A second observer would count everything twice.
        let _ = self.shared.observer.set(observer);
    }

    /// Whether the engine gets on. Does not wait for it.
    pub fn health(&self) -> Health {
        self.shared
            .pulse
            .health(self.shared.clock.now(), self.shared.config.patience)
    }

    /// Takes no new generation on, and waits until those there have ended, `deadline` at most.
    /// Then the engine ends; what was left is ended with a reason that says to ask again. Logs
    /// stay readable while a handle lives. Returns how many were cut short.
    pub async fn drain(&self, deadline: Duration) -> usize {
        self.shared.draining.store(true, Ordering::SeqCst);
        let until = self.shared.clock.now().saturating_add(deadline);
        let (done, cut) = oneshot::channel();
        match self.commands.send(Command::Drain { until, done }) {
            Ok(()) => cut.await.unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// Makes the engine look at its clock now. The machine's clock needs no such call.
    pub fn tick(&self) {
        // A thread that is gone has nothing left to look at.
        let _ = self.commands.send(Command::Tick);
    }

    /// The executor's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Prompt and answer together, at most.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// The settings.
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }
}

/// Why an engine does not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Not even one sequence could be computed.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The system gives no thread.
    #[error("the engine's thread could not be started: {0}")]
    Thread(String),
}
