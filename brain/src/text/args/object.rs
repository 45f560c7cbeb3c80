//! The JSON object that a call's arguments become: open containers, keys, and what is held back.

use std::{collections::HashSet, sync::Arc};

use crate::text::{
    schema::Schema,
    typing::{self, bare, escape, string},
};

/// Deeper containers are read as text.
const MAX_DEPTH: usize = 32;

/// An object that is being written.
#[derive(Debug)]
pub(super) struct Object {
    frames: Vec<Frame>,
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

impl Object {
    /// Ended by `closer`, its members declared by a schema if there is one.
    pub(super) fn new(closer: char, schema: Option<Arc<Schema>>) -> Self {
        Self {
            frames: vec![Frame::new(closer, schema)],
            pending: None,
            junk: false,
            written: false,
        }
    }

    /// Whether anything was written: a pair was found.
    pub(super) fn started(&self) -> bool {
        self.written
    }

    /// Whether there was input but no pair in it.
    pub(super) fn is_junk(&self) -> bool {
        self.junk && !self.written
    }

    /// There was input that means nothing.
    pub(super) fn met_junk(&mut self) {
        self.junk = true;
    }

    /// Whether a bare value may still go on.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Holds a bare value back: see [`Pending`].
    pub(super) fn hold(&mut self, value: String, tail: &str, beyond: &str) {
        self.pending = Some(Pending::new(value, tail, beyond));
    }

    /// Whether only the outermost container is open.
    pub(super) fn is_outermost(&self) -> bool {
        self.frames.len() == 1
    }

    /// Whether nothing was in it yet.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.len() == 1 && self.frames[0].members == 0
    }

    /// A second brace stands around the whole.
    pub(super) fn wrap(&mut self) {
        if let [only] = self.frames.as_mut_slice() {
            only.closer = '}';
        }
    }

    /// Whether there are not too many containers around the next one.
    pub(super) fn may_open(&self) -> bool {
        self.frames.len() < MAX_DEPTH
    }

    /// Opens a container as a member.
    pub(super) fn open(&mut self, opener: char, out: &mut String) {
        self.begin_item(out);
        let schema = self.member_schema();
        let (start, closer) = if opener == '[' {
            ("[", ']')
        } else {
            ("{", '}')
        };
        self.write(start, out);
        self.frames.push(Frame::new(closer, schema));
    }

    /// The call ends: closes what is open.
    pub(super) fn finish(&mut self, out: &mut String) {
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

    /// Closes a text that is open.
    pub(super) fn close_text(&mut self, out: &mut String) {
        self.write("\"", out);
    }

    /// Closes containers up to the one that `c` ends. True if that was the last.
    pub(super) fn close(&mut self, c: char, out: &mut String) -> bool {
        loop {
            if self.frames.len() == 1 {
                self.beyond(c);
                return true;
            }
            self.settle_pending(out);
            let Some(frame) = self.frames.pop() else {
                return true;
            };
            self.write(if frame.closer == ']' { "]" } else { "}" }, out);
            if frame.closer == c {
                return false;
            }
        }
    }

    /// A key is complete: what was pending is a value of its own.
    pub(super) fn begin_pair(&mut self, key: &str, out: &mut String) {
        if let Some(Pending { tail, comma, .. }) = &mut self.pending {
            tail.truncate(*comma);
        }
        self.settle_pending(out);
        let key = key.trim();
        let outer_muted = self.outer_muted();
        let Some(frame) = self.frames.last_mut() else {
            return;
        };
        frame.member = frame.schema.as_ref().and_then(|s| s.property(key)).cloned();
        frame.muted = !frame.keys.insert(key.to_owned());
        if !frame.muted && !outer_muted {
            let first = frame.members == 0;
            frame.members += 1;
            if !self.written {
                self.written = true;
                out.push('{');
            }
            out.push_str(if first { "" } else { "," });
            out.push_str(&string(key));
            out.push(':');
        }
    }

    /// A quote token showed that the pending value is text that goes on up to here.
    pub(super) fn join_pending(&mut self, out: &mut String) {
        if let Some(Pending {
            value,
            tail,
            beyond,
            ..
        }) = self.pending.take()
        {
            self.write_value(&format!("{value}{tail}{beyond}"), true, out);
        }
    }

    /// What follows the pending value is not a part of it, unless it holds words of its own.
    pub(super) fn settle_pending(&mut self, out: &mut String) {
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

    /// A quote token opens a value. True if that is text, to be written as it comes.
    pub(super) fn open_text(&mut self, out: &mut String) -> bool {
        if !typing::is_text(self.member_schema().as_deref()) {
            return false;
        }
        self.begin_item(out);
        self.write("\"", out);
        true
    }

    /// A separator before an item of an array.
    pub(super) fn begin_item(&mut self, out: &mut String) {
        if self.in_object() {
            return;
        }
        let first = self.frames.last().is_none_or(|frame| frame.members == 0);
        if let Some(frame) = self.frames.last_mut() {
            frame.members += 1;
        }
        self.write(if first { "" } else { "," }, out);
    }

    /// Writes what stood between JSON's or Python's quotes.
    pub(super) fn write_delimited(&mut self, quote: char, raw: &str, out: &mut String) {
        let json = format!("{quote}{raw}{quote}");
        let text = match serde_json::from_str::<String>(&json) {
            Ok(text) => text,
            Err(_) => raw.replace(&format!("\\{quote}"), &quote.to_string()),
        };
        self.write_value(&text, true, out);
    }

    /// Writes a whole value; `delimited`: it is text unless something else is declared.
    pub(super) fn write_value(&mut self, raw: &str, delimited: bool, out: &mut String) {
        self.begin_item(out);
        let schema = self.member_schema();
        let json = if delimited && typing::is_text(schema.as_deref()) {
            string(raw)
        } else {
            bare(raw, schema.as_deref())
        };
        self.write(&json, out);
    }

    /// Writes a piece of a text that is open.
    pub(super) fn write_escaped(&mut self, text: &str, out: &mut String) {
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

    /// Whether members have keys.
    pub(super) fn in_object(&self) -> bool {
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
    pub(super) fn closes(&self, c: char) -> bool {
        match self.frames.last() {
            Some(frame) if frame.closer == c => true,
            // A missing bracket: the brace of the object around the array.
            Some(frame) => frame.closer == ']' && c == '}',
            None => false,
        }
    }

    /// Whether a text before a colon is a key, given that a bare value may go on instead.
    pub(super) fn is_key(&self, text: &str) -> bool {
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

    /// What stands behind a pending value.
    pub(super) fn tail(&mut self, c: char) {
        if let Some(pending) = &mut self.pending {
            if c == ',' {
                pending.comma = pending.tail.len();
            }
            pending.tail.push(c);
        }
    }

    /// What stands behind the last brace.
    pub(super) fn beyond(&mut self, c: char) {
        if let Some(pending) = &mut self.pending {
            pending.beyond.push(c);
        }
    }

    /// A text that belongs to no pair.
    pub(super) fn orphan(&mut self, text: &str) {
        self.junk |= !text.trim().is_empty();
    }

    /// Takes the closers of all open containers off the end of a text that was never closed.
    pub(super) fn strip_closers(&self, text: &mut String) {
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
