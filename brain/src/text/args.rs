//! Tool arguments in Gemma's call syntax to JSON, as they stream.
//!
//! The input is what stands between a call's opening brace and its end: characters, and quote
//! tokens (`<|"|>`) as atoms of their own, so that quotes spelled by ordinary tokens are text.
//! JSON is written as soon as it cannot change any more; what was written, all together, is the
//! call's arguments. Models leave out delimiters and braces or write JSON or Python instead: every
//! input gives valid JSON, in linear time.

use std::{collections::HashSet, sync::Arc};

use super::{
    schema::Schema,
    typing::{self, bare, escape, string},
};

/// Deeper containers are read as text.
const MAX_DEPTH: usize = 32;

/// One unit of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atom {
    /// A character of an ordinary token.
    Char(char),
    /// The quote token.
    Quote,
}

/// Reads the arguments of one call.
#[derive(Debug)]
pub struct Args {
    frames: Vec<Frame>,
    state: State,
    /// A bare value that ended at a comma or the last brace. If what follows is no key, or a
    /// quote token comes, its opening quote was left out and it goes on.
    pending: Option<Pending>,
    /// Something was met that belongs to no pair.
    junk: bool,
    written: bool,
}

#[derive(Debug)]
struct Frame {
    closer: char,
    schema: Option<Arc<Schema>>,
    members: usize,
    keys: HashSet<String>,
    /// Schema of the member being read.
    member: Option<Arc<Schema>>,
    /// The member repeats a key: it is read and dropped.
    muted: bool,
}

#[derive(Debug)]
struct Pending {
    value: String,
    /// From the comma behind it on.
    tail: String,
    /// Where in `tail` its last comma is: what follows may be a key.
    comma: usize,
    /// From the last brace on: part of the text only if a quote token follows.
    beyond: String,
}

#[derive(Debug)]
enum State {
    /// Before a key (in an object) or an item (in an array).
    Member,
    QuotedKey(String),
    DelimitedKey(char, String),
    BareKey(String),
    AfterKey(String),
    /// After the colon.
    Value,
    /// Between quote tokens; what may be the closers of an unfinished string is held back.
    Text {
        held: String,
    },
    /// Between quote tokens where something else than text is declared.
    TypedText(String),
    /// Between JSON's or Python's quotes.
    Delimited {
        quote: char,
        raw: String,
        escaped: bool,
    },
    AfterDelimited {
        quote: char,
        raw: String,
        space: String,
    },
    Bare {
        raw: String,
        depth: usize,
    },
    AfterValue,
    /// After the last brace.
    Closed,
}

impl Args {
    /// Arguments that opened with `{` or `(`, read by the tool's schema if there is one.
    pub fn new(opener: char, schema: Option<Arc<Schema>>) -> Self {
        let closer = if opener == '(' { ')' } else { '}' };
        Self {
            frames: vec![Frame::new(closer, schema)],
            state: State::Member,
            pending: None,
            junk: false,
            written: false,
        }
    }

    /// Whether JSON was written: a pair was found.
    pub fn started(&self) -> bool {
        self.written
    }

    /// Whether there was input but no pair in it.
    pub fn is_junk(&self) -> bool {
        self.junk && !self.written
    }

    /// Takes the next atom and appends the JSON that it settles.
    pub fn push(&mut self, atom: Atom, out: &mut String) {
        let state = std::mem::replace(&mut self.state, State::AfterValue);
        self.state = self.step(state, atom, out);
    }

