//! What a reader gives out as the events of a stream.

use std::sync::Arc;

use futures::{Stream, StreamExt as _, stream};
use marathon_proto::brain::{self as pb, generate_event::Event};
use tonic::Status;
use tracing::Span;

use super::convert;
use crate::{
    serving::{Ending, ModelFacts, Read, Reader, Round},
    text::stream::Delta,
};

/// The stream: `started`, then what the reader gives out. Dropping it detaches from the
/// generation.
pub(super) fn stream(
    started: pb::Started,
    mut reader: Reader,
    facts: Arc<ModelFacts>,
    span: Span,
) -> impl Stream<Item = Result<pb::GenerateEvent, Status>> + Send + 'static {
    let reads = stream::poll_fn(move |context| reader.poll_next(context));
    let rest = reads.map(move |read| match read {
        Read::Tokens(round) => Event::Tokens(tokens(round)),
        Read::Finished(ending) => Event::Finished(finished(&ending, &facts, &span)),
    });
    stream::once(async { Event::Started(started) })
        .chain(rest)
        .map(|event| Ok(pb::GenerateEvent { event: Some(event) }))
}

fn tokens(round: Round) -> pb::Tokens {
    let Delta { text, turn } = round.delta;
    pb::Tokens {
        index: round.index as u32,
        ids: round.tokens.iter().map(|token| token.id).collect(),
        logprobs: round
            .tokens
            .iter()
            .filter_map(|token| token.logprobs.as_ref())
            .map(convert::logprob)
            .collect(),
        drafted: round.drafted as u32,
        accepted: round.accepted as u32,
        text,
        turn: turn.into_iter().map(convert::turn_delta).collect(),
    }
}

fn finished(ending: &Ending, facts: &ModelFacts, span: &Span) -> pb::Finished {
    let usage = &ending.outcome.usage;
    let finished = convert::finished(&ending.outcome, &facts.fingerprint);
    tracing::info!(
        parent: span,
        reason = finished.reason().as_str_name(),
        generated = usage.generated,
        cached = usage.cached,
        drafted = usage.drafted,
        accepted = usage.accepted,
        "generation ended"
    );
    pb::Finished {
        turn: Some(convert::assistant_turn(&ending.turn)),
        ..finished
    }
}
