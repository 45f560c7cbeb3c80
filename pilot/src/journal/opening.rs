//! Opening a store: what its files say before sled may touch them, what sled finds, and how that fits
//! what the high-water file remembers. Records are read when a run is ([`super::tree::read_run`]), so
//! opening does not grow dear with what a store holds, and a run that cannot be read holds up no other.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use sled::{Db, Tree};

use super::{
    Head, JournalError, guard,
    high_water::HighWater,
    tree::{self, decode_head, decode_u64},
};
use crate::run::entry::RunId;

/// Content of the marker: the version of the format.
pub(super) const FORMAT: &str = "marathon pilot store 1\n";

/// Name of the marker, which is written last when a store is made.
pub(super) const MARKER: &str = "marathon-store";

/// Key of the epoch: how often the store was opened.
pub(super) const EPOCH_KEY: &[u8] = b"epoch";

/// A database, open.
pub(super) struct Opened {
    /// sled.
    pub(super) db: Db,
    /// Heads by run.
    pub(super) heads: Tree,
    /// The epoch.
    pub(super) meta: Tree,
    /// This opening's.
    pub(super) epoch: u64,
    /// Runs with their heads, or what is wrong with them.
    pub(super) runs: BTreeMap<RunId, Result<Head, String>>,
}

/// Where the database of the store at `path` is.
pub(super) fn database(path: &Path) -> PathBuf {
    path.join("sled")
}

/// How long sled may take for this store: a minute, and more for a large one.
pub(super) fn patience(path: &Path) -> Duration {
    let len = fs::metadata(database(path).join("db")).map_or(0, |data| data.len());
    Duration::from_secs(60 + (len >> 22))
}

/// Looks at the files before sled may touch them. `true`: there is no finished store yet.
pub(super) fn check_files(path: &Path) -> Result<bool, JournalError> {
    let damaged = |what: &str| damaged(path, what);
    match fs::read_to_string(path.join(MARKER)) {
        Ok(text) if text == FORMAT => match fs::metadata(database(path).join("db")) {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(damaged("sled/db is gone")),
            Err(error) => Err(JournalError::io("looking at sled/db", error)),
            Ok(data) if data.len() == 0 => Err(damaged("sled/db is empty")),
            Ok(_) => Ok(false),
        },
        Ok(text) if text.starts_with("marathon pilot store ") => Err(JournalError::Newer {
            path: path.to_owned(),
            what: text.trim().to_owned(),
        }),
        Ok(_) => Err(damaged("its marker file holds something else")),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let marks = HighWater::path(path);
            if marks.exists() && !HighWater::open(path)?.is_empty() {
                return Err(damaged("its marker file is gone"));
            }
            Ok(true)
        }
        Err(error) => Err(JournalError::io("reading the store's marker", error)),
    }
}

/// Opens the database of the store at `path`; `fresh`: one that is still being made.
pub(super) fn open(path: &Path, fresh: bool) -> Result<Opened, JournalError> {
    let owned = path.to_owned();
    let outcome = guard::run(patience(path), move || open_database(&owned, fresh));
    outcome.unwrap_or_else(|failure| Err(failure.of_store(path, "opening it")))
}

fn open_database(path: &Path, fresh: bool) -> Result<Opened, JournalError> {
    let failed = |error| tree::failed(path, "opening sled", error);
    let db = open_patiently(&database(path)).map_err(failed)?;
    let heads = db.open_tree("heads").map_err(failed)?;
    let meta = db.open_tree("meta").map_err(failed)?;
    let runs = find_runs(path, &db, &heads)?;
    if fresh && !runs.is_empty() {
        return Err(damaged(path, "it holds runs, but its marker file is gone"));
    }
    let last = meta.get(EPOCH_KEY).map_err(failed)?;
    let epoch = match last.and_then(|bytes| decode_u64(&bytes)) {
        Some(last) => last + 1,
        None if fresh => 1,
        None => return Err(damaged(path, "its epoch is gone")),
    };
    meta.insert(EPOCH_KEY, &epoch.to_be_bytes())
        .map_err(failed)?;
    db.flush().map_err(failed)?;
    Ok(Opened {
        db,
        heads,
        meta,
        epoch,
        runs,
    })
}

/// Every run: its head, if its records end where the head says.
fn find_runs(
    path: &Path,
    db: &Db,
    heads: &Tree,
) -> Result<BTreeMap<RunId, Result<Head, String>>, JournalError> {
    let failed = |error| tree::failed(path, "looking for runs", error);
    let named = |name: &[u8]| {
        let name = String::from_utf8_lossy(name).into_owned();
        RunId::new(name).map_err(|what| damaged(path, what))
    };
    let mut runs = BTreeMap::new();
    for name in db.tree_names() {
        let Some(run) = name.strip_prefix(tree::RUN_PREFIX) else {
            continue;
        };
        let run = named(run)?;
        let records = db.open_tree(&name).map_err(failed)?;
        let stored = heads.get(run.as_str()).map_err(failed)?;
        let held = tree::count(&records).map_err(failed)?;
        let found = match (stored.as_deref().map(decode_head), held) {
            // A tree is made just before the transaction that writes its first record.
            (None, Some(0)) => continue,
            (None | Some(None), _) => Err("its head is missing".to_owned()),
            (Some(Some(_)), None) => Err(format!("run {run}: an odd key")),
            (Some(Some(head)), Some(held)) if head.next == held => Ok(head),
            (Some(Some(head)), Some(held)) => {
                Err(format!("run {run} has {held} records of {}", head.next))
            }
        };
        runs.insert(run, found);
    }
    for key in heads.iter().keys() {
        runs.entry(named(&key.map_err(failed)?)?)
            .or_insert_with(|| Err("its records are gone".to_owned()));
    }
    Ok(runs)
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

/// Good runs with their heads, and damaged ones with what is wrong.
pub(super) type Compared = (BTreeMap<RunId, Head>, BTreeMap<RunId, String>);

/// Sorts runs into good and damaged ones by what the high-water file remembers.
pub(super) fn compare(
    path: &Path,
    runs: BTreeMap<RunId, Result<Head, String>>,
    high_water: &HighWater,
) -> Result<Compared, JournalError> {
    let mut heads = BTreeMap::new();
    let mut bad = BTreeMap::new();
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
                bad.insert(run, lost);
            }
            Ok(head) if head.next == mark.next && head.hash != mark.hash => {
                let what = format!("the last record of run {run} is not the one acknowledged");
                bad.insert(run, what);
            }
            Ok(head) => {
                heads.insert(run, head);
            }
            Err(what) => {
                bad.insert(run, what);
            }
        }
    }
    if known < high_water.len() {
        let what = format!("{} runs are gone altogether", high_water.len() - known);
        return Err(damaged(path, what));
    }
    Ok((heads, bad))
}

fn damaged(path: &Path, what: impl Into<String>) -> JournalError {
    JournalError::Damaged {
        path: path.to_owned(),
        what: what.into(),
    }
}
