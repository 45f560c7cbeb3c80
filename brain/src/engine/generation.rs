//! A generation's log and the cursors over it.
//!
//! The log only grows: tokens, then an outcome. A cursor reads it from any index at its own pace.
//! The writer never waits for a reader, and a reader that comes late or again finds everything.

use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

use super::clock::Clock;
use crate::sched::{
    fair::Priority,
    request::{Request, RequestHash},
    sequence::Outcome,
    types::{DraftDepth, Emitted, SamplingParams, TokenId},
};

/// What a stream tells its reader first.
#[derive(Clone, Debug)]
pub struct Started {
    /// The generation existed before this call.
    pub attached: bool,
    /// Identity of the request.
    pub request_hash: RequestHash,
    /// Input tokens.
    pub prompt: Arc<[TokenId]>,
    /// Sampling as resolved.
    pub params: Arc<SamplingParams>,
    /// Drafts as asked for.
    pub draft: DraftDepth,
    /// Texts that end the generation.
    pub stop_strings: Arc<[String]>,
    /// The marathon it belongs to; may be empty.
    pub run_id: Arc<str>,
    /// What the front end that started it left for readers.
    pub reading: Option<Arc<dyn Any + Send + Sync>>,
}

impl Started {
    pub(super) fn of(request: &Request, request_hash: RequestHash) -> Self {
        Self {
            attached: false,
            request_hash,
            prompt: request.prompt.clone(),
            params: request.params.clone(),
            draft: request.draft,
            stop_strings: request.stop_strings.clone().into(),
            run_id: request.run_id.as_str().into(),
            reading: request.reading.clone(),
        }
    }
}

/// Tokens of one event, at most. A round has fewer; what a client or a predecessor's log brought is
/// one round however long it is.
pub const MOST_AT_ONCE: usize = 1024;

/// What a cursor reads.
#[derive(Clone, Debug, PartialEq)]
pub enum LogEvent {
    /// A round's tokens, or those of it that lie at or behind the cursor's first index; at most
    /// [`MOST_AT_ONCE`].
    Tokens {
        /// Index of the first of them in the log.
        index: usize,
        /// At least one. Tokens that the client had received come without log-probabilities.
        tokens: Vec<Emitted>,
        /// Drafts checked in the round; 0 when the event does not begin the round.
        drafted: usize,
        /// Drafts emitted in the round; 0 when the event does not begin the round.
        accepted: usize,
    },
    /// The end. Nothing follows.
    Finished(Outcome),
}

/// The log of one generation.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) id: String,
    /// The caller.
    pub(super) owner: Arc<str>,
    /// What a successor needs besides `started` to go on with it.
    pub(super) priority: Priority,
    pub(super) cache_salt: String,
    pub(super) grammar: Arc<str>,
    pub(super) note: Arc<[u8]>,
    /// Whether a successor is to know of it.
    pub(super) kept: bool,
    /// Brains that took it up, this one included, since one gave a token.
    pub(super) attempts: u32,
    /// Tokens it began with.
    begun_at: usize,
    pub(super) started: Started,
    log: Mutex<Log>,
    /// Told of every change of the log.
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Log {
    tokens: Vec<Emitted>,
    rounds: Vec<Round>,
    outcome: Option<Outcome>,
    /// The engine ended, not the generation: a successor goes on with it.
    cut: bool,
    readers: usize,
    /// A predecessor began it, and nobody has come back for it yet.
    awaited: bool,
    /// When the last reader left, the log was made, or it ended: whatever came last.
    quiet_since: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    start: usize,
    drafted: usize,
    accepted: usize,
}

impl Generation {
    /// A log that begins with tokens the client holds already.
    pub(super) fn new(
        id: String,
        request: &Request,
        started: Started,
        received: Vec<Emitted>,
        now: Duration,
    ) -> Self {
        let begun_at = received.len();
        let mut log = Log {
            quiet_since: now,
            ..Log::default()
        };
        if !received.is_empty() {
            log.rounds.push(Round {
                start: 0,
                drafted: 0,
                accepted: 0,
            });
            log.tokens = received;
        }
        Self {
            id,
            owner: request.owner.as_str().into(),
            priority: request.priority,
            cache_salt: request.cache_salt.clone(),
            grammar: request.grammar.clone(),
            note: request.note.clone(),
            kept: request.kept,
            attempts: 1,
            begun_at,
            started,
            log: Mutex::new(log),
            changed: watch::Sender::new(()),
        }
    }

    /// The same as one that so many brains took up since one gave a token.
    pub(super) fn tried(self, attempts: u32) -> Self {
        Self { attempts, ..self }
    }

    /// Brains that have taken it up since one gave a token.
    pub(super) fn attempts_so_far(&self) -> u32 {
        match self.log().tokens.len() > self.begun_at {
            true => 0,
            false => self.attempts,
        }
    }

    /// The same as one that a predecessor began: its reader may come back.
    pub(super) fn awaited(self) -> Self {
        self.log().awaited = true;
        self
    }

