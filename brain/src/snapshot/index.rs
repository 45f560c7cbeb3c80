//! What is on disk: which file holds which unit, which anchors there are, and how large all is.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::sched::{image::AnchorImage, tokens::PrefixKey, types::TokenId};

#[derive(Debug)]
pub(super) struct UnitsFile {
    pub(super) parent: Option<PrefixKey>,
    pub(super) keys: Vec<PrefixKey>,
    pub(super) bytes: u64,
}

#[derive(Debug)]
pub(super) struct AnchorFile {
    pub(super) image: AnchorImage,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) saved: SystemTime,
}

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct Index {
    units: BTreeMap<PathBuf, UnitsFile>,
    /// File and place in it of every unit.
    places: HashMap<PrefixKey, (PathBuf, usize)>,
    anchors: HashMap<(PrefixKey, Vec<TokenId>), AnchorFile>,
}

impl Index {
    pub(super) fn add_units(&mut self, path: PathBuf, file: UnitsFile) {
        for (at, key) in file.keys.iter().enumerate() {
            self.places.insert(*key, (path.clone(), at));
        }
        self.units.insert(path, file);
    }

    pub(super) fn add_anchor(&mut self, file: AnchorFile) {
        let name = (file.image.key, file.image.tail.clone());
        self.anchors.insert(name, file);
    }

    /// The file that holds a unit.
    pub(super) fn unit(&self, key: &PrefixKey) -> Option<&Path> {
        self.places.get(key).map(|(path, _)| path.as_path())
    }

    pub(super) fn anchor(&self, image: &AnchorImage) -> Option<&AnchorFile> {
        self.anchors.get(&(image.key, image.tail.clone()))
    }

    /// The anchors, in no order.
    pub(super) fn images(&self) -> impl Iterator<Item = &AnchorImage> {
        self.anchors.values().map(|file| &file.image)
    }

    /// The anchors, newest first.
    pub(super) fn newest_first(&self) -> Vec<&AnchorImage> {
        let mut all: Vec<_> = self.anchors.values().collect();
        all.sort_by(|a, b| (b.saved, &b.path).cmp(&(a.saved, &a.path)));
        all.into_iter().map(|file| &file.image).collect()
    }

    /// The keys of the units before an anchor, first first; `None` when one is missing.
    pub(super) fn chain(&self, image: &AnchorImage) -> Option<Vec<PrefixKey>> {
        let mut keys = Vec::new();
        let mut at = (image.units > 0).then_some(image.key);
        while let Some(key) = at {
            if keys.len() == image.units {
                return None;
            }
            keys.push(key);
            let (path, place) = self.places.get(&key)?;
            let file = self.units.get(path)?;
            at = match place.checked_sub(1) {
                Some(before) => file.keys.get(before).copied(),
                None => file.parent,
            };
        }
        keys.reverse();
        (keys.len() == image.units).then_some(keys)
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        let units: u64 = self.units.values().map(|file| file.bytes).sum();
        let anchors: u64 = self.anchors.values().map(|file| file.bytes).sum();
        units + anchors
    }

    /// Forgets a file, of either kind.
    pub(super) fn remove(&mut self, path: &Path) {
        self.anchors.retain(|_, file| file.path != path);
        let keys = self.units.remove(path).map(|file| file.keys);
        for key in keys.into_iter().flatten() {
            if self.unit(&key) == Some(path) {
                self.places.remove(&key);
            }
        }
    }

    /// The file to give up next: the oldest anchor's.
    pub(super) fn oldest(&self) -> Option<PathBuf> {
        let files = self.anchors.values();
        let oldest = files.min_by_key(|file| (file.saved, &file.path));
        oldest.map(|file| file.path.clone())
    }

    /// Files of units that no anchor stands on.
    pub(super) fn needless(&self) -> Vec<PathBuf> {
        let mut needed = BTreeSet::new();
        for file in self.anchors.values() {
            let chain = self.chain(&file.image).unwrap_or_default();
            needed.extend(chain.iter().filter_map(|key| self.unit(key)));
        }
        let all = self
            .units
            .keys()
            .filter(|path| !needed.contains(path.as_path()));
        all.cloned().collect()
    }
}
