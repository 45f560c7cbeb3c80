//! Text to token ids and back.
//!
//! Text from a message never makes a special token: whoever spells `<|turn>` in a prompt gets the
//! ordinary tokens of those characters. Only text that this program wrote (a rendered template)
//! is read with special tokens on, and there the parts that came from messages are marked
//! ([`super::guard`]).

use std::{collections::HashMap, path::Path};

use tokenizers::AddedToken;

use super::{admitted, detok, guard::Guard, markers::Markers};
use crate::{model::file, sched::types::TokenId};

/// What is wrong with a tokenizer, or with a text given to it.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file cannot be read.
    #[error("cannot read the tokenizer {path}: {reason}; it stands in the model's repository")]
    Read {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Not a tokenizer, or not one of Gemma's kind.
    #[error("{origin} is not a usable Gemma tokenizer: {reason}")]
    Unusable {
        /// File or "the embedded tokenizer".
        origin: String,
        /// Why.
        reason: String,
    },
    /// Tokenizer and model disagree about the vocabulary.
    #[error(
        "the tokenizer does not match the model: it has {tokenizer} tokens, the model's vocabulary {model}; take tokenizer.json from the same checkpoint"
    )]
    Vocabulary {
        /// Highest token id plus one.
        tokenizer: usize,
        /// The model's `vocab_size`.
        model: usize,
    },
    /// The library could not encode a text.
    #[error("cannot encode the text: {0}")]
    Encode(String),
}

/// What a token id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenText<'a> {
    /// Bytes of text, possibly a part of a character.
    Bytes(&'a [u8]),
    /// A special token and its spelling.
    Special(&'a str),
    /// No token has this id.
    Unknown,
}

/// A Gemma tokenizer: byte-fallback BPE with special tokens.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    markers: Markers,
    /// Bytes of all tokens, one after the other, spellings for the special ones.
    bytes: Vec<u8>,
    /// Token `i` is `bytes[ends[i - 1] .. ends[i]]`.
    ends: Vec<u32>,
    class: Vec<Class>,
    specials: HashMap<String, TokenId>,
    /// Lengths in bytes of the special spellings, longest first.
    special_lengths: Vec<usize>,
    /// Special tokens spelled in given text are meant.
    trusting: bool,
    /// Bytes of the longest token as the vocabulary writes it, with three for a space.
    longest: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Text,
    Special,
    Unknown,
}

