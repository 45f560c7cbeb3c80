//! Safetensors files, mapped or embedded: one file or several behind an index.
//!
//! A header is believed only after every range in it was checked against the file, so that a
//! damaged or hostile file ends in an error that names file and tensor, never in a bad read.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

pub use safetensors::Dtype;

use super::{
    file, header,
    index::{INDEX, Index, WHOLE},
    partial::{marked, unfinished},
    shown::{shown, shown_path},
};

/// A checkpoint that cannot be read. Every form names the file.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file could not be opened, mapped or read.
    #[error("cannot read {}: {}", shown_path(.file), file::why(.source))]
    Io {
        /// Which file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No weights in the folder.
    #[error("{0} holds neither model.safetensors nor model.safetensors.index.json")]
    NoWeights(PathBuf),
    /// A file of the index is not there.
    #[error("{} is not there, and {index} names it; fetch the checkpoint again", shown_path(.file))]
    NoShard {
        /// The missing file.
        file: PathBuf,
        /// The index.
        index: PathBuf,
    },
    /// A file is not there yet, or not all of it.
    #[error(
        "{} is not whole: its download has not finished ({}); run the download again, or take that \
         file away if another download left it",
        shown_path(.file),
        shown_path(.partial)
    )]
    Unfinished {
        /// The file.
        file: PathBuf,
        /// What there is of it, or of a file beside it.
        partial: PathBuf,
    },
    /// The file is not what it should be.
    #[error("{} is damaged: {problem}; fetch it again", shown_path(.file))]
    Damaged {
        /// Which file.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The same tensor twice.
    #[error(
        "tensor {} is in {} and in {}",
        shown(.tensor),
        shown_path(.first),
        shown_path(.second)
    )]
    Twice {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The index names a tensor that its file does not hold.
    #[error(
        "{} should hold tensor {} and does not; fetch it again",
        shown_path(.file),
        shown(.tensor)
    )]
    Missing {
        /// The file of the index.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
}

/// The bytes of a file.
#[derive(Clone)]
enum Source {
    Mapped(Arc<memmap2::Mmap>),
    Embedded(&'static [u8]),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::Mapped(map) => map,
            Source::Embedded(bytes) => bytes,
        }
    }
}

/// A tensor of a file: shape, element type and bytes (little-endian, rows last to first).
#[derive(Clone)]
pub struct Tensor {
    name: String,
    file: Arc<PathBuf>,
    dtype: Dtype,
    shape: Vec<usize>,
    source: Source,
    range: Range<usize>,
}

impl Tensor {
    /// Its full name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file it is in.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its elements' bytes. They need not be aligned.
    pub fn bytes(&self) -> &[u8] {
        &self.source.bytes()[self.range.clone()]
    }

    /// Number `index` of the outermost size: a tensor without that size.
    ///
    /// Panics if there is none such, as slicing does.
    pub fn part(&self, index: usize) -> Tensor {
        assert!(index < self.shape[0], "{self:?} has no part {index}");
        let size = self.range.len() / self.shape[0];
        let start = self.range.start + index * size;
        Tensor {
            shape: self.shape[1..].to_vec(),
            range: start..start + size,
            ..self.clone()
        }
    }

    /// Has the system read these of its bytes from the file, and waits for it.
    pub fn fetch(&self, bytes: Range<usize>) {
        let Source::Mapped(map) = &self.source else {
            return;
        };
        let start = self.range.start + bytes.start;
        // A system that cannot do this reads them when they are used.
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(memmap2::Advice::PopulateRead, start, bytes.len());
        #[cfg(not(target_os = "linux"))]
        let _ = map.advise_range(memmap2::Advice::WillNeed, start, bytes.len());
    }

    /// Gives the whole pages it lies in back to the system; they are read from the file again when
    /// next needed. Nothing happens to embedded bytes.
    pub fn release(&self) {
        self.release_bytes(0..self.range.len());
    }

    /// The same for some of its bytes.
    pub fn release_bytes(&self, bytes: Range<usize>) {
        let Source::Mapped(map) = &self.source else {
            return;
        };
        let start = (self.range.start + bytes.start).next_multiple_of(PAGE);
        let end = (self.range.start + bytes.end.min(self.range.len())) / PAGE * PAGE;
        if start < end {
            // SAFETY: the map is a private, read-only view of a file, and nothing has written to
            // it: a dropped page comes back from the file with the same bytes. Advice may fail
            // without harm.
            #[allow(unsafe_code, reason = "advice on the memory map of the weights")]
            let _ = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
            };
        }
    }
}

/// At least a page of any system this runs on: smaller pieces are not given back.
const PAGE: usize = 64 << 10;

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} {:?} {:?} of {}",
            self.name,
            self.dtype,
            self.shape,
            self.file.display()
        )
    }
}

