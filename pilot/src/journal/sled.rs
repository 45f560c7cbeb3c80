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
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
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
    opening::{self, EPOCH_KEY, FORMAT, MARKER},
    tree::{self, decode_head, decode_u64, encode_head, read_run},
};
use crate::run::entry::{Entry, RunId};

/// Folder of the spools in a store.
const SPOOL: &str = "spool";

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

impl SledJournal {
    /// Opens the store at `path`, which must exist.
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
        disk::make_folders(path).map_err(|error| io("making", error))?;
        let lock = StoreLock::take(path)?;
        let fresh = opening::check_files(path)?;
        // What an agent read and wrote is in these: nobody else's business, whoever made the folder
        // that they are in.
        for inner in [opening::database(path), path.join(SPOOL)] {
            disk::make_folders(&inner)
                .and_then(|()| disk::make_private(&inner))
                .map_err(|error| io("making private folders in", error))?;
        }
        let opened = opening::open(path, fresh)?;
        if fresh {
            disk::sync_tree(path)
                .and_then(|()| disk::sync_way_to(path))
                .map_err(|error| io("syncing", error))?;
            HighWater::create(path).map_err(|error| io("making the high-water file of", error))?;
            disk::replace_file(&path.join(MARKER), FORMAT.as_bytes())
                .map_err(|error| io("marking", error))?;
        }
        let high_water = HighWater::open(path)?;
        let data_file = File::open(path.join("sled/db")).map_err(|error| io("opening", error))?;
        barrier
            .sync_data(&data_file)
            .map_err(|error| io("syncing", error))?;
        let (heads, damaged) = opening::compare(path, opened.runs, &high_water)?;
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
        self.path.join(SPOOL).join(run.as_str())
    }

    /// The store's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tree(&self, run: &RunId) -> Result<Tree, JournalError> {
        self.db
            .open_tree(tree::name(run))
            .map_err(|error| tree::failed(&self.path, "opening a run", error))
    }

    /// One transaction over the run, its head and the epoch: all of it or nothing.
    fn commit(
        &self,
        run: &RunId,
        expected: Head,
        records: &[Framed],
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
            TransactionError::Storage(error) => tree::failed(&self.path, "appending", error),
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
    /// The entries as records that follow `head`, and the head after them.
    fn frame(
        &self,
        run: &RunId,
        mut head: Head,
        entries: &[Entry],
    ) -> Result<(Vec<Framed>, Head), JournalError> {
        let stamp = Stamp {
            epoch: self.epoch,
            wall_ms: wall_ms(),
        };
        let mut records = Vec::with_capacity(entries.len());
        for entry in entries {
            let (bytes, next) = codec::encode(run, head, stamp, entry)
                .map_err(|error| error.of_store(&self.path))?;
            records.push((head.next, bytes));
            head = next;
        }
        Ok((records, head))
    }

    fn expect_room(&self) -> Result<(), JournalError> {
        let free = disk::free_bytes(&self.path)
            .map_err(|error| JournalError::io("asking for free space", error))?;
        if free < FREE_FLOOR {
            let reason = format!("only {} MiB are free; make room and resume", free >> 20);
            return Err(JournalError::io("appending", reason));
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), JournalError> {
        let flushed = self.db.flush();
        flushed.map_err(|error| tree::failed(&self.path, "flushing", error))?;
        Ok(())
    }

    fn sync(&self) -> Result<(), JournalError> {
        self.barrier
            .sync_data(&self.data_file)
            .map_err(|error| JournalError::io("syncing the store", error))
    }

    /// Removes a run, damaged or not, and its spool. It is gone for good when this returns; a crash
    /// in the middle leaves it as it was, or as a damaged run, which can be removed again.
    pub fn remove(&self, run: &RunId) -> Result<(), JournalError> {
        let mut writer = self.writer();
        refuse_broken(&writer)?;
        if !writer.heads.contains_key(run) && !writer.damaged.contains_key(run) {
            return Err(JournalError::UnknownRun(run.to_string()));
        }
        let removed = guard::catch(|| {
            // First, so that nothing is missed when the rest is half done.
            writer
                .high_water
                .forget(run, &*self.barrier)
                .map_err(|error| JournalError::io("lowering the high-water mark", error))?;
            let failed = |error| tree::failed(&self.path, "removing a run", error);
            self.heads.remove(run.as_str()).map_err(failed)?;
            self.db.drop_tree(tree::name(run)).map_err(failed)?;
            self.flush()?;
            self.sync()?;
            match fs::remove_dir_all(self.spool(run)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    Err(JournalError::io("removing the run's spool", error))
                }
                _ => Ok(()),
            }
        });
        let removed = removed.unwrap_or_else(|what| Err(JournalError::io("removing", what)));
        if let Err(error) = &removed {
            writer.broken = Some(error.to_string());
        } else {
            writer.heads.remove(run);
            writer.damaged.remove(run);
        }
        removed
    }
}

/// A record's sequence, and the record in its frame.
type Framed = (u64, Vec<u8>);

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

    fn load(&self, run: &RunId) -> Result<Vec<Record>, JournalError> {
        let known = {
            let writer = self.writer();
            refuse_damaged(&self.path, &writer, run)?;
            *writer
                .heads
                .get(run)
                .ok_or_else(|| JournalError::UnknownRun(run.to_string()))?
        };
        let tree = self.tree(run)?;
        let (path, name) = (self.path.clone(), run.clone());
        let read = guard::run(opening::patience(&path), move || {
            match read_run(&path, &tree, &name, known.next)? {
                (records, head) if head == known => Ok(records),
                _ => Err(JournalError::Damaged {
                    path,
                    what: format!("the last record of run {name} is not the one its head names"),
                }),
            }
        });
        let read = read.unwrap_or_else(|failure| {
            Err(failure.of_store(&self.path, &format!("reading run {run}")))
        });
        if let Err(JournalError::Damaged { what, .. }) = &read {
            // Nothing may be put behind what cannot be read.
            self.writer().damaged.insert(run.clone(), what.clone());
        }
        read
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
        refuse_broken(&writer)?;
        self.expect_room()?;
        let (records, head) = self.frame(run, expected, entries)?;
        let written = guard::catch(|| {
            self.commit(run, expected, &records, head)?;
            self.flush()?;
            if durability == Durability::Synced {
                self.sync()?;
                writer
                    .high_water
                    .raise(run, head, &*self.barrier)
                    .map_err(|error| JournalError::io("raising the high-water mark", error))?;
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

fn refuse_damaged(path: &Path, writer: &Writer, run: &RunId) -> Result<(), JournalError> {
    match writer.damaged.get(run) {
        Some(what) => Err(JournalError::Damaged {
            path: path.to_owned(),
            what: what.clone(),
        }),
        None => Ok(()),
    }
}

fn refuse_broken(writer: &Writer) -> Result<(), JournalError> {
    match &writer.broken {
        Some(why) => Err(JournalError::io(
            "an earlier write failed; open the store again",
            why,
        )),
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
