//! Writes a quantised checkpoint: a shard at a time, several threads in it, nothing but a few rows
//! of weights in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::{
    config::{self, NoObject},
    encode::{self, NotFinite},
    journal::{self, Finished, Journal, JournalError, Opening, Record},
    layout::{Job, Layout, Output, Recipe, Shard, Unit},
    report::{self, Report},
    seal::{self, Sealing},
};
use crate::{
    model::{
        audit::{Audit, audit},
        checkpoint::{Checkpoint, CheckpointError, Tensor},
        config::{ConfigError, parse_target},
        file,
        inventory::Inventory,
        names::{NameError, text_name},
        shown::shown,
        weight::Weight,
    },
    size::show,
};

/// Version of what is written, for unfinished work of another version.
const VERSION: u32 = 2;
/// Bytes of a tensor that are copied at a time.
const COPY: usize = 4 << 20;
/// Room that configuration, tokenizer and report take beside the weights.
const BESIDE: u64 = 64 << 20;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Task {
    /// The checkpoint.
    pub source: PathBuf,
    /// Where the result goes.
    pub target: PathBuf,
    /// How.
    pub recipe: Recipe,
    /// Threads that encode.
    pub threads: usize,
}

/// Hears how far it is.
pub trait Watch: Sync {
    /// Bytes of the source that are to be read, and how many of them an earlier run has read.
    fn begin(&self, total: u64, done: u64);
    /// So many more bytes were read, of the source or of what an earlier run wrote.
    fn advance(&self, bytes: u64);
    /// Bytes that an earlier run wrote, all of which are read first; none as a rule.
    fn look(&self, total: u64);
    /// A file that an earlier run finished is no longer what it wrote, and is made again.
    fn again(&self, file: &str);
    /// A file is done, the `number`th of `count`.
    fn shard(&self, file: &str, number: usize, count: usize);
}

/// Why a checkpoint could not be quantised.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The source's configuration.
    #[error("{file}: {source}")]
    Config {
        /// Its file.
        file: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The source's files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The source's tensors.
    #[error("{folder}: {source}; `brain inspect` lists everything that is wrong")]
    Names {
        /// The source.
        folder: PathBuf,
        /// The first thing that is wrong.
        source: NameError,
    },
    /// Nothing is quantised twice.
    #[error(
        "{} is {form} already: begin with the checkpoint in bf16, fp16 or fp32",
        shown(.tensor)
    )]
    Quantised {
        /// A tensor.
        tensor: String,
        /// How it is stored.
        form: String,
    },
    /// The result has something else in its place.
    #[error("{0} is there already and is no unfinished work of this command: give a new folder")]
    Exists(PathBuf),
    /// One folder for both.
    #[error("{0} cannot be the source and hold the result: give a new folder")]
    Inside(PathBuf),
    /// A weight that cannot be encoded.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// Known before anything is written.
    #[error("{folder} has {} left, the result needs {}", show(*.free), show(*.needed))]
    NoRoom {
        /// Where.
        folder: PathBuf,
        /// Bytes that are left.
        free: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// The file system.
    #[error("cannot {doing} {}: {source}{}", .file.display(), advice(doing, .source))]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With which file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The journal of the work.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The source's configuration.
    #[error("{0}")]
    NoObject(#[from] NoObject),
}

fn advice(doing: &str, error: &io::Error) -> String {
    if doing == READ {
        return match file::remedy(error) {
            "" => String::new(),
            remedy => format!("; {remedy}"),
        };
    }
    let advice = match error.kind() {
        io::ErrorKind::StorageFull => "; make room and run the same command to go on",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; give a folder that can be written"
        }
        _ => "",
    };
    advice.to_owned()
}

/// What is done with a file of the source.
const READ: &str = "read";

fn at<'a>(doing: &'static str, file: &'a Path) -> impl FnOnce(io::Error) -> QuantizeError + 'a {
    move |source| QuantizeError::Io {
        doing,
        file: file.to_owned(),
        source,
    }
}

/// The source, checked.
struct Source {
    config: Vec<u8>,
    tensors: Vec<Tensor>,
    audit: Audit,
    /// First parts of the names of towers.
    towers: BTreeSet<String>,
}

