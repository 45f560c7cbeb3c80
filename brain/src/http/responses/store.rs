//! Responses on disk, so that a later request can build on one and a lost stream can be read
//! again, a restart in between included.
//!
//! A record holds the request; what it generated is a function of it, so a record whose answer is
//! missing or torn loses nothing.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::{identity::RequestId, models::unix_time};
use crate::callers::Owner;

/// Responses of one owner, at most; the oldest make room.
const MOST: usize = 10_000;
/// Writes between two looks at what has expired.
const SWEEP_EVERY: usize = 64;

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

/// The folder of responses.
#[derive(Debug)]
pub(in super::super) struct Store {
    dir: PathBuf,
    lease: Duration,
    writes: AtomicUsize,
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
            writes: AtomicUsize::new(0),
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

    /// Writes a record; the file is whole or not there.
    pub(super) fn save(&self, owner: &Owner, record: &Record) -> io::Result<()> {
        let folder = self.dir.join(owner.name());
        if !folder.is_dir() {
            fs::create_dir_all(&folder)?;
            private(&folder)?;
        }
        if self
            .writes
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(SWEEP_EVERY)
        {
            sweep(&folder);
        }
        let path = folder.join(format!("{}.json", record.id));
        let partial = folder.join(format!(".{}.partial", record.id));
        fs::write(&partial, serde_json::to_vec(record)?)?;
        fs::rename(&partial, &path)
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
        self.path(owner, id)
            .is_some_and(|path| fs::remove_file(path).is_ok())
    }

    /// Where a record lies; `None` when the id is none.
    fn path(&self, owner: &Owner, id: &str) -> Option<PathBuf> {
        RequestId::parse(id.strip_prefix("resp_")?)?;
        Some(self.dir.join(owner.name()).join(format!("{id}.json")))
    }
}

/// Nobody else's business.
fn private(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

/// Removes what has expired and, beyond the most, what is oldest.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let now = unix_time();
    let mut kept: Vec<(u64, PathBuf)> = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let times = fs::read(&path)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Times>(&bytes).ok());
        match times {
            Some(times) if times.expires_at > now => kept.push((times.created_at, path)),
            // A file that cannot be read is of no use to anybody.
            _ => remove(&path),
        }
    }
    kept.sort();
    let excess = kept.len().saturating_sub(MOST);
    kept.iter().take(excess).for_each(|(_, path)| remove(path));
}

#[derive(Deserialize)]
struct Times {
    created_at: u64,
    expires_at: u64,
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "a stored response stays");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(lease: Duration) -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("responses"), lease).unwrap();
        (dir, store)
    }

    #[test]
    fn a_record_is_its_owners_until_its_lease_ends_or_it_is_deleted() {
        let (_dir, store) = store(Duration::from_secs(1000));
        let owner = Owner::anyone();
        let record = store.record("resp_1", "f", Map::new(), vec![Value::Null], 0);
        store.save(&owner, &record).unwrap();
        assert_eq!(store.load(&owner, "resp_1").unwrap().items.len(), 1);
        assert!(store.load(&Owner::of("other"), "resp_1").is_none());
        for bad in ["resp_../x", "1", "resp_", "resp_2"] {
            assert!(store.load(&owner, bad).is_none(), "{bad}");
        }
        assert!(store.delete(&owner, "resp_1"));
        assert!(!store.delete(&owner, "resp_1"));
        assert!(store.load(&owner, "resp_1").is_none());

        let (_dir, store) = self::store(Duration::ZERO);
        store.save(&owner, &record_of(&store, "resp_3")).unwrap();
        assert!(store.load(&owner, "resp_3").is_none());
    }

    fn record_of(store: &Store, id: &str) -> Record {
        store.record(id, "f", Map::new(), Vec::new(), 0)
    }

    #[test]
    fn a_torn_file_is_passed_over_and_swept() {
        let (dir, store) = store(Duration::from_secs(1000));
        let owner = Owner::anyone();
        store.save(&owner, &record_of(&store, "resp_1")).unwrap();
        let folder = dir.path().join("responses").join(owner.name());
        let torn = folder.join("resp_2.json");
        fs::write(&torn, b"{\"version\":1,").unwrap();
        assert!(store.load(&owner, "resp_2").is_none());
        sweep(&folder);
        assert!(!torn.exists());
        assert!(store.load(&owner, "resp_1").is_some());
    }
}