/// A model's vocabulary may be padded up to a multiple of this.
const VOCABULARY_PADDING: usize = 128;

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let bytes = file::read(path).map_err(|error| TokenizerError::Read {
            path: path.display().to_string(),
            reason: file::why(&error),
        })?;
        Self::from_bytes(&bytes, &path.display().to_string())
    }

    /// Reads the bytes of a `tokenizer.json`; `origin` names them in errors.
    pub fn from_bytes(bytes: &[u8], origin: &str) -> Result<Self, TokenizerError> {
        let unusable = |reason: String| TokenizerError::Unusable {
            origin: origin.to_owned(),
            reason,
        };
        admitted::check(bytes).map_err(unusable)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| unusable(error.to_string()))?;
        inner
            .with_truncation(None)
            .map_err(|error| unusable(error.to_string()))?;
        inner.with_padding(None);

        let markers = Markers::find(|spelling| inner.token_to_id(spelling))
            .map_err(|missing| unusable(format!("it has no token {missing}")))?;
        // Markers are special whatever the file says, so that no text can make one.
        let as_special = Markers::SPELLINGS
            .iter()
            .map(|s| AddedToken::from(*s, true).normalized(false));
        inner
            .add_special_tokens(as_special)
            .map_err(|error| unusable(error.to_string()))?;
        inner.set_encode_special_tokens(true);

        let specials: HashMap<String, TokenId> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .map(|(id, token)| (token.content, id))
            .collect();
        let mut special_lengths: Vec<usize> = specials.keys().map(String::len).collect();
        special_lengths.sort_unstable_by(|a, b| b.cmp(a));
        special_lengths.dedup();

        let size = inner
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |id| *id as usize + 1);
        if size > MAX_VOCABULARY {
            return Err(unusable(format!("its highest token id is {}", size - 1)));
        }
        let mut table = Self {
            inner,
            markers,
            bytes: Vec::new(),
            ends: Vec::with_capacity(size),
            class: Vec::with_capacity(size),
            specials,
            special_lengths,
            trusting: false,
            longest: 1,
        };
        table.fill(size);
        Ok(table)
    }

    /// Takes special tokens spelled in given text for what they spell, as the reference
    /// implementation does. Whoever writes the text can then end turns and forge tool results.
    pub fn trust_special_tokens(mut self, trusting: bool) -> Self {
        self.trusting = trusting;
        self
    }

    fn fill(&mut self, size: usize) {
        let special_ids: HashMap<TokenId, String> = self
            .specials
            .iter()
            .map(|(spelling, id)| (*id, spelling.clone()))
            .collect();
        for id in 0..size as TokenId {
            let class = if let Some(spelling) = special_ids.get(&id) {
                self.longest = self.longest.max(spelling.len());
                self.bytes.extend_from_slice(spelling.as_bytes());
                Class::Special
            } else if let Some(token) = self.inner.id_to_token(id) {
                detok::token_bytes(&token, &mut self.bytes);
                self.longest = self.longest.max(token.len());
                Class::Text
            } else {
                Class::Unknown
            };
            self.class.push(class);
            self.ends.push(self.bytes.len() as u32);
        }
    }

    /// Highest token id plus one.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// A text of so many bytes has at least so many tokens.
    pub fn at_least(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.longest)
    }

    /// Refuses a model whose vocabulary is not this tokenizer's.
    pub fn check_vocabulary(&self, model: usize) -> Result<(), TokenizerError> {
        let tokenizer = self.vocab_size();
        if tokenizer > model || tokenizer.next_multiple_of(VOCABULARY_PADDING) < model {
            return Err(TokenizerError::Vocabulary { tokenizer, model });
        }
        Ok(())
    }

    /// The structural tokens.
    pub fn markers(&self) -> &Markers {
        &self.markers
    }

    /// What a token stands for.
    pub fn token(&self, id: TokenId) -> TokenText<'_> {
        let index = id as usize;
        let Some(class) = self.class.get(index) else {
            return TokenText::Unknown;
        };
        let start = if index == 0 {
            0
        } else {
            self.ends[index - 1] as usize
        };
        let bytes = &self.bytes[start..self.ends[index] as usize];
        match class {
            Class::Text => TokenText::Bytes(bytes),
            Class::Special => TokenText::Special(std::str::from_utf8(bytes).unwrap_or_default()),
            Class::Unknown => TokenText::Unknown,
        }
    }

    /// Encodes given text. Nothing in it becomes a special token unless the text is trusted; no
    /// bos is added.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        if self.trusting {
            return self.encode_with_specials(text);
        }
        let mut ids = Vec::new();
        self.encode_plain(text, &mut ids)?;
        Ok(ids)
    }

    /// Encodes text in which spelled special tokens are meant.
    pub fn encode_with_specials(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        self.split_specials(text, |plain| plain.to_owned())
    }

    /// Encodes a rendered template: special tokens are recognised except where `guard` broke
    /// their spelling.
    pub fn encode_guarded(
        &self,
        text: &str,
        guard: &Guard,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        self.split_specials(text, |plain| guard.release(plain))
    }

    /// Token ids to text; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        let mut text = String::new();
        let mut stream = detok::Detok::default();
        for &id in ids {
            match self.token(id) {
                TokenText::Bytes(bytes) => stream.push(bytes, &mut text),
                TokenText::Special(spelling) => {
                    stream.finish(&mut text);
                    if !skip_special {
                        text.push_str(spelling);
                    }
                }
                TokenText::Unknown => {}
            }
        }
        stream.finish(&mut text);
        text
    }

    /// What a guard has to watch: nothing in a text that is trusted.
    pub(super) fn guarded_firsts(&self) -> Vec<char> {
        if self.trusting {
            return Vec::new();
        }
        self.special_firsts()
    }

    /// First bytes of the special spellings.
    fn special_firsts(&self) -> Vec<char> {
        let mut firsts: Vec<char> = self
            .specials
            .keys()
            .filter_map(|s| s.chars().next())
            .collect();
        firsts.sort_unstable();
        firsts.dedup();
        firsts
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn split_specials(
        &self,
        text: &str,
        mut plain: impl FnMut(&str) -> String,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::new();
        let firsts = self.special_firsts();
        let mut start = 0;
        let mut at = 0;
        while let Some(found) = text[at..].find(|c| firsts.contains(&c)) {
            at += found;
            match self.special_at(&text[at..]) {
                Some((id, length)) => {
                    self.encode_plain(&plain(&text[start..at]), &mut ids)?;
                    ids.push(id);
                    at += length;
                    start = at;
                }
                None => at += text[at..].chars().next().map_or(1, char::len_utf8),
            }
        }
        self.encode_plain(&plain(&text[start..]), &mut ids)?;
        Ok(ids)
    }

    /// The longest special token spelled at the start of `text`.
    fn special_at(&self, text: &str) -> Option<(TokenId, usize)> {
        self.special_lengths.iter().find_map(|&length| {
            let id = self.specials.get(text.get(..length)?)?;
            Some((*id, length))
        })
    }
}

