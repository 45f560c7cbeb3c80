//! Stop strings: where a text ends, and what of it may be shown before that is known.
//!
//! A text that could become a stop string is held back until it cannot. Stop strings are matched
//! within the text between special tokens. The first one to be complete ends the text; of several
//! that are complete at the same character, the one that began first.

use std::sync::Arc;

/// Finds stop strings in a text that arrives in pieces. Linear in the text.
#[derive(Clone, Debug)]
pub struct StopFinder {
    patterns: Arc<[Pattern]>,
    /// How many bytes of each pattern the end of the text matches.
    matched: Vec<usize>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// The pattern that ended the text.
    found: Option<usize>,
}

#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `fallback[n]`: the longest proper border of the first `n` bytes.
    fallback: Vec<usize>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut length = 0;
        for index in 1..bytes.len() {
            while length > 0 && bytes[index] != bytes[length] {
                length = fallback[length];
            }
            if bytes[index] == bytes[length] {
                length += 1;
            }
            fallback[index + 1] = length;
        }
        Self { bytes, fallback }
    }

    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.fallback[matched];
        }
        if self.bytes[matched] == byte {
            matched + 1
        } else {
            0
        }
    }
}

impl StopFinder {
    /// A finder for these strings; empty ones never match.
    pub fn new(strings: &[String]) -> Self {
        let patterns: Arc<[Pattern]> = strings
            .iter()
            .filter(|s| !s.is_empty())
            .map(|s| Pattern::new(s))
            .collect();
        Self {
            matched: vec![0; patterns.len()],
            patterns,
            held: String::new(),
            found: None,
        }
    }

    /// Adds text and appends to `out` what is certainly shown. True once a stop string is
    /// complete; then nothing more is ever shown.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stopped() {
            return true;
        }
        if self.patterns.is_empty() {
            out.push_str(text);
            return false;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            let mut longest = 0;
            let patterns = self.patterns.iter().zip(&mut self.matched);
            for (number, (pattern, matched)) in patterns.enumerate() {
                *matched = pattern.advance(*matched, byte);
                if *matched == pattern.bytes.len() && *matched > longest {
                    longest = *matched;
                    self.found = Some(number);
                }
            }
            if longest > 0 {
                let start = before + index + 1 - longest;
                out.push_str(&self.held[..start]);
                self.held.clear();
                return true;
            }
        }
        let keep = self.matched.iter().copied().max().unwrap_or(0);
        let shown = self.held.len() - keep;
        out.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        false
    }

    /// The text is interrupted here (a special token) or ends: shows what was held back.
    pub fn flush(&mut self, out: &mut String) {
        if !self.stopped() {
            out.push_str(&self.held);
        }
        self.held.clear();
        self.matched.fill(0);
    }

    /// A stop string was complete.
    pub fn stopped(&self) -> bool {
        self.found.is_some()
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        std::str::from_utf8(&self.patterns[self.found?].bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Shown text and whether it stopped, with the text cut into pieces of `cut` characters.
    fn run(stops: &[&str], text: &str, cut: usize) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut finder = StopFinder::new(&stops);
        let mut out = String::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(cut) {
            finder.push(&piece.iter().collect::<String>(), &mut out);
        }
        finder.flush(&mut out);
        (out, finder.stopped())
    }

    #[test]
    fn the_first_complete_stop_ends_the_text() {
        assert_eq!(run(&["END"], "abENENDx", 1), ("abEN".into(), true));
        assert_eq!(run(&["aab"], "aaab", 1), ("a".into(), true));
        assert_eq!(run(&["abab", "b"], "aab", 2), ("aa".into(), true));
        assert_eq!(run(&["bc", "abc"], "xabc", 1), ("x".into(), true));
        assert_eq!(run(&["é!"], "caf\u{e9}\u{e9}!", 1), ("café".into(), true));
        assert_eq!(run(&["END", ""], "EN", 1), ("EN".into(), false));
    }

    #[test]
    fn the_stop_string_that_ended_the_text_is_told() {
        let stops = ["x".to_owned(), "END".to_owned(), "AND END".to_owned()];
        let mut finder = StopFinder::new(&stops);
        finder.push("this AND EN", &mut String::new());
        assert_eq!(finder.stop_string(), None);
        finder.push("D x", &mut String::new());
        assert_eq!(finder.stop_string(), Some("AND END"));
    }

    #[test]
    fn only_what_could_become_a_stop_is_held_back() {
        let mut finder = StopFinder::new(&["\n\nUser:".to_owned()]);
        let mut out = String::new();
        finder.push("Hello\n", &mut out);
        assert_eq!(out, "Hello");
        finder.push("there", &mut out);
        assert_eq!(out, "Hello\nthere");
    }

    fn naive(stops: &[String], text: &str) -> (String, bool) {
        for end in 0..=text.len() {
            let hit = stops
                .iter()
                .filter(|s| {
                    !s.is_empty() && text.is_char_boundary(end) && text[..end].ends_with(s.as_str())
                })
                .map(String::len)
                .max();
            if let Some(length) = hit {
                return (text[..end - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn any_cut_agrees_with_a_search_of_the_whole(
            stops in proptest::collection::vec("[abé]{0,4}", 0..4),
            text in "[abé]{0,30}",
            cut in 1usize..6,
        ) {
            let expected = naive(&stops, &text);
            let borrowed: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&borrowed, &text, cut), expected);
        }
    }
}
