//! The logs of generations: one file each, appended to as tokens come.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::record;
use crate::sched::{
    fair::Priority,
    sequence::Outcome,
    types::{DraftDepth, Emitted, SamplingParams, TokenId},
};

/// What was asked for, in full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Begin {
    /// The caller.
    pub owner: String,
    /// The id that the caller chose.
    pub id: String,
    /// The run it belongs to.
    pub run_id: String,
    /// Of that run.
    pub priority: Priority,
    /// Further separation of cached prefixes.
    pub cache_salt: String,
    /// Input tokens.
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// Drafts as asked for.
    pub draft: DraftDepth,
    /// Texts that end it.
    pub stop_strings: Vec<String>,
    /// The form its answer must have; empty: any.
    pub grammar: String,
    /// The front end's own.
    pub note: Vec<u8>,
}

/// A record of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// The first.
    Begin(Box<Begin>),
    /// More tokens.
    Tokens(Vec<Emitted>),
    /// The last.
    End(Outcome),
}

/// A generation as its log tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// What was asked for.
    pub begin: Begin,
    /// Its tokens as far as they were written.
    pub tokens: Vec<Emitted>,
    /// How it ended, if it had.
    pub outcome: Option<Outcome>,
}

/// A log that is being written.
#[derive(Debug)]
pub struct LogWriter {
    file: File,
    path: PathBuf,
}

impl LogWriter {
    /// Begins a log with the tokens there are, in place of any of the same id: until it is
    /// written, that one stands.
    ///
    /// # Errors
    /// The system's.
    pub fn create(folder: &Path, begin: Begin, tokens: Vec<Emitted>) -> io::Result<Self> {
        let path = folder.join(file_name(&begin.owner, &begin.id));
        let partial = path.with_extension("part");
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&partial)?;
        let mut log = Self { file, path };
        log.append(&Record::Begin(Box::new(begin)))?;
        if !tokens.is_empty() {
            log.append(&Record::Tokens(tokens))?;
        }
        fs::rename(&partial, &log.path)?;
        Ok(log)
    }

    /// Appends a record: it survives the process, though not a power cut.
    ///
    /// # Errors
    /// The system's. The log ends before this record then.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        record::append(&mut self.file, record)
    }

    /// Makes it durable: it survives a power cut too.
    ///
    /// # Errors
    /// The system's.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// The generation is forgotten: so is its log.
    pub fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(file = %self.path.display(), %error, "a log cannot be removed");
        }
    }
}

/// Reads every log of a folder. Those without a whole beginning are removed: they promise nothing.
pub fn read_all(folder: &Path) -> Vec<Saved> {
    let mut all = Vec::new();
    for path in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = path.path();
        match fs::read(&path).ok().and_then(|bytes| read(&bytes)) {
            Some(saved) => all.push(saved),
            None => {
                tracing::warn!(file = %path.display(), "a log of no use is removed");
                let _ = fs::remove_file(&path);
            }
        }
    }
    all
}

/// Reads a log; `None` when it has no whole beginning.
pub fn read(bytes: &[u8]) -> Option<Saved> {
    let mut rest = bytes;
    let Some(Record::Begin(begin)) = record::next(&mut rest) else {
        return None;
    };
    let mut saved = Saved {
        begin: *begin,
        tokens: Vec::new(),
        outcome: None,
    };
    while let Some(record) = record::next(&mut rest) {
        match record {
            Record::Begin(_) => break,
            Record::Tokens(tokens) => saved.tokens.extend(tokens),
            Record::End(outcome) => {
                saved.outcome = Some(outcome);
                break;
            }
        }
    }
    Some(saved)
}

fn file_name(owner: &str, id: &str) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("marathon brain generation log 1");
    hasher.update(&(owner.len() as u64).to_le_bytes());
    hasher.update(owner.as_bytes());
    hasher.update(id.as_bytes());
    format!("{}.log", &hasher.finalize().to_hex()[..32])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::types::Logprobs;

    fn begin() -> Begin {
        Begin {
            owner: "key".into(),
            id: "g".into(),
            run_id: "run".into(),
            priority: Priority::default(),
            cache_salt: String::new(),
            prompt: vec![1, 2, 3],
            params: SamplingParams::greedy(9),
            draft: DraftDepth::Auto,
            stop_strings: vec!["end".into()],
            grammar: "a grammar".into(),
            note: vec![7],
        }
    }

    fn token(id: TokenId) -> Emitted {
        let logprobs = Some(Logprobs {
            chosen: -0.1 * id as f32,
            top: vec![(id, -1.5)],
        });
        Emitted { id, logprobs }
    }

    #[test]
    fn a_log_cut_or_damaged_anywhere_keeps_the_records_before() {
        let folder = tempfile::tempdir().unwrap();
        let first = vec![token(0), token(10)];
        let mut log = LogWriter::create(folder.path(), begin(), first).unwrap();
        for id in 1..5 {
            log.append(&Record::Tokens(vec![token(id), token(id + 10)]))
                .unwrap();
        }
        log.sync().unwrap();
        let bytes = fs::read(&log.path).unwrap();
        let whole = read(&bytes).unwrap();
        assert_eq!((whole.begin.clone(), whole.tokens.len()), (begin(), 10));
        assert_eq!(read_all(folder.path()), std::slice::from_ref(&whole));
        let mut lengths = Vec::new();
        for cut in 0..=bytes.len() {
            if let Some(saved) = read(&bytes[..cut]) {
                assert_eq!(saved.tokens[..], whole.tokens[..saved.tokens.len()]);
                lengths.push(saved.tokens.len());
            }
            let mut flipped = bytes.clone();
            if let Some(byte) = flipped.get_mut(cut) {
                *byte ^= 1;
                let saved = read(&flipped).map_or(0, |saved| saved.tokens.len());
                assert!(saved < 10, "byte {cut}");
            }
        }
        lengths.dedup();
        assert_eq!(lengths, [0, 2, 4, 6, 8, 10]);
        log.remove();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
