//! A model turn as it streams: content, thought and tool calls.
//!
//! Structure is recognised by token id: a special token is structure, the same characters made by
//! ordinary tokens are text. However the tokens arrive in pieces, the events are the same.
//! Malformed calls are recovered when a name and a brace can be found; otherwise their text is
//! handed back as content, so that nothing the model said is lost.

use std::{collections::HashMap, sync::Arc};

use super::{
    args::{Args, Atom},
    conversation::is_name_char,
    markers::Markers,
    schema::Schema,
    visible::Piece,
};
use crate::sched::types::TokenId;

/// A piece of the turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnEvent {
    /// Text for the reader.
    Content(String),
    /// The model's thought.
    Reasoning(String),
    /// A tool call begins.
    CallStart {
        /// Number of the call in its turn.
        index: usize,
        /// The tool.
        name: String,
    },
    /// JSON that continues the arguments of a call.
    CallArguments {
        /// Number of the call in its turn.
        index: usize,
        /// To be appended.
        json: String,
    },
}

/// A call as parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedCall {
    /// The tool.
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// What a turn amounts to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedTurn {
    /// Text for the reader.
    pub content: String,
    /// The model's thought.
    pub reasoning: String,
    /// In order.
    pub calls: Vec<ParsedCall>,
}

impl ParsedTurn {
    /// Takes an event in.
    pub fn apply(&mut self, event: &TurnEvent) {
        match event {
            TurnEvent::Content(text) => self.content.push_str(text),
            TurnEvent::Reasoning(text) => self.reasoning.push_str(text),
            TurnEvent::CallStart { name, .. } => self.calls.push(ParsedCall {
                name: name.clone(),
                arguments: String::new(),
            }),
            TurnEvent::CallArguments { index, json } => {
                if let Some(call) = self.calls.get_mut(*index) {
                    call.arguments.push_str(json);
                }
            }
        }
    }
}

/// The id of a turn's call.
pub fn call_id(index: usize) -> String {
    format!("call_{index}")
}

/// Where the prompt leaves the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At the beginning of a turn; it may think first.
    Fresh,
    /// After a thought, or in the middle of a turn.
    Content,
    /// In an open thought; `labelled`: its label is in the prompt.
    Thought {
        /// Whether "thought" and a newline follow the marker already.
        labelled: bool,
    },
}

impl Start {
    /// Reads it off the end of a prompt.
    pub fn after(prompt: &[TokenId], markers: &Markers) -> Self {
        for (index, &id) in prompt.iter().enumerate().rev() {
            if id == markers.channel_open {
                return Self::Thought {
                    labelled: index + 1 < prompt.len(),
                };
            }
            if id == markers.turn_open {
                return Self::Fresh;
            }
            let inside = [
                markers.channel_close,
                markers.call_open,
                markers.response_open,
            ];
            if inside.contains(&id) {
                return Self::Content;
            }
        }
        Self::Fresh
    }
}

const LABEL: &str = "thought\n";

/// The streaming parser of a model turn.
pub struct TurnParser {
    markers: Markers,
    schemas: Arc<HashMap<String, Arc<Schema>>>,
    state: State,
    calls: usize,
    /// Room for the JSON of a piece.
    json: String,
}

enum State {
    /// At the very start: a label without its marker may come.
    Opening {
        text: String,
        fresh: bool,
    },
    Content,
    /// `label`: the beginning of the thought as long as it may be the label; `newline`: a newline
    /// that belongs to the markup if the thought ends here.
    Reasoning {
        label: Option<String>,
        newline: bool,
    },
    /// After `<|tool_call>`, before the brace.
    Head {
        text: String,
        raw: String,
    },
    Arguments(Box<Call>),
    /// No name: the text becomes content.
    Broken {
        raw: String,
    },
}

struct Call {
    name: String,
    args: Args,
    announced: bool,
    /// The call as the model wrote it, until it is announced.
    raw: String,
}

impl TurnParser {
    /// A parser for what follows a prompt. `schemas`: parameters by tool, for typing arguments.
    pub fn new(markers: Markers, start: Start, schemas: Arc<HashMap<String, Arc<Schema>>>) -> Self {
        let state = match start {
            Start::Fresh => State::Opening {
                text: String::new(),
                fresh: true,
            },
            Start::Content => State::Opening {
                text: String::new(),
                fresh: false,
            },
            Start::Thought { labelled } => State::Reasoning {
                label: (!labelled).then(String::new),
                newline: false,
            },
        };
        Self {
            markers,
            schemas,
            state,
            calls: 0,
            json: String::new(),
        }
    }

