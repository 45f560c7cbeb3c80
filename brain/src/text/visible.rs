//! Tokens to the text and special tokens that a reader may see.

use std::sync::Arc;

use super::{
    detok::Detok,
    stop::StopFinder,
    tokenizer::{TokenText, Tokenizer},
};
use crate::sched::{request::StopCheck, types::TokenId};

/// What a token completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Text; never empty.
    Text(&'a str),
    /// A special token.
    Special(TokenId),
}

/// Decodes tokens, holding back unfinished characters and what may become a stop string.
pub struct VisibleText {
    tokenizer: Arc<Tokenizer>,
    detok: Detok,
    finder: StopFinder,
    /// Tokens to come whose text is not searched for stop strings.
    unchecked: u32,
    decoded: String,
    shown: String,
}

impl VisibleText {
    /// Stop strings count after the first `min_tokens` tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[String], min_tokens: u32) -> Self {
        Self {
            tokenizer,
            detok: Detok::default(),
            finder: StopFinder::new(stops),
            unchecked: min_tokens,
            decoded: String::new(),
            shown: String::new(),
        }
    }

    /// Takes the next token. After a stop string nothing is emitted any more.
    pub fn push(&mut self, token: TokenId, emit: &mut dyn FnMut(Piece<'_>)) {
        let tokenizer = self.tokenizer.clone();
        match tokenizer.token(token) {
            TokenText::Bytes(bytes) => {
                self.detok.push(bytes, &mut self.decoded);
                self.show(emit);
            }
            TokenText::Special(_) | TokenText::Unknown => {
                self.finish(emit);
                if !self.stopped() {
                    emit(Piece::Special(token));
                }
            }
        }
        self.unchecked = self.unchecked.saturating_sub(1);
    }

    /// The text ends here: emits what was held back.
    pub fn finish(&mut self, emit: &mut dyn FnMut(Piece<'_>)) {
        self.detok.finish(&mut self.decoded);
        self.show(emit);
        self.finder.flush(&mut self.shown);
        self.emit_shown(emit);
    }

    /// A stop string was complete.
    pub fn stopped(&self) -> bool {
        self.finder.stopped()
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.finder.stop_string()
    }

    fn show(&mut self, emit: &mut dyn FnMut(Piece<'_>)) {
        if self.unchecked > 0 {
            self.shown.push_str(&self.decoded);
        } else {
            self.finder.push(&self.decoded, &mut self.shown);
        }
        self.decoded.clear();
        self.emit_shown(emit);
    }

    fn emit_shown(&mut self, emit: &mut dyn FnMut(Piece<'_>)) {
        if !self.shown.is_empty() {
            emit(Piece::Text(&self.shown));
            self.shown.clear();
        }
    }
}

/// The engine's stop check: tells after each token whether a stop string is complete.
pub struct StopStrings(VisibleText);

impl StopStrings {
    /// Checks for these strings in the text after the first `min_tokens` tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, strings: &[String], min_tokens: u32) -> Self {
        Self(VisibleText::new(tokenizer, strings, min_tokens))
    }
}

impl StopCheck for StopStrings {
    fn push(&mut self, token: TokenId) -> bool {
        self.0.push(token, &mut |_| {});
        self.0.stopped()
    }
}
