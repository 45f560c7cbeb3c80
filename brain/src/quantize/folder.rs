//! The folder of the result: how it is taken, and how files come into it, each whole and synced or
//! not at all.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use super::{
    journal,
    layout::Layout,
    report,
    run::{QuantizeError, READ, at},
};
use crate::model::{file, index::INDEX};

/// Room that configuration, index and report take beside the weights and what is copied.
const BESIDE: u64 = 64 << 20;

/// A folder that was taken.
#[derive(Debug)]
pub(super) struct Claimed {
    target: PathBuf,
    /// Folders that were made for it, itself first.
    made: Vec<PathBuf>,
}

impl Claimed {
    /// The outermost folder above it that had to be made, if any.
    pub(super) fn above(&self) -> Option<&Path> {
        self.made.iter().skip(1).next_back().map(PathBuf::as_path)
    }

    /// Takes away what was made in it, and what was made of folders if nothing else is in them.
    pub(super) fn give_back(self, layout: &Layout, copied: &[Copied]) {
        // What cannot be taken away stays: the error that led here is what is told.
        for shard in &layout.shards {
            let _ = fs::remove_file(self.target.join(&shard.file));
            let _ = fs::remove_file(beside(&self.target, &shard.file));
        }
        for copy in copied {
            if let Some(name) = copy.from.file_name() {
                let _ = fs::remove_file(beside(&copy.folder, name));
            }
        }
        for folder in self.made {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Takes the folder if it is new, empty, or holds unfinished work of these files and nothing else.
pub(super) fn claim(
    target: &Path,
    source: &Path,
    layout: &Layout,
    copied: &[Copied],
) -> Result<Claimed, QuantizeError> {
    if !target.exists() && target.symlink_metadata().is_ok() {
        return Err(QuantizeError::DeadLink(target.to_owned()));
    }
    let real = |path: &Path| fs::canonicalize(path).map_err(at(READ, path));
    let named = |path: &Path| match path.as_os_str().is_empty() {
        true => PathBuf::from("."),
        false => path.to_owned(),
    };
    let (missing, there): (Vec<PathBuf>, Vec<PathBuf>) =
        target.ancestors().map(named).partition(|p| !p.exists());
    // Looked at before anything is made, so that nothing has to be taken away again.
    if let Some(nearest) = there.first()
        && real(nearest)?.starts_with(real(source)?)
    {
        return Err(QuantizeError::Inside(target.to_owned()));
    }
    fs::create_dir_all(target).map_err(at("make", target))?;
    for parent in missing.iter().filter_map(|made| made.parent()).map(named) {
        sync_folder(&parent)?;
    }
    check_content(target, layout, copied)?;
    Ok(Claimed {
        target: target.to_owned(),
        made: missing,
    })
}

fn check_content(target: &Path, layout: &Layout, copied: &[Copied]) -> Result<(), QuantizeError> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(target).map_err(at(READ, target))? {
        entries.push(entry.map_err(at(READ, target))?.file_name());
    }
    if !entries.is_empty() && !target.join(journal::FILE).is_file() {
        return Err(QuantizeError::Exists(target.to_owned()));
    }
    let shards = layout.shards.iter().map(|s| s.file.as_str());
    let ours: BTreeSet<&OsStr> = WRITTEN
        .into_iter()
        .chain(shards)
        .chain([ASSISTANT])
        .map(OsStr::new)
        .chain(copied.iter().filter_map(|c| c.from.file_name()))
        .collect();
    // Hidden ones, of this program and of others, are in nobody's way.
    let hidden = |name: &OsString| name.as_encoded_bytes().starts_with(b".");
    let foreign = |name: &&OsString| !ours.contains(name.as_os_str()) && !hidden(name);
    match entries.iter().find(foreign) {
        None => Ok(()),
        Some(file) => Err(QuantizeError::Foreign {
            folder: target.to_owned(),
            file: file.to_string_lossy().into_owned(),
        }),
    }
}

/// The folder of an assistant within that of its model.
const ASSISTANT: &str = "assistant";

/// What is written beside the weights.
const WRITTEN: [&str; 5] = [
    "config.json",
    "hf_quant_config.json",
    INDEX,
    journal::FILE,
    report::FILE,
];

/// An error unless the disk holds the files of weights `open`, bytes all together, and all that comes
/// beside them.
pub(super) fn check_room(folder: &Path, open: u64, copied: &[Copied]) -> Result<(), QuantizeError> {
    let copied: u64 = copied.iter().map(|c| c.bytes).sum();
    let needed = open.saturating_add(copied).saturating_add(BESIDE);
    let about = rustix::fs::statvfs(folder).map_err(|e| at("measure", folder)(e.into()))?;
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    if free < needed {
        return Err(QuantizeError::NoRoom {
            folder: folder.to_owned(),
            free,
            needed,
        });
    }
    Ok(())
}

/// Where a file is written before it gets its name.
pub(super) fn beside(target: &Path, file: impl AsRef<OsStr>) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(file);
    name.push(".partial");
    target.join(name)
}

/// Gives a file that is written its name, for good.
pub(super) fn settle(
    target: &Path,
    file: impl AsRef<OsStr>,
    written: &File,
) -> Result<(), QuantizeError> {
    let (from, to) = (beside(target, &file), target.join(file.as_ref()));
    written.sync_all().map_err(at("write", &to))?;
    fs::rename(&from, &to).map_err(at("write", &to))?;
    sync_folder(target)
}

fn sync_folder(folder: &Path) -> Result<(), QuantizeError> {
    let opened = File::open(folder).map_err(at("open", folder))?;
    opened.sync_all().map_err(at("write", folder))
}

pub(super) fn write_small(target: &Path, file: &str, bytes: &[u8]) -> Result<(), QuantizeError> {
    let path = beside(target, file);
    let written = File::create(&path).map_err(at("write", &path))?;
    written.write_all_at(bytes, 0).map_err(at("write", &path))?;
    settle(target, file, &written)
}

/// A file of the source that is copied as it is.
#[derive(Debug)]
pub(super) struct Copied {
    from: PathBuf,
    /// The folder that it comes into.
    folder: PathBuf,
    bytes: u64,
}

impl Copied {
    /// All that is copied: what stands beside the weights, and the assistant.
    pub(super) fn all(source: &Path, target: &Path) -> Result<Vec<Self>, QuantizeError> {
        let mut all = Self::of_folder(source, target, is_copied)?;
        let assistant = source.join(ASSISTANT);
        // One that is there and cannot be read is an error, not a model without a drafter.
        if file::is_there(&assistant).map_err(at(READ, &assistant))? {
            let target = target.join(ASSISTANT);
            all.extend(Self::of_folder(&assistant, &target, |name| {
                !name.starts_with('.')
            })?);
        }
        Ok(all)
    }

