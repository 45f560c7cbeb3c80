//! The engine's loop: take commands, plan, run, commit, publish. One thread owns the device.

use std::{
    any::Any,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, TryRecvError},
    },
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    generation::{Generation, Waiting},
    handle::Shared,
    observer::Turn,
    persist::Persister,
    tiers::Tiers,
};
use crate::{
    backend::{Executor, Lost},
    sched::{
        request::{FinishReason, ValidRequest},
        scheduler::{Event, Scheduler, Submitted},
        sequence::{Outcome, Timings, Usage},
        types::{Emitted, SeqId, Step, StepOutput},
    },
    snapshot::ledger::RunUsage,
};

/// What handles tell the thread.
pub(super) enum Command {
    Submit(Arc<Generation>, Box<ValidRequest>),
    Cancel(Arc<Generation>),
    Drain {
        until: Duration,
        done: oneshot::Sender<usize>,
    },
    Tick,
}

/// A step that gave no result.
struct Failure {
    reason: String,
    lost: Lost,
}

pub(super) struct EngineThread {
    shared: Arc<Shared>,
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    inbox: Receiver<Command>,
    by_seq: HashMap<SeqId, Arc<Generation>>,
    /// Who waits for what the step at hand emits or ends; empty between steps.
    waiting: Waiting,
    /// When the next lease may end.
    next_sweep: Duration,
    drains: Vec<(Duration, oneshot::Sender<usize>)>,
    /// Failed runs since the last good one.
    failures: u32,
    /// Failed runs that a sequence was part of since it last emitted a token.
    strikes: HashMap<SeqId, u32>,
    /// Why the device is gone, once it is.
    gone: Option<String>,
    tiers: Tiers,
    persister: Option<Persister>,
}

/// How long a fetched prefix is waited for before commands are looked at again.
const FETCHING: Duration = Duration::from_millis(5);
/// Why generations end when the engine does.
const SHUTTING_DOWN: &str = "brain is shutting down";

impl EngineThread {
    pub(super) fn new(
        shared: Arc<Shared>,
        scheduler: Scheduler,
        executor: Box<dyn Executor>,
        inbox: Receiver<Command>,
        tiers: Tiers,
        persister: Option<Persister>,
    ) -> Self {
        Self {
            shared,
            scheduler,
            executor,
            inbox,
            by_seq: HashMap::new(),
            waiting: Waiting::default(),
            next_sweep: Duration::ZERO,
            drains: Vec::new(),
            failures: 0,
            strikes: HashMap::new(),
            gone: None,
            tiers,
            persister,
        }
    }

