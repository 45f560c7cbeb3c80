//! The demo's own folder, gone at the end unless it is to be kept.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use super::random::Random;

/// A new folder for temporary things that only this user can enter.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    keep: bool,
}

impl Folder {
    /// Makes it. With `keep` it stays.
    pub fn new(keep: bool) -> io::Result<Self> {
        // A link in the way there (`/tmp` on some systems) would make a name of two.
        let parent = std::env::temp_dir().canonicalize()?;
        let mut random = Random::new(u64::from(std::process::id()));
        for _ in 0..100 {
            let path = parent.join(format!("pilot-demo-{:08x}", random.bits() as u32));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self { path, keep }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From here on it stays, because someone should look into it.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep {
            // What cannot be removed is in a folder for temporary things.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_unless_kept() {
        let (first, mut second) = (Folder::new(false).unwrap(), Folder::new(false).unwrap());
        assert_ne!(first.path(), second.path());
        fs::write(first.path().join("x"), "x").unwrap();
        second.keep();
        let (gone, kept) = (first.path().to_owned(), second.path().to_owned());
        drop(first);
        drop(second);
        assert!(!gone.exists() && kept.is_dir());
        fs::remove_dir(kept).unwrap();
    }
}
