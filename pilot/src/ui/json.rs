//! One JSON object a line, for scripts.

use std::io::{self, Write};

use super::{Happening, View};

/// Writes JSON lines.
pub struct Json<W> {
    out: W,
}

impl<W: Write> Json<W> {
    /// Into `out`.
    pub fn new(out: W) -> Self {
        Self { out }
    }
}

impl<W: Write + Send> View for Json<W> {
    fn show(&mut self, happening: &Happening) -> io::Result<()> {
        let mut line = serde_json::to_string(happening).map_err(io::Error::other)?;
        line.push('\n');
        // One write a line: readers of a pipe never see half of one for long.
        self.out.write_all(line.as_bytes())?;
        self.out.flush()
    }
}
