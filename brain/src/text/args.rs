//! Tool arguments in Gemma's call syntax to JSON, as they stream.
//!
//! The input is what stands between a call's opening brace and its end: characters, and quote
//! tokens (`<|"|>`) as atoms of their own, so that quotes spelled by ordinary tokens are text.
//! JSON is written as soon as it cannot change any more; what was written, all together, is the
//! call's arguments. Models leave out delimiters and braces or write JSON or Python instead: every
//! input gives valid JSON, in linear time.

mod object;

use std::sync::Arc;

use super::schema::Schema;
use object::Object;

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
    object: Object,
    state: State,
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
            object: Object::new(closer, schema),
            state: State::Member,
        }
    }

    /// Whether JSON was written: a pair was found.
    pub fn started(&self) -> bool {
        self.object.started()
    }

    /// Whether there was input but no pair in it.
    pub fn is_junk(&self) -> bool {
        self.object.is_junk()
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
                    if !settled.is_empty() {
                        if !held.is_empty() {
                            self.object.write_escaped(held, out);
                            held.clear();
                        }
                        self.object.write_escaped(settled, out);
                    }
                    held.push_str(&rest[settled.len()..]);
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
                self.object.strip_closers(&mut held);
                self.object.write_escaped(&held, out);
                self.object.close_text(out);
            }
            State::TypedText(mut raw) | State::Delimited { mut raw, .. } => {
                self.object.strip_closers(&mut raw);
                self.object.write_value(&raw, true, out);
            }
            State::AfterDelimited { raw, .. } => self.object.write_value(&raw, true, out),
            State::Bare { raw, .. } => self.object.write_value(&raw, false, out),
            State::Value if self.object.in_object() => self.object.write_value("", false, out),
            State::BareKey(text)
            | State::QuotedKey(text)
            | State::DelimitedKey(_, text)
            | State::AfterKey(text) => self.object.orphan(&text),
            _ => {}
        }
        self.object.finish(out);
    }

    fn step(&mut self, state: State, atom: Atom, out: &mut String) -> State {
        match state {
            State::Member => self.member(atom, out),
            State::QuotedKey(key) => match atom {
                Atom::Quote => State::AfterKey(key),
                Atom::Char(c) => State::QuotedKey(extend(key, c)),
            },
            State::DelimitedKey(quote, key) => self.delimited_key(quote, key, atom, out),
            State::BareKey(key) => self.bare_key(key, atom, out),
            State::AfterKey(key) => self.after_key(key, atom, out),
            State::Value => self.value_start(atom, out),
            State::Text { held } => self.text(held, atom, out),
            State::TypedText(raw) => match atom {
                Atom::Char(c) => State::TypedText(extend(raw, c)),
                Atom::Quote => self.value(&raw, out),
            },
            State::Delimited {
                quote,
                raw,
                escaped,
            } => match atom {
                Atom::Quote => self.value(&raw, out),
                Atom::Char(c) => delimited(quote, raw, escaped, c),
            },
            State::AfterDelimited { quote, raw, space } => {
                self.after_delimited(quote, raw, space, atom, out)
            }
            State::Bare { raw, depth } => match atom {
                // Its opening quote was left out.
                Atom::Quote => self.value(&raw, out),
                Atom::Char(c) => self.bare_char(raw, depth, c, out),
            },
            State::AfterValue => self.after_value(atom, out),
            State::Closed => self.closed(atom, out),
        }
    }

    fn member(&mut self, atom: Atom, out: &mut String) -> State {
        match atom {
            atom if !self.object.in_object() => self.value_start(atom, out),
            Atom::Quote if self.object.is_pending() => self.go_on(out),
            Atom::Quote => State::QuotedKey(String::new()),
            Atom::Char(c) => self.key_start(c, out),
        }
    }

    fn delimited_key(&mut self, quote: char, key: String, atom: Atom, out: &mut String) -> State {
        match atom {
            Atom::Char(c) => {
                self.object.tail(c);
                match c == quote {
                    true => State::AfterKey(key),
                    false => State::DelimitedKey(quote, extend(key, c)),
                }
            }
            Atom::Quote if self.object.is_pending() => self.go_on(out),
            Atom::Quote => State::AfterKey(key),
        }
    }

    fn bare_key(&mut self, key: String, atom: Atom, out: &mut String) -> State {
        let c = match atom {
            Atom::Quote if self.object.is_pending() => return self.go_on(out),
            Atom::Quote => {
                // The colon was left out.
                self.object.begin_pair(&key, out);
                return self.open_text(out);
            }
            Atom::Char(c) => c,
        };
        match c {
            ':' | '=' if self.object.is_key(&key) => {
                self.object.begin_pair(&key, out);
                State::Value
            }
            ',' => {
                self.object.tail(c);
                self.object.orphan(&key);
                State::Member
            }
            c if self.object.closes(c) => {
                self.object.orphan(&key);
                self.close(c, out)
            }
            c => {
                self.object.tail(c);
                State::BareKey(extend(key, c))
            }
        }
    }

    fn after_key(&mut self, key: String, atom: Atom, out: &mut String) -> State {
        match atom {
            Atom::Char(':' | '=') => {
                self.object.begin_pair(&key, out);
                State::Value
            }
            Atom::Char(c) if c.is_whitespace() => {
                self.object.tail(c);
                State::AfterKey(key)
            }
            atom => {
                self.object.orphan(&key);
                self.member(atom, out)
            }
        }
    }

    fn text(&mut self, held: String, atom: Atom, out: &mut String) -> State {
        match atom {
            Atom::Quote => {
                self.object.write_escaped(&held, out);
                self.object.close_text(out);
                State::AfterValue
            }
            Atom::Char(c) => {
                let held = extend(held, c);
                if may_close(c) {
                    return State::Text { held };
                }
                self.object.write_escaped(&held, out);
                State::Text {
                    held: String::new(),
                }
            }
        }
    }

    fn after_delimited(
        &mut self,
        quote: char,
        raw: String,
        space: String,
        atom: Atom,
        out: &mut String,
    ) -> State {
        match atom {
            Atom::Char(c) if c.is_whitespace() => State::AfterDelimited {
                quote,
                raw,
                space: extend(space, c),
            },
            Atom::Char(',' | '}' | ']' | ')') => {
                self.object.write_delimited(quote, &raw, out);
                self.after_value(atom, out)
            }
            Atom::Char(c) => {
                // No delimiters after all: 'tis a bare value.
                let raw = format!("{quote}{raw}{quote}{space}");
                self.bare_char(raw, 0, c, out)
            }
            Atom::Quote => {
                self.object.write_delimited(quote, &raw, out);
                State::AfterValue
            }
        }
    }

    fn after_value(&mut self, atom: Atom, out: &mut String) -> State {
        match atom {
            Atom::Quote if self.object.in_object() => State::AfterValue,
            Atom::Quote => self.open_text(out),
            Atom::Char(',') => State::Member,
            Atom::Char(c) if self.object.closes(c) => self.close(c, out),
            Atom::Char(c) if may_close(c) => State::AfterValue,
            atom => self.member(atom, out),
        }
    }

    fn closed(&mut self, atom: Atom, out: &mut String) -> State {
        match atom {
            Atom::Quote if self.object.is_pending() => return self.go_on(out),
            Atom::Char(c) => self.object.beyond(c),
            Atom::Quote => {}
        }
        State::Closed
    }

    /// A value that stood between quotes.
    fn value(&mut self, raw: &str, out: &mut String) -> State {
        self.object.write_value(raw, true, out);
        State::AfterValue
    }

    fn key_start(&mut self, c: char, out: &mut String) -> State {
        if self.object.closes(c) {
            return self.close(c, out);
        }
        self.object.tail(c);
        match c {
            ',' => State::Member,
            c if c.is_whitespace() => State::Member,
            '"' | '\'' => State::DelimitedKey(c, String::new()),
            // A second brace around the whole, or a closer of nothing.
            '{' if self.object.is_empty() => {
                self.object.wrap();
                State::Member
            }
            '}' | ']' | ')' => State::Member,
            ':' | '=' if !self.object.is_pending() => {
                self.object.met_junk();
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
        let object = self.object.in_object();
        if c.is_whitespace() || (c == ',' && !object) {
            return if object { State::Value } else { State::Member };
        }
        if c == ',' {
            self.object.write_value("", false, out);
            return State::Member;
        }
        if self.object.closes(c) {
            if object {
                self.object.write_value("", false, out);
            }
            return self.close(c, out);
        }
        match c {
            '{' | '[' if self.object.may_open() => {
                self.object.open(c, out);
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
            ',' if self.object.in_object() && depth == 0 => {
                self.object.hold(raw, ",", "");
                State::Member
            }
            ',' if depth == 0 => {
                self.object.write_value(&raw, false, out);
                State::Member
            }
            c if self.object.closes(c) => {
                if self.object.is_outermost() {
                    self.object.hold(raw, "", &c.to_string());
                    return State::Closed;
                }
                self.object.write_value(&raw, false, out);
                self.close(c, out)
            }
            c => State::Bare {
                raw: extend(raw, c),
                depth,
            },
        }
    }

    /// What was pending went on up to here.
    fn go_on(&mut self, out: &mut String) -> State {
        self.object.join_pending(out);
        State::AfterValue
    }

    fn open_text(&mut self, out: &mut String) -> State {
        match self.object.open_text(out) {
            true => State::Text {
                held: String::new(),
            },
            false => State::TypedText(String::new()),
        }
    }

    fn close(&mut self, c: char, out: &mut String) -> State {
        match self.object.close(c, out) {
            true => State::Closed,
            false => State::AfterValue,
        }
    }
}

/// A character behind an opening delimiter.
fn delimited(quote: char, raw: String, escaped: bool, c: char) -> State {
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
