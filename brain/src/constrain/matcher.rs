//! A grammar in step with one answer.

use std::sync::Arc;

use super::compile::Grammar;
use crate::{
    sched::{
        constraint::{Broken, Constraint},
        mask::Mask,
        types::TokenId,
    },
    text::markers::Markers,
};

/// Where an answer stands that may begin with a thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A thought may begin, or the answer.
    Opening,
    /// In a thought: any text, until its end.
    Thinking,
    /// In what the grammar is about.
    Answering,
}

impl Place {
    /// Where the prompt leaves the model.
    fn after(prompt: &[TokenId], markers: &Markers) -> Self {
        for &id in prompt.iter().rev() {
            if id == markers.channel_open {
                return Self::Thinking;
            }
            // A turn has one thought, and this one has had it.
            if id == markers.channel_close {
                return Self::Answering;
            }
            if [markers.turn_open, markers.call_open, markers.response_open].contains(&id) {
                return Self::Opening;
            }
        }
        // Text that is no conversation is continued without thoughts.
        Self::Answering
    }
}

/// Says which tokens may come next in one answer.
///
/// A thought comes first or not at all, and is free; then the grammar holds. The answer may end
/// where the grammar is complete, and must end where it cannot go on.
pub struct Matcher {
    grammar: Arc<Grammar>,
    state: llguidance::Matcher,
    start: Place,
    place: Place,
    /// Tokens of the thought, those that open and close it included.
    thought: usize,
    /// Tokens behind it.
    answer: Vec<TokenId>,
    /// Tokens that end the turn.
    ends: Vec<TokenId>,
}

impl Matcher {
    /// At the beginning of the answer to a prompt.
    pub(super) fn new(grammar: Arc<Grammar>, prompt: &[TokenId], ends: Vec<TokenId>) -> Self {
        let start = Place::after(prompt, &grammar.markers);
        Self {
            state: grammar.fresh(),
            grammar,
            start,
            place: start,
            thought: 0,
            answer: Vec::new(),
            ends,
        }
    }

    fn allow_answer(&mut self, mask: &mut Mask) -> Result<(), Broken> {
        if self.state.is_error() {
            self.replay()?;
        }
        let ended = self.state.is_stopped();
        let complete = ended || self.state.is_accepting().map_err(broken)?;
        if !ended {
            match self.state.compute_mask() {
                Ok(tokens) => mask.insert_words(tokens.as_slice()),
                // Nothing can follow, which the end may well do.
                Err(_) if complete => {}
                Err(error) => return Err(broken(error)),
            }
        }
        mask.remove(self.grammar.markers.eos);
        self.ends.iter().for_each(|&id| mask.remove(id));
        if complete {
            self.ends.iter().for_each(|&id| mask.insert(id));
        }
        Ok(())
    }

    /// Brings the state back to where the answer is, from the beginning.
    fn replay(&mut self) -> Result<(), Broken> {
        self.state = self.grammar.fresh();
        self.state.consume_tokens(&self.answer).map_err(broken)
    }
}

impl Constraint for Matcher {
    fn allowed(&mut self, mask: &mut Mask) -> Result<(), Broken> {
        let markers = &self.grammar.markers;
        match self.place {
            Place::Thinking => {
                mask.insert_words(self.grammar.text.words());
                mask.insert(markers.channel_close);
            }
            Place::Opening => {
                let open = markers.channel_open;
                self.allow_answer(mask)?;
                mask.insert(open);
            }
            Place::Answering => self.allow_answer(mask)?,
        }
        Ok(())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), Broken> {
        let markers = &self.grammar.markers;
        match self.place {
            Place::Opening if token == markers.channel_open => {
                (self.place, self.thought) = (Place::Thinking, 1);
            }
            Place::Thinking if token == markers.channel_close => {
                (self.place, self.thought) = (Place::Answering, self.thought + 1);
            }
            Place::Thinking if self.grammar.text.allows(token) => self.thought += 1,
            Place::Thinking => {
                return Err(Broken(format!("token {token} is no text of a thought")));
            }
            Place::Opening | Place::Answering => {
                if self.state.is_error() {
                    self.replay()?;
                }
                if let Err(error) = self.state.consume_token(token) {
                    self.replay()?;
                    return Err(broken(error));
                }
                self.answer.push(token);
                self.place = Place::Answering;
            }
        }
        Ok(())
    }

    fn rewind(&mut self, count: usize) -> Result<(), Broken> {
        let answered = count.min(self.answer.len());
        self.answer.truncate(self.answer.len() - answered);
        if answered > 0 && (self.state.is_error() || self.state.rollback(answered).is_err()) {
            self.replay()?;
        }
        let thought = count - answered;
        self.thought = self
            .thought
            .checked_sub(thought)
            .ok_or_else(|| Broken(format!("there are no {count} tokens to take back")))?;
        if self.answer.is_empty() && self.thought == 0 {
            self.place = self.start;
        } else if thought > 0 {
            self.place = Place::Thinking;
        }
        Ok(())
    }
}

/// The first line says what happened; the rest is the library's state.
fn broken(error: impl std::fmt::Display) -> Broken {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    Broken(format!("its grammar cannot go on: {line:.200}"))
}
