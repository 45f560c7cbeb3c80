//! Writes a quantised checkpoint: a shard at a time, several threads in it, nothing but a few rows
//! of weights in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::{
    config::{self, NoObject},
    encode::{self, NotFinite},
    folder::{Copied, beside, check_room, claim, settle, write_small},
    journal::{self, Finished, Journal, JournalError, Opening, Record},
    layout::{Job, Layout, Output, Recipe, Shard, Unit},
    report::{self, Report},
    seal::{self, Sealing},
};
use crate::{
    model::{
        LoadError, NoFolder,
        audit::{Audit, audit},
        check_folder,
        checkpoint::{Checkpoint, CheckpointError, Tensor},
        config::{ConfigError, parse_target},
        file,
        index::INDEX,
        inventory::Inventory,
        load_drafter,
        names::{NameError, text_name},
        shown::{shown, shown_path},
        weight::{Weight, codes::first_not_finite},
    },
    size::show,
};

/// Version of what is written, for unfinished work of another version.
const VERSION: u32 = 3;
/// Bytes of a tensor that are copied at a time.
const COPY: usize = 4 << 20;

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
    /// This folder, above that of the result, was not there and was made.
    fn made(&self, folder: &Path);
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
    /// No source.
    #[error(transparent)]
    NoFolder(#[from] NoFolder),
    /// An assistant in the source that could not be served.
    #[error(transparent)]
    Drafter(LoadError),
    /// The source was written to.
    #[error(
        "{} was changed while it was read, so that nothing of it can be used: let that end and begin \
         again",
        shown_path(.file)
    )]
    Changed {
        /// The file.
        file: PathBuf,
    },
    /// Unfinished work has something beside it.
    #[error(
        "{folder} holds unfinished work and {}, which is none of it: take that away or give a new \
         folder",
        shown(.file)
    )]
    Foreign {
        /// The folder of the result.
        folder: PathBuf,
        /// What else is in it.
        file: String,
    },
    /// A link in the place of the result.
    #[error("{0} is a link that leads nowhere: give a new folder")]
    DeadLink(PathBuf),
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
    journal::advice(error).to_owned()
}

/// What is done with a file of the source.
pub(super) const READ: &str = "read";

pub(super) fn at<'a>(
    doing: &'static str,
    file: &'a Path,
) -> impl FnOnce(io::Error) -> QuantizeError + 'a {
    move |source| QuantizeError::Io {
        doing,
        file: file.to_owned(),
        source,
    }
}

impl QuantizeError {
    /// Whether the source is at fault, so that no run comes to an end of what was begun.
    fn spoils(&self) -> bool {
        matches!(
            self,
            Self::NotFinite(_) | Self::Changed { .. } | Self::NoObject(_)
        )
    }
}

/// The source, checked.
struct Source {
    config: Vec<u8>,
    tensors: Vec<Tensor>,
    audit: Audit,
    /// First parts of the names of towers.
    towers: BTreeSet<String>,
    /// Tensors of plain numbers that the model computes with.
    finite: BTreeSet<String>,
    /// What its files were when they were opened.
    stamps: BTreeMap<PathBuf, Stamp>,
}

/// By what a file is known to be the same, and not to have been written to: length, inode, and times
/// of its content and of itself, which no program can set back.
#[derive(Debug, PartialEq, Eq)]
struct Stamp(u64, u64, [i64; 4]);

impl Stamp {
    fn of(file: &Path) -> Result<Self, QuantizeError> {
        let about = fs::metadata(file).map_err(at(READ, file))?;
        let times = [
            about.mtime(),
            about.mtime_nsec(),
            about.ctime(),
            about.ctime_nsec(),
        ];
        Ok(Self(about.len(), about.ino(), times))
    }
}

impl Source {
    fn open(dir: &Path) -> Result<Self, QuantizeError> {
        check_folder(dir)?;
        let file = dir.join("config.json");
        let config = file::read(&file).map_err(at(READ, &file))?;
        let plan =
            parse_target(&config).map_err(|source| QuantizeError::Config { file, source })?;
        let assistant = dir.join("assistant");
        if file::is_there(&assistant).map_err(at(READ, &assistant))? {
            load_drafter(&assistant, &plan).map_err(QuantizeError::Drafter)?;
        }
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
        let files: BTreeSet<&Path> = tensors.iter().map(Tensor::file).collect();
        let stamp = |file: &Path| Ok((file.to_owned(), Stamp::of(file)?));
        let stamps: Result<_, QuantizeError> = files.into_iter().map(stamp).collect();
        let stamps = stamps?;
        let filled = audit.filled.iter().flat_map(|f| &f.weights);
        let finite = filled.filter_map(Weight::fallible);
        let finite = finite.map(|t| t.name().to_owned()).collect();
        Ok(Self {
            config,
            tensors,
            audit,
            towers,
            finite,
            stamps,
        })
    }

    /// An error if a file is not what it was.
    fn unchanged(&self) -> Result<(), QuantizeError> {
        self.stamps.iter().try_for_each(|(file, stamp)| {
            match Stamp::of(file).is_ok_and(|now| now == *stamp) {
                true => Ok(()),
                false => Err(QuantizeError::Changed { file: file.clone() }),
            }
        })
    }

