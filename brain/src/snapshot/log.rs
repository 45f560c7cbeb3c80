//! The logs of generations: one file each, appended to as tokens come.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Folder, file::FileError, record, sync_folder};
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
    /// So many brains took it up and have given no token since the last one that is here.
    Attempts(u32),
}

/// A generation as its log tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// What was asked for.
    pub begin: Begin,
    /// Its tokens as far as they were written.
    pub tokens: Vec<Emitted>,
    /// Brains that took it up and gave no token since.
    pub attempts: u32,
    /// How it ended, if it had.
    pub outcome: Option<Outcome>,
    /// Bytes of whole records: where the log goes on.
    pub bytes: u64,
}

/// A log that is being written. One that has ended keeps no file open.
#[derive(Debug)]
pub struct LogWriter {
    file: Option<File>,
    path: PathBuf,
    /// The folder knows its name for good.
    entered: bool,
}

impl LogWriter {
    /// Begins a log with the tokens there are, in place of any of the same id: until it is
    /// written, that one stands, whatever happens to the machine.
    ///
    /// # Errors
    /// The system's. Nothing is left behind then.
    pub fn create(
        folder: &Path,
        begin: Begin,
        tokens: Vec<Emitted>,
        attempts: u32,
    ) -> io::Result<Self> {
        let path = folder.join(file_name(&begin.owner, &begin.id));
        let partial = path.with_extension("part");
        let created = write_first(&partial, begin, tokens, attempts).and_then(|file| {
            let replaces = path.exists();
            if replaces {
                file.sync_data()?;
            }
            fs::rename(&partial, &path)?;
            let mut log = Self {
                file: Some(file),
                path,
                entered: false,
            };
            if replaces {
                log.enter()?;
            }
            Ok(log)
        });
        if created.is_err() {
            // What is there of it is of no use; the first error is what matters.
            let _ = fs::remove_file(&partial);
        }
        created
    }

    /// Goes on with a log that was read, behind its last whole record.
    ///
    /// # Errors
    /// The system's.
    pub fn go_on(path: &Path, saved: &Saved) -> io::Result<Self> {
        if saved.outcome.is_some() {
            return Ok(Self {
                file: None,
                path: path.to_owned(),
                entered: true,
            });
        }
        let mut file = OpenOptions::new().write(true).open(path)?;
        // Half a record may follow: what is appended to that is not read.
        file.set_len(saved.bytes)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self {
            file: Some(file),
            path: path.to_owned(),
            entered: false,
        })
    }

    /// Appends a record: it survives the process, though not a power cut.
    ///
    /// # Errors
    /// The system's, and that the log has ended. It ends before this record then.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        match &mut self.file {
            Some(file) => record::append(file, record),
            None => Err(io::Error::other("the log has ended")),
        }
    }

    /// Appends the last record and makes it durable.
    ///
    /// # Errors
    /// The system's.
    pub fn end(&mut self, outcome: Outcome) -> io::Result<()> {
        self.append(&Record::End(outcome))?;
        self.sync()?;
        self.file = None;
        Ok(())
    }

    /// Makes it durable: it survives a power cut too.
    ///
    /// # Errors
    /// The system's.
    pub fn sync(&mut self) -> io::Result<()> {
        if let Some(file) = &self.file {
            file.sync_data()?;
        }
        self.enter()
    }

    fn enter(&mut self) -> io::Result<()> {
        if !self.entered {
            sync_folder(&self.path)?;
            self.entered = true;
        }
        Ok(())
    }

    /// The generation is forgotten: so is its log.
    pub fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(file = %self.path.display(), %error, "a log cannot be removed");
        }
    }
}

fn write_first(path: &Path, begin: Begin, tokens: Vec<Emitted>, attempts: u32) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(path)?;
    record::append(&mut file, &Record::Begin(Box::new(begin)))?;
    if !tokens.is_empty() {
        record::append(&mut file, &Record::Tokens(tokens))?;
    }
    if attempts > 0 {
        record::append(&mut file, &Record::Attempts(attempts))?;
    }
    Ok(file)
}

/// Reads every log of a folder. One that is damaged is put into quarantine, one that cannot be read
/// now is left for a later brain, and what a brain left that was killed while it began a log is
/// removed: the log that it was to replace is still there.
pub fn read_all(folder: &Folder) -> Vec<(PathBuf, Saved)> {
    let mut all = Vec::new();
    let entries = fs::read_dir(folder.generations()).into_iter().flatten();
    for path in entries.flatten().map(|entry| entry.path()) {
        match path.extension().and_then(OsStr::to_str) {
            Some("log") => {}
            Some("part") => {
                let _ = fs::remove_file(&path);
                continue;
            }
            _ => continue,
        }
        match read_file(&path) {
            Ok(saved) => all.push((path, saved)),
            Err(FileError::Io(error)) => tracing::warn!(
                file = %path.display(),
                %error,
                "a generation's log cannot be read; it stays for the next start"
            ),
            Err(error) => folder.quarantine(&path, &error.to_string()),
        }
    }
    all
}

