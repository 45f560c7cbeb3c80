//! The journal in a sled store.
//!
//! Folder of a store:
//!
//! | name | what |
//! |---|---|
//! | `lock` | held while a pilot has the store open |
//! | `marathon-store` | marker with the format's version; written last when a store is made |
//! | `high-water` | how far each run had come ([`super::high_water`]) |
//! | `sled/` | the database: a tree for each run, one with the heads, one with the epoch |
//! | `live` | socket at which the holder answers questions ([`super::share`]) |
//! | `spool/` | output of supervised commands, one folder for each run |
//!
//! A record is cut into chunks of [`tree::CHUNK`] bytes under keys `sequence, chunk` (big-endian): larger
//! values would make sled write files of their own, which it does not sync. A synced commit is a
//! transaction, `flush()`, `fdatasync` of sled's file, then the high-water line; only then is the
//! append acknowledged. After a failed write the state of the page cache is unknown, so nothing
//! more is written until the store is opened anew.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use sled::{
    Db, Transactional, Tree,
    transaction::{ConflictableTransactionError, TransactionError},
};

use super::{
    Durability, Head, History, Journal, JournalError, Record, RunListing,
    codec::{self, Stamp},
    disk::{self, Barrier, DiskBarrier},
    guard,
    high_water::HighWater,
    lock::StoreLock,
    memory::from_codec,
    tree::{self, decode_head, decode_u64, encode_head, read_run},
};
use crate::run::entry::{Entry, RunId};

const FORMAT: &str = "marathon pilot store 1\n";
const MARKER: &str = "marathon-store";
const EPOCH_KEY: &[u8] = b"epoch";

/// Free bytes below which nothing is appended.
const FREE_FLOOR: u64 = 16 << 20;

/// A store, open and locked.
pub struct SledJournal {
    path: PathBuf,
    db: Db,
    heads: Tree,
    meta: Tree,
    epoch: u64,
    data_file: File,
    barrier: Arc<dyn Barrier>,
    writer: Mutex<Writer>,
    _lock: StoreLock,
}

struct Writer {
    heads: BTreeMap<RunId, Head>,
    damaged: BTreeMap<RunId, String>,
    high_water: HighWater,
    /// Why nothing may be written any more.
    broken: Option<String>,
}

struct Opened {
    db: Db,
    heads: Tree,
    meta: Tree,
    epoch: u64,
    runs: BTreeMap<RunId, Result<Head, String>>,
}

impl SledJournal {
    /// Opens the store at `path`, which must exist, and verifies every run in it.
    pub fn open(path: &Path) -> Result<Self, JournalError> {
        let parts = [path.join(MARKER), path.join("sled"), HighWater::path(path)];
        if parts.iter().all(|part| !part.exists()) {
            return Err(JournalError::NoStore(path.to_owned()));
        }
        Self::open_with(path, Arc::new(DiskBarrier))
    }

    /// Opens the store at `path`, making it if there is none.
    pub fn open_or_create(path: &Path) -> Result<Self, JournalError> {
        Self::open_with(path, Arc::new(DiskBarrier))
    }

