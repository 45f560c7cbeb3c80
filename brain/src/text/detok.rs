//! Incremental decoding: bytes of tokens in, whole characters out.
//!
//! A character may be spread over several byte tokens, so an incomplete tail is held back until
//! the next token completes it. Bytes that cannot become UTF-8 turn into U+FFFD, exactly as in
//! `String::from_utf8_lossy` of the whole. Every byte is looked at a bounded number of times.

/// The incomplete character at the end of what was decoded so far.
#[derive(Clone, Debug, Default)]
pub struct Detok {
    /// At most three bytes: the longest incomplete UTF-8 sequence.
    tail: Vec<u8>,
}

impl Detok {
    /// Adds bytes and appends the characters that they complete to `out`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let joined;
        let mut rest = if self.tail.is_empty() {
            bytes
        } else {
            let mut all = std::mem::take(&mut self.tail);
            all.extend_from_slice(bytes);
            joined = all;
            &joined[..]
        };
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    return;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    match error.error_len() {
                        Some(length) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[length..];
                        }
                        None => {
                            self.tail = after.to_vec();
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Ends the text here: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.tail.is_empty() {
            self.tail.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends the bytes that an ordinary token of the vocabulary stands for: `<0x0A>` is a byte,
/// "▁" a space.
pub fn token_bytes(token: &str, out: &mut Vec<u8>) {
    let byte = token
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .filter(|hex| hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        .and_then(|hex| u8::from_str_radix(hex, 16).ok());
    match byte {
        Some(byte) => out.push(byte),
        None => out.extend_from_slice(token.replace('▁', " ").as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(chunks: &[Vec<u8>]) -> String {
        let mut detok = Detok::default();
        let mut out = String::new();
        for chunk in chunks {
            detok.push(chunk, &mut out);
        }
        detok.finish(&mut out);
        out
    }

    #[test]
    fn a_character_over_four_byte_tokens_appears_once_whole() {
        let mut detok = Detok::default();
        let mut out = String::new();
        for byte in "😊".as_bytes() {
            assert_eq!(out, "");
            detok.push(&[*byte], &mut out);
        }
        assert_eq!(out, "😊");
    }

    #[test]
    fn tokens_stand_for_bytes() {
        let bytes = |token: &str| {
            let mut out = Vec::new();
            token_bytes(token, &mut out);
            out
        };
        assert_eq!(bytes("<0xE2>"), [0xE2]);
        assert_eq!(bytes("▁Café"), " Café".as_bytes());
        assert_eq!(bytes("<0xZZ>"), b"<0xZZ>");
        assert_eq!(bytes("<0x+1>"), b"<0x+1>".to_vec().as_slice());
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_lossy_text(bytes in proptest::collection::vec(any::<u8>(), 0..60), cuts in proptest::collection::vec(1usize..5, 0..60)) {
            let mut chunks = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                chunks.push(head.to_vec());
                rest = tail;
            }
            chunks.push(rest.to_vec());
            prop_assert_eq!(decode(&chunks), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn text_survives_any_cut(text in "\\PC{0,40}", cut in 1usize..4) {
            let chunks: Vec<Vec<u8>> = text.as_bytes().chunks(cut).map(<[u8]>::to_vec).collect();
            prop_assert_eq!(decode(&chunks), text);
        }
    }
}