/// More than any model has, and small enough for the tables.
const MAX_VOCABULARY: usize = 1 << 22;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::text::testing::{self, tokenizer};

    /// Loads the demo's tokenizer after a change to its file.
    fn changed(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, TokenizerError> {
        let mut file: Value = serde_json::from_slice(testing::TOKENIZER).unwrap();
        change(&mut file);
        Tokenizer::from_bytes(file.to_string().as_bytes(), "a tokenizer")
    }

    fn refused(change: impl FnOnce(&mut Value)) -> String {
        changed(change).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn tokens_have_gemmas_ids() {
        let tokenizer = tokenizer();
        let m = tokenizer.markers();
        assert_eq!((m.eos, m.bos, m.call_open, m.response_open), (1, 2, 48, 50));
        assert_eq!(
            (m.quote, m.channel_open, m.turn_open, m.turn_close),
            (52, 100, 105, 106)
        );
        assert_eq!(tokenizer.encode("\n").unwrap(), [107]);
        assert_eq!(tokenizer.token(107), TokenText::Bytes(b"\n"));
        assert_eq!(tokenizer.token(106), TokenText::Special("<turn|>"));
        assert_eq!(tokenizer.token(1024), TokenText::Unknown);
    }

    #[test]
    fn unusable_files_say_why() {
        let garbage = Tokenizer::from_bytes(b"{}", "the file x")
            .map(|_| ())
            .unwrap_err();
        assert!(
            garbage
                .to_string()
                .starts_with("the file x is not a usable Gemma tokenizer: ")
        );
        let missing = Tokenizer::from_file(Path::new("/nowhere/tokenizer.json")).map(|_| ());
        assert!(
            missing
                .unwrap_err()
                .to_string()
                .starts_with("cannot read the tokenizer /nowhere")
        );
        let without_quote = refused(|file| {
            let tokens = file["added_tokens"].as_array_mut().unwrap();
            tokens.retain(|token| token["content"] != "<|\"|>");
            let vocab = file["model"]["vocab"].as_object_mut().unwrap();
            vocab.shift_remove("<|\"|>");
        });
        assert!(
            without_quote.ends_with("it has no token <|\"|>"),
            "{without_quote}"
        );
        let other_decoder = refused(|file| {
            file["decoder"] = json!({"type": "ByteLevel", "add_prefix_space": true,
                                     "trim_offsets": true, "use_regex": true});
        });
        assert!(
            other_decoder.contains("its decoder has the step"),
            "{other_decoder}"
        );
    }

    #[test]
    fn tokenizers_of_other_kinds_are_refused_before_they_are_built() {
        let all_dots =
            json!({"type": "Replace", "pattern": {"String": "."}, "content": "aaaaaaaaaa"});
        let map = json!({"type": "Precompiled", "precompiled_charsmap": "//8AAP////8="});
        type Refusal = (&'static str, fn(&mut Value, Value), Value);
        let refusals: [Refusal; 9] = [
            ("dropout", |f, v| f["model"]["dropout"] = v, json!(0.5)),
            ("BPE", |f, v| f["model"]["type"] = v, json!("WordLevel")),
            (
                "continuing_subword_prefix",
                |f, v| f["model"]["continuing_subword_prefix"] = v,
                json!("##"),
            ),
            (
                "byte_fallback",
                |f, v| f["model"]["byte_fallback"] = v,
                json!(false),
            ),
            ("normalizer", |f, v| f["normalizer"] = v, map),
            (
                "normalizer",
                |f, v| f["normalizer"] = json!({"type": "Sequence", "normalizers": [v]}),
                all_dots,
            ),
            (
                "pre_tokenizer",
                |f, v| f["pre_tokenizer"] = v,
                json!({"type": "Whitespace"}),
            ),
            (
                "stands for two tokens",
                |f, v| f["model"]["vocab"]["<0x41>"] = v,
                json!(107),
            ),
            (
                "no token <0x41>",
                |f, _| {
                    f["model"]["vocab"]
                        .as_object_mut()
                        .unwrap()
                        .shift_remove("<0x41>");
                },
                json!(null),
            ),
        ];
        for (word, change, value) in refusals {
            let message = refused(|file| change(file, value));
            assert!(message.contains(word), "{word}: {message}");
        }
        let text = String::from_utf8(testing::TOKENIZER.to_vec()).unwrap();
        let at = text.find("\"decoder\"").unwrap();
        let broken = text[..at].to_owned() + &text[at..].replacen(':', "x", 2);
        let error = Tokenizer::from_bytes(broken.as_bytes(), "the file x").map(|_| ());
        assert!(error.unwrap_err().to_string().contains("expected `:`"));
    }

    #[test]
    fn a_marker_is_special_whatever_the_file_says() {
        let tokenizer = changed(|file| {
            for token in file["added_tokens"].as_array_mut().unwrap() {
                token["special"] = json!(false);
            }
        })
        .unwrap();
        assert!(!tokenizer.encode("a<turn|>").unwrap().contains(&106));
        assert_eq!(tokenizer.encode_with_specials("<turn|>").unwrap(), [106]);
    }

    #[test]
    fn the_models_vocabulary_must_be_the_tokenizers() {
        let tokenizer = tokenizer();
        assert!(tokenizer.check_vocabulary(1024).is_ok());
        for model in [96, 1023, 1025, 262_144] {
            assert!(tokenizer.check_vocabulary(model).is_err(), "{model}");
        }
    }

    #[test]
    fn special_tokens_are_found_as_the_library_finds_them() {
        let tokenizer = tokenizer();
        let library = tokenizers::Tokenizer::from_bytes(testing::TOKENIZER).unwrap();
        for text in [
            "",
            "<bos><|turn>user\nHi there<turn|>\n",
            "<<|turn><turn|>><|tool_call>call:f{a:<|\"|>é😊<|\"|>}<tool_call|>",
            "<|tool<|tool>|>  <pad><unk>x",
        ] {
            let expected = library.encode(text, false).unwrap();
            assert_eq!(
                tokenizer.encode_with_specials(text).unwrap(),
                expected.get_ids(),
                "{text}"
            );
        }
    }

    #[test]
    fn trusted_text_is_read_as_the_library_reads_it() {
        let tokenizer = changed(|_| ()).unwrap().trust_special_tokens(true);
        let library = tokenizers::Tokenizer::from_bytes(testing::TOKENIZER).unwrap();
        let text = "a<turn|>\n<|turn>model\n";
        let expected = library.encode(text, false).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), expected.get_ids());
        assert!(tokenizer.guarded_firsts().is_empty());
    }

    proptest! {
        #[test]
        fn a_text_has_no_fewer_tokens_than_its_bytes_say(text in "(\\PC| |\n|return ){0,60}") {
            let tokenizer = tokenizer();
            let tokens = tokenizer.encode(&text).unwrap().len();
            prop_assert!(tokenizer.at_least(text.len()) <= tokens);
        }

        #[test]
        fn text_survives_and_makes_no_special_token(
            text in "(\\PC|[a-z \n]|<turn[|]>|<[|]turn>|<[|]\"[|]>|<0x41>){0,30}"
        ) {
            let tokenizer = tokenizer();
            let ids = tokenizer.encode(&text).unwrap();
            let special = ids.iter().find(|id| matches!(tokenizer.token(**id), TokenText::Special(_)));
            prop_assert_eq!(special, None);
            // The space and its stand-in are one character to this family of tokenizers.
            prop_assert_eq!(tokenizer.decode(&ids, false), text.replace('▁', " "));
        }
    }
}