impl Source {
    fn open(dir: &Path) -> Result<Self, QuantizeError> {
        let file = dir.join("config.json");
        let config = file::read(&file).map_err(at(READ, &file))?;
        let plan =
            parse_target(&config).map_err(|source| QuantizeError::Config { file, source })?;
        let checkpoint = Checkpoint::open(dir)?;
        let names = |source| QuantizeError::Names {
            folder: dir.to_owned(),
            source,
        };
        let audit = audit(&checkpoint, &Inventory::target(&plan)).map_err(names)?;
        if let Some((_, fault)) = audit.faults.first() {
            return Err(names(fault.clone()));
        }
        if let Some(first) = audit.unknown.first() {
            return Err(names(NameError::value(
                first,
                "it is no part of the model that config.json describes",
            )));
        }
        let mut weights = audit.filled.iter().flat_map(|f| &f.weights);
        if let Some(w) = weights.find(|w| !matches!(w, Weight::Float(_))) {
            return Err(QuantizeError::Quantised {
                tensor: w.tensors().first().map_or("", |t| t.name()).to_owned(),
                form: w.form().to_string(),
            });
        }
        // In the order of the files, so that a disk reads them in one go.
        let mut tensors: Vec<Tensor> = checkpoint.tensors().cloned().collect();
        tensors.sort_by_key(|t| (t.file().to_owned(), t.bytes().as_ptr() as usize));
        let towers = tensors
            .iter()
            .filter(|t| text_name(t.name()).is_none())
            .map(|t| {
                let parts = 1 + usize::from(t.name().starts_with("model."));
                t.name()
                    .split('.')
                    .take(parts)
                    .collect::<Vec<_>>()
                    .join(".")
            })
            .collect();
        Ok(Self {
            config,
            tensors,
            audit,
            towers,
        })
    }

    /// Hash of all that decides whether unfinished work is of this source.
    fn identity(&self) -> Result<String, QuantizeError> {
        let mut hash = blake3::Hasher::new();
        let mut files = BTreeSet::new();
        hash.update(&self.config);
        for t in &self.tensors {
            hash.update(format!("{} {:?} {:?}\n", t.name(), t.dtype(), t.shape()).as_bytes());
            files.insert(t.file());
        }
        for file in files {
            let about = fs::metadata(file).map_err(at(READ, file))?;
            let changed = about.modified().map_err(at(READ, file))?;
            hash.update(format!("{} {changed:?}\n", about.len()).as_bytes());
        }
        Ok(hash.finalize().to_hex().to_string())
    }

    fn bytes(&self, job: &Job) -> u64 {
        let bytes = |i: usize| self.tensors[i].bytes().len() as u64;
        match &job.unit {
            Unit::Copy(source) => bytes(*source),
            Unit::Encode(matrices) => matrices
                .iter()
                .map(|m| {
                    let width = self.tensors[m.source].dtype().bitsize() / 8;
                    (m.rows * m.cols * width) as u64
                })
                .sum(),
        }
    }
}

/// Quantises a checkpoint, or goes on with it.
pub fn run(task: &Task, watch: &dyn Watch) -> Result<Report, QuantizeError> {
    let source = Source::open(&task.source)?;
    let layout = Layout::new(&source.tensors, &source.audit, &task.recipe);
    let target = &task.target;
    claim(target, &task.source)?;
    let opening = Opening {
        version: VERSION,
        recipe: task.recipe,
        source: source.identity()?,
    };
    let (mut journal, finished) = Journal::open(target, &opening)?;
    watch.look(finished.iter().map(|f| f.bytes).sum());
    let mut done = still_finished(&layout, finished, target, watch);
    let read = |shard: &Shard| shard.jobs.iter().map(|j| source.bytes(j)).sum::<u64>();
    let (ready, open): (Vec<&Shard>, Vec<&Shard>) = layout
        .shards
        .iter()
        .partition(|s| done.contains_key(&s.file));
    let needed: u64 = open.iter().map(|s| s.bytes).sum();
    check_room(target, needed + BESIDE)?;
    let total = layout.shards.iter().map(read).sum();
    watch.begin(total, ready.iter().map(|s| read(s)).sum());
    for (i, shard) in layout.shards.iter().enumerate() {
        if ready.iter().any(|r| r.file == shard.file) {
            continue;
        }
        let finished = write_shard(shard, &source.tensors, task, watch)?;
        journal.finished(&finished)?;
        done.insert(shard.file.clone(), finished);
        watch.shard(&shard.file, i + 1, layout.shards.len());
    }
    let records: Vec<Record> = layout
        .shards
        .iter()
        .filter_map(|s| done.get(&s.file))
        .flat_map(|f| f.records.clone())
        .collect();
    let report = Report::new(&layout, task.recipe, total, &records);
    complete(task, &source, &layout, &report)?;
    journal.remove()?;
    Ok(report)
}

