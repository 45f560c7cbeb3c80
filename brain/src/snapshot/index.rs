//! What is on disk: which file holds which unit, which anchors there are, and how large all is.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::sched::{image::AnchorImage, tokens::PrefixKey, types::TokenId};

#[derive(Debug)]
pub(super) struct UnitsFile {
    pub(super) path: PathBuf,
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

/// Number of a file of units.
type FileId = u64;

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct Index {
    units: HashMap<FileId, UnitsFile>,
    ids: HashMap<PathBuf, FileId>,
    next_id: FileId,
    /// File and place in it of every unit.
    places: HashMap<PrefixKey, (FileId, usize)>,
    anchors: HashMap<(PrefixKey, Vec<TokenId>), AnchorFile>,
    /// Of all files.
    bytes: u64,
    /// Files forgotten so far.
    removals: u64,
}

impl Index {
    pub(super) fn add_units(&mut self, file: UnitsFile) {
        let id = self.next_id;
        self.next_id += 1;
        for (at, key) in file.keys.iter().enumerate() {
            self.places.insert(*key, (id, at));
        }
        self.bytes += file.bytes;
        let before = self.ids.insert(file.path.clone(), id);
        self.units.insert(id, file);
        // A file that was written again holds what it held.
        let before = before.and_then(|id| self.units.remove(&id));
        self.bytes -= before.map_or(0, |file| file.bytes);
    }

    pub(super) fn add_anchor(&mut self, file: AnchorFile) {
        let name = (file.image.key, file.image.tail.clone());
        self.bytes += file.bytes;
        let before = self.anchors.insert(name, file);
        self.bytes -= before.map_or(0, |file| file.bytes);
    }

    /// The file that holds a unit.
    pub(super) fn unit(&self, key: &PrefixKey) -> Option<&Path> {
        let (id, _) = self.places.get(key)?;
        self.units.get(id).map(|file| file.path.as_path())
    }

    pub(super) fn has_unit(&self, key: &PrefixKey) -> bool {
        self.places.contains_key(key)
    }

    pub(super) fn anchor(&self, image: &AnchorImage) -> Option<&AnchorFile> {
        self.anchors.get(&(image.key, image.tail.clone()))
    }

    /// The anchors, in no order.
    pub(super) fn images(&self) -> impl Iterator<Item = &AnchorImage> {
        self.anchors.values().map(|file| &file.image)
    }

    /// The anchors, newest first.
    pub(super) fn newest_first(&self) -> Vec<&AnchorFile> {
        let mut all: Vec<_> = self.anchors.values().collect();
        all.sort_by(|a, b| (b.saved, &b.path).cmp(&(a.saved, &a.path)));
        all
    }

    /// The keys of the units before an anchor, first first; `None` when one is missing.
    pub(super) fn chain(&self, image: &AnchorImage) -> Option<Vec<PrefixKey>> {
        let mut keys = Vec::with_capacity(image.units.min(self.places.len()));
        self.walk(image, |key, _| keys.push(key))?;
        keys.reverse();
        Some(keys)
    }

    /// Whether all units before an anchor are here.
    pub(super) fn is_complete(&self, image: &AnchorImage) -> bool {
        self.walk(image, |_, _| ()).is_some()
    }