    /// Takes text or a special token; adds what it completes to `out`.
    pub fn push(&mut self, piece: Piece<'_>, out: &mut Vec<TurnEvent>) {
        match piece {
            Piece::Text(text) => self.text(text, out),
            Piece::Special(id) => self.marker(id, out),
        }
    }

    /// The turn ends here.
    pub fn finish(&mut self, out: &mut Vec<TurnEvent>) {
        let state = std::mem::replace(&mut self.state, State::Content);
        self.leave(state, "", out);
    }

    fn text(&mut self, text: &str, out: &mut Vec<TurnEvent>) {
        match &mut self.state {
            State::Content => content(text, out),
            State::Opening { text: held, fresh } => {
                held.push_str(text);
                if let Some(rest) = held.strip_prefix(LABEL) {
                    let rest = rest.to_owned();
                    // A turn that begins with the label is a thought; after a thought the label
                    // is a slip.
                    self.state = if *fresh {
                        State::Reasoning {
                            label: None,
                            newline: false,
                        }
                    } else {
                        State::Content
                    };
                    self.text(&rest, out);
                } else if !LABEL.starts_with(held.as_str()) {
                    content(held, out);
                    self.state = State::Content;
                }
            }
            State::Reasoning { label, newline } => {
                if let Some(held) = label {
                    held.push_str(text);
                    if LABEL.starts_with(held.as_str()) && held != LABEL {
                        return;
                    }
                    let shown = held.strip_prefix(LABEL).unwrap_or(held).to_owned();
                    *label = None;
                    reasoning(&shown, newline, out);
                } else {
                    reasoning(text, newline, out);
                }
            }
            State::Head { .. } => self.head(text, out),
            State::Arguments(call) => {
                // The usual case, without a detour.
                if let (true, Some(TurnEvent::CallArguments { index, json })) =
                    (call.announced, out.last_mut())
                    && *index == self.calls
                {
                    call.args.push_text(text, json);
                    return;
                }
                self.json.clear();
                call.args.push_text(text, &mut self.json);
                if !call.announced {
                    call.raw.push_str(text);
                }
                announce(call, self.calls, &self.json, out);
            }
            State::Broken { raw } => raw.push_str(text),
        }
    }

    fn head(&mut self, text: &str, out: &mut Vec<TurnEvent>) {
        let State::Head { text: head, raw } = &mut self.state else {
            return;
        };
        let Some(at) = text.find(['{', '(']) else {
            head.push_str(text);
            raw.push_str(text);
            return;
        };
        let (before, rest) = text.split_at(at);
        let opener = if rest.starts_with('(') { '(' } else { '{' };
        head.push_str(before);
        raw.push_str(before);
        raw.push(opener);
        let raw = std::mem::take(raw);
        self.state = match call_name(head) {
            Some(name) => {
                let schema = self.schemas.get(&name).cloned();
                State::Arguments(Box::new(Call {
                    args: Args::new(opener, schema),
                    name,
                    announced: false,
                    raw,
                }))
            }
            None => State::Broken { raw },
        };
        self.text(&rest[1..], out);
    }

    fn marker(&mut self, id: TokenId, out: &mut Vec<TurnEvent>) {
        let m = self.markers;
        if id == m.quote {
            match &mut self.state {
                State::Arguments(call) => {
                    self.json.clear();
                    call.args.push(Atom::Quote, &mut self.json);
                    if !call.announced {
                        call.raw.push_str("<|\"|>");
                    }
                    announce(call, self.calls, &self.json, out);
                }
                State::Head { raw, .. } | State::Broken { raw } => raw.push_str("<|\"|>"),
                _ => {}
            }
            return;
        }
        let state = std::mem::replace(&mut self.state, State::Content);
        if id == m.call_open {
            self.leave(state, "", out);
            self.state = State::Head {
                text: String::new(),
                raw: "<|tool_call>".to_owned(),
            };
        } else if id == m.channel_open {
            self.state = match state {
                thinking @ State::Reasoning { .. } => thinking,
                other => {
                    self.leave(other, "", out);
                    State::Reasoning {
                        label: Some(String::new()),
                        newline: false,
                    }
                }
            };
        } else if id == m.call_close {
            match state {
                calling @ (State::Head { .. } | State::Arguments(_) | State::Broken { .. }) => {
                    self.leave(calling, "<tool_call|>", out);
                }
                other => self.state = other,
            }
        } else if id == m.channel_close {
            match state {
                thinking @ (State::Reasoning { .. } | State::Opening { .. }) => {
                    self.leave(thinking, "", out);
                }
                other => self.state = other,
            }
        } else if m.ends_turn(id) || id == m.turn_open {
            self.leave(state, "", out);
        } else {
            // Any other special token means nothing in a turn.
            self.state = state;
        }
    }

