//! What must reach the disk, and in which order.
//!
//! sled's `flush()` asks Linux for `sync_file_range`, which does not commit a file's new length: a
//! power cut then takes acknowledged records with it. So each synced commit ends with `fdatasync`
//! on sled's own file, through the [`Barrier`] here. It is a trait so that a test can count the
//! calls and make one fail.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::Path,
};

/// Makes file content durable.
pub trait Barrier: Send + Sync {
    /// Content and length of `file` survive a power cut when this returns.
    fn sync_data(&self, file: &File) -> io::Result<()>;
}

/// The real one.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskBarrier;

impl Barrier for DiskBarrier {
    fn sync_data(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }
}

/// Makes the names in a folder durable.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes `folder` and what is missing above it, for its owner alone. The names of those that it made
/// are durable when it returns.
pub fn make_folders(folder: &Path) -> io::Result<()> {
    let missing = folder
        .ancestors()
        .take_while(|place| !place.as_os_str().is_empty() && !place.exists());
    let missing: Vec<&Path> = missing.collect();
    for place in missing.into_iter().rev() {
        match DirBuilder::new().mode(0o700).create(place) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            // Somebody else may have been faster.
            _ => sync_folder(above(place))?,
        }
    }
    Ok(())
}

/// Makes durable the name of `folder` and of every folder on the way to it in the same file system:
/// whoever made them may have died before that.
pub fn sync_way_to(folder: &Path) -> io::Result<()> {
    let folder = folder.canonicalize()?;
    let device = fs::metadata(&folder)?.dev();
    for place in folder.ancestors().skip(1) {
        if fs::metadata(place)?.dev() != device {
            break;
        }
        match sync_folder(place) {
            // Nobody who may not even look into it has made a name in it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Makes `folder`, which must exist, its owner's alone.
pub fn make_private(folder: &Path) -> io::Result<()> {
    let mode = fs::metadata(folder)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

fn above(place: &Path) -> &Path {
    match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes every file and folder below `folder`, and itself, durable.
pub fn sync_tree(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_tree(&entry.path())?;
        } else if kind.is_file() {
            File::open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(folder)
}

/// Creates or replaces a small file so that a crash leaves the old content or the new, and returns
/// when the new is durable.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = above(path);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let temporary = folder.join(name);
    let mut file = File::create(&temporary)?;
    io::Write::write_all(&mut file, content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_folder(folder)
}

/// Bytes that an ordinary user may still write on the disk of `folder`.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_made_all_the_way_and_are_their_owners() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("a/b/c");
        for _ in 0..2 {
            make_folders(&deep).unwrap();
            for place in ["a", "a/b", "a/b/c"] {
                let mode = fs::metadata(root.path().join(place)).unwrap().mode();
                assert_eq!(mode & 0o777, 0o700, "{place}");
            }
            sync_way_to(&deep).unwrap();
        }
        fs::write(root.path().join("file"), "").unwrap();
        assert!(make_folders(&root.path().join("file/x")).is_err());
    }
}
