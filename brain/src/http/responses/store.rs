//! Responses on disk, so that a later request can build on one and a lost stream can be read
//! again, a restart in between included.
//!
//! A record holds the request; what it generated is a function of it, so a record whose answer is
//! missing or torn loses nothing. A file is whole and durable before anybody is told of it. Its
//! time of change is the end of its lease, so that what has expired is found without reading.
//!
//! Everything here waits for the disk.

use std::{
    ffi::OsStr,
    fs::{self, File},
    hash::{BuildHasher as _, RandomState},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::{identity::RequestId, models::unix_time};
use crate::callers::Owner;

/// Responses of one owner, at most; the oldest make room.
const MOST: usize = 10_000;
/// Writers of different responses seldom wait for each other.
const LOCKS: usize = 64;
/// Ends the name of a file that is being written.
const PARTIAL: &str = "partial";
/// Nobody writes a file for so long.
const ABANDONED: Duration = Duration::from_secs(60 * 60);

/// A stored response.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    /// Form of the file.
    version: u32,
    pub(super) id: String,
    pub(super) created_at: u64,
    expires_at: u64,
    /// The model that answers.
    pub(super) fingerprint: String,
    /// The request as it was sent.
    pub(super) request: Map<String, Value>,
    /// Every input item, those of the responses before it included.
    pub(super) items: Vec<Value>,
    /// How many of them are of the responses before it.
    pub(super) before: usize,
    /// The answer, once it is whole.
    pub(super) response: Option<Value>,
}

const VERSION: u32 = 1;

/// What became of a record that was to be kept.
#[derive(Debug)]
pub(super) enum Kept {
    /// This is stored now, or was before.
    As(Box<Record>),
    /// The id is another request's.
    Taken,
}

/// The folder of responses.
#[derive(Debug)]
pub(in super::super) struct Store {
    dir: PathBuf,
    lease: Duration,
    /// Each for a share of all ids. Who looks at a record and then writes or removes it holds the
    /// id's.
    locks: Vec<Mutex<()>>,
    hasher: RandomState,
}

impl Store {
    /// Opens a folder, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made or written to.
    pub(in super::super) fn open(dir: &Path, lease: Duration) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        private(dir)?;
        let probe = dir.join(".probe");
        fs::write(&probe, b"")?;
        fs::remove_file(&probe)?;
        Ok(Self {
            dir: dir.to_owned(),
            lease,
            locks: (0..LOCKS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
        })
    }

    /// A record of a request that is about to be answered.
    pub(super) fn record(
        &self,
        id: &str,
        fingerprint: &str,
        request: Map<String, Value>,
        items: Vec<Value>,
        before: usize,
    ) -> Record {
        let now = unix_time();
        Record {
            version: VERSION,
            id: id.to_owned(),
            created_at: now,
            expires_at: now.saturating_add(self.lease.as_secs()),
            fingerprint: fingerprint.to_owned(),
            request,
            items,
            before,
            response: None,
        }
    }

    fn lock(&self, owner: &str, id: &str) -> MutexGuard<'_, ()> {
        let hash = self.hasher.hash_one((owner, id));
        let lock = &self.locks[hash as usize % LOCKS];
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a new record, unless there is one of its id.
    ///
    /// # Errors
    /// The system's; nothing is stored then.
    pub(super) fn keep(&self, owner: &Owner, record: Record) -> io::Result<Kept> {
        let _lock = self.lock(owner.name(), &record.id);
        match self.load(owner, &record.id) {
            None => {
                self.write(owner, &record)?;
                Ok(Kept::As(Box::new(record)))
            }
            Some(there) if there.request == record.request => Ok(Kept::As(Box::new(there))),
            Some(_) => Ok(Kept::Taken),
        }
    }

    /// Adds the answer to a record, unless the record has one or was removed in the meantime.
    ///
    /// # Errors
    /// The system's; the record stands as it was then.
    pub(super) fn complete(&self, owner: &Owner, id: &str, response: Value) -> io::Result<()> {
        let _lock = self.lock(owner.name(), id);
        let there = self.load(owner, id);
        let Some(record) = there.filter(|there| there.response.is_none()) else {
            return Ok(());
        };
        let response = Some(response);
        self.write(owner, &Record { response, ..record })
    }

