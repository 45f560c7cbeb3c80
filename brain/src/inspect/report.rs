//! What is said of a checkpoint. Every field is a fact of its files or follows from them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{
    header::{Entry, Header},
    memory::{Kv, MemoryPlan},
    problem::Problem,
};
use crate::model::{
    audit::Audit,
    inventory::{Part, Storage},
    names::text_name,
    plan::{KvSource, LayerPlan, Plan},
};

/// A checkpoint, or one file of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// As it was given.
    pub path: String,
    /// `target`, `assistant`, `file` or `unknown`.
    pub kind: &'static str,
    /// The configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<Architecture>,
    /// How many numbers it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Parameters>,
    /// The recipe that the configuration names, if the weights are quantised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// How they are stored.
    pub storage: Vec<Stored>,
    /// The files of weights.
    pub files: Vec<FileFacts>,
    /// What keys and values take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<Kv>,
    /// Layers for which the files have scales of an FP8 cache, keys and values counted apart.
    pub kv_scales: usize,
    /// The configuration asks for an FP8 cache: `--kv-cache-dtype auto` is fp8.
    pub asks_for_fp8_cache: bool,
    /// What fits a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryPlan>,
    /// Its drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafter: Option<DrafterFacts>,
    /// Tokenizer, template and defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<TextFacts>,
    /// What is odd and served all the same: above all where the configuration says another form
    /// of weights than the files hold.
    pub notes: Vec<String>,
    /// Everything that is wrong.
    pub problems: Vec<Problem>,
    /// Every tensor, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorFacts>>,
}

/// A configuration, every field resolved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Architecture {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the target that an assistant belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backbone: Option<usize>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Keys that a sliding layer sees.
    pub window: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Bound of the logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f32>,
    /// Width of the per-layer input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_layer_input: Option<usize>,
    /// Experts of a layer, and how many a token uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<[usize; 2]>,
    /// Width of an expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_intermediate: Option<usize>,
    /// Clusters of an assistant's head, and how many are looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clusters: Option<[usize; 2]>,
    /// Its layers; equal ones share a row.
    pub layers: Vec<LayerRow>,
}

/// Layers that are alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerRow {
    /// How many.
    pub count: usize,
    /// Which: `0-4,6-10`.
    pub layers: String,
    /// `sliding_attention` or `full_attention`.
    pub kind: &'static str,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Where keys and values come from.
    pub cache: String,
    /// Width of the dense feed-forward block.
    pub intermediate: usize,
}

/// Numbers of a model. Token ids are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parameters {
    /// Of the text decoder. A head that is the embedding is counted once.
    pub total: u64,
    /// That a token is multiplied with: all but the per-layer table and the experts not chosen.
    pub active: u64,
    /// Of the token embedding.
    pub embedding: u64,
    /// Of the per-layer table.
    pub per_layer_table: u64,
    /// Of all experts.
    pub experts: u64,
    /// Of towers for images and sound, which are not read.
    pub towers: u64,
}

/// Weights of one part in one form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stored {
    /// What they are for.
    pub part: &'static str,
    /// How they are stored.
    pub form: String,
    /// Tensors, scales included.
    pub tensors: usize,
    /// Numbers, scales not included.
    pub parameters: u64,
    /// Bytes, scales included.
    pub bytes: u64,
}

/// A file of weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileFacts {
    /// Its name.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// Tensors.
    pub tensors: usize,
}

/// A drafter beside its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrafterFacts {
    /// Its folder.
    pub path: String,
    /// Whether it can draft for this target.
    pub fits: bool,
    /// Its numbers.
    pub parameters: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Layers of the target whose cache it reads: sliding, full.
    pub reads: [Option<usize>; 2],
}

/// What turns text into tokens and back.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextFacts {
    /// Tokens that the tokenizer knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// BLAKE3 of the chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Sampling defaults: 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// 0 keeps all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// 1 keeps all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Tokens that are never emitted.
    pub suppressed: Vec<u32>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorFacts {
    /// Its full name.
    pub name: String,
    /// Its file.
    pub file: String,
    /// Element type, as the file has it.
    pub dtype: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// What it is used for: a part, `tower`, `unread` or `unknown`.
    pub used: &'static str,
}

/// The name of a part.
pub fn part_name(part: Part) -> &'static str {
    match part {
        Part::Embedding => "embedding",
        Part::PerLayerTable => "per-layer table",
        Part::Head => "head",
        Part::Attention => "attention",
        Part::Dense => "feed-forward",
        Part::Experts => "experts",
        Part::Router => "router",
        Part::PerLayerInput => "per-layer input",
        Part::Norm => "norms",
        Part::Bridge => "bridge",
        Part::Clusters => "clusters",
    }
}

impl Architecture {
    /// Of a decoder.
    pub fn of(model_type: String, plan: &Plan) -> Self {
        let mut rows: Vec<(&LayerPlan, Vec<usize>)> = Vec::new();
        for (i, layer) in plan.layers.iter().enumerate() {
            match rows.iter_mut().find(|(like, _)| *like == layer) {
                Some((_, numbers)) => numbers.push(i),
                None => rows.push((layer, vec![i])),
            }
        }
        let rows = rows.into_iter().map(|(layer, numbers)| LayerRow {
            count: numbers.len(),
            layers: ranges(&numbers),
            kind: layer.kind.name(),
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            cache: match layer.kv {
                KvSource::Own { values_only: false } => "keys and values".to_owned(),
                KvSource::Own { values_only: true } => "values, keys formed from them".to_owned(),
                KvSource::Shared { owner } => format!("of layer {owner}"),
                KvSource::Target => "of the target".to_owned(),
            },
            intermediate: layer.intermediate,
        });
        Self {
            model_type,
            hidden: plan.hidden,
            backbone: None,
            vocab: plan.vocab,
            heads: plan.heads,
            window: plan.window,
            max_positions: plan.max_positions,
            softcap: plan.softcap,
            per_layer_input: plan.per_layer_input.map(|p| p.dim),
            experts: plan.moe.map(|m| [m.experts, m.top_k]),
            expert_intermediate: plan.moe.map(|m| m.intermediate),
            clusters: None,
            layers: rows.collect(),
        }
    }
}