    /// Whether nobody has come back for it since a predecessor began it.
    pub(super) fn is_awaited(&self) -> bool {
        self.log().awaited
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a round.
    pub(super) fn append(&self, tokens: Vec<Emitted>, drafted: usize, accepted: usize) {
        let mut log = self.log();
        let start = log.tokens.len();
        log.rounds.push(Round {
            start,
            drafted,
            accepted,
        });
        log.tokens.extend(tokens);
        drop(log);
        self.changed.send_replace(());
    }

    /// Ends the log; false when it had ended.
    pub(super) fn finish(&self, now: Duration, outcome: Outcome) -> bool {
        self.end(now, outcome, false)
    }

    /// Ends the log because the engine ends; false when it had ended. A successor goes on with it.
    pub(super) fn cut(&self, now: Duration, outcome: Outcome) -> bool {
        self.end(now, outcome, true)
    }

    fn end(&self, now: Duration, outcome: Outcome, cut: bool) -> bool {
        let mut log = self.log();
        if log.outcome.is_some() {
            return false;
        }
        log.outcome = Some(outcome);
        log.cut = cut;
        log.quiet_since = log.quiet_since.max(now);
        drop(log);
        self.changed.send_replace(());
        true
    }

    /// How it ended, if it has.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.log().outcome.clone()
    }

    /// The tokens so far.
    pub(super) fn tokens(&self) -> Vec<Emitted> {
        self.log().tokens.clone()
    }

    /// The tokens from an index on, and how it ended if it has and will not go on.
    pub(super) fn since(&self, index: usize) -> (Vec<Emitted>, Option<Outcome>) {
        let log = self.log();
        let tokens = log.tokens.get(index..).unwrap_or_default().to_vec();
        (tokens, log.outcome.clone().filter(|_| !log.cut))
    }

    /// Whether it ended; since when nobody reads, if nobody does.
    pub(super) fn attendance(&self) -> (bool, Option<Duration>) {
        let log = self.log();
        (
            log.outcome.is_some(),
            (log.readers == 0).then_some(log.quiet_since),
        )
    }

    /// A reader from the given index on; the log's length when it ended before that.
    pub(super) fn read_from(
        self: &Arc<Self>,
        from: usize,
        clock: &Arc<dyn Clock>,
    ) -> Result<Cursor, usize> {
        // Subscribed before the first look: a change after it is not missed.
        let changed = self.changed.subscribe();
        let mut log = self.log();
        if log.outcome.is_some() && from > log.tokens.len() {
            return Err(log.tokens.len());
        }
        log.readers += 1;
        log.awaited = false;
        drop(log);
        Ok(Cursor {
            generation: self.clone(),
            next: from,
            changed,
            clock: clock.clone(),
            ended: false,
        })
    }
}

/// A reader of a log. Dropping it detaches; the generation goes on for its lease.
#[derive(Debug)]
pub struct Cursor {
    generation: Arc<Generation>,
    next: usize,
    changed: watch::Receiver<()>,
    clock: Arc<dyn Clock>,
    ended: bool,
}

impl Cursor {
    /// The next event; `None` behind the end. Waits for what is not there yet. Dropping the
    /// future loses nothing.
    pub async fn next(&mut self) -> Option<LogEvent> {
        loop {
            if self.ended {
                return None;
            }
            self.changed.mark_unchanged();
            if let Some(event) = self.try_next() {
                return Some(event);
            }
            // The sender lives in the generation that this cursor holds.
            self.changed.changed().await.ok()?;
        }
    }

    /// The next event if it is there.
    pub fn try_next(&mut self) -> Option<LogEvent> {
        if self.ended {
            return None;
        }
        let log = self.generation.log();
        if self.next < log.tokens.len() {
            let round = log.rounds.partition_point(|round| round.start <= self.next) - 1;
            let end = log
                .rounds
                .get(round + 1)
                .map_or(log.tokens.len(), |next| next.start)
                .min(self.next.saturating_add(MOST_AT_ONCE));
            let Round {
                start,
                drafted,
                accepted,
            } = log.rounds[round];
            let whole = start == self.next;
            let event = LogEvent::Tokens {
                index: self.next,
                tokens: log.tokens[self.next..end].to_vec(),
                drafted: if whole { drafted } else { 0 },
                accepted: if whole { accepted } else { 0 },
            };
            self.next = end;
            return Some(event);
        }
        let outcome = log.outcome.clone()?;
        self.ended = true;
        Some(LogEvent::Finished(outcome))
    }

    /// Index of the next token it will read.
    pub fn position(&self) -> usize {
        self.next
    }

    /// Id of the generation.
    pub fn generation_id(&self) -> &str {
        &self.generation.id
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        let mut log = self.generation.log();
        log.readers -= 1;
        if log.readers == 0 {
            log.quiet_since = log.quiet_since.max(self.clock.now());
        }
    }
}