    /// Takes the characters of ordinary tokens, one after the other; long texts in one piece.
    pub fn push_text(&mut self, text: &str, out: &mut String) {
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            match &mut self.state {
                // Only a quote token ends it.
                State::Text { held } => {
                    let settled = rest.trim_end_matches(may_close);
                    let mut written = String::new();
                    if settled.is_empty() {
                        held.push_str(rest);
                    } else {
                        written = std::mem::replace(held, rest[settled.len()..].to_owned());
                        written.push_str(settled);
                    }
                    self.write_escaped(&written, out);
                    return;
                }
                State::TypedText(raw) => {
                    raw.push_str(rest);
                    return;
                }
                _ => self.push(Atom::Char(c), out),
            }
            rest = &rest[c.len_utf8()..];
        }
    }

    /// The call ends: completes the JSON.
    pub fn finish(&mut self, out: &mut String) {
        let state = std::mem::replace(&mut self.state, State::Closed);
        match state {
            State::Text { mut held } => {
                self.strip_closers(&mut held);
                self.write_escaped(&held, out);
                self.write("\"", out);
            }
            State::TypedText(mut raw) | State::Delimited { mut raw, .. } => {
                self.strip_closers(&mut raw);
                self.write_value(&raw, true, out);
            }
            State::AfterDelimited { raw, .. } => self.write_value(&raw, true, out),
            State::Bare { raw, .. } => self.write_value(&raw, false, out),
            State::Value if self.in_object() => self.write_value("", false, out),
            State::BareKey(text)
            | State::QuotedKey(text)
            | State::DelimitedKey(_, text)
            | State::AfterKey(text) => self.orphan(&text),
            _ => {}
        }
        self.settle_pending(out);
        if !self.written && !self.junk {
            self.written = true;
            out.push_str("{}");
            return;
        }
        while let Some(frame) = self.frames.pop() {
            if self.written && !self.muted() {
                out.push(if frame.closer == ']' { ']' } else { '}' });
            }
        }
    }

    fn step(&mut self, state: State, atom: Atom, out: &mut String) -> State {
        match (state, atom) {
            (State::Member, atom) if !self.in_object() => self.value_start(atom, out),
            (State::Member, Atom::Quote) if self.pending.is_some() => self.join_pending(out),
            (State::Member, Atom::Quote) => State::QuotedKey(String::new()),
            (State::Member, Atom::Char(c)) => self.key_start(c, out),

            (State::QuotedKey(key), Atom::Quote) => State::AfterKey(key),
            (State::QuotedKey(key), Atom::Char(c)) => State::QuotedKey(extend(key, c)),
            (State::DelimitedKey(quote, key), Atom::Char(c)) => {
                self.tail(c);
                if c == quote {
                    State::AfterKey(key)
                } else {
                    State::DelimitedKey(quote, extend(key, c))
                }
            }
            (State::BareKey(_) | State::DelimitedKey(..), Atom::Quote)
                if self.pending.is_some() =>
            {
                self.join_pending(out)
            }
            (State::DelimitedKey(_, key), Atom::Quote) => State::AfterKey(key),
            (State::BareKey(key), Atom::Quote) => {
                // The colon was left out.
                self.begin_pair(key, out, |args, out| args.open_text(out))
            }
            (State::BareKey(key), Atom::Char(c)) => match c {
                ':' | '=' if self.is_key(&key) => self.begin_pair(key, out, |_, _| State::Value),
                ',' => {
                    self.tail(c);
                    self.orphan(&key);
                    State::Member
                }
                c if self.closes(c) => {
                    self.orphan(&key);
                    self.close(c, out)
                }
                c => {
                    self.tail(c);
                    State::BareKey(extend(key, c))
                }
            },
            (State::AfterKey(key), Atom::Char(':' | '=')) => {
                self.begin_pair(key, out, |_, _| State::Value)
            }
            (State::AfterKey(key), Atom::Char(c)) if c.is_whitespace() => {
                self.tail(c);
                State::AfterKey(key)
            }
            (State::AfterKey(key), atom) => {
                self.orphan(&key);
                self.step(State::Member, atom, out)
            }

            (State::Value, atom) => self.value_start(atom, out),

            (State::Text { held }, Atom::Quote) => {
                self.write_escaped(&held, out);
                self.write("\"", out);
                State::AfterValue
            }
            (State::Text { held }, Atom::Char(c)) => {
                let held = extend(held, c);
                if may_close(c) {
                    return State::Text { held };
                }
                self.write_escaped(&held, out);
                State::Text {
                    held: String::new(),
                }
            }
            (State::TypedText(raw), Atom::Char(c)) => State::TypedText(extend(raw, c)),
            (State::TypedText(raw), Atom::Quote) => {
                self.write_value(&raw, true, out);
                State::AfterValue
            }
            (State::Delimited { raw, .. }, Atom::Quote) => {
                self.write_value(&raw, true, out);
                State::AfterValue
            }
            (
                State::Delimited {
                    quote,
                    raw,
                    escaped,
                },
                Atom::Char(c),
            ) => {
                if c == quote && !escaped {
                    return State::AfterDelimited {
                        quote,
                        raw,
                        space: String::new(),
                    };
                }
                let escaped = c == '\\' && !escaped;
                State::Delimited {
                    quote,
                    raw: extend(raw, c),
                    escaped,
                }
            }
            (State::AfterDelimited { quote, raw, space }, Atom::Char(c)) => {
                if c.is_whitespace() {
                    return State::AfterDelimited {
                        quote,
                        raw,
                        space: extend(space, c),
                    };
                }
                if c == ',' || matches!(c, '}' | ']' | ')') {
                    self.write_delimited(quote, &raw, out);
                    return self.step(State::AfterValue, Atom::Char(c), out);
                }
                // No delimiters after all: 'tis a bare value.
                let raw = format!("{quote}{raw}{quote}{space}");
                self.step(State::Bare { raw, depth: 0 }, Atom::Char(c), out)
            }
            (State::AfterDelimited { quote, raw, .. }, Atom::Quote) => {
                self.write_delimited(quote, &raw, out);
                State::AfterValue
            }
            (State::Bare { raw, .. }, Atom::Quote) => {
                // Its opening quote was left out.
                self.write_value(&raw, true, out);
                State::AfterValue
            }
            (State::Bare { raw, depth }, Atom::Char(c)) => self.bare_char(raw, depth, c, out),

            (State::AfterValue, Atom::Quote) => {
                if self.in_object() {
                    State::AfterValue
                } else {
                    self.open_text(out)
                }
            }
            (State::AfterValue, Atom::Char(c)) => {
                if c == ',' {
                    State::Member
                } else if self.closes(c) {
                    self.close(c, out)
                } else if c.is_whitespace() || matches!(c, '}' | ']' | ')') {
                    State::AfterValue
                } else {
                    self.step(State::Member, Atom::Char(c), out)
                }
            }

            (State::Closed, Atom::Quote) if self.pending.is_some() => self.join_pending(out),
            (State::Closed, Atom::Char(c)) => {
                self.beyond(c);
                State::Closed
            }
            (State::Closed, Atom::Quote) => State::Closed,
        }
    }

    fn key_start(&mut self, c: char, out: &mut String) -> State {
        if self.closes(c) {
            return self.close(c, out);
        }
        self.tail(c);
        match c {
            ',' => State::Member,
            c if c.is_whitespace() => State::Member,
            '"' | '\'' => State::DelimitedKey(c, String::new()),
            // A second brace around the whole, or a closer of nothing.
            '{' if self.frames.len() == 1 && self.frames[0].members == 0 => {
                self.frames[0].closer = '}';
                State::Member
            }
            '}' | ']' | ')' => State::Member,
            ':' | '=' if self.pending.is_none() => {
                self.junk = true;
                State::Member
            }
            c => State::BareKey(c.to_string()),
        }
    }

    fn value_start(&mut self, atom: Atom, out: &mut String) -> State {
        let c = match atom {
            Atom::Quote => return self.open_text(out),
            Atom::Char(c) => c,
        };
        let object = self.in_object();
        if c.is_whitespace() || (c == ',' && !object) {
            return if object { State::Value } else { State::Member };
        }
        if c == ',' {
            self.write_value("", false, out);
            return State::Member;
        }
        if self.closes(c) {
            if object {
                self.write_value("", false, out);
            }
            return self.close(c, out);
        }
        match c {
            '{' | '[' if self.frames.len() < MAX_DEPTH => {
                self.begin_item(out);
                let (closer, schema) = match (c, self.member_schema()) {
                    ('[', schema) => (']', schema),
                    (_, schema) => ('}', schema),
                };
                self.write(if c == '[' { "[" } else { "{" }, out);
                self.frames.push(Frame::new(closer, schema));
                State::Member
            }
            '"' | '\'' => State::Delimited {
                quote: c,
                raw: String::new(),
                escaped: false,
            },
            c => self.bare_char(String::new(), 0, c, out),
        }
    }

    fn bare_char(&mut self, raw: String, depth: usize, c: char, out: &mut String) -> State {
        match c {
            '(' | '[' | '{' => State::Bare {
                raw: extend(raw, c),
                depth: depth + 1,
            },
            ')' | ']' | '}' if depth > 0 => State::Bare {
                raw: extend(raw, c),
                depth: depth - 1,
            },
            ',' if self.in_object() && depth == 0 => {
                self.pending = Some(Pending::new(raw, ",", ""));
                State::Member
            }
            ',' if depth == 0 => {
                self.write_value(&raw, false, out);
                State::Member
            }
            c if self.closes(c) => {
                if self.frames.len() == 1 {
                    self.pending = Some(Pending::new(raw, "", &c.to_string()));
                    return State::Closed;
                }
                self.write_value(&raw, false, out);
                self.close(c, out)
            }
            c => State::Bare {
                raw: extend(raw, c),
                depth,
            },
        }
    }

    /// A quote token showed that the pending value is text that goes on up to here.
    fn join_pending(&mut self, out: &mut String) -> State {
        if let Some(Pending {
            value,
            tail,
            beyond,
            ..
        }) = self.pending.take()
        {
            self.write_value(&format!("{value}{tail}{beyond}"), true, out);
        }
        State::AfterValue
    }

    /// What follows the pending value is not a part of it, unless it holds words of its own.
    fn settle_pending(&mut self, out: &mut String) {
        let Some(Pending { value, tail, .. }) = self.pending.take() else {
            return;
        };
        let words = tail.trim_end_matches([' ', '\n', '\t', '\r', ',', '}', ']', ')']);
        if words.is_empty() {
            self.write_value(&value, false, out);
        } else {
            self.write_value(&format!("{value}{words}"), true, out);
        }
    }

    fn begin_pair(
        &mut self,
        key: String,
        out: &mut String,
        next: impl FnOnce(&mut Self, &mut String) -> State,
    ) -> State {
        if let Some(Pending { tail, comma, .. }) = &mut self.pending {
            tail.truncate(*comma);
        }
        self.settle_pending(out);
        let key = key.trim().to_owned();
        let outer_muted = self.outer_muted();
        let Some(frame) = self.frames.last_mut() else {
            return State::Closed;
        };
        frame.member = frame
            .schema
            .as_ref()
            .and_then(|s| s.property(&key))
            .cloned();
        frame.muted = !frame.keys.insert(key.clone());
        if !frame.muted && !outer_muted {
            let first = frame.members == 0;
            frame.members += 1;
            if !self.written {
                self.written = true;
                out.push('{');
            }
            out.push_str(if first { "" } else { "," });
            out.push_str(&string(&key));
            out.push(':');
        }
        next(self, out)
    }

    /// A separator before an item of an array.
    fn begin_item(&mut self, out: &mut String) {
        if self.in_object() {
            return;
        }
        let first = self.frames.last().is_none_or(|frame| frame.members == 0);
        if let Some(frame) = self.frames.last_mut() {
            frame.members += 1;
        }
        self.write(if first { "" } else { "," }, out);
    }

    fn open_text(&mut self, out: &mut String) -> State {
        if !typing::is_text(self.member_schema().as_deref()) {
            return State::TypedText(String::new());
        }
        self.begin_item(out);
        self.write("\"", out);
        State::Text {
            held: String::new(),
        }
    }

    fn write_delimited(&mut self, quote: char, raw: &str, out: &mut String) {
        let json = format!("{quote}{raw}{quote}");
        let text = match serde_json::from_str::<String>(&json) {
            Ok(text) => text,
            Err(_) => raw.replace(&format!("\\{quote}"), &quote.to_string()),
        };
        self.write_value(&text, true, out);
    }

    /// Writes a whole value; `delimited`: it is text unless something else is declared.
    fn write_value(&mut self, raw: &str, delimited: bool, out: &mut String) {
        self.begin_item(out);
        let schema = self.member_schema();
        let json = if delimited && typing::is_text(schema.as_deref()) {
            string(raw)
        } else {
            bare(raw, schema.as_deref())
        };
        self.write(&json, out);
    }

    fn write_escaped(&mut self, text: &str, out: &mut String) {
        if !self.muted() {
            escape(text, out);
        }
    }

    fn write(&mut self, json: &str, out: &mut String) {
        if !self.muted() {
            out.push_str(json);
        }
    }

    fn muted(&self) -> bool {
        self.frames.iter().any(|frame| frame.muted)
    }

    fn outer_muted(&self) -> bool {
        let outer = self.frames.len().saturating_sub(1);
        self.frames[..outer].iter().any(|frame| frame.muted)
    }

    fn in_object(&self) -> bool {
        self.frames.last().is_none_or(|frame| frame.closer != ']')
    }

    fn member_schema(&self) -> Option<Arc<Schema>> {
        let frame = self.frames.last()?;
        if frame.closer == ']' {
            frame.schema.as_ref()?.items.clone()
        } else {
            frame.member.clone()
        }
    }

    /// Whether `c` ends the innermost container, or one around it whose members it cannot be in.
    fn closes(&self, c: char) -> bool {
        match self.frames.last() {
            Some(frame) if frame.closer == c => true,
            // A missing bracket: the brace of the object around the array.
            Some(frame) => frame.closer == ']' && c == '}',
            None => false,
        }
    }

    fn close(&mut self, c: char, out: &mut String) -> State {
        loop {
            if self.frames.len() == 1 {
                self.beyond(c);
                return State::Closed;
            }
            self.settle_pending(out);
            let Some(frame) = self.frames.pop() else {
                return State::Closed;
            };
            self.write(if frame.closer == ']' { "]" } else { "}" }, out);
            if frame.closer == c {
                return State::AfterValue;
            }
        }
    }

    /// Whether a text before a colon is a key, given that a bare value may go on instead.
    fn is_key(&self, text: &str) -> bool {
        let text = text.trim();
        if self.pending.is_none() {
            return true;
        }
        let declared = self.frames.last().and_then(|frame| frame.schema.as_ref());
        match declared {
            Some(schema) if !schema.properties.is_empty() => schema.property(text).is_some(),
            _ => !text.is_empty() && !text.contains(char::is_whitespace),
        }
    }

    fn tail(&mut self, c: char) {
        if let Some(pending) = &mut self.pending {
            if c == ',' {
                pending.comma = pending.tail.len();
            }
            pending.tail.push(c);
        }
    }

    fn beyond(&mut self, c: char) {
        if let Some(pending) = &mut self.pending {
            pending.beyond.push(c);
        }
    }

    fn orphan(&mut self, text: &str) {
        self.junk |= !text.trim().is_empty();
    }

    /// Takes the closers of all open containers off the end of a text that was never closed.
    fn strip_closers(&self, text: &mut String) {
        for frame in &self.frames {
            let end = text.trim_end().len();
            if !text[..end].ends_with(frame.closer) {
                return;
            }
            text.truncate(end - frame.closer.len_utf8());
        }
    }
}

impl Pending {
    fn new(value: String, tail: &str, beyond: &str) -> Self {
        Self {
            value,
            tail: tail.to_owned(),
            comma: 0,
            beyond: beyond.to_owned(),
        }
    }
}

impl Frame {
    fn new(closer: char, schema: Option<Arc<Schema>>) -> Self {
        Self {
            closer,
            schema,
            members: 0,
            keys: HashSet::new(),
            member: None,
            muted: false,
        }
    }
}

/// Whether a character at the end of a text may belong to what closes an unfinished one.
fn may_close(c: char) -> bool {
    c.is_whitespace() || matches!(c, '}' | ']' | ')')
}

fn extend(mut text: String, c: char) -> String {
    text.push(c);
    text
}

#[cfg(test)]
mod tests;