/// `0-4,6-10` of sorted numbers.
pub fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *n => *last = *n,
            _ => runs.push((*n, *n)),
        }
    }
    let text = runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    text.collect::<Vec<_>>().join(",")
}

impl Parameters {
    /// Of what an audit found, beside towers.
    pub fn of(audit: &Audit, plan: &Plan, entries: &[&Entry]) -> Self {
        let mut sum = Self::default();
        for filled in &audit.filled {
            let slot = &filled.slot;
            if slot.storage == Storage::Tokens {
                continue;
            }
            let elements = slot.elements();
            sum.total += elements;
            match slot.part {
                Part::Embedding => sum.embedding += elements,
                Part::PerLayerTable => sum.per_layer_table += elements,
                Part::Experts => sum.experts += elements,
                _ => {}
            }
        }
        let chosen = plan
            .moe
            .map_or(0, |m| sum.experts / m.experts as u64 * m.top_k as u64);
        sum.active = sum.total - sum.per_layer_table - sum.experts + chosen;
        sum.towers = entries
            .iter()
            .filter(|e| text_name(&e.name).is_none())
            .map(|e| e.shape.iter().map(|n| *n as u64).product::<u64>())
            .sum();
        sum
    }
}

/// What is stored how: a row for every part in every form, and one for what is not read.
pub fn storage(audit: &Audit, entries: &[&Entry]) -> Vec<Stored> {
    let mut rows: BTreeMap<(Part, String), Stored> = BTreeMap::new();
    let mut add = |part: Part, form: String, tensors: usize, parameters: u64, bytes: u64| {
        let row = rows.entry((part, form.clone())).or_insert(Stored {
            part: part_name(part),
            form,
            tensors: 0,
            parameters: 0,
            bytes: 0,
        });
        row.tensors += tensors;
        row.parameters += parameters;
        row.bytes += bytes;
    };
    for filled in &audit.filled {
        // The experts of a layer may be parts of one tensor.
        let mut names: BTreeSet<&str> = BTreeSet::new();
        for weight in &filled.weights {
            let tensors = weight.tensors();
            let new = tensors.iter().filter(|t| names.insert(t.name())).count();
            let parameters = weight.rows() as u64 * weight.cols() as u64;
            let (form, bytes) = (weight.form().to_string(), weight.stored_bytes() as u64);
            add(filled.slot.part, form, new, parameters, bytes);
        }
    }
    if let Some(ids) = &audit.tokens {
        add(
            Part::Clusters,
            "token ids".into(),
            1,
            0,
            ids.bytes().len() as u64,
        );
    }
    let mut rows: Vec<Stored> = rows.into_values().collect();
    let towers: Vec<_> = entries
        .iter()
        .filter(|e| text_name(&e.name).is_none())
        .collect();
    if !towers.is_empty() {
        rows.push(Stored {
            part: "towers",
            form: "not read".into(),
            tensors: towers.len(),
            parameters: towers
                .iter()
                .map(|e| e.shape.iter().map(|n| *n as u64).product::<u64>())
                .sum(),
            bytes: towers.iter().map(|e| e.bytes).sum(),
        });
    }
    rows
}

/// What is stored how, where nothing is known of the model: a row for every element type.
pub fn storage_of_file(header: &Header) -> Vec<Stored> {
    let mut rows: BTreeMap<String, Stored> = BTreeMap::new();
    for entry in &header.entries {
        let form = format!("{:?}", entry.dtype);
        let row = rows.entry(form.clone()).or_insert(Stored {
            part: "tensors",
            form,
            tensors: 0,
            parameters: 0,
            bytes: 0,
        });
        row.tensors += 1;
        row.parameters += entry.shape.iter().map(|n| *n as u64).product::<u64>();
        row.bytes += entry.bytes;
    }
    rows.into_values().collect()
}

/// Every tensor and what it is used for.
pub fn tensors(audit: Option<&Audit>, entries: &[&Entry]) -> Vec<TensorFacts> {
    let mut used: BTreeMap<String, &'static str> = BTreeMap::new();
    if let Some(audit) = audit {
        for filled in &audit.filled {
            for tensor in filled.weights.iter().flat_map(|w| w.tensors()) {
                used.insert(tensor.name().to_owned(), part_name(filled.slot.part));
            }
        }
        for tensor in &audit.unknown {
            used.insert(tensor.name().to_owned(), "unknown");
        }
        if let Some(tensor) = &audit.tokens {
            used.insert(tensor.name().to_owned(), part_name(Part::Clusters));
        }
    }
    let facts = entries.iter().map(|e| TensorFacts {
        name: e.name.clone(),
        file: e.file.clone(),
        dtype: format!("{:?}", e.dtype),
        shape: e.shape.clone(),
        used: match text_name(&e.name) {
            None => "tower",
            Some(_) => used.get(&e.name).copied().unwrap_or("unread"),
        },
    });
    facts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_short() {
        for (numbers, text) in [
            (&[][..], ""),
            (&[3], "3"),
            (&[0, 1, 2], "0-2"),
            (&[0, 1, 3, 5, 6], "0-1,3,5-6"),
        ] {
            assert_eq!(ranges(numbers), text);
        }
    }
}
