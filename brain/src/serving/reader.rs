//! A cursor over a log as rounds of tokens with the text and turn deltas that they complete.
//!
//! Text and turn deltas depend on all tokens before them, so the cursor reads the log from its
//! start; what is given out begins at the index that the client asked for.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Context, Poll},
};

use crate::{
    engine::{Cursor, LogEvent, MOST_AT_ONCE},
    sched::{sequence::Outcome, types::Emitted},
    text::{
        stream::{Delta, TurnStream},
        turn::ParsedTurn,
    },
};

/// Tokens and what they complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Round {
    /// Index of the first token in the generation.
    pub index: usize,
    /// Empty only in the last round, which then carries what was held back until the end.
    pub tokens: Vec<Emitted>,
    /// Text and turn deltas.
    pub delta: Delta,
    /// Drafts checked; 0 when the reader began within the round.
    pub drafted: usize,
    /// Drafts emitted; 0 when the reader began within the round.
    pub accepted: usize,
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Why, and what it took.
    pub outcome: Outcome,
    /// The whole turn, tokens before the reader's first index included.
    pub turn: ParsedTurn,
    /// Tokens of thoughts.
    pub reasoning_tokens: usize,
    /// The stop string that ended it, if one did.
    pub stop_string: Option<String>,
}

/// What a reader gives out.
#[derive(Clone, Debug, PartialEq)]
pub enum Read {
    /// More tokens.
    Tokens(Round),
    /// The end. Nothing follows.
    Finished(Ending),
}

/// Reads one generation. Dropping it detaches from the generation.
pub struct Reader {
    cursor: Cursor,
    text: TurnStream,
    /// First index that the client wants.
    from: usize,
    /// Tokens read.
    read: usize,
    ready: VecDeque<Read>,
    one_by_one: bool,
    /// Tokens read since others had their turn.
    unbroken: usize,
}

impl Reader {
    /// `cursor` must be at index 0.
    pub(super) fn new(cursor: Cursor, text: TurnStream, from: usize) -> Self {
        Self {
            cursor,
            text,
            from,
            read: 0,
            ready: VecDeque::new(),
            one_by_one: false,
            unbroken: 0,
        }
    }

    /// From now on gives out one token at a time, however many a round had: what is given out is
    /// then a function of the tokens alone.
    pub fn one_by_one(&mut self) {
        self.one_by_one = true;
    }

    /// What comes next; `None` behind the end. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Read> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The same, for a stream.
    pub fn poll_next(&mut self, context: &Context<'_>) -> Poll<Option<Read>> {
        loop {
            if let Some(read) = self.ready.pop_front() {
                return Poll::Ready(Some(read));
            }
            // A long log that is there already is read without waiting for anything.
            if self.unbroken >= MOST_AT_ONCE {
                self.unbroken = 0;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let event = match self.cursor.poll_next(context) {
                Poll::Ready(event) => event,
                Poll::Pending => {
                    self.unbroken = 0;
                    return Poll::Pending;
                }
            };
            match event {
                Some(LogEvent::Tokens {
                    tokens,
                    drafted,
                    accepted,
                    ..
                }) => {
                    self.unbroken += tokens.len();
                    self.take(tokens, drafted, accepted);
                }
                Some(LogEvent::Finished(outcome)) => self.finish(outcome),
                None => return Poll::Ready(None),
            }
        }
    }

    /// A round: its tokens before `from` only move the text on.
    fn take(&mut self, mut tokens: Vec<Emitted>, drafted: usize, accepted: usize) {
        let index = self.read;
        self.read += tokens.len();
        let skipped = self.from.saturating_sub(index).min(tokens.len());
        if skipped > 0 {
            let rest = tokens.split_off(skipped);
            self.push(&tokens);
            tokens = rest;
        }
        if tokens.is_empty() {
            return;
        }
        if self.one_by_one {
            for (number, token) in tokens.into_iter().enumerate() {
                let tokens = vec![token];
                let delta = self.push(&tokens);
                self.ready.push_back(Read::Tokens(Round {
                    index: index + skipped + number,
                    tokens,
                    delta,
                    ..Round::default()
                }));
            }
            return;
        }
        let delta = self.push(&tokens);
        let whole = skipped == 0;
        self.ready.push_back(Read::Tokens(Round {
            index: index + skipped,
            tokens,
            delta,
            drafted: if whole { drafted } else { 0 },
            accepted: if whole { accepted } else { 0 },
        }));
    }

    fn finish(&mut self, outcome: Outcome) {
        let delta = self.text.finish();
        if !delta.text.is_empty() || !delta.turn.is_empty() {
            self.ready.push_back(Read::Tokens(Round {
                index: self.read.max(self.from),
                delta,
                ..Round::default()
            }));
        }
        self.ready.push_back(Read::Finished(Ending {
            outcome,
            turn: self.text.turn().clone(),
            reasoning_tokens: self.text.reasoning_tokens(),
            stop_string: self.text.stop_string().map(str::to_owned),
        }));
    }

    fn push(&mut self, tokens: &[Emitted]) -> Delta {
        let ids: Vec<_> = tokens.iter().map(|token| token.id).collect();
        self.text.push(&ids)
    }
}
