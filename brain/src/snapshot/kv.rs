//! The store of blocks: units and anchors in files, within a quota.

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use super::{
    Folder,
    file::{self, Content, FileError},
    index::{AnchorFile, Index, UnitsFile},
};
use crate::sched::{
    below::Found,
    image::AnchorImage,
    tokens::{PrefixKey, TokenList},
};

/// See the module's description. Shared by the engine, which reads, and a thread that writes.
#[derive(Debug)]
pub struct KvStore {
    folder: Arc<Folder>,
    quota: u64,
    index: Mutex<Index>,
}

impl KvStore {
    /// Looks through the folder. Damaged files are put into quarantine, units that no anchor
    /// stands on are removed, and so is what exceeds the quota.
    pub fn open(folder: Arc<Folder>, quota: u64) -> Self {
        let store = Self {
            folder,
            quota,
            index: Mutex::default(),
        };
        let entries = fs::read_dir(store.folder.path()).into_iter().flatten();
        for path in entries.flatten().map(|entry| entry.path()) {
            match path.extension().and_then(|kind| kind.to_str()) {
                Some("kv") => store.look_at(path),
                // Left by a brain that was killed while it wrote.
                Some("part") => remove(&path),
                _ => {}
            }
        }
        store.clean();
        store
    }

    fn look_at(&self, path: PathBuf) {
        let content = match file::read_header(&path, self.folder.identity()) {
            Ok(content) => content,
            Err(error) => return self.put_aside(&path, &error),
        };
        let Ok(metadata) = fs::metadata(&path) else {
            return;
        };
        let saved = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        self.add(path, content, metadata.len(), saved);
    }

