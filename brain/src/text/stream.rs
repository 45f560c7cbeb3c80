//! A generation's tokens to what its reader sees: text and a parsed turn.
//!
//! The tokens are the truth; this is a function of them. A reader that attaches in the middle
//! replays the tokens before and gets the rest exactly as the first reader did.

use std::{collections::HashMap, sync::Arc};

use super::{
    conversation::Tool,
    schema::Schema,
    tokenizer::{TokenText, Tokenizer},
    turn::{ParsedTurn, Start, TurnEvent, TurnParser},
    visible::{Piece, VisibleText},
};
use crate::sched::types::TokenId;

/// What some tokens complete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// Text without special tokens.
    pub text: String,
    /// The same, parsed.
    pub turn: Vec<TurnEvent>,
}

/// What the text of a generation depends on besides its tokens.
#[derive(Clone)]
pub struct StreamOptions {
    /// Where the prompt leaves the model.
    pub start: Start,
    /// Parameters by tool name, for typing arguments.
    pub schemas: Arc<HashMap<String, Arc<Schema>>>,
    /// Texts that end the generation.
    pub stop_strings: Vec<String>,
    /// Tokens that end the generation; they have no text.
    pub stop_tokens: Vec<TokenId>,
    /// Stops count after this many tokens.
    pub min_tokens: u32,
}

/// Turns tokens into deltas, one generation from its first token on.
pub struct TurnStream {
    visible: VisibleText,
    parser: TurnParser,
    stop_tokens: Vec<TokenId>,
    tokenizer: Arc<Tokenizer>,
    turn: ParsedTurn,
}

impl TurnStream {
    /// At the start of a generation.
    pub fn new(tokenizer: Arc<Tokenizer>, options: StreamOptions) -> Self {
        Self {
            visible: VisibleText::new(tokenizer.clone(), &options.stop_strings, options.min_tokens),
            parser: TurnParser::new(*tokenizer.markers(), options.start, options.schemas),
            stop_tokens: options.stop_tokens,
            tokenizer,
            turn: ParsedTurn::default(),
        }
    }

    /// Takes the next tokens.
    pub fn push(&mut self, tokens: &[TokenId]) -> Delta {
        self.collect(|visible, tokenizer, stop_tokens, emit| {
            for &token in tokens {
                let is_text = matches!(tokenizer.token(token), TokenText::Bytes(_));
                if !(is_text && stop_tokens.contains(&token)) {
                    visible.push(token, emit);
                }
            }
        })
    }

    /// The generation is finished: what was held back.
    pub fn finish(&mut self) -> Delta {
        let mut delta = self.collect(|visible, _, _, emit| visible.finish(emit));
        let mut last = Vec::new();
        self.parser.finish(&mut last);
        last.iter().for_each(|event| self.turn.apply(event));
        delta.turn.extend(last);
        delta
    }

    /// The turn so far.
    pub fn turn(&self) -> &ParsedTurn {
        &self.turn
    }

    fn collect(
        &mut self,
        feed: impl FnOnce(&mut VisibleText, &Tokenizer, &[TokenId], &mut dyn FnMut(Piece<'_>)),
    ) -> Delta {
        let mut delta = Delta::default();
        let parser = &mut self.parser;
        feed(
            &mut self.visible,
            &self.tokenizer,
            &self.stop_tokens,
            &mut |piece| {
                if let Piece::Text(text) = piece {
                    delta.text.push_str(text);
                }
                parser.push(piece, &mut delta.turn);
            },
        );
        for event in &delta.turn {
            self.turn.apply(event);
        }
        delta
    }
}

/// Schemas of tools by name; a tool whose schema cannot be used has none.
pub fn schemas(tools: &[Tool]) -> Arc<HashMap<String, Arc<Schema>>> {
    let by_name = tools
        .iter()
        .filter_map(|tool| {
            let schema = Schema::parse(tool.parameters.as_ref()?).ok()?;
            Some((tool.name.clone(), Arc::new(schema)))
        })
        .collect();
    Arc::new(by_name)
}