    /// As [`Self::open_or_create`], with a barrier of the caller's.
    pub fn open_with(path: &Path, barrier: Arc<dyn Barrier>) -> Result<Self, JournalError> {
        let io = |what: &str, error: std::io::Error| {
            JournalError::io(format!("{what} {}", path.display()), error)
        };
        // What an agent read and wrote is in here: nobody else's business.
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| io("making", error))?;
        let lock = StoreLock::take(path)?;
        let fresh = Self::check_files(path)?;
        let opened = Self::open_sled(path, fresh)?;
        if fresh {
            disk::sync_tree(path).map_err(|error| io("syncing", error))?;
            if let Some(parent) = path.canonicalize().ok().as_deref().and_then(Path::parent) {
                disk::sync_folder(parent).map_err(|error| io("syncing the folder of", error))?;
            }
            HighWater::create(path).map_err(|error| io("making the high-water file of", error))?;
            disk::replace_file(&path.join(MARKER), FORMAT.as_bytes())
                .map_err(|error| io("marking", error))?;
        }
        let high_water = HighWater::open(path)?;
        let data_file = File::open(path.join("sled/db")).map_err(|error| io("opening", error))?;
        barrier
            .sync_data(&data_file)
            .map_err(|error| io("syncing", error))?;
        let (heads, damaged) = compare(path, opened.runs, &high_water)?;
        let writer = Writer {
            heads,
            damaged,
            high_water,
            broken: None,
        };
        Ok(Self {
            path: path.to_owned(),
            db: opened.db,
            heads: opened.heads,
            meta: opened.meta,
            epoch: opened.epoch,
            data_file,
            barrier,
            writer: Mutex::new(writer),
            _lock: lock,
        })
    }

    /// Folder for the spools of `run`.
    pub fn spool(&self, run: &RunId) -> PathBuf {
        self.path.join("spool").join(run.as_str())
    }

    /// The store's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Looks at the files before sled may touch them. `true`: there is no finished store yet.
    fn check_files(path: &Path) -> Result<bool, JournalError> {
        let damaged = |what: &str| JournalError::Damaged {
            path: path.to_owned(),
            what: what.to_owned(),
        };
        let sled_len = fs::metadata(path.join("sled/db"))
            .map(|data| data.len())
            .ok();
        match fs::read_to_string(path.join(MARKER)) {
            Ok(text) if text == FORMAT => match sled_len {
                None => Err(damaged("sled/db is gone")),
                Some(0) => Err(damaged("sled/db is empty")),
                Some(_) => Ok(false),
            },
            Ok(text) if text.starts_with("marathon pilot store ") => {
                let what = text.trim().to_owned();
                Err(JournalError::Newer {
                    path: path.to_owned(),
                    what,
                })
            }
            Ok(_) => Err(damaged("its marker file holds something else")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let marks = HighWater::path(path);
                if marks.exists() && !HighWater::open(path)?.is_empty() {
                    return Err(damaged("its marker file is gone"));
                }
                Ok(true)
            }
            Err(error) => Err(JournalError::io("reading the store's marker", error)),
        }
    }

    fn open_sled(path: &Path, fresh: bool) -> Result<Opened, JournalError> {
        let folder = path.join("sled");
        let len = fs::metadata(folder.join("db")).map_or(0, |data| data.len());
        let patience = Duration::from_secs(60 + (len >> 22));
        let owned = path.to_owned();
        let outcome = guard::run(patience, move || open_and_verify(&owned, &folder, fresh));
        outcome.unwrap_or_else(|what| {
            let what = format!("sled gave up on it ({what})");
            Err(JournalError::Damaged {
                path: path.to_owned(),
                what,
            })
        })
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tree(&self, run: &RunId) -> Result<Tree, JournalError> {
        self.db
            .open_tree(tree::name(run))
            .map_err(|error| JournalError::io("opening a run", error))
    }

    /// One transaction over the run, its head and the epoch: all of it or nothing.
    fn commit(
        &self,
        run: &RunId,
        expected: Head,
        records: &[(u64, Vec<u8>)],
        head: Head,
    ) -> Result<(), JournalError> {
        let tree = self.tree(run)?;
        let outcome = (&tree, &self.heads, &self.meta).transaction(|(tree, heads, meta)| {
            let abort = ConflictableTransactionError::Abort;
            let epoch = meta.get(EPOCH_KEY)?.and_then(|bytes| decode_u64(&bytes));
            if epoch != Some(self.epoch) {
                return Err(abort(Refusal::Epoch));
            }
            let stored = heads.get(run.as_str())?;
            let found = match &stored {
                None => Head::EMPTY,
                Some(bytes) => decode_head(bytes).ok_or(abort(Refusal::Head))?,
            };
            if found != expected {
                return Err(abort(Refusal::Conflict(found.next)));
            }
            for (sequence, bytes) in records {
                for (key, chunk) in tree::chunks(*sequence, bytes) {
                    tree.insert(&key, chunk)?;
                }
            }
            heads.insert(run.as_str(), encode_head(head))?;
            Ok(())
        });
        outcome.map_err(|error| match error {
            TransactionError::Storage(error) => JournalError::io("appending", error),
            TransactionError::Abort(Refusal::Conflict(found)) => JournalError::Conflict {
                run: run.clone(),
                expected: expected.next,
                found,
            },
            TransactionError::Abort(Refusal::Epoch) => {
                JournalError::io("appending", "another pilot opened the store meanwhile")
            }
            TransactionError::Abort(Refusal::Head) => JournalError::Damaged {
                path: self.path.clone(),
                what: format!("the head of run {run}"),
            },
        })
    }
}

