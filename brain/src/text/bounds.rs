//! What a chat template may cost. It is a program of whoever made the checkpoint: a wrong one has to end
//! with a message, and may neither end brain nor keep it.
//!
//! Steps are counted by the interpreter itself. Here are the limits of what a single step may do: how
//! deep the parser goes, what is printed, and what is padded. Nothing bounds strings that a template
//! doubles again and again; only a limit on the process does.

use std::{io, thread};

use minijinja::{
    Environment, Error, ErrorKind,
    value::{Value, ValueKind},
};

/// Bytes of source. Those of released models are 20,000 at most.
const SOURCE: usize = 128 << 10;
/// The parser goes a step deeper for every operator of a chain, and a byte can be one.
const STACK: usize = 1 << 30;
/// Bytes that a rendering writes.
const WRITTEN: usize = 256 << 20;
/// Values that are printed at a time, and how deep they lie in one another.
const PRINTED: usize = 4 << 20;
const DEPTH: usize = 200;
/// Width of padding and indenting.
const WIDTH: usize = 1000;

fn refusal(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Adds a template to an environment.
///
/// # Errors
/// Syntax, or too long a source.
pub(super) fn compile(
    env: &mut Environment<'static>,
    name: &'static str,
    source: String,
) -> Result<(), Error> {
    if source.len() > SOURCE {
        return Err(refusal(format!(
            "it has {} bytes; {SOURCE} are the most that are read",
            source.len()
        )));
    }
    thread::scope(|scope| {
        let compiler = thread::Builder::new()
            .name("template".into())
            .stack_size(STACK)
            .spawn_scoped(scope, || env.add_template_owned(name, source));
        let compiler = compiler.map_err(|error| refusal(format!("no thread for it: {error}")))?;
        compiler
            .join()
            .unwrap_or_else(|_| Err(refusal("the template engine fails on it".into())))
    })
}

/// Refuses values that take too long to print.
pub(super) fn printable(value: &Value) -> Result<(), Error> {
    fn count(value: &Value, depth: usize, left: &mut usize) -> bool {
        if depth == 0 || *left == 0 {
            return false;
        }
        *left -= 1;
        let of_map = value.kind() == ValueKind::Map;
        if !of_map && !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            return true;
        }
        value.try_iter().into_iter().flatten().all(|item| {
            let inner = match of_map {
                true => value.get_item(&item).unwrap_or_default(),
                false => item,
            };
            count(&inner, depth - 1, left)
        })
    }
    match count(value, DEPTH, &mut PRINTED.clone()) {
        true => Ok(()),
        false => Err(refusal(format!(
            "it prints more than {PRINTED} values, or values more than {DEPTH} deep"
        ))),
    }
}

/// Refuses padding beyond any page.
pub(super) fn width(width: usize) -> Result<usize, Error> {
    match width <= WIDTH {
        true => Ok(width),
        false => Err(refusal(format!("a width of {width}; {WIDTH} is the most"))),
    }
}

/// Refuses a format string with a number beyond any width, or with one that is an argument.
pub(super) fn format(format: &str) -> Result<(), Error> {
    let mut open = 0usize;
    for c in format.replace("{{", "").chars() {
        match c {
            '{' => open += 1,
            '}' => open = open.saturating_sub(1),
            _ => continue,
        }
        if open > 1 {
            return Err(refusal("a width that is an argument".into()));
        }
    }
    if format.contains('*') && format.contains('%') {
        return Err(refusal("a width that is an argument".into()));
    }
    let numbers = format.split(|c: char| !c.is_ascii_digit());
    let most = numbers.map(|n| {
        n.parse()
            .unwrap_or(if n.is_empty() { 0 } else { usize::MAX })
    });
    width(most.max().unwrap_or(0)).map(|_| ())
}

/// What a rendering wrote.
#[derive(Default)]
pub(super) struct Page(Vec<u8>);

impl Page {
    /// The text, as templates write nothing else.
    pub(super) fn text(self) -> String {
        String::from_utf8(self.0).unwrap_or_default()
    }
}

impl io::Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > WRITTEN - self.0.len() {
            return Err(io::Error::other(format!(
                "more than {} MiB are written",
                WRITTEN >> 20
            )));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