    /// Visits the units before an anchor, last first; `None` when one is missing.
    fn walk(&self, image: &AnchorImage, mut visit: impl FnMut(PrefixKey, FileId)) -> Option<()> {
        let (mut left, mut at) = (image.units, (image.units > 0).then_some(image.key));
        // The file of the unit before: the next one is in the same, mostly.
        let mut last: Option<(FileId, &UnitsFile)> = None;
        while let Some(key) = at {
            left = left.checked_sub(1)?;
            let (id, place) = *self.places.get(&key)?;
            let file = match last {
                Some((same, file)) if same == id => file,
                _ => self.units.get(&id)?,
            };
            last = Some((id, file));
            visit(key, id);
            at = match place.checked_sub(1) {
                Some(before) => file.keys.get(before).copied(),
                None => file.parent,
            };
        }
        (left == 0).then_some(())
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Files forgotten so far: as long as this does not change, what was complete is.
    pub(super) fn removals(&self) -> u64 {
        self.removals
    }

    /// Forgets a file, of either kind.
    pub(super) fn remove(&mut self, path: &Path) {
        self.removals += 1;
        let gone = &mut self.bytes;
        self.anchors.retain(|_, file| {
            let stays = file.path != path;
            *gone -= if stays { 0 } else { file.bytes };
            stays
        });
        if let Some(id) = self.ids.remove(path) {
            self.remove_units(id);
        }
    }

    fn remove_units(&mut self, id: FileId) -> Option<PathBuf> {
        let file = self.units.remove(&id)?;
        self.bytes -= file.bytes;
        for key in &file.keys {
            if self.places.get(key).is_some_and(|(there, _)| *there == id) {
                self.places.remove(key);
            }
        }
        Some(file.path)
    }

    /// Forgets the oldest anchors until the rest has at most so many bytes, and every file of units
    /// that no anchor stands on. Returns the files.
    pub(super) fn shrink(&mut self, quota: u64) -> Vec<PathBuf> {
        let (mut needed, mut bytes) = (HashSet::new(), 0u64);
        let mut given_up = Vec::new();
        for file in self.newest_first() {
            let (mut files, mut more) = (Vec::new(), file.bytes);
            if given_up.is_empty() {
                let mut last = None;
                let complete = self.walk(&file.image, |_, id| {
                    if last.replace(id) != Some(id) {
                        files.push(id);
                    }
                });
                if complete.is_none() {
                    // Nothing goes on from it; it costs its own bytes until it is the oldest.
                    files.clear();
                }
                files.sort_unstable();
                files.dedup();
                files.retain(|id| !needed.contains(id));
                let sizes = files.iter().filter_map(|id| self.units.get(id));
                more += sizes.map(|file| file.bytes).sum::<u64>();
            }
            if given_up.is_empty() && bytes.saturating_add(more) <= quota {
                bytes += more;
                needed.extend(files);
            } else {
                given_up.push(file.path.clone());
            }
        }
        for path in &given_up {
            self.remove(path);
        }
        let needless = self.units.keys().filter(|id| !needed.contains(*id));
        for id in needless.copied().collect::<Vec<_>>() {
            self.removals += 1;
            if let Some(path) = self.remove_units(id) {
                self.ids.remove(&path);
                given_up.push(path);
            }
        }
        given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> PrefixKey {
        PrefixKey::root("index", "test", &number.to_string())
    }

    fn units(index: &mut Index, name: &str, keys: std::ops::Range<usize>, bytes: u64) {
        index.add_units(UnitsFile {
            path: name.into(),
            parent: keys.start.checked_sub(1).map(key),
            keys: keys.map(key).collect(),
            bytes,
        });
    }

    fn image(units: usize) -> AnchorImage {
        AnchorImage {
            key: key(units.saturating_sub(1)),
            units,
            tail: vec![7],
            window_first: 0,
            pin: None,
        }
    }

    fn anchor(index: &mut Index, name: &str, units: usize, bytes: u64, saved: u64) {
        index.add_anchor(AnchorFile {
            image: image(units),
            path: name.into(),
            bytes,
            saved: SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(saved),
        });
    }

    /// Three anchors in one chain over two files, and a file that nothing stands on.
    fn filled() -> Index {
        let mut index = Index::default();
        units(&mut index, "first", 0..10, 100);
        units(&mut index, "second", 10..30, 200);
        units(&mut index, "lone", 40..50, 50);
        anchor(&mut index, "short", 5, 1, 1);
        anchor(&mut index, "long", 30, 1, 2);
        anchor(&mut index, "middle", 12, 1, 3);
        index
    }

    fn sorted(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
        paths.sort();
        paths
    }

    #[test]
    fn a_chain_is_complete_or_it_is_none() {
        let mut index = filled();
        let chain = |index: &Index, units| index.chain(&image(units));
        assert_eq!(chain(&index, 30), Some((0..30).map(key).collect()));
        assert!(index.is_complete(&image(12)));
        let wrong = AnchorImage {
            units: 13,
            ..image(12)
        };
        assert!(!index.is_complete(&wrong), "a chain of another length");
        let before = index.removals();
        index.remove(Path::new("first"));
        assert!(index.removals() > before);
        assert_eq!(chain(&index, 30), None);
        assert!(!index.is_complete(&image(5)));
        units(&mut index, "first", 0..10, 100);
        assert!(index.is_complete(&image(30)));
    }

    #[test]
    fn the_oldest_anchors_go_and_what_only_they_stood_on() {
        for (quota, gone, left) in [
            (u64::MAX, &["lone"][..], 303),
            (303, &["lone"], 303),
            // The two files are needed by the newest too.
            (302, &["lone", "short"], 302),
            (301, &["lone", "long", "short"], 301),
            (
                300,
                &["first", "lone", "long", "middle", "second", "short"],
                0,
            ),
        ] {
            let mut index = filled();
            let paths: Vec<PathBuf> = gone.iter().map(PathBuf::from).collect();
            assert_eq!(sorted(index.shrink(quota)), paths, "{quota}");
            assert_eq!(index.bytes(), left, "{quota}");
            assert_eq!(index.shrink(quota), [""; 0].map(PathBuf::from));
        }
    }

    #[test]
    fn a_file_that_is_written_again_counts_once() {
        let mut index = filled();
        let bytes = index.bytes();
        units(&mut index, "second", 10..30, 200);
        anchor(&mut index, "long", 30, 1, 9);
        assert_eq!(index.bytes(), bytes);
        assert!(index.is_complete(&image(30)));
        index.remove(Path::new("second"));
        assert_eq!(index.bytes(), bytes - 200);
        assert!(!index.has_unit(&key(10)) && index.has_unit(&key(9)));
    }
}