    /// Writes a record: the file is whole and durable then, or what it was.
    fn write(&self, owner: &Owner, record: &Record) -> io::Result<()> {
        let folder = self.dir.join(owner.name());
        if !folder.is_dir() {
            fs::create_dir_all(&folder)?;
            private(&folder)?;
            File::open(&self.dir)?.sync_all()?;
        }
        let name = RequestId::random();
        let partial = folder.join(format!(".{}.{PARTIAL}", name.text()));
        let written = write_whole(&partial, record)
            .and_then(|()| fs::rename(&partial, folder.join(format!("{}.json", record.id))));
        if written.is_err() {
            remove(&partial);
        }
        written.and_then(|()| File::open(&folder)?.sync_all())
    }

    /// The owner's record of this id; `None` when there is none or its lease is over.
    pub(super) fn load(&self, owner: &Owner, id: &str) -> Option<Record> {
        let bytes = fs::read(self.path(owner, id)?).ok()?;
        let record: Record = match serde_json::from_slice(&bytes) {
            Ok(record) => record,
            Err(error) => {
                tracing::warn!(id, %error, "a stored response is damaged and passed over");
                return None;
            }
        };
        let valid =
            record.version == VERSION && record.id == id && record.before <= record.items.len();
        (valid && record.expires_at > unix_time()).then_some(record)
    }

    /// Removes a record; false when there was none.
    pub(super) fn delete(&self, owner: &Owner, id: &str) -> bool {
        let _lock = self.lock(owner.name(), id);
        self.path(owner, id)
            .is_some_and(|path| fs::remove_file(path).is_ok())
    }

    /// Where a record lies; `None` when the id is none.
    fn path(&self, owner: &Owner, id: &str) -> Option<PathBuf> {
        RequestId::parse(id.strip_prefix("resp_")?)?;
        Some(self.dir.join(owner.name()).join(format!("{id}.json")))
    }

    /// Removes what has expired, what was never finished and, of each owner, what is oldest beyond
    /// the most.
    pub(in super::super) fn sweep(&self) {
        let folders = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        folders.for_each(|folder| self.sweep_folder(&folder.path(), MOST));
    }

    fn sweep_folder(&self, folder: &Path, most: usize) {
        let now = SystemTime::now();
        let mut kept: Vec<(SystemTime, PathBuf)> = Vec::new();
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(changed) = entry.metadata().and_then(|about| about.modified()) else {
                continue;
            };
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") if changed > now || self.is_leased(folder, &path) => {
                    kept.push((changed, path));
                }
                Some(PARTIAL) if changed + ABANDONED < now => remove(&path),
                _ => {}
            }
        }
        kept.sort();
        let excess = kept.len().saturating_sub(most);
        kept.iter().take(excess).for_each(|(_, path)| remove(path));
    }

    /// Looks into a file whose time of change says that it has expired: it may have been copied
    /// from elsewhere without its times, or be written just now. One that has expired is removed.
    fn is_leased(&self, folder: &Path, path: &Path) -> bool {
        let owner = folder.file_name().and_then(OsStr::to_str);
        let id = path.file_stem().and_then(OsStr::to_str);
        let _lock = self.lock(owner.unwrap_or_default(), id.unwrap_or_default());
        let lease = fs::read(path)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Lease>(&bytes).ok());
        match lease {
            Some(lease) if lease.expires_at > unix_time() => {
                if let Ok(file) = File::open(path) {
                    date(&file, lease.expires_at);
                }
                true
            }
            // A file that cannot be read is of no use to anybody.
            _ => {
                remove(path);
                false
            }
        }
    }
}

#[derive(Deserialize)]
struct Lease {
    expires_at: u64,
}

fn write_whole(path: &Path, record: &Record) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    date(&file, record.expires_at);
    file.sync_all()
}

/// Gives a file the end of its lease as its time of change. Where that cannot be, the file is read
/// when it is swept.
fn date(file: &File, expires_at: u64) {
    let Some(time) = UNIX_EPOCH.checked_add(Duration::from_secs(expires_at)) else {
        return;
    };
    if let Err(error) = file.set_modified(time) {
        tracing::debug!(%error, "a stored response has no time");
    }
}