    /// Completes what is open. `closing`: how the model ended it, for text handed back.
    fn leave(&mut self, state: State, closing: &str, out: &mut Vec<TurnEvent>) {
        match state {
            State::Opening { text, .. } => content(&text, out),
            State::Content => {}
            State::Reasoning { label, .. } => {
                // A thought that is nothing but its label is empty; the last newline is markup.
                if let Some(text) = label.filter(|text| text.as_str() != LABEL.trim_end()) {
                    reasoning(&text, &mut false, out);
                }
            }
            State::Head { text, raw } => match call_name(&text) {
                Some(name) if text.trim_start().starts_with("call") => {
                    self.whole_call(name, out);
                }
                _ if text.trim().is_empty() && raw == format!("<|tool_call>{text}") => {}
                _ => content(&format!("{raw}{closing}"), out),
            },
            State::Arguments(mut call) => {
                let mut json = String::new();
                call.args.finish(&mut json);
                if call.args.is_junk() {
                    content(&format!("{}{closing}", call.raw), out);
                } else {
                    announce(&mut call, self.calls, &json, out);
                    self.calls += 1;
                }
            }
            State::Broken { raw } => content(&format!("{raw}{closing}"), out),
        }
    }

    fn whole_call(&mut self, name: String, out: &mut Vec<TurnEvent>) {
        let index = self.calls;
        self.calls += 1;
        out.push(TurnEvent::CallStart { index, name });
        out.push(TurnEvent::CallArguments {
            index,
            json: "{}".to_owned(),
        });
    }
}

/// Sends a call's start as soon as its arguments have one, and the arguments that are settled.
fn announce(call: &mut Call, index: usize, json: &str, out: &mut Vec<TurnEvent>) {
    if json.is_empty() {
        return;
    }
    if !call.announced {
        call.announced = true;
        call.raw = String::new();
        out.push(TurnEvent::CallStart {
            index,
            name: call.name.clone(),
        });
    }
    match out.last_mut() {
        Some(TurnEvent::CallArguments {
            index: last,
            json: grown,
        }) if *last == index => {
            grown.push_str(json);
        }
        _ => out.push(TurnEvent::CallArguments {
            index,
            json: json.to_owned(),
        }),
    }
}

/// The name in front of a call's brace: `call:NAME`, `:NAME`, `<call>NAME` or only `NAME`.
fn call_name(head: &str) -> Option<String> {
    let head = head.trim();
    let after_word = head.strip_prefix("call").map(str::trim_start);
    let name = after_word
        .and_then(|rest| rest.strip_prefix(':'))
        .or_else(|| head.strip_prefix(':'))
        .or_else(|| head.strip_prefix("<call>"))
        .unwrap_or(head)
        .trim();
    (!name.is_empty() && name.chars().all(is_name_char)).then(|| name.to_owned())
}

fn content(text: &str, out: &mut Vec<TurnEvent>) {
    if text.is_empty() {
        return;
    }
    match out.last_mut() {
        Some(TurnEvent::Content(grown)) => grown.push_str(text),
        _ => out.push(TurnEvent::Content(text.to_owned())),
    }
}

/// Adds to the thought; one newline at its end is held back.
fn reasoning(text: &str, newline: &mut bool, out: &mut Vec<TurnEvent>) {
    if text.is_empty() {
        return;
    }
    let (shown, held) = match text.strip_suffix('\n') {
        Some(before) => (before, true),
        None => (text, false),
    };
    let before = if std::mem::replace(newline, held) {
        "\n"
    } else {
        ""
    };
    if before.is_empty() && shown.is_empty() {
        return;
    }
    match out.last_mut() {
        Some(TurnEvent::Reasoning(grown)) => {
            grown.push_str(before);
            grown.push_str(shown);
        }
        _ => out.push(TurnEvent::Reasoning(format!("{before}{shown}"))),
    }
}

#[cfg(test)]
mod tests;