    fn of_folder(
        from: &Path,
        to: &Path,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<Self>, QuantizeError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(from).map_err(at(READ, from))? {
            let path = entry.map_err(at(READ, from))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let Ok(about) = path.metadata() else {
                continue;
            };
            if about.is_file() && wanted(&name) {
                found.push(Self {
                    folder: to.to_owned(),
                    bytes: about.len(),
                    from: path,
                });
            }
        }
        Ok(found)
    }

    /// Copies it.
    pub(super) fn copy(&self) -> Result<(), QuantizeError> {
        let Some(name) = self.from.file_name() else {
            return Ok(());
        };
        if !self.folder.exists() {
            fs::create_dir_all(&self.folder).map_err(at("make", &self.folder))?;
        }
        let mut from = file::open(&self.from).map_err(at(READ, &self.from))?;
        let path = beside(&self.folder, name);
        let mut written = File::create(&path).map_err(at("write", &path))?;
        io::copy(&mut from, &mut written).map_err(at("write", &path))?;
        settle(&self.folder, name, &written)
    }
}

/// Files that are not copied: weights in whatever format, and what is written anew.
fn is_copied(name: &str) -> bool {
    const WEIGHTS: [&str; 9] = [
        "safetensors",
        "bin",
        "pt",
        "pth",
        "gguf",
        "onnx",
        "msgpack",
        "h5",
        "incomplete",
    ];
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    !name.starts_with('.') && !WEIGHTS.contains(&extension) && !WRITTEN.contains(&name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn nothing() -> Layout {
        Layout {
            shards: Vec::new(),
            encoded: BTreeSet::new(),
            kept: BTreeSet::new(),
        }
    }

    #[test]
    fn a_folder_that_is_not_taken_is_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let own = source.join("own");
        fs::create_dir_all(&own).unwrap();
        for inside in [own.clone(), source.join("new/deep"), own.join("../x")] {
            let refused = claim(&inside, &source, &nothing(), &[]).unwrap_err();
            assert!(matches!(refused, QuantizeError::Inside(_)), "{refused}");
        }
        let left: Vec<_> = fs::read_dir(&source).unwrap().collect();
        assert!(own.is_dir() && left.len() == 1, "{left:?}");
    }

    #[test]
    fn folders_that_are_made_above_the_result_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::create_dir(&source).unwrap();
        let path = |name: &str| dir.path().join(name);
        let take = |name: &str| claim(&path(name), &source, &nothing(), &[]);
        assert_eq!(take("new").unwrap().above(), None);
        assert_eq!(take("new").unwrap().above(), None);
        let made = take("a/b/c").unwrap();
        assert_eq!(made.above(), Some(path("a").as_path()));
        assert!(path("a/b/c").is_dir());
        // What was made for nothing is taken away, and nothing else.
        made.give_back(&nothing(), &[]);
        assert!(!path("a").exists());
        take("new").unwrap().give_back(&nothing(), &[]);
        assert!(path("new").is_dir());
    }

