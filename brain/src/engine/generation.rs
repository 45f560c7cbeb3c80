//! A generation's log and the cursors over it.
//!
//! The log only grows: tokens, then an outcome. A cursor reads it from any index at its own pace.
//! The writer never waits for a reader, and a reader that comes late or again finds everything.

use std::{
    any::Any,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

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
    /// Readers that found nothing new, by their numbers.
    waiting: Vec<(u64, Waker)>,
    /// Number of the next reader.
    next_reader: u64,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    start: usize,
    drafted: usize,
    accepted: usize,
}

/// Readers to be woken. The tokens of a step are all there before anybody is woken for one: who is
/// woken may take the processor from the thread that hands out the rest.
#[derive(Debug, Default)]
pub(super) struct Waiting(Vec<Waker>);

impl Waiting {
    /// Wakes them.
    pub(super) fn wake(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }
}

impl Log {
    fn take_waiting(&mut self, into: &mut Waiting) {
        into.0
            .extend(self.waiting.drain(..).map(|(_, waker)| waker));
    }

    fn wait(&mut self, reader: u64, waker: &Waker) {
        match self.waiting.iter_mut().find(|(there, _)| *there == reader) {
            Some((_, there)) => there.clone_from(waker),
            None => self.waiting.push((reader, waker.clone())),
        }
    }

    /// The rest of the round at this index, or the end behind the last one.
    fn event_at(&self, index: usize) -> Option<LogEvent> {
        if index >= self.tokens.len() {
            return self.outcome.clone().map(LogEvent::Finished);
        }
        // Most readers are as far as the log.
        let round = match self.rounds.last() {
            Some(last) if last.start <= index => self.rounds.len() - 1,
            _ => self.rounds.partition_point(|round| round.start <= index) - 1,
        };
        let next = self.rounds.get(round + 1);
        let end = next.map_or(self.tokens.len(), |next| next.start);
        let end = end.min(index.saturating_add(MOST_AT_ONCE));
        let Round {
            start,
            drafted,
            accepted,
        } = self.rounds[round];
        let whole = start == index;
        Some(LogEvent::Tokens {
            index,
            tokens: self.tokens[index..end].to_vec(),
            drafted: if whole { drafted } else { 0 },
            accepted: if whole { accepted } else { 0 },
        })
    }
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

    /// Appends a round. Who waits for it is to be woken.
    pub(super) fn append(
        &self,
        tokens: Vec<Emitted>,
        drafted: usize,
        accepted: usize,
        waiting: &mut Waiting,
    ) {
        let mut log = self.log();
        let start = log.tokens.len();
        log.rounds.push(Round {
            start,
            drafted,
            accepted,
        });
        log.tokens.extend(tokens);
        log.take_waiting(waiting);
    }

    /// Ends the log and wakes its readers; false when it had ended.
    pub(super) fn finish(&self, now: Duration, outcome: Outcome) -> bool {
        let mut waiting = Waiting::default();
        let ended = self.end(now, outcome, false, &mut waiting);
        waiting.wake();
        ended
    }

    /// The same; who waits for it is to be woken.
    pub(super) fn finish_quietly(
        &self,
        now: Duration,
        outcome: Outcome,
        waiting: &mut Waiting,
    ) -> bool {
        self.end(now, outcome, false, waiting)
    }

    /// Ends the log because the engine ends; false when it had ended. A successor goes on with it.
    pub(super) fn cut(&self, now: Duration, outcome: Outcome) -> bool {
        let mut waiting = Waiting::default();
        let ended = self.end(now, outcome, true, &mut waiting);
        waiting.wake();
        ended
    }

    fn end(&self, now: Duration, outcome: Outcome, cut: bool, waiting: &mut Waiting) -> bool {
        let mut log = self.log();
        if log.outcome.is_some() {
            return false;
        }
        log.outcome = Some(outcome);
        log.cut = cut;
        log.quiet_since = log.quiet_since.max(now);
        log.take_waiting(waiting);
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
        let mut log = self.log();
        if log.outcome.is_some() && from > log.tokens.len() {
            return Err(log.tokens.len());
        }
        log.readers += 1;
        log.awaited = false;
        log.next_reader += 1;
        Ok(Cursor {
            generation: self.clone(),
            reader: log.next_reader,
            next: from,
            clock: clock.clone(),
            ended: false,
        })
    }
}

/// A reader of a log. Dropping it detaches; the generation goes on for its lease.
#[derive(Debug)]
pub struct Cursor {
    generation: Arc<Generation>,
    reader: u64,
    next: usize,
    clock: Arc<dyn Clock>,
    ended: bool,
}

