//! An input as the pieces of a model turn: some control characters stand for special tokens, some
//! begin a new piece, and what is between them is text.

use brain::text::markers::Markers;

/// One piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text of ordinary tokens.
    Text(String),
    /// A special token, by its number among [`Markers::SPELLINGS`].
    Special(usize),
}

/// The byte of each special token. Tab, newline and carriage return stay text.
const CODES: [u8; 14] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 14, 15, 0x1f];

/// Splits an input.
pub fn read(input: &[u8]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut text = Vec::new();
    let flush = |text: &mut Vec<u8>, pieces: &mut Vec<Piece>| {
        if !text.is_empty() {
            pieces.push(Piece::Text(String::from_utf8_lossy(text).into_owned()));
            text.clear();
        }
    };
    for &byte in input {
        if let Some(number) = CODES.iter().position(|code| *code == byte) {
            flush(&mut text, &mut pieces);
            pieces.push(Piece::Special(number));
        } else if (0x10..0x1f).contains(&byte) {
            flush(&mut text, &mut pieces);
        } else {
            text.push(byte);
        }
    }
    flush(&mut text, &mut pieces);
    pieces
}

/// An input of a text in which special tokens are spelled.
pub fn write(text: &str) -> Vec<u8> {
    assert_eq!(CODES.len(), Markers::SPELLINGS.len(), "one byte each");
    let mut out = text.to_owned();
    for (spelling, code) in Markers::SPELLINGS.iter().zip(CODES) {
        out = out.replace(spelling, &char::from(code).to_string());
    }
    out.into_bytes()
}
