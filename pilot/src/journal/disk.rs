//! What must reach the disk, and in which order.
//!
//! sled's `flush()` asks Linux for `sync_file_range`, which does not commit a file's new length: a
//! power cut then takes acknowledged records with it. So each synced commit ends with `fdatasync`
//! on sled's own file, through the [`Barrier`] here. It is a trait so that a test can count the
//! calls and make one fail.

use std::{
    fs::{self, File},
    io,
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
    let folder = path.parent().unwrap_or(Path::new("."));
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
