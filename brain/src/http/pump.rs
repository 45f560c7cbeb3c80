//! From what choices read to the events of a stream.

use std::pin::Pin;

use futures::{
    Stream, StreamExt as _,
    stream::{self, SelectAll},
};

use super::{
    error::ApiError,
    generation::{Choice, failure},
    sse::{Events, Outgoing},
};
use crate::serving::{Ending, Read, Round};

/// Writes one kind of stream. Every call adds the events that it makes.
pub(super) trait Script: Send + 'static {
    /// A choice has more tokens.
    fn tokens(&mut self, choice: usize, round: &Round, out: &mut Outgoing);

    /// A choice has ended well.
    fn finished(&mut self, choice: usize, ending: &Ending, out: &mut Outgoing);

    /// A choice broke off: the last call.
    fn broken(&mut self, error: &ApiError, out: &mut Outgoing);

    /// Every choice has ended: the last call.
    fn end(&mut self, out: &mut Outgoing);
}

/// The events of these choices, as they come. Dropping the stream drops the choices.
pub(super) fn events(mut choices: Vec<Choice>, script: impl Script) -> Events {
    let reads = match choices.len() {
        1 => Reads::One(Box::new(choices.remove(0))),
        _ => Reads::Several(stream::select_all(
            choices.into_iter().map(|choice| reads(Box::new(choice))),
        )),
    };
    // In a box, because a stream that unfolds moves its state with every item.
    let pump = Box::new(Pump {
        reads,
        script,
        out: Outgoing::default(),
        ended: false,
    });
    Box::pin(stream::unfold(pump, |mut pump| async move {
        pump.fill().await;
        (!pump.out.is_empty()).then(|| (pump.out.take(), pump))
    }))
}

/// Where reads come from. One choice is the rule, and needs no queue.
enum Reads {
    One(Box<Choice>),
    Several(SelectAll<ChoiceReads>),
}

impl Reads {
    async fn next(&mut self) -> Option<(usize, Read)> {
        match self {
            Self::One(choice) => Some((choice.index, choice.next().await?)),
            Self::Several(reads) => reads.next().await,
        }
    }
}

/// What a choice reads, with its number.
type ChoiceReads = Pin<Box<dyn Stream<Item = (usize, Read)> + Send>>;

fn reads(choice: Box<Choice>) -> ChoiceReads {
    Box::pin(stream::unfold(choice, |mut choice| async move {
        let read = choice.next().await?;
        Some(((choice.index, read), choice))
    }))
}

struct Pump<S> {
    reads: Reads,
    script: S,
    out: Outgoing,
    ended: bool,
}

impl<S: Script> Pump<S> {
    /// Reads until there is something to send; there is nothing behind the end.
    async fn fill(&mut self) {
        while self.out.is_empty() && !self.ended {
            let out = &mut self.out;
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
