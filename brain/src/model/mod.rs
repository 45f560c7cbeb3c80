//! Checkpoints, and the forward pass over them.
//!
//! [`load`] turns a folder into a [`LoadedModel`]: config.json becomes a plan per layer, every text
//! tensor is found, checked and used exactly once, the assistant beside it likewise. The forward
//! pass ([`gemma::Gemma`], [`drafter::Drafter`]) is written once over [`crate::backend::ops::Ops`].

pub mod audit;
pub mod checkpoint;
pub mod config;
pub mod drafter;
pub(crate) mod file;
pub mod fingerprint;
#[cfg(test)]
#[path = "../../tests/support/forms.rs"]
pub(crate) mod forms;
pub mod gemma;
pub mod generation;
pub(crate) mod header;
pub(crate) mod index;
pub mod inventory;

pub mod kv_dtype;
pub mod kv_scales;
pub mod names;
pub(crate) mod partial;
pub mod plan;
pub mod quant_config;
pub mod reading;
pub(crate) mod shown;
pub(crate) mod spread;
pub mod weight;
pub mod weights;

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, CheckpointError, Tensor};
use config::ConfigError;
use fingerprint::numbers;
use generation::GenerationDefaults;
use names::{NameError, text_name};
use plan::{DraftPlan, KvSource, Plan};
use reading::Reading;
use spread::spread;
use weight::Weight;
use weights::{DraftWeights, TargetWeights};

/// A checkpoint that cannot be served. Every form says which file or folder is meant.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Not a folder.
    #[error(transparent)]
    NoFolder(#[from] NoFolder),
    /// A file is missing or unreadable.
    #[error("cannot read {}: {}", .file.display(), file::why(.source))]
    Io {
        /// Which file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A configuration that is not served.
    #[error("{file}: {source}")]
    Config {
        /// Which file.
        file: PathBuf,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// Weights that cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights that do not fit the configuration.
    #[error("{folder}: {source}")]
    Names {
        /// Which folder.
        folder: PathBuf,
        /// What is wrong with them.
        source: NameError,
    },
    /// An assistant of another model.
    #[error(
        "the assistant in {folder} does not fit the model: {problem}; give the one that was made for \
         it, or --drafter none"
    )]
    Mismatch {
        /// Which folder.
        folder: PathBuf,
        /// Where they differ.
        problem: String,
    },
}

/// How to load.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// The folder of the assistant that drafts, if one does.
    pub drafter: Option<PathBuf>,
}

/// Where the assistant of a checkpoint may be: in its folder as `assistant`, or beside it with the
/// name of the hub's repositories.
pub fn drafter_places(folder: &Path) -> Vec<PathBuf> {
    let beside = folder.file_name().map(|name| {
        let mut name = name.to_os_string();
        name.push("-assistant");
        folder.with_file_name(name)
    });
    std::iter::once(folder.join("assistant"))
        .chain(beside)
        .collect()
}

/// The assistant that belongs to a checkpoint. One that is there is taken, so that a broken one is
/// an error and not a model without a drafter.
pub fn drafter_of(folder: &Path) -> Option<PathBuf> {
    drafter_places(folder)
        .into_iter()
        .find(|place| place.symlink_metadata().is_ok())
}

/// A model's files, compiled into the binary.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedFiles {
    /// config.json
    pub config: &'static [u8],
    /// generation_config.json, if any.
    pub generation_config: Option<&'static [u8]>,
    /// model.safetensors
    pub weights: &'static [u8],
}

/// A target and perhaps its assistant, compiled into the binary.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedCheckpoint {
    /// What errors call it.
    pub label: &'static str,
    /// The target.
    pub target: EmbeddedFiles,
    /// Its assistant.
    pub assistant: Option<EmbeddedFiles>,
}

/// An assistant that fits its target.
#[derive(Debug)]
pub struct LoadedDrafter {
    /// Its plan.
    pub plan: DraftPlan,
    /// Its weights.
    pub weights: DraftWeights,
}

/// A checkpoint, checked, ready for a back end.
#[derive(Debug)]
pub struct LoadedModel {
    /// Its plan.
    pub plan: Plan,
    /// Its weights.
    pub weights: TargetWeights,
    /// Its assistant.
    pub drafter: Option<LoadedDrafter>,
    /// How it wants to be sampled.
    pub defaults: GenerationDefaults,
    /// On its way to the hash of everything but a back end's recipe.
    pub reading: Reading,
    /// Things worth a warning, one line each.
    pub notes: Vec<String>,
    /// Calibrated scales of an FP8 cache that were found, of keys and of values.
    pub kv_scales: usize,
    /// Its configuration asks for an FP8 cache.
    pub asks_for_fp8_cache: bool,
}