/// Of what an earlier run finished, that whose file is still what it wrote, by the file's name.
/// Every byte is read for it: a result is never pieced together from what nobody looked at.
fn still_finished(
    layout: &Layout,
    finished: Vec<Finished>,
    target: &Path,
    watch: &dyn Watch,
) -> BTreeMap<String, Finished> {
    // The last line about a file counts: it may have been made again.
    let mut done: BTreeMap<String, Finished> =
        finished.into_iter().map(|f| (f.file.clone(), f)).collect();
    done.retain(|name, finished| {
        let shard = layout.shards.iter().find(|s| s.file == *name);
        let sound = shard.is_some_and(|shard| {
            let read = |bytes| watch.advance(bytes);
            finished.bytes == shard.bytes && seal::holds(target, shard, &finished.seal, &read)
        });
        if !sound {
            watch.again(name);
        }
        sound
    });
    done
}

/// Takes the folder if it is new, empty, or has a journal.
fn claim(target: &Path, source: &Path) -> Result<(), QuantizeError> {
    if !target.exists() {
        fs::create_dir_all(target).map_err(at("make", target))?;
    }
    let real = |path: &Path| fs::canonicalize(path).map_err(at(READ, path));
    if real(target)?.starts_with(real(source)?) {
        // Only a folder that was just made is taken away again.
        let _ = fs::remove_dir(target);
        return Err(QuantizeError::Inside(target.to_owned()));
    }
    if !target.is_dir() {
        return Err(QuantizeError::Exists(target.to_owned()));
    }
    let mut entries = fs::read_dir(target).map_err(at(READ, target))?;
    if entries.next().is_some() && !target.join(journal::FILE).is_file() {
        return Err(QuantizeError::Exists(target.to_owned()));
    }
    Ok(())
}