enum Refusal {
    Epoch,
    Head,
    Conflict(u64),
}

impl History for SledJournal {
    fn runs(&self) -> Result<Vec<RunListing>, JournalError> {
        let writer = self.writer();
        let good = writer
            .heads
            .iter()
            .map(|(run, head)| (run.clone(), Ok(*head)));
        let bad = writer
            .damaged
            .iter()
            .map(|(run, what)| (run.clone(), Err(what.clone())));
        let all: BTreeMap<RunId, Result<Head, String>> = good.chain(bad).collect();
        Ok(all
            .into_iter()
            .map(|(run, head)| RunListing { run, head })
            .collect())
    }

    fn load(&self, run: &RunId, from: u64) -> Result<Vec<Record>, JournalError> {
        let known = {
            let writer = self.writer();
            refuse_damaged(&self.path, &writer, run)?;
            *writer
                .heads
                .get(run)
                .ok_or_else(|| JournalError::UnknownRun(run.to_string()))?
        };
        let tree = self.tree(run)?;
        let mut records = Vec::new();
        let read = guard::catch(|| {
            read_run(&self.path, &tree, run, known.next, |record| {
                if record.sequence >= from {
                    records.push(record);
                }
            })
        });
        read.unwrap_or_else(|what| {
            Err(JournalError::Damaged {
                path: self.path.clone(),
                what: format!("run {run}: {what}"),
            })
        })?;
        Ok(records)
    }
}

impl Journal for SledJournal {
    fn head(&self, run: &RunId) -> Result<Head, JournalError> {
        let writer = self.writer();
        refuse_damaged(&self.path, &writer, run)?;
        Ok(writer.heads.get(run).copied().unwrap_or(Head::EMPTY))
    }

    fn append(
        &self,
        run: &RunId,
        expected: Head,
        entries: &[Entry],
        durability: Durability,
    ) -> Result<Head, JournalError> {
        let mut writer = self.writer();
        refuse_damaged(&self.path, &writer, run)?;
        if let Some(why) = &writer.broken {
            return Err(JournalError::io(
                "an earlier write failed; open the store again",
                why,
            ));
        }
        let free = disk::free_bytes(&self.path)
            .map_err(|error| JournalError::io("asking for free space", error))?;
        if free < FREE_FLOOR {
            let reason = format!("only {} MiB are free; make room and resume", free >> 20);
            return Err(JournalError::io("appending", reason));
        }
        let stamp = Stamp {
            epoch: self.epoch,
            wall_ms: wall_ms(),
        };
        let mut head = expected;
        let mut records = Vec::with_capacity(entries.len());
        for entry in entries {
            let (bytes, next) = codec::encode(run, head, stamp, entry)
                .map_err(|error| from_codec(self.path.clone(), error))?;
            records.push((head.next, bytes));
            head = next;
        }
        let written = guard::catch(|| {
            self.commit(run, expected, &records, head)?;
            self.db
                .flush()
                .map_err(|error| JournalError::io("flushing", error))?;
            if durability == Durability::Synced {
                let io = |what: &str, error| JournalError::io(what, error);
                self.barrier
                    .sync_data(&self.data_file)
                    .map_err(|error| io("syncing the store", error))?;
                writer
                    .high_water
                    .raise(run, head, &*self.barrier)
                    .map_err(|error| io("raising the high-water mark", error))?;
            }
            Ok(())
        });
        match written.unwrap_or_else(|what| Err(JournalError::io("appending", what))) {
            Ok(()) => {
                writer.heads.insert(run.clone(), head);
                Ok(head)
            }
            Err(conflict @ JournalError::Conflict { .. }) => Err(conflict),
            Err(error) => {
                writer.broken = Some(error.to_string());
                Err(error)
            }
        }
    }
}