    /// Runs until the last handle is gone, a drain is over, or the device is gone or given up.
    pub(super) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.work()));
        let (reason, sound) = match ended {
            Ok(reason) => (reason, self.failures == 0),
            Err(panic) => (format!("the engine panicked: {}", message(&*panic)), false),
        };
        self.close(&reason, sound);
    }

    fn work(&mut self) -> String {
        if let Some(saver) = self.tiers.saver() {
            let now = self.shared.clock.now();
            saver.restore(now, &mut self.scheduler, &mut *self.executor);
        }
        loop {
            if !self.take_commands() {
                return SHUTTING_DOWN.into();
            }
            let now = self.shared.clock.now();
            self.shared.pulse.begin(now);
            if now >= self.next_sweep {
                self.sweep(now);
            }
            let over = |(until, _): &(Duration, _)| *until <= now || self.scheduler.is_idle();
            if self.drains.iter().any(over) {
                return SHUTTING_DOWN.into();
            }
            self.take_fetched();
            self.step();
            if let Some(reason) = self.gone.take() {
                return reason;
            }
            self.tiers.settle(&self.scheduler);
            if let Some(saver) = self.tiers.saver() {
                saver.advance(now, &self.scheduler, &mut *self.executor);
            }
            if let Some(persister) = &self.persister {
                persister.wake();
            }
            let tiers = self.tiers.stats();
            self.shared.set_stats(self.scheduler.stats(), tiers);
            self.shared.pulse.end();
            if self.failures >= self.shared.config.give_up_after {
                return format!("{} runs in a row failed on the device", self.failures);
            }
        }
    }

    /// Takes all commands there are; waits for one when there is nothing to compute. False when
    /// no handle is left.
    fn take_commands(&mut self) -> bool {
        if self.scheduler.is_idle() && self.drains.is_empty() {
            let now = self.shared.clock.now();
            let saving = self.tiers.saver().and_then(|saver| saver.next(now));
            let nap = self.next_sweep.saturating_sub(now);
            let nap = saving.map_or(nap, |saving| nap.min(saving));
            match self.inbox.recv_timeout(nap) {
                Ok(command) => self.take(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take(&mut self, command: Command) {
        let now = self.shared.clock.now();
        match command {
            Command::Submit(generation, request) => {
                match self.scheduler.submit(now, *request) {
                    Submitted::Queued(seq) => {
                        self.by_seq.insert(seq, generation);
                        if self.tiers.prefetch(seq, &self.scheduler) {
                            self.scheduler.hold(seq);
                        }
                    }
                    Submitted::Done(outcome) => {
                        generation.finish(now, outcome);
                    }
                }
                // New work is when unread work must make room.
                self.next_sweep = now;
            }
            Command::Cancel(generation) => self.cancel(now, &generation),
            Command::Drain { until, done } => self.drains.push((until, done)),
            Command::Tick => self.next_sweep = now,
        }
    }

    fn cancel(&mut self, now: Duration, generation: &Arc<Generation>) {
        let seq = self
            .by_seq
            .iter()
            .find(|(_, there)| Arc::ptr_eq(there, generation))
            .map(|(&seq, _)| seq);
        if let Some(seq) = seq
            && let Some(outcome) = self.scheduler.cancel(now, seq)
        {
            self.finish(now, seq, outcome);
            self.waiting.wake();
        }
    }

    /// Ends and forgets what nobody has read for a lease, and unread work beyond the quota. Who
    /// comes back for it starts it again from the tokens it has.
    fn sweep(&mut self, now: Duration) {
        let config = &self.shared.config;
        let (lease, orphans) = (config.lease, config.orphans);
        // Looked at and taken out under one lock: whoever attaches finds it before, and then it
        // stays, or does not find it.
        let (overdue, next) = self.shared.registry().take_overdue(now, lease, orphans);
        self.next_sweep = next;
        if let Some(saver) = self.tiers.saver().filter(|_| !overdue.is_empty()) {
            saver.save_soon(now);
        }
        for generation in overdue {
            self.cancel(now, &generation);
            tracing::debug!(
                id = generation.id,
                "a generation that nobody read is forgotten"
            );
        }
    }

    /// Lets those go on whose prefix has been read. With nobody else there it waits for one: a
    /// command that comes in the meantime is looked at soon after.
    fn take_fetched(&mut self) {
        if !self.tiers.is_fetching() {
            return;
        }
        let patience = match self.scheduler.is_held_up() {
            true => FETCHING,
            false => Duration::ZERO,
        };
        for seq in self.tiers.arrived(patience) {
            self.scheduler.release(seq);
        }
    }

    /// Computes one step. One that fails is planned and run again; a sequence whose steps go on
    /// failing is run by itself and ended when it fails alone, so that it takes no other with it.
    ///
    /// Strikes are taken back by an emitted token only: it is progress that no failure undoes.
    fn step(&mut self) {
        let now = self.shared.clock.now();
        let row_seconds = self.scheduler.row_seconds();
        let mut below = self.tiers.reach(&mut *self.executor, row_seconds);
        let Some(step) = self.scheduler.plan_over(now, &mut below) else {
            return;
        };
        if !step.seqs.iter().any(|rows| self.is_suspect(rows.seq)) {
            if let Err(failure) = self.compute(&step, now) {
                self.recover(&step, &failure);
            }
            return;
        }
        for rows in step.seqs {
            // A part of a plan is a plan.
            let seq = rows.seq;
            let alone = Step { seqs: vec![rows] };
            let Err(failure) = self.compute(&alone, now) else {
                continue;
            };
            if self.is_suspect(seq) {
                let now = self.shared.clock.now();
                if let Some(outcome) = self.scheduler.fail(now, seq, failure.reason.clone()) {
                    self.finish(now, seq, outcome);
                    self.waiting.wake();
                }
            }
            self.recover(&alone, &failure);
            if failure.lost != Lost::Nothing {
                // The rest of the plan rests on blocks that are gone.
                return;
            }
        }
    }

    fn is_suspect(&self, seq: SeqId) -> bool {
        self.strikes
            .get(&seq)
            .is_some_and(|&strikes| strikes > self.shared.config.retries)
    }

    fn recover(&mut self, step: &Step, failure: &Failure) {
        self.failures += 1;
        tracing::error!(
            reason = failure.reason,
            lost = ?failure.lost,
            failures = self.failures,
            "a step failed"
        );
        for rows in step
            .seqs
            .iter()
            .filter(|rows| self.by_seq.contains_key(&rows.seq))
        {
            *self.strikes.entry(rows.seq).or_default() += 1;
        }
        match failure.lost {
            Lost::Nothing => {}
            Lost::Memory => self.scheduler.reset(),
            Lost::Device => self.gone = Some(failure.reason.clone()),
        }
    }

    /// Runs a step whose planning began at `begun`, takes the results in and publishes them.
    fn compute(&mut self, step: &Step, begun: Duration) -> Result<(), Failure> {
        let clock = self.shared.clock.clone();
        let before = clock.now();
        self.shared.pulse.begin(before);
        let output = self.run_on_device(step)?;
        let now = clock.now();
        let events = self
            .scheduler
            // Masks of drafts are made while planning: they are part of what drafts cost.
            .commit(now, step, output, now.saturating_sub(begun))
            .map_err(|error| Failure {
                reason: error.to_string(),
                lost: Lost::Nothing,
            })?;
        self.failures = 0;
        self.charge(step, now.saturating_sub(before));
        for event in events {
            match event {
                Event::Tokens {
                    seq,
                    tokens,
                    drafted,
                    accepted,
                } => self.emit(seq, tokens, drafted, accepted),
                Event::Finished { seq, outcome } => self.finish(now, seq, outcome),
            }
        }
        self.waiting.wake();
        if let Some(observer) = self.shared.observer() {
            observer.turn(&turn(step, [begun, before, now, clock.now()]));
        }
        Ok(())
    }

    fn run_on_device(&mut self, step: &Step) -> Result<StepOutput, Failure> {
        match catch_unwind(AssertUnwindSafe(|| self.executor.run(step))) {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(error)) => Err(Failure {
                reason: error.to_string(),
                lost: error.lost,
            }),
            Err(panic) => Err(Failure {
                reason: format!("the executor panicked: {}", message(&*panic)),
                // What the device holds is not trusted any more.
                lost: Lost::Memory,
            }),
        }
    }

    /// Publishes a round's tokens.
    fn emit(&mut self, seq: SeqId, tokens: Vec<Emitted>, drafted: usize, accepted: usize) {
        self.strikes.remove(&seq);
        let Some(generation) = self.by_seq.get(&seq) else {
            return;
        };
        self.shared.ledger().add(
            &generation.owner,
            &generation.started.run_id,
            &RunUsage {
                generated_tokens: tokens.len() as u64,
                drafted_tokens: drafted as u64,
                accepted_tokens: accepted as u64,
                ..RunUsage::default()
            },
        );
        if let Some(observer) = self.shared.observer() {
            observer.round(tokens.len(), drafted, accepted);
        }
        generation.append(tokens, drafted, accepted, &mut self.waiting);
    }

    /// Shares a step's time among the runs that had rows in it.
    fn charge(&self, step: &Step, elapsed: Duration) {
        let micros = elapsed.as_micros() as u64;
        let (all, mut ledger) = (step.rows().max(1) as u64, self.shared.ledger());
        let (mut rows, mut charged) = (0, 0);
        for seq in &step.seqs {
            rows += seq.tokens.len() as u64;
            // What rounding left over goes to the next: the shares add up to the whole.
            let share = micros * rows / all - charged;
            charged += share;
            if let Some(generation) = self.by_seq.get(&seq.seq) {
                let usage = RunUsage {
                    device_micros: share,
                    ..RunUsage::default()
                };
                ledger.add(&generation.owner, &generation.started.run_id, &usage);
            }
        }
    }

    /// Ends a generation. Its readers are to be woken.
    fn finish(&mut self, now: Duration, seq: SeqId, outcome: Outcome) {
        self.strikes.remove(&seq);
        if let Some(generation) = self.by_seq.remove(&seq) {
            if let Some(observer) = self.shared.observer() {
                observer.finished(&outcome);
            }
            self.shared.ledger().add(
                &generation.owner,
                &generation.started.run_id,
                &RunUsage {
                    generations: 1,
                    prompt_tokens: outcome.usage.prompt as u64,
                    cached_tokens: outcome.usage.cached as u64,
                    ..RunUsage::default()
                },
            );
            // Whoever reads the end finds it counted.
            let tiers = self.tiers.stats();
            self.shared.set_stats(self.scheduler.stats(), tiers);
            generation.finish_quietly(now, outcome, &mut self.waiting);
            // Its lease begins.
            self.next_sweep = self
                .next_sweep
                .min(now.saturating_add(self.shared.config.lease));
        }
    }

    /// Ends every log, so that no reader waits for a thread that is gone.
    ///
    /// Then saves what is worth it, if what the device holds is `sound`.
    fn close(mut self, reason: &str, sound: bool) {
        let now = self.shared.clock.now();
        // Under the registry's lock, so that no generation is taken in that nobody computes.
        let registry = self.shared.registry();
        self.shared.pulse.stop(reason);
        let mut cut = 0;
        for generation in registry.all() {
            let usage = Usage {
                prompt: generation.started.prompt.len(),
                generated: generation.tokens().len(),
                ..Usage::default()
            };
            let reason = FinishReason::Failed(reason.into());
            let outcome = Outcome {
                reason,
                usage,
                timings: Timings::default(),
            };
            cut += usize::from(generation.cut(now, outcome));
        }
        drop(registry);
        // Left over when handing out a step broke off.
        self.waiting.wake();
        let running: Vec<SeqId> = self.by_seq.keys().copied().collect();
        for seq in running.into_iter().filter(|_| sound) {
            // Its log has ended; its blocks become an anchor for the successor.
            self.scheduler.cancel(now, seq);
        }
        if let Some(saver) = self.tiers.take_saver() {
            saver.finish(sound, &self.scheduler, &mut *self.executor);
        }
        if let Some(persister) = self.persister.take() {
            persister.finish(sound);
        }
        self.shared
            .set_stats(self.scheduler.stats(), self.tiers.stats());
        for (_, done) in self.drains.drain(..) {
            // Who asked may have stopped waiting.
            let _ = done.send(cut);
        }
    }
}

/// What a step was, and the times at which planning, the device and publishing began and ended.
fn turn(step: &Step, [begun, planned, computed, published]: [Duration; 4]) -> Turn {
    let mut turn = Turn {
        begun,
        planned,
        computed,
        published,
        ..Turn::default()
    };
    for rows in &step.seqs {
        let drafts = rows.sample.as_ref().map_or(0, |sample| sample.drafts);
        turn.emitting += usize::from(rows.sample.is_some());
        turn.drafts += drafts;
        let decodes = rows.sample.is_some() && rows.tokens.len() == drafts + 1;
        turn.prefill += if decodes {
            0
        } else {
            rows.tokens.len() - drafts
        };
    }
    turn
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
