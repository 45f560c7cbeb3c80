//! A cursor over a log as the events of a stream.
//!
//! Text and turn deltas depend on all tokens before them, so the cursor reads the log from its
//! start; events begin at the index that the client asked for.

use std::{collections::VecDeque, sync::Arc};

use futures::{Stream, stream};
use marathon_proto::brain::{self as pb, generate_event::Event};
use tonic::Status;
use tracing::Span;

use super::{ModelFacts, convert};
use crate::{
    engine::{Cursor, LogEvent},
    sched::{sequence::Outcome, types::Emitted},
    text::stream::{Delta, TurnStream},
};

/// Turns one cursor into events.
pub(super) struct Reader {
    cursor: Cursor,
    text: TurnStream,
    facts: Arc<ModelFacts>,
    /// First index that the client wants.
    from: usize,
    /// Tokens read.
    read: usize,
    ready: VecDeque<Event>,
    span: Span,
}

impl Reader {
    /// `cursor` must be at index 0 and `started` the stream's first event.
    pub(super) fn new(
        started: pb::Started,
        cursor: Cursor,
        text: TurnStream,
        facts: Arc<ModelFacts>,
        from: usize,
        span: Span,
    ) -> Self {
        Self {
            cursor,
            text,
            facts,
            from,
            read: 0,
            ready: VecDeque::from([Event::Started(started)]),
            span,
        }
    }

    /// The stream. Dropping it detaches from the generation.
    pub(super) fn into_stream(
        self,
    ) -> impl Stream<Item = Result<pb::GenerateEvent, Status>> + Send + 'static {
        stream::unfold(self, |mut reader| async move {
            let event = reader.next().await?;
            Some((Ok(pb::GenerateEvent { event: Some(event) }), reader))
        })
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            match self.cursor.next().await? {
                LogEvent::Tokens {
                    tokens,
                    drafted,
                    accepted,
                    ..
                } => {
                    self.take(tokens, drafted, accepted);
                }
                LogEvent::Finished(outcome) => self.finish(&outcome),
            }
        }
    }

    /// A round: its tokens before `from` only move the text on.
    fn take(&mut self, mut tokens: Vec<Emitted>, drafted: usize, accepted: usize) {
        let index = self.read;
        self.read += tokens.len();
        let skipped = self.from.saturating_sub(index).min(tokens.len());
        let rest = tokens.split_off(skipped);
        self.push(&tokens);
        if rest.is_empty() {
            return;
        }
        let delta = self.push(&rest);
        let whole = skipped == 0;
        self.ready.push_back(Event::Tokens(pb::Tokens {
            index: (index + skipped) as u32,
            ids: rest.iter().map(|token| token.id).collect(),
            logprobs: rest
                .iter()
                .filter_map(|token| token.logprobs.as_ref())
                .map(convert::logprob)
                .collect(),
            drafted: if whole { drafted as u32 } else { 0 },
            accepted: if whole { accepted as u32 } else { 0 },
            ..tokens_of(delta)
        }));
    }

    fn finish(&mut self, outcome: &Outcome) {
        let delta = self.text.finish();
        if !delta.text.is_empty() || !delta.turn.is_empty() {
            self.ready.push_back(Event::Tokens(pb::Tokens {
                index: self.read.max(self.from) as u32,
                ..tokens_of(delta)
            }));
        }
        let finished = convert::finished(outcome, &self.facts.fingerprint);
        tracing::info!(
            parent: &self.span,
            reason = finished.reason().as_str_name(),
            generated = outcome.usage.generated,
            cached = outcome.usage.cached,
            drafted = outcome.usage.drafted,
            accepted = outcome.usage.accepted,
            "generation ended"
        );
        self.ready.push_back(Event::Finished(pb::Finished {
            turn: Some(convert::assistant_turn(self.text.turn())),
            ..finished
        }));
    }

    fn push(&mut self, tokens: &[Emitted]) -> Delta {
        let ids: Vec<_> = tokens.iter().map(|token| token.id).collect();
        self.text.push(&ids)
    }
}

fn tokens_of(delta: Delta) -> pb::Tokens {
    pb::Tokens {
        text: delta.text,
        turn: delta.turn.into_iter().map(convert::turn_delta).collect(),
        ..pb::Tokens::default()
    }
}