/// Nobody else's business.
fn private(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "a stored response stays");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn store(lease: Duration) -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("responses"), lease).unwrap();
        (dir, store)
    }

    const LONG: Duration = Duration::from_secs(1000);

    fn record_of(store: &Store, id: &str) -> Record {
        store.record(id, "f", Map::new(), vec![Value::Null], 0)
    }

    fn kept(store: &Store, owner: &Owner, record: Record) -> Record {
        match store.keep(owner, record).unwrap() {
            Kept::As(record) => *record,
            Kept::Taken => panic!("the id is free"),
        }
    }

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_record_is_its_owners_until_its_lease_ends_or_it_is_deleted() {
        let (_dir, store) = store(LONG);
        let owner = Owner::anyone();
        kept(&store, &owner, record_of(&store, "resp_1"));
        assert_eq!(store.load(&owner, "resp_1").unwrap().items.len(), 1);
        assert!(store.load(&Owner::of("other"), "resp_1").is_none());
        for bad in ["resp_../x", "1", "resp_", "resp_2"] {
            assert!(store.load(&owner, bad).is_none(), "{bad}");
        }
        assert!(store.delete(&owner, "resp_1"));
        assert!(!store.delete(&owner, "resp_1"));
        assert!(store.load(&owner, "resp_1").is_none());

        let (_dir, store) = self::store(Duration::ZERO);
        kept(&store, &owner, record_of(&store, "resp_3"));
        assert!(store.load(&owner, "resp_3").is_none());
    }

    #[test]
    fn an_answer_is_added_once_and_never_to_what_was_deleted() {
        let (_dir, store) = store(LONG);
        let owner = Owner::anyone();
        kept(&store, &owner, record_of(&store, "resp_1"));
        store.complete(&owner, "resp_1", json!("first")).unwrap();
        store.complete(&owner, "resp_1", json!("second")).unwrap();
        let first = Some(json!("first"));
        assert_eq!(store.load(&owner, "resp_1").unwrap().response, first);
        // The same request again finds it whole; another one does not get its id.
        let again = kept(&store, &owner, record_of(&store, "resp_1"));
        assert_eq!(again.response, first);
        let mut other = record_of(&store, "resp_1");
        other.request.insert("input".into(), json!("else"));
        assert!(matches!(store.keep(&owner, other).unwrap(), Kept::Taken));
        assert!(store.delete(&owner, "resp_1"));
        store.complete(&owner, "resp_1", json!("late")).unwrap();
        assert!(store.load(&owner, "resp_1").is_none());
    }

    #[test]
    fn a_sweep_takes_what_is_over_of_every_owner_and_nothing_else() {
        let (dir, store) = store(LONG);
        let (owner, other) = (Owner::anyone(), Owner::of("other"));
        let folder = |owner: &Owner| dir.path().join("responses").join(owner.name());
        for id in ["resp_1", "resp_2", "resp_3"] {
            kept(&store, &owner, record_of(&store, id));
        }
        kept(
            &store,
            &other,
            Record {
                expires_at: 1,
                ..record_of(&store, "resp_1")
            },
        );
        let mine = folder(&owner);
        fs::write(mine.join("resp_4.json"), b"{\"version\":1,").unwrap();
        assert!(store.load(&owner, "resp_4").is_none(), "it is torn");
        let left = File::create(mine.join(".x.partial")).unwrap();
        left.set_modified(UNIX_EPOCH).unwrap();
        File::create(mine.join(".y.partial")).unwrap();
        // A copy without its times.
        let copied = File::open(mine.join("resp_2.json")).unwrap();
        copied.set_modified(UNIX_EPOCH).unwrap();
        store.sweep();
        assert_eq!(files(&folder(&other)), 0);
        assert_eq!(
            files(&mine),
            4,
            "three records and a file that is being written"
        );
        assert!(copied.metadata().unwrap().modified().unwrap() > SystemTime::now());
        store.sweep_folder(&mine, 1);
        assert_eq!(files(&mine), 2);
    }

    #[test]
    fn a_write_that_fails_leaves_nothing_and_what_was_there() {
        let (dir, store) = store(LONG);
        let owner = Owner::anyone();
        kept(&store, &owner, record_of(&store, "resp_1"));
        let folder = dir.path().join("responses").join(owner.name());
        // A file cannot take the place of a folder.
        fs::create_dir(folder.join("resp_2.json")).unwrap();
        assert!(store.keep(&owner, record_of(&store, "resp_2")).is_err());
        assert_eq!(files(&folder), 2);
    }
}
