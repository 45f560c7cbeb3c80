//! JSON text as Python's `json.dumps(…, ensure_ascii=False)` writes it, for the `tojson` filter.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

/// `value` as JSON text with Python's separators.
pub(super) fn dumps(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut out = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut out, Spaced))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

#[cfg(test)]
mod tests {
    #[test]
    fn separators_and_letters_as_python_writes_them() {
        let value = serde_json::json!({"a": [1, "é<"], "b": {}});
        assert_eq!(
            super::dumps(&value).unwrap(),
            r#"{"a": [1, "é<"], "b": {}}"#
        );
    }
}