/// Loads a checkpoint folder. Its weights are still being read when it returns: whoever takes them in
/// asks [`Reading::digest`] at the end whether all is well with them.
pub fn load(dir: &Path, options: &LoadOptions) -> Result<LoadedModel, LoadError> {
    check_folder(dir)?;
    let config = read(&dir.join("config.json"))?;
    let generation = read_optional(&dir.join("generation_config.json"))?;
    let quantization = read_optional(&dir.join("hf_quant_config.json"))?;
    let plan = parse_config(dir, &config)?;
    let files = Files {
        folder: dir,
        config: &config,
        generation: generation.as_deref(),
        quantization: quantization.as_deref(),
    };
    let mut model = assemble(&files, plan, Checkpoint::open(dir)?)?;
    if let Some(folder) = &options.drafter {
        model.drafter = Some(load_drafter(folder, &model.plan)?);
    }
    Ok(model)
}

/// Loads the assistant of a folder, which must fit the model.
pub(crate) fn load_drafter(folder: &Path, target: &Plan) -> Result<LoadedDrafter, LoadError> {
    check_folder(folder)?;
    let config = read(&folder.join("config.json"))?;
    let checkpoint = Checkpoint::open(folder)?;
    assemble_drafter(folder, &config, &checkpoint, target)
}

/// Loads a checkpoint that is part of the binary. `drafter` false leaves its assistant out.
pub fn load_embedded(
    embedded: &EmbeddedCheckpoint,
    drafter: bool,
) -> Result<LoadedModel, LoadError> {
    let folder = Path::new(embedded.label);
    let target = &embedded.target;
    let plan = parse_config(folder, target.config)?;
    let label = |file: &str| format!("{}/{file}", embedded.label);
    let checkpoint = Checkpoint::embedded(&label("model.safetensors"), target.weights)?;
    let files = Files {
        folder,
        config: target.config,
        generation: target.generation_config,
        quantization: None,
    };
    let mut model = assemble(&files, plan, checkpoint)?;
    if let Some(assistant) = embedded.assistant.as_ref().filter(|_| drafter) {
        let folder = folder.join("assistant");
        let label = label("assistant/model.safetensors");
        let checkpoint = Checkpoint::embedded(&label, assistant.weights)?;
        let drafter = assemble_drafter(&folder, assistant.config, &checkpoint, &model.plan)?;
        model.drafter = Some(drafter);
    }
    Ok(model)
}

struct Files<'a> {
    folder: &'a Path,
    config: &'a [u8],
    generation: Option<&'a [u8]>,
    quantization: Option<&'a [u8]>,
}

/// No checkpoint is under this name.
#[derive(Debug, thiserror::Error)]
#[error("{} {why}: give the folder with config.json, the name of a model on the hub, or demo", .folder.display())]
pub struct NoFolder {
    folder: PathBuf,
    why: String,
}

impl NoFolder {
    /// What is wrong with it, to stand behind its name.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }
}

