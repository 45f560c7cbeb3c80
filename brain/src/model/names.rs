//! Which tensor is which: prefixes, towers, and the rule that every text tensor is used exactly once.

use std::collections::BTreeMap;

use super::{
    checkpoint::{Checkpoint, Dtype, Tensor},
    shown::{shown, shown_text},
};

/// A checkpoint whose tensors do not fit its configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Not there.
    #[error("tensor {0} is missing; the checkpoint is incomplete or not what its config.json says")]
    Missing(String),
    /// There, but another size.
    #[error(
        "tensor {} has shape {} where config.json asks for {expected:?} (in {file})",
        shown(.name),
        shown_text(&format!("{found:?}"))
    )]
    Shape {
        /// Its name.
        name: String,
        /// The file it is in, as it may be shown.
        file: String,
        /// In the file.
        found: Vec<usize>,
        /// From config.json.
        expected: Vec<usize>,
    },
    /// A form of number that is not served.
    #[error("tensor {} holds {found:?}; {expected} would be served (in {file})", shown(.name))]
    Dtype {
        /// Its name.
        name: String,
        /// The file it is in, as it may be shown.
        file: String,
        /// In the file.
        found: Dtype,
        /// What would do.
        expected: &'static str,
    },
    /// Something that no model has.
    #[error("tensor {}: {problem} (in {file})", shown(.name))]
    Value {
        /// Its name.
        name: String,
        /// The file it is in, as it may be shown.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// Two tensors of the checkpoint stand for the same one.
    #[error("tensors {} and {} stand for the same weights", shown(.first), shown(.second))]
    Ambiguous {
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// Text tensors that nothing uses: running without them would give wrong tokens.
    #[error(
        "{count} text tensors are unknown, the first is {} (in {file}); this model is not served",
        shown(.first)
    )]
    Unknown {
        /// One of them.
        first: String,
        /// The file it is in, as it may be shown.
        file: String,
        /// How many there are.
        count: usize,
    },
}

impl NameError {
    pub(super) fn shape(tensor: &Tensor, expected: Vec<usize>) -> Self {
        NameError::Shape {
            name: tensor.name().to_owned(),
            file: file_name(tensor),
            found: tensor.shape().to_vec(),
            expected,
        }
    }

    pub(super) fn dtype(tensor: &Tensor, expected: &'static str) -> Self {
        NameError::Dtype {
            name: tensor.name().to_owned(),
            file: file_name(tensor),
            found: tensor.dtype(),
            expected,
        }
    }

    pub(crate) fn value(tensor: &Tensor, problem: impl Into<String>) -> Self {
        NameError::Value {
            name: tensor.name().to_owned(),
            file: file_name(tensor),
            problem: problem.into(),
        }
    }
}

fn file_name(tensor: &Tensor) -> String {
    let file = tensor.file();
    shown(
        &file
            .file_name()
            .unwrap_or(file.as_os_str())
            .to_string_lossy(),
    )
}

/// Parts of multimodal checkpoints that a text decoder has no use for.
const TOWERS: [&str; 6] = [
    "vision_tower.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
    "multi_modal_projector.",
];

/// Prefixes of the text decoder, longest first.
const PREFIXES: [&str; 4] = [
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
];

/// The name without its outer prefix, or `None` for a tensor of a tower.
pub fn text_name(full: &str) -> Option<&str> {
    let inner = full.strip_prefix("model.").unwrap_or(full);
    if TOWERS.iter().any(|tower| inner.starts_with(tower)) {
        return None;
    }
    Some(
        PREFIXES
            .iter()
            .find_map(|prefix| full.strip_prefix(prefix))
            .unwrap_or(full),
    )
}

/// One spelling for what some files put under `moe.`.
fn canonical(name: &str) -> String {
    let Some((layer, rest)) = name.split_once(".moe.") else {
        return name.to_owned();
    };
    match rest.starts_with("gate_up_proj") || rest.starts_with("down_proj") {
        true => format!("{layer}.experts.{rest}"),
        false => format!("{layer}.{rest}"),
    }
}

/// The text tensors that are not used yet, by their name without prefix.
pub struct Unused {
    tensors: BTreeMap<String, Tensor>,
}

impl Unused {
    /// All text tensors of a checkpoint.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, NameError> {
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            let Some(name) = text_name(tensor.name()) else {
                continue;
            };
            if let Some(other) = tensors.insert(canonical(name), tensor.clone()) {
                return Err(NameError::Ambiguous {
                    first: other.name().to_owned(),
                    second: tensor.name().to_owned(),
                });
            }
        }
        Ok(Self { tensors })
    }

    /// Whether a tensor is there and unused.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Whether any unused tensor's name begins so.
    pub fn has_prefix(&self, prefix: &str) -> bool {
        let mut from = self.tensors.range(prefix.to_owned()..);
        from.next()
            .is_some_and(|(name, _)| name.starts_with(prefix))
    }

    /// Uses a tensor of any element type, whose shape must be `expected`.
    pub fn take(&mut self, name: &str, expected: &[usize]) -> Result<Tensor, NameError> {
        let tensor = self
            .take_any(name)
            .ok_or_else(|| NameError::Missing(name.to_owned()))?;
        if tensor.shape() != expected {
            return Err(NameError::shape(&tensor, expected.to_vec()));
        }
        Ok(tensor)
    }

    /// Uses a tensor, if it is there, whatever it holds.
    pub fn take_any(&mut self, name: &str) -> Option<Tensor> {
        self.tensors.remove(name)
    }

    /// Forgets tensors that some files carry though nothing reads them.
    pub fn drop_prefix(&mut self, prefix: &str) {
        self.tensors.retain(|name, _| !name.starts_with(prefix));
    }

    /// What was not used.
    pub fn into_rest(self) -> impl Iterator<Item = Tensor> {
        self.tensors.into_values()
    }

    /// An error unless everything was used.
    pub fn finish(self) -> Result<(), NameError> {
        match self.tensors.values().next() {
            None => Ok(()),
            Some(first) => Err(NameError::Unknown {
                first: first.name().to_owned(),
                file: file_name(first),
                count: self.tensors.len(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_have_one_spelling() {
        for (name, expected) in [
            (
                "layers.3.moe.experts.7.down_proj.weight",
                "layers.3.experts.7.down_proj.weight",
            ),
            ("layers.3.moe.gate_up_proj", "layers.3.experts.gate_up_proj"),
            ("layers.3.moe.down_proj", "layers.3.experts.down_proj"),
            ("layers.3.moe.router.scale", "layers.3.router.scale"),
            ("layers.3.experts.down_proj", "layers.3.experts.down_proj"),
        ] {
            assert_eq!(canonical(name), expected);
        }
    }

    #[test]
    fn prefixes_are_stripped_and_towers_skipped() {
        for full in [
            "model.language_model.layers.0.self_attn.q_proj.weight",
            "language_model.model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "layers.0.self_attn.q_proj.weight",
        ] {
            assert_eq!(
                text_name(full),
                Some("layers.0.self_attn.q_proj.weight"),
                "{full}"
            );
        }
        assert_eq!(text_name("lm_head.weight"), Some("lm_head.weight"));
        assert_eq!(
            text_name("language_model.lm_head.weight"),
            Some("lm_head.weight")
        );
        for tower in [
            "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
            "model.audio_tower.layers.0.norm.weight",
            "model.embed_vision.embedding_projection.weight",
            "vision_tower.std_bias",
            "model.vision_embedder.x",
        ] {
            assert_eq!(text_name(tower), None, "{tower}");
        }
    }
}
