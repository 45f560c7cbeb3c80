//! The cache on the disk, in the layout of `huggingface_hub`.
//!
//! A repository is `models--OWNER--NAME`: `blobs/` holds contents by their ETag, `snapshots/COMMIT/`
//! a tree of links to them, `refs/REVISION` the commit that a branch or tag was last seen at. What
//! is still coming is `blobs/ETAG.incomplete`, kept for the next attempt; a lock in `.locks/` lets
//! one program at a time write it.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::{HubError, ModelName, error::io as io_error, files, name::is_commit};
use crate::model::file;

/// One repository in the cache.
#[derive(Clone, Debug)]
pub struct RepoCache {
    root: PathBuf,
    locks: PathBuf,
}

/// Held while a blob is written; released when dropped.
#[derive(Debug)]
pub struct BlobLock {
    _file: File,
}

impl RepoCache {
    /// The place of a model in the cache folder `cache`. Nothing is created yet.
    pub fn new(cache: &Path, name: &ModelName) -> Self {
        let folder = format!("models--{}", name.repository().replace('/', "--"));
        Self {
            root: cache.join(&folder),
            locks: cache.join(".locks").join(&folder),
        }
    }

    /// Folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Content by its ETag.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// Content that is still coming.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The commit of a revision as last seen; a whole hash is its own.
    pub fn commit(&self, name: &ModelName) -> Option<String> {
        if let Some(commit) = name.commit() {
            return Some(commit.to_owned());
        }
        let text = fs::read_to_string(self.root.join("refs").join(name.revision())).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    /// Remembers the commit of a revision.
    pub fn remember(&self, name: &ModelName, commit: &str) -> Result<(), HubError> {
        if name.commit().is_some() || self.commit(name).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.root.join("refs").join(name.revision());
        make_parent(&path)?;
        // Written beside and moved, so that a reader sees the old or the new one.
        let mut beside = path.clone().into_os_string();
        beside.push(format!(".{}", std::process::id()));
        let beside = PathBuf::from(beside);
        fs::write(&beside, commit).map_err(|error| io_error("write", &beside, error))?;
        fs::rename(&beside, &path).map_err(|error| io_error("write", &path, error))
    }

    /// The files of a commit whose contents are there, by their paths in the repository.
    pub fn listing(&self, commit: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        collect(&self.snapshot(commit), "", &mut found);
        found
    }

    /// Whether a commit's file is there with this content.
    pub fn has(&self, commit: &str, file: &str, etag: &str, size: u64) -> bool {
        let link = self.snapshot(commit).join(file);
        let target = fs::canonicalize(self.blob(etag));
        let is_size = |path: &Path| fs::metadata(path).is_ok_and(|found| found.len() == size);
        is_size(&link)
            && match target {
                Ok(blob) => fs::canonicalize(&link).is_ok_and(|link| link == blob),
                // Where links cannot be made the file itself lies in the snapshot.
                Err(_) => fs::symlink_metadata(&link).is_ok_and(|found| found.is_file()),
            }
    }

    /// Makes a commit's file point at its content.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(file);
        make_parent(&link)?;
        let blob = self.blob(etag);
        let depth = file.matches('/').count() + 2;
        let relative: PathBuf = std::iter::repeat_n("..", depth)
            .collect::<PathBuf>()
            .join("blobs")
            .join(etag);
        if fs::read_link(&link).is_ok_and(|found| found == relative) {
            return Ok(());
        }
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("replace", &link, error));
            }
            _ => {}
        }
        match std::os::unix::fs::symlink(&relative, &link) {
            Ok(()) => Ok(()),
            // A disk without links: the file itself.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported
                ) =>
            {
                fs::rename(&blob, &link).map_err(|error| io_error("write", &link, error))
            }
            Err(error) => Err(io_error("write", &link, error)),
        }
    }

    /// Waits until no other program writes this blob. `waiting` is called when it has to wait.
    pub fn lock(&self, etag: &str, waiting: impl FnOnce()) -> Result<BlobLock, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        make_parent(&path)?;
        let failed = |error| io_error("lock", &path, error);
        let file = file::open_to_append(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                waiting();
                file.lock().map_err(failed)?;
            }
            Err(fs::TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(BlobLock { _file: file })
    }

    /// Creates the folder of the blobs and gives it.
    pub fn make_blobs(&self) -> Result<PathBuf, HubError> {
        let folder = self.root.join("blobs");
        fs::create_dir_all(&folder).map_err(|error| io_error("create", &folder, error))?;
        Ok(folder)
    }
}

fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|error| io_error("create", parent, error))
}

/// Adds the files under `folder`. Files are links to contents; a link to a folder is none of the
/// layout's, and may lead round in circles.
fn collect(folder: &Path, prefix: &str, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let path = format!("{prefix}{name}");
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), &format!("{path}/"), found);
        } else if entry.path().is_file() && files::is_inside(&path) {
            found.insert(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn cache() -> (tempfile::TempDir, RepoCache, ModelName) {
        let folder = tempfile::tempdir().unwrap();
        let name: ModelName = "o/n@refs/pr/1".parse().unwrap();
        let cache = RepoCache::new(folder.path(), &name);
        (folder, cache, name)
    }

    #[test]
    fn the_layout_is_the_one_of_the_python_library() {
        let (folder, cache, name) = cache();
        std::fs::write(cache.make_blobs().unwrap().join("e1"), "abc").unwrap();
        cache.link(COMMIT, "sub/x.json", "e1").unwrap();
        cache.remember(&name, COMMIT).unwrap();
        let root = folder.path().join("models--o--n");
        assert_eq!(
            fs::read_link(root.join("snapshots").join(COMMIT).join("sub/x.json")).unwrap(),
            Path::new("../../../blobs/e1")
        );
        assert_eq!(
            fs::read_to_string(root.join("refs/refs/pr/1")).unwrap(),
            COMMIT
        );
        assert_eq!(cache.commit(&name).as_deref(), Some(COMMIT));
        assert!(cache.has(COMMIT, "sub/x.json", "e1", 3));
        assert!(!cache.has(COMMIT, "sub/x.json", "e1", 4));
        assert!(!cache.has(COMMIT, "sub/x.json", "e2", 3));
        assert_eq!(
            cache.listing(COMMIT).into_iter().collect::<Vec<_>>(),
            ["sub/x.json"]
        );
    }

    #[test]
    fn a_link_without_its_content_is_no_file() {
        let (_folder, cache, _) = cache();
        std::fs::write(cache.make_blobs().unwrap().join("e1"), "abc").unwrap();
        cache.link(COMMIT, "x", "e1").unwrap();
        fs::remove_file(cache.blob("e1")).unwrap();
        assert!(cache.listing(COMMIT).is_empty());
        assert!(!cache.has(COMMIT, "x", "e1", 3));
        // A link to what it was before is replaced.
        std::fs::write(cache.blob("e2"), "defg").unwrap();
        cache.link(COMMIT, "x", "e2").unwrap();
        assert!(cache.has(COMMIT, "x", "e2", 4));
    }

    #[test]
    fn a_second_writer_waits_for_the_first() {
        let (_folder, cache, _) = cache();
        let held = cache.lock("e1", || panic!("nobody else is there")).unwrap();
        let (waits, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                cache
                    .lock("e1", || waits.send(()).unwrap())
                    .map(|_| ())
                    .unwrap();
            });
            told.recv().unwrap();
            assert!(!second.is_finished());
            drop(held);
        });
    }

    #[test]
    fn a_ref_that_is_no_commit_is_not_believed() {
        let (folder, cache, name) = cache();
        let refs = folder.path().join("models--o--n/refs/refs/pr");
        fs::create_dir_all(&refs).unwrap();
        fs::write(refs.join("1"), "../../elsewhere").unwrap();
        assert_eq!(cache.commit(&name), None);
    }
}