    fn add(&self, path: PathBuf, content: Content, bytes: u64, saved: SystemTime) {
        match content {
            Content::Units { parent, keys } => self.index().add_units(UnitsFile {
                path,
                parent,
                keys,
                bytes,
            }),
            Content::Anchor(image) => self.index().add_anchor(AnchorFile {
                image,
                path,
                bytes,
                saved,
            }),
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a unit is here.
    pub fn has_unit(&self, key: &PrefixKey) -> bool {
        self.index().has_unit(key)
    }

    /// The first units of a chain, from number `from` on, that are neither here nor elsewhere: the
    /// numbers of those that follow each other. `None` when all are somewhere.
    pub fn first_missing(
        &self,
        chain: &[PrefixKey],
        from: usize,
        elsewhere: impl Fn(&PrefixKey) -> bool,
    ) -> Option<Range<usize>> {
        let index = self.index();
        let there = |key: &PrefixKey| index.has_unit(key) || elsewhere(key);
        let rest = chain.get(from..)?;
        let first = rest.iter().position(|key| !there(key))?;
        let many = rest[first..].iter().take_while(|key| !there(key)).count();
        Some(from + first..from + first + many)
    }

    /// Files given up so far. As long as this does not change, an anchor that was here is.
    pub fn removals(&self) -> u64 {
        self.index().removals()
    }

    /// Whether an anchor is here, whole and with the same pin.
    pub fn has_anchor(&self, image: &AnchorImage) -> bool {
        let index = self.index();
        index
            .anchor(image)
            .is_some_and(|file| file.image == *image && index.is_complete(image))
    }

    /// The anchor here that spares the most of the tokens, if more than `above`. The device has the
    /// first `known` units, and others may be had elsewhere.
    pub fn best(
        &self,
        tokens: &TokenList,
        stride: usize,
        known: usize,
        above: usize,
        elsewhere: impl Fn(&PrefixKey) -> bool,
    ) -> Option<Found> {
        let index = self.index();
        let there = |unit: &usize| {
            let key = tokens.key(*unit);
            key.is_some_and(|key| index.has_unit(&key) || elsewhere(&key))
        };
        let reach = known + (known + 1..).take_while(there).count();
        let fits = |image: &&AnchorImage| {
            image.units <= reach && tokens.key(image.units) == Some(image.key)
        };
        let best = index
            .images()
            .filter(fits)
            .map(|image| (image.spares(tokens, stride), image))
            .max_by_key(|(spares, _)| *spares);
        let (_, image) = best.filter(|(spares, _)| *spares > above)?;
        let chain = (1..=image.units).map_while(|unit| tokens.key(unit));
        Some(Found {
            image: image.clone(),
            chain: chain.collect(),
        })
    }

    /// Bytes of the file of an anchor; 0 when it is not here.
    pub fn anchor_bytes(&self, image: &AnchorImage) -> u64 {
        self.index().anchor(image).map_or(0, |file| file.bytes)
    }

    /// The anchors, newest first, each with the keys of its units; incomplete ones are left out.
    pub fn anchors(&self) -> Vec<(AnchorImage, Vec<PrefixKey>)> {
        let index = self.index();
        let all = index.newest_first().into_iter();
        all.filter_map(|file| Some((file.image.clone(), index.chain(&file.image)?)))
            .collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.index().bytes()
    }

    /// Saves blocks. Beyond the quota the oldest anchors go.
    ///
    /// # Errors
    /// The system's, such as a full disk. What was saved before is untouched.
    pub fn write(&self, content: Content, data: &[u8]) -> io::Result<()> {
        let path = self.folder.path().join(file_name(&content));
        let bytes = file::write(&path, self.folder.identity(), &content, data)?;
        // Until their anchor comes, units look needless: what exceeds the quota goes with it.
        let complete = matches!(content, Content::Anchor(_));
        self.add(path, content, bytes, SystemTime::now());
        if complete && self.bytes() > self.quota {
            self.clean();
        }
        Ok(())
    }

    /// The units of the file that holds this one, and their bytes. A file that is not what it says
    /// is put into quarantine.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn read_units(&self, key: &PrefixKey) -> Result<(Vec<PrefixKey>, Vec<u8>), FileError> {
        let path = self.index().unit(key).map(Path::to_owned);
        let path = path.ok_or(FileError::Gone)?;
        match self.read(&path)? {
            (Content::Units { keys, .. }, data) => Ok((keys, data)),
            _ => Err(FileError::Damaged("it holds no units")),
        }
    }

    /// The bytes of an anchor's own blocks.
    ///
    /// # Errors
    /// Why they cannot be used.
    pub fn read_anchor(&self, image: &AnchorImage) -> Result<Vec<u8>, FileError> {
        let path = self.index().anchor(image).map(|file| file.path.clone());
        let path = path.ok_or(FileError::Gone)?;
        self.read(&path).map(|(_, data)| data)
    }

    fn read(&self, path: &Path) -> Result<(Content, Vec<u8>), FileError> {
        let read = file::read(path, self.folder.identity());
        if let Err(error) = &read {
            // What cannot be read is not here; it is computed and written again.
            self.index().remove(path);
            self.put_aside(path, error);
        }
        read
    }

    /// Puts a file that is not what it says into quarantine. One that the system does not give now
    /// stays where it is.
    fn put_aside(&self, path: &Path, error: &FileError) {
        if error.is_the_files() {
            self.folder.quarantine(path, &error.to_string());
        } else if !matches!(error, FileError::Gone) {
            tracing::warn!(file = %path.display(), %error, "a snapshot file cannot be read; it stays");
        }
    }

    /// Gives up the oldest anchors until the rest fits the quota, and units that nothing needs.
    fn clean(&self) {
        let given_up = self.index().shrink(self.quota);
        // Nobody who looks something up waits for the disk.
        for path in given_up {
            remove(&path);
        }
    }
}

/// A file that cannot be removed is in nobody's way but the disk's.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!(file = %path.display(), %error, "a snapshot file cannot be removed");
    }
}