    #[test]
    fn unfinished_work_is_taken_up_only_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("s"), dir.path().join("t"));
        fs::create_dir(&source).unwrap();
        fs::write(source.join("tokenizer.json"), "x").unwrap();
        fs::create_dir(&target).unwrap();
        let copied = Copied::all(&source, &target).unwrap();
        let take = || claim(&target, &source, &nothing(), &copied);
        for name in [journal::FILE, "tokenizer.json", ".x.partial", "config.json"] {
            fs::write(target.join(name), "x").unwrap();
        }
        take().unwrap();
        fs::write(target.join("mine"), "x").unwrap();
        let refused = take().unwrap_err();
        assert!(
            matches!(refused, QuantizeError::Foreign { .. }),
            "{refused}"
        );
        assert!(refused.to_string().contains("mine"), "{refused}");
        fs::remove_file(target.join(journal::FILE)).unwrap();
        let refused = take().unwrap_err();
        assert!(matches!(refused, QuantizeError::Exists(_)), "{refused}");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("gone", &link).unwrap();
        let refused = claim(&link, &source, &nothing(), &[]).unwrap_err();
        assert!(matches!(refused, QuantizeError::DeadLink(_)), "{refused}");
    }

    #[test]
    fn a_copy_is_whole_or_has_no_name_and_counts_for_the_room() {
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("s"), dir.path().join("t"));
        fs::create_dir_all(source.join("assistant")).unwrap();
        fs::create_dir(&target).unwrap();
        for (name, bytes) in [
            ("tokenizer.json", 3),
            ("model.safetensors", 1000),
            ("assistant/model.safetensors", 500),
        ] {
            fs::write(source.join(name), vec![7; bytes]).unwrap();
        }
        let copied = Copied::all(&source, &target).unwrap();
        assert_eq!(copied.iter().map(|c| c.bytes).sum::<u64>(), 503);
        // What a broken run left behind is no file of the result, and is written over.
        fs::write(beside(&target, "tokenizer.json"), "half of something long").unwrap();
        copied.iter().try_for_each(Copied::copy).unwrap();
        assert_eq!(fs::read(target.join("tokenizer.json")).unwrap(), [7; 3]);
        let names = |dir: &Path| fs::read_dir(dir).unwrap().count();
        assert_eq!((names(&target), names(&target.join("assistant"))), (2, 1));
        // Where the copy cannot be finished there is no file under the name.
        let gone = Copied {
            from: source.join("gone"),
            folder: target.clone(),
            bytes: 0,
        };
        gone.copy().unwrap_err();
        assert!(!target.join("gone").exists());
        let room = check_room(&target, u64::MAX - 600, &copied).unwrap_err();
        let QuantizeError::NoRoom { needed, .. } = room else {
            panic!("{room}")
        };
        assert_eq!(needed, u64::MAX, "the sum has an end");
    }

    #[cfg(unix)]
    #[test]
    fn an_assistant_that_is_a_link_to_nowhere_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("gone", dir.path().join("assistant")).unwrap();
        let error = Copied::all(dir.path(), dir.path()).unwrap_err().to_string();
        assert!(error.contains("assistant"), "{error}");
    }
}