fn check_room(folder: &Path, needed: u64) -> Result<(), QuantizeError> {
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
fn beside(target: &Path, file: &str) -> PathBuf {
    target.join(format!(".{file}.partial"))
}

/// Gives a file that is written and synced its name, for good.
fn settle(target: &Path, file: &str, written: &File) -> Result<(), QuantizeError> {
    let (from, to) = (beside(target, file), target.join(file));
    written.sync_all().map_err(at("write", &to))?;
    fs::rename(&from, &to).map_err(at("write", &to))?;
    let folder = File::open(target).map_err(at("open", target))?;
    folder.sync_all().map_err(at("write", target))
}

fn write_small(target: &Path, file: &str, bytes: &[u8]) -> Result<(), QuantizeError> {
    let path = beside(target, file);
    let written = File::create(&path).map_err(at("write", &path))?;
    written.write_all_at(bytes, 0).map_err(at("write", &path))?;
    settle(target, file, &written)
}

fn write_shard(
    shard: &Shard,
    sources: &[Tensor],
    task: &Task,
    watch: &dyn Watch,
) -> Result<Finished, QuantizeError> {
    let path = beside(&task.target, &shard.file);
    let file = File::create(&path).map_err(at("write", &path))?;
    file.write_all_at(&shard.header, 0)
        .map_err(at("write", &path))?;
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = Mutex::new(BTreeMap::new());
    let work = || {
        while let Some((i, job)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            shard.jobs.get(i).map(|job| (i, job))
        } {
            if failed.load(Ordering::Relaxed) {
                return;
            }
            let result = write_job(job, sources, task, (&file, &path), watch);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.insert(i, result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..task.threads.clamp(1, shard.jobs.len().max(1)) {
            scope.spawn(work);
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (mut records, mut tensors) = (Vec::new(), Vec::new());
    for result in results.into_values() {
        let (of_job, hashes) = result?;
        records.extend(of_job);
        tensors.extend(hashes);
    }
    settle(&task.target, &shard.file, &file)?;
    Ok(Finished {
        file: shard.file.clone(),
        bytes: shard.bytes,
        seal: seal::seal(&shard.header, tensors),
        records,
    })
}

/// What was encoded, and the hashes of the tensors that were written.
fn write_job(
    job: &Job,
    sources: &[Tensor],
    task: &Task,
    (file, path): (&File, &Path),
    watch: &dyn Watch,
) -> Result<(Vec<Record>, Vec<blake3::Hash>), QuantizeError> {
    let mut sealing = Sealing::new(job);
    let mut write = |offset: u64, bytes: &[u8]| {
        sealing.wrote(offset, bytes);
        file.write_all_at(bytes, offset).map_err(at("write", path))
    };
    let records = match &job.unit {
        Unit::Copy(source) => {
            copy(&sources[*source], &job.outputs, &mut write, watch)?;
            sources[*source].release();
            Vec::new()
        }
        Unit::Encode(matrices) => {
            let format = task.recipe.format;
            let read = |bytes| watch.advance(bytes);
            let records =
                encode::encode(matrices, &job.outputs, sources, format, &mut write, &read)?;
            for matrix in matrices {
                // A tensor of all experts is read on by others.
                if matrix.rows == sources[matrix.source].shape()[0] {
                    sources[matrix.source].release();
                }
            }
            records
        }
    };
    Ok((records, sealing.finish()))
}

fn copy(
    tensor: &Tensor,
    outputs: &[Output],
    write: &mut encode::Sink<'_, QuantizeError>,
    watch: &dyn Watch,
) -> Result<(), QuantizeError> {
    for output in outputs {
        for (i, bytes) in tensor.bytes().chunks(COPY).enumerate() {
            write(output.offset + (i * COPY) as u64, bytes)?;
            watch.advance(bytes.len() as u64);
        }
    }
    Ok(())
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
    let written = [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        journal::FILE,
        report::FILE,
    ];
    !name.starts_with('.') && !WEIGHTS.contains(&extension) && !written.contains(&name)
}

/// Everything beside the weights. config.json comes last: without it nothing takes the folder for
/// a checkpoint.
fn complete(
    task: &Task,
    source: &Source,
    layout: &Layout,
    report: &Report,
) -> Result<(), QuantizeError> {
    let (from, to) = (&task.source, &task.target);
    copy_files(from, to, is_copied)?;
    let assistant = from.join("assistant");
    if assistant.is_dir() {
        let to = to.join("assistant");
        fs::create_dir_all(&to).map_err(at("make", &to))?;
        copy_files(&assistant, &to, |name| !name.starts_with('.'))?;
    }
    let exclude = config::exclude(layout, &source.towers);
    let format = task.recipe.format;
    let json = |value: &serde_json::Value| format!("{value:#}\n").into_bytes();
    if let Some(index) = layout.index() {
        write_small(to, "model.safetensors.index.json", &json(&index))?;
    }
    let quantised = config::beside(format, &exclude);
    write_small(to, "hf_quant_config.json", &json(&quantised))?;
    let text = serde_json::to_vec_pretty(report)
        .map_err(|error| at("write", &to.join(report::FILE))(error.into()))?;
    write_small(to, report::FILE, &text)?;
    let config = config::config(&source.config, format, &exclude)?;
    write_small(to, "config.json", &json(&config))
}

fn copy_files(from: &Path, to: &Path, wanted: impl Fn(&str) -> bool) -> Result<(), QuantizeError> {
    for entry in fs::read_dir(from).map_err(at(READ, from))? {
        let path = entry.map_err(at(READ, from))?.path();
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        if path.is_file() && wanted(name) {
            let target = to.join(name);
            fs::copy(&path, &target).map_err(at("write", &target))?;
        }
    }
    Ok(())
}