/// All tensors of a checkpoint by name.
#[derive(Debug, Default)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    /// Maps `model.safetensors`, or every file of `model.safetensors.index.json`, in `dir`.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let single = dir.join(WHOLE);
        let index = dir.join(INDEX);
        let mut checkpoint = Self::default();
        if there(&single)? {
            checkpoint.add_whole(single)?;
        } else if there(&index)? {
            checkpoint.add_shards(dir, &index)?;
        } else if let Some(partial) = unfinished(dir, "model") {
            return Err(CheckpointError::Unfinished {
                file: single,
                partial,
            });
        } else {
            return Err(CheckpointError::NoWeights(dir.to_owned()));
        }
        Ok(checkpoint)
    }

    /// Maps these files, whatever they are called.
    pub fn of_files(paths: &[PathBuf]) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self::default();
        for path in paths {
            checkpoint.add(map(path)?, path.clone())?;
        }
        Ok(checkpoint)
    }

    /// Reads one embedded file; `label` stands for its path in errors.
    pub fn embedded(label: &str, bytes: &'static [u8]) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self::default();
        checkpoint.add(Source::Embedded(bytes), PathBuf::from(label))?;
        Ok(checkpoint)
    }

    /// The tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    fn add_shards(&mut self, dir: &Path, index: &Path) -> Result<(), CheckpointError> {
        let io = |source| CheckpointError::Io {
            file: index.to_owned(),
            source,
        };
        let damaged = |problem: String| CheckpointError::Damaged {
            file: index.to_owned(),
            problem,
        };
        let text = file::read(index).map_err(io)?;
        let parsed = Index::sound(&text).map_err(|fault| damaged(format!("it {fault}")))?;
        for name in parsed.files() {
            let path = dir.join(name);
            if !there(&path)? {
                return Err(absent(dir, path, name, index));
            }
            self.add_whole(path)?;
        }
        for (tensor, file) in &parsed.weight_map {
            let found = self
                .tensors
                .get(tensor)
                .is_some_and(|t| *t.file == dir.join(file));
            if !found {
                let file = dir.join(file);
                return Err(CheckpointError::Missing {
                    file,
                    tensor: tensor.clone(),
                });
            }
        }
        Ok(())
    }

    /// Maps a file, unless it is still being fetched: some programs give it its length first.
    fn add_whole(&mut self, file: PathBuf) -> Result<(), CheckpointError> {
        match marked(&file) {
            Some(partial) => Err(CheckpointError::Unfinished { file, partial }),
            None => self.add(map(&file)?, file),
        }
    }

    fn add(&mut self, source: Source, path: PathBuf) -> Result<(), CheckpointError> {
        let file = Arc::new(path);
        let damaged = |problem: String| CheckpointError::Damaged {
            file: file.to_path_buf(),
            problem,
        };
        let entries = header::read(source.bytes()).map_err(|fault| damaged(fault.to_string()))?;
        for (entry, range) in entries {
            let name = entry.name;
            let tensor = Tensor {
                name: name.clone(),
                file: file.clone(),
                dtype: entry.dtype,
                shape: entry.shape,
                source: source.clone(),
                range,
            };
            if let Some(other) = self.tensors.insert(name.clone(), tensor) {
                return Err(CheckpointError::Twice {
                    tensor: name,
                    first: other.file.to_path_buf(),
                    second: file.to_path_buf(),
                });
            }
        }
        Ok(())
    }
}

/// A shard that the index names and that is not there.
fn absent(dir: &Path, file: PathBuf, name: &str, index: &Path) -> CheckpointError {
    match unfinished(dir, name) {
        Some(partial) => CheckpointError::Unfinished { file, partial },
        None => CheckpointError::NoShard {
            file,
            index: index.to_owned(),
        },
    }
}

fn there(path: &Path) -> Result<bool, CheckpointError> {
    file::is_there(path).map_err(|source| CheckpointError::Io {
        file: path.to_owned(),
        source,
    })
}

fn map(path: &Path) -> Result<Source, CheckpointError> {
    let io = |source| CheckpointError::Io {
        file: path.to_owned(),
        source,
    };
    let file = file::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() == 0 {
        let problem = "it is empty".to_owned();
        return Err(CheckpointError::Damaged {
            file: path.to_owned(),
            problem,
        });
    }
    // SAFETY: the map is read-only; weights are not written while they are served. A file cut short
    // by someone else ends the process, as for any mapped file.
    #[allow(unsafe_code, reason = "memory map of the weights")]
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
    // Read in large pages, a file costs hardly any time of a processor, and its weights are found
    // faster ever after. Advice may fail without harm.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(Source::Mapped(Arc::new(map)))
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