fn file_name(content: &Content) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("marathon brain snapshot file 1");
    let kind = match content {
        Content::Units { keys, .. } => {
            for key in keys {
                hasher.update(&key.0);
            }
            "units"
        }
        Content::Anchor(image) => {
            hasher.update(&image.key.0);
            for token in &image.tail {
                hasher.update(&token.to_le_bytes());
            }
            "anchor"
        }
    };
    format!("{kind}-{}.kv", &hasher.finalize().to_hex()[..32])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Identity;

    fn store(root: &Path, quota: u64) -> KvStore {
        let identity = Identity {
            fingerprint: "f".into(),
            layout: "l".into(),
        };
        KvStore::open(Arc::new(Folder::open(root, identity).unwrap()), quota)
    }

    fn key(number: usize) -> PrefixKey {
        PrefixKey::root("store", "test", &number.to_string())
    }

    fn units(keys: Range<usize>) -> Content {
        Content::Units {
            parent: keys.start.checked_sub(1).map(key),
            keys: keys.map(key).collect(),
        }
    }

    fn anchor(units: usize) -> AnchorImage {
        AnchorImage {
            key: key(units - 1),
            units,
            tail: vec![7],
            window_first: 0,
            pin: None,
        }
    }

    fn quarantined(store: &KvStore) -> usize {
        let quarantine = store.folder.path().join("quarantine");
        fs::read_dir(quarantine).unwrap().count()
    }

    #[test]
    fn only_a_file_that_is_at_fault_is_put_aside() {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path(), u64::MAX);
        let path = store.folder.path().join(file_name(&units(0..2)));
        let write = || {
            store.write(units(0..2), b"some blocks").unwrap();
            assert_eq!(store.read_units(&key(1)).unwrap().1, b"some blocks");
        };
        write();
        fs::remove_file(&path).unwrap();
        assert!(matches!(store.read_units(&key(1)), Err(FileError::Gone)));
        assert!(!store.has_unit(&key(1)), "it is computed again");
        write();
        fs::remove_file(&path).unwrap();
        // A folder in its place stands in for a system that gives an error.
        fs::create_dir(&path).unwrap();
        assert!(matches!(store.read_units(&key(1)), Err(FileError::Io(_))));
        assert!(path.exists() && !store.has_unit(&key(1)));
        assert_eq!(quarantined(&store), 0);
        fs::remove_dir(&path).unwrap();
        write();
        fs::write(&path, "x").unwrap();
        let damaged = store.read_units(&key(1));
        assert!(matches!(damaged, Err(FileError::Damaged(_))));
        assert!(!path.exists());
        assert_eq!(quarantined(&store), 1);
    }

    #[test]
    fn the_first_missing_units_follow_each_other() {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path(), u64::MAX);
        let chain: Vec<_> = (0..10).map(key).collect();
        let nowhere = |_: &PrefixKey| false;
        assert_eq!(store.first_missing(&chain, 0, nowhere), Some(0..10));
        store.write(units(0..3), b"x").unwrap();
        store.write(units(6..8), b"x").unwrap();
        assert_eq!(store.first_missing(&chain, 0, nowhere), Some(3..6));
        assert_eq!(store.first_missing(&chain, 4, nowhere), Some(4..6));
        assert_eq!(store.first_missing(&chain, 6, nowhere), Some(8..10));
        assert_eq!(store.first_missing(&chain, 11, nowhere), None);
        let elsewhere = |there: &PrefixKey| *there == key(4);
        assert_eq!(store.first_missing(&chain, 0, elsewhere), Some(3..4));
        store.write(units(3..6), b"x").unwrap();
        store.write(units(8..10), b"x").unwrap();
        assert_eq!(store.first_missing(&chain, 0, nowhere), None);
    }

    #[test]
    fn what_goes_for_the_quota_is_counted_and_leaves_the_disk() {
        let root = tempfile::tempdir().unwrap();
        let bytes = {
            let store = store(root.path(), u64::MAX);
            store.write(units(0..5), &[1; 1000]).unwrap();
            store.write(Content::Anchor(anchor(5)), &[1; 100]).unwrap();
            store.write(units(5..10), &[1; 1000]).unwrap();
            assert!(store.has_anchor(&anchor(5)));
            store.bytes()
        };
        let store = store(root.path(), bytes);
        let before = store.removals();
        store.write(units(5..10), &[1; 1000]).unwrap();
        assert_eq!(store.removals(), before, "until their anchor comes");
        store.write(Content::Anchor(anchor(10)), &[1; 100]).unwrap();
        assert!(store.removals() > before && store.bytes() <= bytes);
        assert!(store.has_anchor(&anchor(10)) && !store.has_anchor(&anchor(5)));
        let files = fs::read_dir(store.folder.path()).unwrap().flatten();
        let files = files.filter(|entry| entry.path().extension() == Some("kv".as_ref()));
        assert_eq!(files.count(), 3);
    }
}