    /// Hash of all that decides whether unfinished work is of this source.
    fn identity(&self) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(&self.config);
        for t in &self.tensors {
            hash.update(format!("{} {:?} {:?}\n", t.name(), t.dtype(), t.shape()).as_bytes());
        }
        for stamp in self.stamps.values() {
            hash.update(format!("{stamp:?}\n").as_bytes());
        }
        hash.finalize().to_hex().to_string()
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
    let layout = Layout::new(&source.tensors, &source.audit, &task.recipe).map_err(|fault| {
        QuantizeError::Names {
            folder: task.source.clone(),
            source: fault,
        }
    })?;
    let target = &task.target;
    let copied = Copied::all(&task.source, target)?;
    let claimed = claim(target, &task.source, &layout, &copied)?;
    if let Some(above) = claimed.above() {
        watch.made(above);
    }
    let opening = Opening {
        version: VERSION,
        recipe: task.recipe,
        source: source.identity(),
    };
    let (mut journal, finished) = Journal::open(target, &opening)?;
    let begun = !finished.is_empty();
    let made = make(
        task,
        &source,
        &layout,
        &copied,
        (&mut journal, finished),
        watch,
    );
    match &made {
        Ok(_) => journal.remove()?,
        // What nobody can go on with, or nothing was made of, is not left in the way of others.
        Err(error)
            if error.spoils() || (matches!(error, QuantizeError::NoRoom { .. }) && !begun) =>
        {
            journal.remove()?;
            claimed.give_back(&layout, &copied);
        }
        Err(_) => {}
    }
    made
}

/// Makes what is not finished yet.
fn make(
    task: &Task,
    source: &Source,
    layout: &Layout,
    copied: &[Copied],
    (journal, finished): (&mut Journal, Vec<Finished>),
    watch: &dyn Watch,
) -> Result<Report, QuantizeError> {
    let target = &task.target;
    watch.look(finished.iter().map(|f| f.bytes).sum());
    let mut done = still_finished(layout, finished, target, watch);
    let read = |shard: &Shard| shard.jobs.iter().map(|j| source.bytes(j)).sum::<u64>();
    let (ready, open): (Vec<&Shard>, Vec<&Shard>) = layout
        .shards
        .iter()
        .partition(|s| done.contains_key(&s.file));
    let needed: u64 = open.iter().map(|s| s.bytes).sum();
    check_room(target, needed, copied)?;
    let total = layout.shards.iter().map(read).sum();
    watch.begin(total, ready.iter().map(|s| read(s)).sum());
    for (i, shard) in layout.shards.iter().enumerate() {
        if ready.iter().any(|r| r.file == shard.file) {
            continue;
        }
        source.unchanged()?;
        let finished = write_shard(shard, source, task, watch)?;
        source.unchanged()?;
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
    let report = Report::new(layout, task.recipe, total, &records);
    complete(task, source, layout, copied, &report)?;
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

fn write_shard(
    shard: &Shard,
    source: &Source,
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
            let result = write_job(job, source, task, (&file, &path), watch);
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
    source: &Source,
    task: &Task,
    (file, path): (&File, &Path),
    watch: &dyn Watch,
) -> Result<(Vec<Record>, Vec<blake3::Hash>), QuantizeError> {
    let sources = &source.tensors;
    let mut sealing = Sealing::new(job);
    let mut write = |offset: u64, bytes: &[u8]| {
        sealing.wrote(offset, bytes);
        file.write_all_at(bytes, offset).map_err(at("write", path))
    };
    let records = match &job.unit {
        Unit::Copy(i) => {
            let finite = source.finite.contains(sources[*i].name());
            copy(&sources[*i], finite, &job.outputs, &mut write, watch)?;
            sources[*i].release();
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

/// Copies a tensor; `finite`: each of its numbers must be.
fn copy(
    tensor: &Tensor,
    finite: bool,
    outputs: &[Output],
    write: &mut encode::Sink<'_, QuantizeError>,
    watch: &dyn Watch,
) -> Result<(), QuantizeError> {
    for output in outputs {
        for (i, bytes) in tensor.bytes().chunks(COPY).enumerate() {
            if finite && first_not_finite(tensor.dtype(), bytes).is_some() {
                let tensor = tensor.name().to_owned();
                return Err(NotFinite { tensor }.into());
            }
            write(output.offset + (i * COPY) as u64, bytes)?;
            watch.advance(bytes.len() as u64);
        }
    }
    Ok(())
}

/// Everything beside the weights. config.json comes last: without it nothing takes the folder for
/// a checkpoint.
fn complete(
    task: &Task,
    source: &Source,
    layout: &Layout,
    copied: &[Copied],
    report: &Report,
) -> Result<(), QuantizeError> {
    copied.iter().try_for_each(Copied::copy)?;
    let to = &task.target;
    let exclude = config::exclude(layout, &source.towers);
    let format = task.recipe.format;
    let json = |value: &serde_json::Value| format!("{value:#}\n").into_bytes();
    if let Some(index) = layout.index() {
        write_small(to, INDEX, &json(&index))?;
    }
    let quantised = config::beside(format, &exclude);
    write_small(to, "hf_quant_config.json", &json(&quantised))?;
    let text = serde_json::to_vec_pretty(report)
        .map_err(|error| at("write", &to.join(report::FILE))(error.into()))?;
    write_small(to, report::FILE, &text)?;
    let config = config::config(&source.config, format, &exclude)?;
    write_small(to, "config.json", &json(&config))
}