fn open_and_verify(path: &Path, folder: &Path, fresh: bool) -> Result<Opened, JournalError> {
    let io = |error: sled::Error| match error {
        sled::Error::Corruption { .. } => JournalError::Damaged {
            path: path.to_owned(),
            what: "sled finds corruption".into(),
        },
        other => JournalError::io("opening sled", other),
    };
    let db = open_patiently(folder).map_err(io)?;
    let heads = db.open_tree("heads").map_err(io)?;
    let meta = db.open_tree("meta").map_err(io)?;
    let mut runs = BTreeMap::new();
    for name in db.tree_names() {
        let Some(run) = name.strip_prefix(tree::RUN_PREFIX) else {
            continue;
        };
        let run = String::from_utf8_lossy(run).into_owned();
        let run = RunId::new(run).map_err(|what| JournalError::Damaged {
            path: path.to_owned(),
            what,
        })?;
        let tree = db.open_tree(&name).map_err(io)?;
        let stored = heads.get(run.as_str()).map_err(io)?;
        let Some(head) = stored.as_deref().and_then(decode_head) else {
            // A tree is made just before the transaction that writes its first record.
            if !tree.is_empty() || stored.is_some() {
                runs.insert(run, Err("its head is missing".to_owned()));
            }
            continue;
        };
        let found = match read_run(path, &tree, &run, head.next, |_| {}) {
            Ok(found) if found == head => Ok(head),
            Ok(_) => Err("its last record is not the one its head names".to_owned()),
            Err(JournalError::Damaged { what, .. }) => Err(what),
            Err(other) => return Err(other),
        };
        runs.insert(run, found);
    }
    for key in heads.iter().keys() {
        let run = RunId::new(String::from_utf8_lossy(&key.map_err(io)?).into_owned()).map_err(
            |what| JournalError::Damaged {
                path: path.to_owned(),
                what,
            },
        )?;
        runs.entry(run)
            .or_insert_with(|| Err("its records are gone".to_owned()));
    }
    if fresh && !runs.is_empty() {
        let what = "it holds runs, but its marker file is gone".to_owned();
        return Err(JournalError::Damaged {
            path: path.to_owned(),
            what,
        });
    }
    let last = meta
        .get(EPOCH_KEY)
        .map_err(io)?
        .and_then(|bytes| decode_u64(&bytes));
    if last.is_none() && !fresh {
        let what = "its epoch is gone".to_owned();
        return Err(JournalError::Damaged {
            path: path.to_owned(),
            what,
        });
    }
    let epoch = last.unwrap_or(0) + 1;
    meta.insert(EPOCH_KEY, &epoch.to_be_bytes()).map_err(io)?;
    db.flush().map_err(io)?;
    Ok(Opened {
        db,
        heads,
        meta,
        epoch,
        runs,
    })
}

/// sled gives its own file lock back some time after its handle is dropped, on a thread of its own.
/// The store's lock is held already, so a locked database can only be that.
fn open_patiently(folder: &Path) -> sled::Result<Db> {
    let config = sled::Config::new()
        .path(folder)
        .mode(sled::Mode::LowSpace)
        .flush_every_ms(None);
    for _ in 0..200 {
        match config.open() {
            Err(sled::Error::Io(error)) if error.to_string().contains("lock") => {
                thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
    config.open()
}

type Compared = (BTreeMap<RunId, Head>, BTreeMap<RunId, String>);

/// Sorts runs into good and damaged ones by what the high-water file remembers.
fn compare(
    path: &Path,
    runs: BTreeMap<RunId, Result<Head, String>>,
    high_water: &HighWater,
) -> Result<Compared, JournalError> {
    let mut heads = BTreeMap::new();
    let mut damaged = BTreeMap::new();
    let mut known = 0;
    for (run, found) in runs {
        let mark = high_water.mark(&run);
        known += usize::from(mark != Head::EMPTY);
        match found {
            Ok(head) if head.next < mark.next => {
                let lost = format!(
                    "run {run} had {} records, {} are left",
                    mark.next, head.next
                );
                damaged.insert(run, lost);
            }
            Ok(head) if head.next == mark.next && head.hash != mark.hash => {
                let what = format!("the last record of run {run} is not the one acknowledged");
                damaged.insert(run, what);
            }
            Ok(head) => {
                heads.insert(run, head);
            }
            Err(what) => {
                damaged.insert(run, what);
            }
        }
    }
    if known < high_water.len() {
        let what = format!("{} runs are gone altogether", high_water.len() - known);
        return Err(JournalError::Damaged {
            path: path.to_owned(),
            what,
        });
    }
    Ok((heads, damaged))
}

fn refuse_damaged(path: &Path, writer: &Writer, run: &RunId) -> Result<(), JournalError> {
    match writer.damaged.get(run) {
        Some(what) => Err(JournalError::Damaged {
            path: path.to_owned(),
            what: what.clone(),
        }),
        None => Ok(()),
    }
}

fn wall_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
#[path = "sled_tests.rs"]
mod tests;