/// Whether this is a folder that can be looked into.
pub fn check_folder(folder: &Path) -> Result<(), NoFolder> {
    let why = match folder.metadata() {
        Ok(about) if about.is_dir() => return Ok(()),
        Ok(_) => "is not a folder".to_owned(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "is not there".to_owned(),
        Err(error) => format!("cannot be looked into ({})", file::why(&error)),
    };
    Err(NoFolder {
        folder: folder.to_owned(),
        why,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    file::read(path).map_err(|source| LoadError::Io {
        file: path.to_owned(),
        source,
    })
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let there = file::is_there(path).map_err(|source| LoadError::Io {
        file: path.to_owned(),
        source,
    })?;
    there.then(|| read(path)).transpose()
}

fn parse_config(folder: &Path, config: &[u8]) -> Result<Plan, LoadError> {
    config::parse_target(config).map_err(|source| LoadError::Config {
        file: folder.join("config.json"),
        source,
    })
}

/// Whether a folder holds a model that is served, by its configuration alone: what is no model is
/// said before anything else of the folder is looked at.
pub fn check_config(folder: &Path) -> Result<(), LoadError> {
    check_folder(folder)?;
    let config = read(&folder.join("config.json"))?;
    parse_config(folder, &config).map(drop)
}

fn assemble(
    files: &Files<'_>,
    mut plan: Plan,
    checkpoint: Checkpoint,
) -> Result<LoadedModel, LoadError> {
    let folder = files.folder;
    let defaults =
        generation::parse(files.generation, files.config, plan.vocab).map_err(|wrong| {
            LoadError::Config {
                file: folder.join(wrong.file),
                source: wrong.problem,
            }
        })?;
    let names = |source| LoadError::Names {
        folder: folder.to_owned(),
        source,
    };
    let weights = weights::target(&checkpoint, &plan).map_err(names)?;
    for (layer, weights) in plan.layers.iter_mut().zip(&weights.layers) {
        let values_only = layer.kv == KvSource::Own { values_only: true };
        let scales = &weights.attention.kv_scales;
        layer.kv_scales = scales.resolve(layer.head_dim, values_only).map_err(names)?;
    }
    let text: Vec<Tensor> = checkpoint
        .tensors()
        .filter(|t| text_name(t.name()).is_some())
        .cloned()
        .collect();
    // As early as can be: until its bytes come, there is time for everything else.
    let reading = Reading::start(text, &weights.all(), numbers(&plan));
    all_right(&weights.all(), Weight::check_scales).map_err(names)?;
    let notes = quant_config::differences(files.config, files.quantization, &weights.all());
    let asks_for_fp8_cache = quant_config::asks_for_fp8_cache(files.config, files.quantization);
    let kv_scales = weights
        .layers
        .iter()
        .map(|l| l.attention.kv_scales.count())
        .sum();
    Ok(LoadedModel {
        plan,
        weights,
        drafter: None,
        defaults,
        reading,
        notes: notes
            .into_iter()
            .map(|note| format!("{}: {note}", folder.display()))
            .collect(),
        kv_scales,
        asks_for_fp8_cache,
    })
}

fn assemble_drafter(
    folder: &Path,
    config: &[u8],
    checkpoint: &Checkpoint,
    target: &Plan,
) -> Result<LoadedDrafter, LoadError> {
    let plan = config::parse_assistant(config).map_err(|source| LoadError::Config {
        file: folder.join("config.json"),
        source,
    })?;
    check_fit(target, &plan).map_err(|problem| LoadError::Mismatch {
        folder: folder.to_owned(),
        problem,
    })?;
    let names = |source| LoadError::Names {
        folder: folder.to_owned(),
        source,
    };
    let weights = weights::assistant(checkpoint, &plan).map_err(names)?;
    all_right(&weights.all(), Weight::check_values).map_err(names)?;
    Ok(LoadedDrafter { plan, weights })
}

/// Checks all of them; the first error counts.
fn all_right(
    weights: &[&Weight],
    check: impl Fn(&Weight) -> Result<(), NameError> + Sync,
) -> Result<(), NameError> {
    spread(weights, |w| check(w)).into_iter().collect()
}

/// An assistant reads the target's hidden state, embedding and cache: all must have its sizes.
pub(crate) fn check_fit(target: &Plan, draft: &DraftPlan) -> Result<(), String> {
    let text = &draft.text;
    if draft.backbone != target.hidden {
        return Err(format!(
            "it reads a width of {}, not {}",
            draft.backbone, target.hidden
        ));
    }
    if text.vocab != target.vocab {
        return Err(format!(
            "it has {} tokens, not {}",
            text.vocab, target.vocab
        ));
    }
    for layer in &text.layers {
        let kind = layer.kind;
        let Some(owner) = target.last_owner(kind) else {
            return Err(format!("the model has no {} cache", kind.name()));
        };
        let owner = &target.layers[owner];
        if (layer.head_dim, layer.kv_heads) != (owner.head_dim, owner.kv_heads) {
            return Err(format!(
                "its {} layers read {} heads of {}, the model caches {} of {}",
                kind.name(),
                layer.kv_heads,
                layer.head_dim,
                owner.kv_heads,
                owner.head_dim
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_of_an_assistant_must_fit_the_cache_that_it_reads() {
        let text = |layers: serde_json::Value| {
            let mut text = serde_json::json!({
                "model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 64,
                "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
                "num_key_value_heads": 4, "head_dim": 32, "sliding_window": 8,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            });
            text["per_layer_config"] = layers;
            text
        };
        let target = config::parse_target(text(serde_json::json!({})).to_string().as_bytes());
        let target = target.unwrap();
        let fit = |layers: serde_json::Value| {
            let assistant = serde_json::json!({
                "model_type": "gemma4_assistant", "backbone_hidden_size": 64,
                "text_config": text(layers),
            });
            let plan = config::parse_assistant(assistant.to_string().as_bytes()).unwrap();
            check_fit(&target, &plan)
        };
        assert_eq!(fit(serde_json::json!({})), Ok(()));
        for layer in ["0", "1", "2"] {
            let message = fit(serde_json::json!({(layer): {"num_key_value_heads": 2}}));
            assert!(message.unwrap_err().contains("2 heads of 32"), "{layer}");
        }
    }
}
