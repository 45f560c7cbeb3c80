//! From what choices read to the events of a stream.

use std::collections::VecDeque;

use axum::response::sse::Event;
use futures::{Stream, StreamExt as _, stream};

use super::{
    error::ApiError,
    generation::{Choice, failure},
    sse::Events,
};
use crate::serving::{Ending, Read, Round};

/// Writes one kind of stream. Every call adds the events that it makes.
pub(super) trait Script: Send + 'static {
    /// A choice has more tokens.
    fn tokens(&mut self, choice: usize, round: &Round, out: &mut VecDeque<Event>);

    /// A choice has ended well.
    fn finished(&mut self, choice: usize, ending: &Ending, out: &mut VecDeque<Event>);

    /// A choice broke off: the last call.
    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Event>);

    /// Every choice has ended: the last call.
    fn end(&mut self, out: &mut VecDeque<Event>);
}

/// The events of these choices, as they come. Dropping the stream drops the choices.
pub(super) fn events(choices: Vec<Choice>, script: impl Script) -> Events {
    let reads = stream::select_all(choices.into_iter().map(|choice| Box::pin(reads(choice))));
    let pump = Pump {
        reads,
        script,
        ready: VecDeque::new(),
        ended: false,
    };
    Box::pin(stream::unfold(pump, |mut pump| async move {
        let event = pump.next().await?;
        Some((event, pump))
    }))
}

/// What a choice reads, with its number.
fn reads(choice: Choice) -> impl Stream<Item = (usize, Read)> + Send {
    stream::unfold(choice, |mut choice| async move {
        let read = choice.next().await?;
        Some(((choice.index, read), choice))
    })
}

struct Pump<R, S> {
    reads: R,
    script: S,
    ready: VecDeque<Event>,
    ended: bool,
}

impl<R: Stream<Item = (usize, Read)> + Unpin, S: Script> Pump<R, S> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            let out = &mut self.ready;
            match self.reads.next().await {
                Some((choice, Read::Tokens(round))) => self.script.tokens(choice, &round, out),
                Some((choice, Read::Finished(ending))) => match failure(&ending) {
                    None => self.script.finished(choice, &ending, out),
                    Some(error) => {
                        self.script.broken(&error, out);
                        self.ended = true;
                    }
                },
                None => {
                    self.script.end(out);
                    self.ended = true;
                }
            }
        }
    }
}