impl Cursor {
    /// The next event; `None` behind the end. Waits for what is not there yet. Dropping the
    /// future loses nothing.
    pub async fn next(&mut self) -> Option<LogEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The same, for a stream.
    pub fn poll_next(&mut self, context: &Context<'_>) -> Poll<Option<LogEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut log = self.generation.log();
        let Some(event) = log.event_at(self.next) else {
            // Under the lock of the first look: a change after it is not missed.
            log.wait(self.reader, context.waker());
            return Poll::Pending;
        };
        drop(log);
        self.pass(&event);
        Poll::Ready(Some(event))
    }

    /// The next event if it is there.
    pub fn try_next(&mut self) -> Option<LogEvent> {
        if self.ended {
            return None;
        }
        let event = self.generation.log().event_at(self.next)?;
        self.pass(&event);
        Some(event)
    }

    fn pass(&mut self, event: &LogEvent) {
        match event {
            LogEvent::Tokens { tokens, .. } => self.next += tokens.len(),
            LogEvent::Finished(_) => self.ended = true,
        }
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
        log.waiting.retain(|(reader, _)| *reader != self.reader);
        log.readers -= 1;
        if log.readers == 0 {
            log.quiet_since = log.quiet_since.max(self.clock.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::Wake,
    };

    use super::{super::clock::SystemClock, *};

    #[derive(Default)]
    struct Calls(AtomicUsize);

    impl Wake for Calls {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Calls {
        fn count(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    fn generation(id: &str) -> Arc<Generation> {
        let request = Request::new(vec![1], SamplingParams::greedy(9));
        let started = Started::of(&request, request.hash());
        let now = Duration::ZERO;
        Arc::new(Generation::new(
            id.into(),
            &request,
            started,
            Vec::new(),
            now,
        ))
    }

    fn cursor(of: &Arc<Generation>) -> Cursor {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
        of.read_from(0, &clock).unwrap()
    }

    fn poll(cursor: &mut Cursor, calls: &Arc<Calls>) -> Poll<Option<LogEvent>> {
        let waker = calls.clone().into();
        cursor.poll_next(&Context::from_waker(&waker))
    }

    fn append(to: &Generation, id: TokenId, waiting: &mut Waiting) {
        to.append(vec![Emitted { id, logprobs: None }], 0, 0, waiting);
    }

    #[test]
    fn every_token_of_a_step_is_there_before_anybody_is_woken() {
        let (all, calls) = ([generation("a"), generation("b")], Arc::<Calls>::default());
        let mut cursors = all.each_ref().map(cursor);
        for cursor in &mut cursors {
            assert_eq!(poll(cursor, &calls), Poll::Pending);
            // Asking again is no second wait.
            assert_eq!(poll(cursor, &calls), Poll::Pending);
        }
        let mut waiting = Waiting::default();
        all.iter().for_each(|one| append(one, 7, &mut waiting));
        assert_eq!(calls.count(), 0);
        waiting.wake();
        assert_eq!(calls.count(), 2);
        for cursor in &mut cursors {
            let Poll::Ready(Some(LogEvent::Tokens { tokens, .. })) = poll(cursor, &calls) else {
                panic!("the token is there");
            };
            assert_eq!(tokens[0].id, 7);
        }
        // Nobody waits now.
        append(&all[0], 8, &mut waiting);
        waiting.wake();
        assert_eq!(calls.count(), 2);
    }

    #[test]
    fn a_reader_that_has_gone_is_not_kept() {
        let (one, calls) = (generation("a"), Arc::<Calls>::default());
        let (mut first, mut second) = (cursor(&one), cursor(&one));
        assert_eq!(poll(&mut first, &calls), Poll::Pending);
        assert_eq!(poll(&mut second, &calls), Poll::Pending);
        drop(first);
        assert_eq!(one.log().waiting.len(), 1);
        let outcome = Outcome {
            reason: crate::sched::request::FinishReason::Length,
            usage: crate::sched::sequence::Usage::default(),
            timings: crate::sched::sequence::Timings::default(),
        };
        assert!(one.finish(Duration::ZERO, outcome));
        assert_eq!(calls.count(), 1, "the end wakes who is left");
        let ended = poll(&mut second, &calls);
        assert!(matches!(ended, Poll::Ready(Some(LogEvent::Finished(_)))));
        assert_eq!(poll(&mut second, &calls), Poll::Ready(None));
    }
}
