//! From what choices read to the events of a stream.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Bytes;
use futures::Stream;

use super::{
    error::ApiError,
    generation::{Choice, failure},
    sse::{Events, Outgoing},
};
use crate::serving::{Ending, Read, Round};

/// Writes one kind of stream. Every call adds the events that it makes.
pub(super) trait Script: Send + Unpin + 'static {
    /// A choice has more tokens.
    fn tokens(&mut self, choice: usize, round: &Round, out: &mut Outgoing);

    /// Why a choice did not end well, if it did not.
    fn failure(&self, ending: &Ending) -> Option<ApiError> {
        failure(ending)
    }

    /// A choice has ended well.
    fn finished(&mut self, choice: usize, ending: &Ending, out: &mut Outgoing);

    /// A choice broke off: the last call.
    fn broken(&mut self, error: &ApiError, out: &mut Outgoing);

    /// Every choice has ended: the last call.
    fn end(&mut self, out: &mut Outgoing);
}

/// The events of these choices, as they come. Dropping the stream drops the choices.
pub(super) fn events(choices: Vec<Choice>, script: impl Script) -> Events {
    Box::pin(Pump {
        choices,
        script,
        out: Outgoing::default(),
        ended: false,
    })
}

struct Pump<S> {
    /// Those that have more to read.
    choices: Vec<Choice>,
    script: S,
    out: Outgoing,
    ended: bool,
}

impl<S: Script> Stream for Pump<S> {
    type Item = Bytes;

    /// What all choices have goes out in one piece.
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while self.out.is_empty() {
            if self.ended {
                return Poll::Ready(None);
            }
            if !self.advance(context) {
                return Poll::Pending;
            }
        }
        Poll::Ready(Some(self.out.take()))
    }
}

impl<S: Script> Pump<S> {
    /// Reads once from every choice that has something; false when none has.
    fn advance(&mut self, context: &Context<'_>) -> bool {
        let (mut any, mut at) = (false, 0);
        while let Some(choice) = self.choices.get_mut(at) {
            let (index, read) = (choice.index, choice.poll_next(context));
            any |= read.is_ready();
            match read {
                Poll::Pending => at += 1,
                Poll::Ready(None) => {
                    self.choices.remove(at);
                }
                Poll::Ready(Some(read)) => {
                    at += 1;
                    self.write(index, &read);
                }
            }
            if self.ended {
                return true;
            }
        }
        if self.choices.is_empty() {
            self.script.end(&mut self.out);
            self.ended = true;
        }
        any || self.ended
    }

    fn write(&mut self, choice: usize, read: &Read) {
        let out = &mut self.out;
        match read {
            Read::Tokens(round) => self.script.tokens(choice, round, out),
            Read::Finished(ending) => match self.script.failure(ending) {
                None => self.script.finished(choice, ending, out),
                Some(error) => {
                    self.script.broken(&error, out);
                    self.ended = true;
                }
            },
        }
    }
}