fn read_file(path: &Path) -> Result<Saved, FileError> {
    let saved = read(&fs::read(path)?).ok_or(FileError::Damaged("it has no whole beginning"))?;
    let name = file_name(&saved.begin.owner, &saved.begin.id);
    match path.file_name() == Some(OsStr::new(&name)) {
        true => Ok(saved),
        false => Err(FileError::Damaged("its name is not that of its generation")),
    }
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
        attempts: 0,
        outcome: None,
        bytes: (bytes.len() - rest.len()) as u64,
    };
    while let Some(record) = record::next(&mut rest) {
        match record {
            Record::Begin(_) => break,
            Record::Tokens(tokens) => {
                saved.tokens.extend(tokens);
                saved.attempts = 0;
            }
            Record::Attempts(attempts) => saved.attempts = attempts,
            Record::End(outcome) => saved.outcome = Some(outcome),
        }
        saved.bytes = (bytes.len() - rest.len()) as u64;
        if saved.outcome.is_some() {
            break;
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
    use crate::{sched::types::Logprobs, snapshot::Identity};

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

    fn folder(root: &Path) -> Folder {
        let identity = Identity {
            fingerprint: "f".into(),
            layout: "l".into(),
        };
        Folder::open(root, identity).unwrap()
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect()
    }

    #[test]
    fn a_log_cut_or_damaged_anywhere_keeps_the_records_before() {
        let root = tempfile::tempdir().unwrap();
        let folder = folder(root.path());
        let first = vec![token(0), token(10)];
        let mut log = LogWriter::create(&folder.generations(), begin(), first, 0).unwrap();
        for id in 1..5 {
            log.append(&Record::Tokens(vec![token(id), token(id + 10)]))
                .unwrap();
        }
        log.sync().unwrap();
        let bytes = fs::read(&log.path).unwrap();
        let whole = read(&bytes).unwrap();
        assert_eq!((whole.begin.clone(), whole.tokens.len()), (begin(), 10));
        assert_eq!(read_all(&folder), [(log.path.clone(), whole.clone())]);
        let mut lengths = Vec::new();
        for cut in 0..=bytes.len() {
            if let Some(saved) = read(&bytes[..cut]) {
                assert_eq!(saved.tokens[..], whole.tokens[..saved.tokens.len()]);
                assert_eq!(read(&bytes[..saved.bytes as usize]), Some(saved.clone()));
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
        assert_eq!(names(&folder.generations()), [""; 0]);
    }

    #[test]
    fn a_log_goes_on_behind_its_last_whole_record() {
        let root = tempfile::tempdir().unwrap();
        let folder = folder(root.path());
        let mut log = LogWriter::create(&folder.generations(), begin(), vec![token(0)], 2).unwrap();
        log.append(&Record::Tokens(vec![token(1)])).unwrap();
        let path = log.path.clone();
        drop(log);
        let bytes = fs::read(&path).unwrap();
        for torn in 0..7 {
            // A process that was killed left half a record.
            fs::write(&path, [&bytes[..], &[1; 7][..torn]].concat()).unwrap();
            let (_, saved) = read_all(&folder).pop().unwrap();
            assert_eq!((saved.tokens.len(), saved.attempts), (2, 0));
            let mut log = LogWriter::go_on(&path, &saved).unwrap();
            log.append(&Record::Attempts(1)).unwrap();
            let (_, again) = read_all(&folder).pop().unwrap();
            assert_eq!((again.tokens.len(), again.attempts), (2, 1));
            log.append(&Record::Tokens(vec![token(2)])).unwrap();
            let (_, again) = read_all(&folder).pop().unwrap();
            assert_eq!((again.tokens.len(), again.attempts), (3, 0));
        }
    }

    #[test]
    fn what_was_not_begun_to_the_end_is_removed_and_what_is_no_log_is_put_aside() {
        let root = tempfile::tempdir().unwrap();
        let folder = folder(root.path());
        let generations = folder.generations();
        let log = LogWriter::create(&generations, begin(), vec![token(0)], 0).unwrap();
        // A kill between writing and moving into place leaves both.
        fs::copy(&log.path, log.path.with_extension("part")).unwrap();
        fs::write(generations.join("torn.part"), "x").unwrap();
        fs::write(generations.join("empty.log"), "").unwrap();
        fs::copy(&log.path, generations.join("copy.log")).unwrap();
        let read: Vec<_> = read_all(&folder)
            .into_iter()
            .map(|(path, _)| path)
            .collect();
        assert_eq!(read, std::slice::from_ref(&log.path));
        assert_eq!(names(&generations).len(), 1);
        let mut aside = names(&folder.path().join("quarantine"));
        aside.sort();
        assert_eq!(aside, ["copy.log", "empty.log"]);
    }

    #[test]
    fn a_log_that_cannot_be_read_now_stays() {
        let root = tempfile::tempdir().unwrap();
        let folder = folder(root.path());
        let generations = folder.generations();
        let name = file_name("key", "g");
        // A folder in its place stands in for a system that gives an error.
        fs::create_dir(generations.join(&name)).unwrap();
        assert_eq!(read_all(&folder), []);
        assert_eq!(names(&generations), [name]);
    }

    #[test]
    fn a_log_that_cannot_be_begun_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let folder = folder(root.path());
        let generations = folder.generations();
        let taken = generations.join(file_name("key", "g"));
        fs::create_dir_all(taken.join("in the way")).unwrap();
        assert!(LogWriter::create(&generations, begin(), Vec::new(), 0).is_err());
        assert_eq!(names(&generations).len(), 1);
    }
}
