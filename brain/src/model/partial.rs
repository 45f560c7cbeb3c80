//! Downloads that have not finished, told from files that were never there.

use std::path::{Path, PathBuf};

/// What download programs call a file that they are still writing.
const ENDINGS: [&str; 4] = ["incomplete", "part", "aria2", "crdownload"];

/// What says that a file which is there, perhaps in its full length, is still being written.
pub(crate) fn marked(file: &Path) -> Option<PathBuf> {
    let name = file.file_name()?;
    ENDINGS.iter().find_map(|ending| {
        let mut marker = name.to_owned();
        marker.push(".");
        marker.push(ending);
        let marker = file.with_file_name(marker);
        marker.symlink_metadata().is_ok().then_some(marker)
    })
}

/// The unfinished download of a file that is missing from `folder`, if one is to be seen: beside
/// it, or where the hub's client keeps it for a plain folder or for a snapshot in its cache.
pub(super) fn unfinished(folder: &Path, file: &str) -> Option<PathBuf> {
    let named = |path: &PathBuf| {
        let name = path.file_name().map(|n| n.to_string_lossy());
        name.is_some_and(|n| n.starts_with(file))
    };
    let beside = [
        folder.to_owned(),
        folder.join(".cache/huggingface/download"),
    ];
    if let Some(found) = beside.iter().flat_map(|dir| partial(dir)).find(named) {
        return Some(found);
    }
    // The cache names its files by content, so that any could be the one.
    let blobs = folder.join("../../blobs");
    partial(&blobs).into_iter().next()
}

fn partial(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|path| {
            let ending = path.extension().and_then(|e| e.to_str());
            ending.is_some_and(|e| ENDINGS.contains(&e))
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_still_being_written_is_marked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, "whole by its length").unwrap();
        std::fs::write(folder.path().join("other.safetensors.part"), "").unwrap();
        assert_eq!(marked(&file), None);
        for ending in ENDINGS {
            let marker = folder.path().join(format!("model.safetensors.{ending}"));
            std::fs::write(&marker, "").unwrap();
            assert_eq!(marked(&file).as_ref(), Some(&marker));
            std::fs::remove_file(&marker).unwrap();
        }
    }

    #[test]
    fn downloads_are_found_where_they_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("snapshots/abc");
        let hub = folder.join(".cache/huggingface/download");
        std::fs::create_dir_all(&hub).unwrap();
        std::fs::create_dir_all(root.path().join("blobs")).unwrap();
        let shard = "model-00002-of-00002.safetensors";
        assert_eq!(unfinished(&folder, shard), None);
        let blob = root.path().join("blobs/0123.incomplete");
        std::fs::write(&blob, b"").unwrap();
        assert!(
            unfinished(&folder, shard)
                .unwrap()
                .ends_with("blobs/0123.incomplete")
        );
        std::fs::write(
            hub.join("model-00001-of-00002.safetensors.77.incomplete"),
            b"",
        )
        .unwrap();
        assert!(
            unfinished(&folder, shard)
                .unwrap()
                .ends_with("blobs/0123.incomplete")
        );
        let ours = hub.join(format!("{shard}.88.incomplete"));
        std::fs::write(&ours, b"").unwrap();
        assert_eq!(unfinished(&folder, shard), Some(ours));
        let part = folder.join(format!("{shard}.part"));
        std::fs::write(&part, b"").unwrap();
        assert_eq!(unfinished(&folder, shard), Some(part));
    }
}
