//! The usage ledger on disk: a file of records, each the whole sums of one run; the last one of a
//! run counts. Appended to as sums change, written anew when most of it is out of date.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{record, sync_folder};

/// What a run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunUsage {
    /// Generations that ended.
    pub generations: u64,
    /// Prompt tokens of these.
    pub prompt_tokens: u64,
    /// Of the prompt tokens, taken from the cache.
    pub cached_tokens: u64,
    /// Tokens emitted.
    pub generated_tokens: u64,
    /// Drafts checked.
    pub drafted_tokens: u64,
    /// Drafts emitted.
    pub accepted_tokens: u64,
    /// Time of the device in microseconds: of each step the share of its rows.
    pub device_micros: u64,
}

impl RunUsage {
    /// Adds what another took.
    pub fn add(&mut self, other: &Self) {
        self.generations += other.generations;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        self.device_micros += other.device_micros;
    }
}

/// The sums of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    /// Whose run it is.
    pub owner: String,
    /// Its name; empty for all requests without one.
    pub run: String,
    /// What it took. Nothing: it is forgotten.
    pub usage: RunUsage,
}

/// A ledger that is being written.
#[derive(Debug)]
pub struct LedgerFile {
    path: PathBuf,
    file: Option<File>,
    bytes: u64,
    /// What it took when it was last written anew.
    whole_bytes: u64,
}

/// A file below this size is not worth writing anew.
const SMALL: u64 = 256 << 10;

impl LedgerFile {
    /// What a predecessor wrote, and the file to go on with. Nothing is written yet.
    pub fn open(folder: &Path) -> (Self, Vec<Sums>) {
        let path = folder.join("usage.ledger");
        let bytes = fs::read(&path).unwrap_or_default();
        let mut rest = &bytes[..];
        let sums = std::iter::from_fn(|| record::next(&mut rest)).collect();
        let file = Self {
            path,
            file: None,
            bytes: 0,
            whole_bytes: 0,
        };
        (file, sums)
    }

    /// Whether all sums have to be written, not only those that changed: the file is new here, was
    /// not written to the end, or is mostly out of date.
    pub fn wants_all(&self) -> bool {
        self.file.is_none() || self.bytes > SMALL.max(4 * self.whole_bytes)
    }

    /// Writes all sums in place of what was there: until they are whole, that stands.
    ///
    /// # Errors
    /// The system's.
    pub fn write_all(&mut self, sums: &[Sums]) -> io::Result<()> {
        self.file = None;
        let partial = self.path.with_extension("part");
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&partial)?;
        let mut bytes = Vec::new();
        for one in sums {
            bytes.extend(record::framed(one)?);
        }
        file.write_all(&bytes)?;
        file.sync_data()?;
        fs::rename(&partial, &self.path)?;
        sync_folder(&self.path)?;
        self.file = Some(file);
        (self.bytes, self.whole_bytes) = (bytes.len() as u64, bytes.len() as u64);
        Ok(())
    }

    /// Appends the sums that changed.
    ///
    /// # Errors
    /// The system's. The next call has to write all.
    pub fn append(&mut self, sums: &[Sums]) -> io::Result<()> {
        let Some(file) = &mut self.file else {
            return Err(io::Error::other("the ledger has not been begun"));
        };
        let mut bytes = Vec::new();
        for one in sums {
            bytes.extend(record::framed(one)?);
        }
        if let Err(error) = file.write_all(&bytes) {
            // What follows half a record is not read.
            self.file = None;
            return Err(error);
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Makes it durable.
    ///
    /// # Errors
    /// The system's.
    pub fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(run: &str, generated_tokens: u64) -> Sums {
        Sums {
            owner: "key".into(),
            run: run.into(),
            usage: RunUsage {
                generated_tokens,
                ..RunUsage::default()
            },
        }
    }

    #[test]
    fn what_was_written_is_read_wherever_the_file_is_cut() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, before) = LedgerFile::open(folder.path());
        assert!(before.is_empty() && file.wants_all());
        assert!(file.append(&[sums("a", 1)]).is_err());
        file.write_all(&[sums("a", 1), sums("b", 2)]).unwrap();
        file.append(&[sums("a", 3)]).unwrap();
        file.append(&[sums("c", 4)]).unwrap();
        let expected = [sums("a", 1), sums("b", 2), sums("a", 3), sums("c", 4)];
        let path = folder.path().join("usage.ledger");
        let bytes = fs::read(&path).unwrap();
        let mut seen = Vec::new();
        for cut in 0..=bytes.len() {
            fs::write(&path, &bytes[..cut]).unwrap();
            let (_, read) = LedgerFile::open(folder.path());
            assert_eq!(read[..], expected[..read.len()]);
            seen.push(read.len());
        }
        seen.dedup();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_file_that_is_mostly_out_of_date_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, _) = LedgerFile::open(folder.path());
        file.write_all(&[sums("a", 0)]).unwrap();
        let mut last = 0;
        while !file.wants_all() {
            last += 1;
            let same = vec![sums("a", last); 64];
            file.append(&same).unwrap();
        }
        file.write_all(&[sums("a", last)]).unwrap();
        assert!(!file.wants_all());
        assert!(
            fs::metadata(folder.path().join("usage.ledger"))
                .unwrap()
                .len()
                < 200
        );
        assert_eq!(LedgerFile::open(folder.path()).1, [sums("a", last)]);
    }
}
