//! The files of weights of a folder: their headers, their index, and what is wrong with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{
    header::{self, Header},
    problem::{FETCH_AGAIN, Problem, SAME_CHECKPOINT},
    read,
};
use crate::model::{
    audit::{Audit, audit},
    checkpoint::{Checkpoint, CheckpointError},
    index::{INDEX, Index, IndexFault, WHOLE, is_plain},
    inventory::Inventory,
    names::NameError,
    partial::marked,
    shown::{shown, shown_text},
};

/// The files of weights of a folder.
pub(super) struct Weights {
    pub(super) headers: Vec<Header>,
    /// Paths of those that are whole.
    sound: Vec<PathBuf>,
    /// Whether it is known which files there should be.
    listed: bool,
}

impl Weights {
    /// Reads their headers.
    pub(super) fn read(dir: &Path, problems: &mut Vec<Problem>) -> Self {
        let mut weights = Self {
            headers: Vec::new(),
            sound: Vec::new(),
            listed: false,
        };
        // A link counts that leads nowhere: what it leads to is what is missing.
        let named = |file: &str| dir.join(file).symlink_metadata().is_ok();
        let (single, index) = (WHOLE, INDEX);
        if dir.join(single).exists() || (named(single) && !named(index)) {
            weights.listed = true;
            weights.add(dir, single, problems);
        } else if named(index) {
            let before = problems.len();
            let Some(map) = read(dir, index, problems).and_then(|text| weight_map(&text, problems))
            else {
                return weights;
            };
            weights.listed = problems.len() == before;
            let files: BTreeSet<&String> = map.values().collect();
            for file in files {
                weights.add(dir, file, problems);
            }
            weights.check_index(&map, problems);
        } else {
            let problem = "has neither model.safetensors nor model.safetensors.index.json";
            let remedy = "fetch the weights";
            problems.push(Problem::of_file(
                &dir.display().to_string(),
                problem,
                remedy,
            ));
        }
        weights
    }

    fn add(&mut self, dir: &Path, file: &str, problems: &mut Vec<Problem>) {
        let before = problems.len();
        let path = dir.join(file);
        if let Some(marker) = marked(&path) {
            let marker = marker.file_name().unwrap_or_default().to_string_lossy();
            let problem = format!("is still being fetched, as {} says", shown(&marker));
            let remedy = "run the download again, or take that away if another left it";
            problems.push(Problem::of_file(file, problem, remedy));
        }
        self.headers.push(header::read(&path, problems));
        if problems.len() == before {
            self.sound.push(path);
        }
    }

    /// Whether every file that should be there is, and is whole: only then can a tensor be said to
    /// be missing.
    fn whole(&self) -> bool {
        self.listed && self.sound.len() == self.headers.len()
    }

    fn check_index(&self, map: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
        let held: BTreeMap<&str, &str> = self
            .headers
            .iter()
            .flat_map(|h| h.entries.iter().map(|e| (e.name.as_str(), e.file.as_str())))
            .collect();
        for (tensor, file) in map {
            let missing = held.get(tensor.as_str()) != Some(&file.as_str());
            let whole = self.sound.iter().any(|p| p.ends_with(file));
            if missing && whole {
                let problem = "does not hold what the index says it holds";
                problems.push(Problem::of_tensor(file, tensor, problem, FETCH_AGAIN));
            }
        }
    }

    /// Holds what the whole ones hold against what the configuration asks for.
    pub(super) fn audit(
        &self,
        inventory: &Inventory,
        problems: &mut Vec<Problem>,
    ) -> Option<Audit> {
        let checkpoint = Checkpoint::of_files(&self.sound)
            .map_err(|error| problems.push(of_checkpoint(&error)))
            .ok()?;
        let audit = audit(&checkpoint, inventory)
            .map_err(|error| problems.push(of_name(&error)))
            .ok()?;
        for (_, error) in &audit.faults {
            // What a broken file or index keeps from view is not missing: that is the problem.
            if self.whole() || !matches!(error, NameError::Missing(_)) {
                problems.push(of_name(error));
            }
        }
        for tensor in &audit.unknown {
            problems.push(Problem::of_tensor(
                &file_name(tensor.file()),
                tensor.name(),
                "is no part of the model that config.json describes",
                SAME_CHECKPOINT,
            ));
        }
        Some(audit)
    }
}

/// The file of every tensor. Whatever is wrong becomes a problem; what is sound is kept all the same.
fn weight_map(text: &[u8], problems: &mut Vec<Problem>) -> Option<BTreeMap<String, String>> {
    let mut wrong = |fault: IndexFault| {
        let problem = fault.to_string();
        problems.push(Problem::of_file(INDEX, problem, FETCH_AGAIN));
    };
    let mut map = Index::parse(text).map_err(&mut wrong).ok()?.weight_map;
    if map.is_empty() {
        wrong(IndexFault::Empty);
    }
    map.retain(|tensor, file| {
        let plain = is_plain(file);
        if !plain {
            let file = shown(file);
            let problem = format!("is said to be in \"{file}\", which is not a plain file name");
            problems.push(Problem::of_tensor(INDEX, tensor, problem, FETCH_AGAIN));
        }
        plain
    });
    Some(map)
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

fn of_checkpoint(error: &CheckpointError) -> Problem {
    let file = match error {
        CheckpointError::Io { file, .. }
        | CheckpointError::Damaged { file, .. }
        | CheckpointError::Missing { file, .. }
        | CheckpointError::NoShard { file, .. }
        | CheckpointError::Unfinished { file, .. }
        | CheckpointError::NoWeights(file)
        | CheckpointError::Twice { second: file, .. } => file_name(file),
    };
    Problem::of_file(&file, error.to_string(), FETCH_AGAIN)
}

fn of_name(error: &NameError) -> Problem {
    let (file, tensor, problem) = match error {
        NameError::Missing(name) => ("", name, "is missing".to_owned()),
        NameError::Shape {
            name,
            file,
            found,
            expected,
        } => (
            file.as_str(),
            name,
            format!(
                "has shape {} where config.json asks for {expected:?}",
                shown_text(&format!("{found:?}"))
            ),
        ),
        NameError::Dtype {
            name,
            file,
            found,
            expected,
        } => (
            file.as_str(),
            name,
            format!("holds {found:?} where {expected} would be served"),
        ),
        NameError::Value {
            name,
            file,
            problem,
        } => (file.as_str(), name, problem.clone()),
        NameError::Ambiguous { first, second } => (
            "",
            first,
            format!("stands for the same weights as {}", shown(second)),
        ),
        NameError::Unknown { first, file, .. } => (file.as_str(), first, "is unknown".to_owned()),
    };
    let file = if file.is_empty() { "weights" } else { file };
    Problem::of_tensor(file, tensor, problem, SAME_CHECKPOINT)
}
