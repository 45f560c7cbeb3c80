//! A generation's tokens to what its reader sees: text and a parsed turn.
//!
//! The tokens are the truth; this is a function of them. A reader that attaches in the middle
//! replays the tokens before and gets the rest exactly as the first reader did.

use std::{collections::HashMap, sync::Arc};

use super::{
    conversation::Tool,
    markers::Markers,
    schema::{Room, Schema},
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
    thoughts: ThoughtCounter,
}

impl TurnStream {
    /// At the start of a generation.
    pub fn new(tokenizer: Arc<Tokenizer>, options: StreamOptions) -> Self {
        Self {
            thoughts: ThoughtCounter::new(tokenizer.markers(), options.start),
            visible: VisibleText::new(tokenizer.clone(), &options.stop_strings, options.min_tokens),
            parser: TurnParser::new(*tokenizer.markers(), options.start, options.schemas),
            stop_tokens: options.stop_tokens,
            tokenizer,
            turn: ParsedTurn::default(),
        }
    }

    /// Takes the next tokens.
    pub fn push(&mut self, tokens: &[TokenId]) -> Delta {
        tokens.iter().for_each(|&token| self.thoughts.take(token));
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

    /// Tokens of thoughts so far, their markers included.
    pub fn reasoning_tokens(&self) -> usize {
        self.thoughts.count
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.visible.stop_string()
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

/// Counts the tokens between the markers of a thought, the markers included.
struct ThoughtCounter {
    open: TokenId,
    close: TokenId,
    inside: bool,
    count: usize,
}

impl ThoughtCounter {
    fn new(markers: &Markers, start: Start) -> Self {
        Self {
            open: markers.channel_open,
            close: markers.channel_close,
            inside: matches!(start, Start::Thought { .. }),
            count: 0,
        }
    }

    fn take(&mut self, token: TokenId) {
        self.inside |= token == self.open;
        self.count += usize::from(self.inside);
        self.inside &= token != self.close;
    }
}

/// Schemas of tools by name; a tool whose schema cannot be used has none.
pub fn schemas(tools: &[Tool]) -> Arc<HashMap<String, Arc<Schema>>> {
    let mut room = Room::default();
    let by_name = tools
        .iter()
        .filter_map(|tool| {
            let schema = Schema::parse(tool.parameters.as_ref()?, &mut room).ok()?;
            Some((tool.name.clone(), Arc::new(schema)))
        })
        .collect();
    Arc::new(by_name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::testing::tokenizer;

    /// Deltas of one kind that follow each other are one.
    fn merged(events: Vec<TurnEvent>) -> Vec<TurnEvent> {
        let mut out: Vec<TurnEvent> = Vec::new();
        for event in events {
            match (out.last_mut(), event) {
                (Some(TurnEvent::Content(grown)), TurnEvent::Content(text))
                | (Some(TurnEvent::Reasoning(grown)), TurnEvent::Reasoning(text)) => {
                    grown.push_str(&text);
                }
                (
                    Some(TurnEvent::CallArguments { index, json }),
                    TurnEvent::CallArguments {
                        index: next,
                        json: more,
                    },
                ) if *index == next => json.push_str(&more),
                (_, event) => out.push(event),
            }
        }
        out
    }

    /// Text, events and turn of tokens that arrive in groups that end at `cuts`.
    fn read(
        tokens: &[TokenId],
        cuts: &[usize],
        stops: &[String],
    ) -> (String, Vec<TurnEvent>, ParsedTurn) {
        let mut stream = TurnStream::new(
            tokenizer(),
            StreamOptions {
                start: Start::Fresh,
                schemas: Arc::default(),
                stop_strings: stops.to_vec(),
                stop_tokens: Vec::new(),
                min_tokens: 2,
            },
        );
        let mut text = String::new();
        let mut events = Vec::new();
        let mut take = |delta: Delta| {
            text.push_str(&delta.text);
            events.extend(delta.turn);
        };
        let mut rest = tokens;
        for cut in cuts {
            let (group, after) = rest.split_at((*cut).min(rest.len()));
            take(stream.push(group));
            rest = after;
        }
        take(stream.push(rest));
        take(stream.finish());
        (text, merged(events), stream.turn().clone())
    }

    fn said() -> impl Strategy<Value = Vec<TokenId>> {
        let spelled = (0..Markers::SPELLINGS.len()).prop_map(|i| Markers::SPELLINGS[i].to_owned());
        let part = prop_oneof![
            3 => spelled,
            2 => Just("call:f{a:<|\"|>x<|\"|>,n:".to_owned()),
            1 => Just("<|channel>thought\n".to_owned()),
            4 => "[a-c{}():,\"'0-9\\n END é😊]{1,6}",
        ];
        proptest::collection::vec(part, 0..30)
            .prop_map(|parts| tokenizer().encode_with_specials(&parts.concat()).unwrap())
    }

    proptest! {
        #[test]
        fn any_split_of_the_tokens_gives_the_same_events(
            tokens in said(),
            cuts in proptest::collection::vec(0usize..6, 0..40),
            stops in proptest::collection::vec("(END|n\\}|😊)", 0..2),
        ) {
            let whole = read(&tokens, &[], &stops);
            prop_assert_eq!(&read(&tokens, &cuts, &stops), &whole);
            prop_assert_eq!(&read(&tokens, &vec![1; tokens.len()], &stops), &whole);
            let mut turn = ParsedTurn::default();
            whole.1.iter().for_each(|event| turn.apply(event));
            prop_assert_eq!(turn, whole.2);
        }
    }

    #[test]
    fn the_tokens_of_a_thought_are_counted_with_their_markers() {
        let mut counter = ThoughtCounter {
            open: 1,
            close: 2,
            inside: false,
            count: 0,
        };
        for token in [5, 1, 6, 7, 2, 8, 2, 9] {
            counter.take(token);
        }
        assert_eq!(counter.count, 4);
    }
}
