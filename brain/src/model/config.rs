//! Reads config.json, in every form that Gemma 4 checkpoints carry, into a [`Plan`].
//!
//! Seen in the field: a text decoder nested under `text_config`, or alone at the top level; full
//! layers described by `global_head_dim` and `num_global_key_value_heads`, or by `per_layer_config`
//! overrides; layer types listed or left out.

mod layers;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    plan::{DraftHead, DraftPlan, Kind, Moe, PerLayerInput, Plan, Rope},
    shown::{shown, shown_text},
};

/// What is wrong with a config.json, without the file's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or a field of the wrong type.
    #[error("is not a model configuration: {0}")]
    Syntax(String),
    /// Another architecture.
    #[error(
        "model_type is \"{}\", another family of models, which is not served; expected {expected}: \
         give a Gemma 4 checkpoint",
        shown(.found)
    )]
    Architecture {
        /// What the file says.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// An assistant where a model should be.
    #[error(
        "is an MTP assistant ({0}), not a model: give it as --drafter, and the model that it was \
         made for as --model"
    )]
    Assistant(String),
    /// A model where an assistant should be.
    #[error(
        "is a whole model ({0}), not an MTP assistant: give the assistant made for --model, whose \
         name ends in -assistant, or --drafter none"
    )]
    NoAssistant(String),
    /// A field is missing or contradicts another.
    #[error("{field}: {problem}")]
    Field {
        /// Its name.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// What is said may quote the file, and is shown safely.
fn field(name: &str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Field {
        field: name.into(),
        problem: shown_text(&problem.into()),
    }
}

/// The text part, as written. Defaults are the reference's where real files rely on them.
#[derive(Deserialize)]
struct RawText {
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    global_head_dim: Option<usize>,
    num_global_key_value_heads: Option<usize>,
    hidden_activation: Option<String>,
    #[serde(default = "default_positions")]
    max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_window")]
    sliding_window: usize,
    layer_types: Option<Vec<String>>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<String>,
    vocab_size_per_layer_input: Option<usize>,
    #[serde(default)]
    hidden_size_per_layer_input: Option<usize>,
    #[serde(default)]
    attention_k_eq_v: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    num_kv_shared_layers: usize,
    #[serde(default)]
    use_double_wide_mlp: bool,
    #[serde(default)]
    enable_moe_block: bool,
    num_experts: Option<usize>,
    top_k_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    expert_intermediate_size: Option<usize>,
    rope_parameters: Option<BTreeMap<String, RawRope>>,
    per_layer_config: Option<BTreeMap<String, RawOverride>>,
}

#[derive(Deserialize)]
struct RawOverride {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

#[derive(Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
}

fn default_positions() -> usize {
    131_072
}
fn default_eps() -> f64 {
    1e-6
}
fn default_window() -> usize {
    512
}

/// Far above any real model; keeps products of sizes in range.
const MAX_WIDTH: usize = 1 << 20;

/// Largest head and largest per-layer input.
pub const MAX_HEAD: usize = 1024;

/// Reads a target's config.json.
pub fn parse_target(json: &[u8]) -> Result<Plan, ConfigError> {
    let top = object(json)?;
    let outer = model_type(&top);
    if is_assistant(&outer) {
        return Err(ConfigError::Assistant(outer));
    }
    let (within, text) = match top.get("text_config") {
        Some(Value::Object(text)) if is_target(&outer) => (NESTED, text.clone()),
        None if is_target(&outer) => ("", top),
        _ => {
            return Err(ConfigError::Architecture {
                found: outer,
                expected: "gemma4, gemma4_text, gemma4_unified or gemma4_unified_text",
            });
        }
    };
    let raw = raw_text(within, text)?;
    let inner = raw.model_type.clone().unwrap_or_default();
    if !inner.is_empty() && !is_target(&inner) {
        return Err(ConfigError::Architecture {
            found: inner,
            expected: "gemma4_text or gemma4_unified_text in text_config",
        });
    }
    plan(&raw, false)
}

/// Reads an assistant's config.json.
pub fn parse_assistant(json: &[u8]) -> Result<DraftPlan, ConfigError> {
    let top = object(json)?;
    let outer = model_type(&top);
    if is_target(&outer) {
        return Err(ConfigError::NoAssistant(outer));
    }
    if !is_assistant(&outer) {
        return Err(ConfigError::Architecture {
            found: outer,
            expected: "gemma4_assistant or gemma4_unified_assistant",
        });
    }
    let Some(Value::Object(text)) = top.get("text_config") else {
        return Err(field("text_config", "missing"));
    };
    let text = plan(&raw_text(NESTED, text.clone())?, true)?;
    let backbone = number(&top, "backbone_hidden_size")?
        .ok_or_else(|| field("backbone_hidden_size", "missing"))?;
    check_width("backbone_hidden_size", backbone)?;
    let ordered = match top.get("use_ordered_embeddings") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(b)) => *b,
        Some(_) => return Err(field("use_ordered_embeddings", "must be true or false")),
    };
    let head = if ordered {
        let count = number(&top, "num_centroids")?.unwrap_or(2048);
        let top_k = number(&top, "centroid_intermediate_top_k")?.unwrap_or(32);
        if count == 0 || !text.vocab.is_multiple_of(count) {
            return Err(field(
                "num_centroids",
                format!("{count} does not divide the vocabulary of {}", text.vocab),
            ));
        }
        if top_k == 0 || top_k > count {
            return Err(field(
                "centroid_intermediate_top_k",
                format!("{top_k} is not in 1..={count}"),
            ));
        }
        DraftHead::Centroids { count, top_k }
    } else {
        DraftHead::Dense
    };
    Ok(DraftPlan {
        text,
        backbone,
        head,
    })
}

fn is_assistant(model_type: &str) -> bool {
    matches!(model_type, "gemma4_assistant" | "gemma4_unified_assistant")
}

fn is_target(model_type: &str) -> bool {
    matches!(
        model_type,
        "gemma4" | "gemma4_text" | "gemma4_unified" | "gemma4_unified_text"
    )
}

fn object(json: &[u8]) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_slice(json).map_err(|e| ConfigError::Syntax(shown_text(&e.to_string())))
}

fn model_type(top: &Map<String, Value>) -> String {
    top.get("model_type")
        .and_then(Value::as_str)
        .unwrap_or("")
        .to_owned()
}

fn number(top: &Map<String, Value>, name: &str) -> Result<Option<usize>, ConfigError> {
    match top.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(v) => match v.as_u64() {
            Some(n) if n <= u64::from(u32::MAX) => Ok(Some(n as usize)),
            _ => Err(field(name, format!("{v} is not a size"))),
        },
    }
}

/// What stands before the names of the text part's fields where it is a part of the file.
const NESTED: &str = "text_config.";

fn raw_text(within: &str, text: Map<String, Value>) -> Result<RawText, ConfigError> {
    // A `null` means "default" in these files; serde would refuse it for plain numbers.
    let text: Map<String, Value> = text.into_iter().filter(|(_, v)| !v.is_null()).collect();
    serde_path_to_error::deserialize(Value::Object(text)).map_err(|error| {
        let problem = shown_text(&error.inner().to_string());
        match error.path().iter().next() {
            None => ConfigError::Syntax(problem),
            Some(_) => field(&shown(&format!("{within}{}", error.path())), problem),
        }
    })
}

fn check_width(name: &str, n: usize) -> Result<(), ConfigError> {
    if n == 0 || n > MAX_WIDTH {
        return Err(field(name, format!("{n} is not in 1..={MAX_WIDTH}")));
    }
    Ok(())
}

/// A positive number as it is computed with, which must not be nothing or without end as such.
fn single(name: &str, n: f64) -> Result<f32, ConfigError> {
    let single = n as f32;
    if single.is_normal() && single > 0.0 {
        return Ok(single);
    }
    Err(field(name, format!("{n:e} is no positive fp32 number")))
}

fn plan(raw: &RawText, assistant: bool) -> Result<Plan, ConfigError> {
    for (name, n) in [
        ("vocab_size", raw.vocab_size),
        ("hidden_size", raw.hidden_size),
        ("intermediate_size", raw.intermediate_size),
        ("num_attention_heads", raw.num_attention_heads),
        ("num_key_value_heads", raw.num_key_value_heads),
        ("sliding_window", raw.sliding_window),
    ] {
        check_width(name, n)?;
    }
    if raw.num_hidden_layers == 0 || raw.num_hidden_layers > 1000 {
        return Err(field(
            "num_hidden_layers",
            format!("{} is not in 1..=1000", raw.num_hidden_layers),
        ));
    }
    if raw.max_position_embeddings == 0 || raw.max_position_embeddings > 1 << 24 {
        return Err(field("max_position_embeddings", "is not in 1..=2^24"));
    }
    let eps = single("rms_norm_eps", raw.rms_norm_eps)?;
    if eps >= 1.0 {
        return Err(field("rms_norm_eps", format!("{eps} is not in (0, 1)")));
    }
    if let Some(a) = raw
        .hidden_activation
        .as_deref()
        .filter(|a| *a != "gelu_pytorch_tanh")
    {
        return Err(field(
            "hidden_activation",
            format!("{a:?} is not gelu_pytorch_tanh"),
        ));
    }
    if raw.attention_bias {
        return Err(field("attention_bias", "true is not served"));
    }
    if raw.use_bidirectional_attention.as_deref() == Some("all") {
        return Err(field(
            "use_bidirectional_attention",
            "\"all\" is not a generating model",
        ));
    }
    let softcap = match raw.final_logit_softcapping {
        None => None,
        Some(cap) => Some(single("final_logit_softcapping", cap)?),
    };
    let per_layer_input = per_layer_input(raw)?;
    let moe = moe(raw)?;
    if assistant && (per_layer_input.is_some() || moe.is_some()) {
        return Err(field(
            "text_config",
            "an assistant has neither per-layer inputs nor experts",
        ));
    }
    let layers = layers::layers(raw, assistant)?;
    Ok(Plan {
        hidden: raw.hidden_size,
        heads: raw.num_attention_heads,
        vocab: raw.vocab_size,
        window: raw.sliding_window,
        max_positions: raw.max_position_embeddings,
        eps,
        softcap,
        per_layer_input,
        moe,
        rope_sliding: rope(raw, Kind::Sliding)?,
        rope_full: rope(raw, Kind::Full)?,
        layers,
    })
}

fn per_layer_input(raw: &RawText) -> Result<Option<PerLayerInput>, ConfigError> {
    match raw.hidden_size_per_layer_input.unwrap_or(0) {
        0 => Ok(None),
        dim => {
            if dim > MAX_HEAD {
                return Err(field(
                    "hidden_size_per_layer_input",
                    format!("{dim} is above {MAX_HEAD}"),
                ));
            }
            let vocab = raw.vocab_size_per_layer_input.unwrap_or(raw.vocab_size);
            if vocab < raw.vocab_size {
                return Err(field(
                    "vocab_size_per_layer_input",
                    format!("{vocab} is less than the vocabulary of {}", raw.vocab_size),
                ));
            }
            check_width("vocab_size_per_layer_input", vocab)?;
            Ok(Some(PerLayerInput { dim, vocab }))
        }
    }
}

fn moe(raw: &RawText) -> Result<Option<Moe>, ConfigError> {
    if !raw.enable_moe_block {
        return Ok(None);
    }
    let need = |name: &str, n: Option<usize>| n.ok_or_else(|| field(name, "missing"));
    let experts = need("num_experts", raw.num_experts)?;
    let top_k = need("top_k_experts", raw.top_k_experts)?;
    let width = raw.moe_intermediate_size.or(raw.expert_intermediate_size);
    let intermediate = need("moe_intermediate_size", width)?;
    check_width("moe_intermediate_size", intermediate)?;
    if experts == 0 || experts > 4096 || top_k == 0 || top_k > experts {
        return Err(field(
            "top_k_experts",
            format!("{top_k} of {experts} experts makes no sense"),
        ));
    }
    Ok(Some(Moe {
        experts,
        top_k,
        intermediate,
    }))
}

fn rope(raw: &RawText, kind: Kind) -> Result<Rope, ConfigError> {
    let (theta, partial, default_type) = match kind {
        Kind::Sliding => (10_000.0, 1.0, "default"),
        Kind::Full => (1_000_000.0, 0.25, "proportional"),
    };
    let mut rope = Rope {
        theta,
        partial,
        factor: 1.0,
    };
    if let Some(r) = raw
        .rope_parameters
        .as_ref()
        .and_then(|m| m.get(kind.name()))
    {
        let name = r.rope_type.as_deref().unwrap_or(default_type);
        if !matches!(name, "default" | "proportional") {
            return Err(field(
                "rope_parameters",
                format!("rope_type {name:?} is not served"),
            ));
        }
        rope.theta = r.rope_theta.unwrap_or(theta);
        rope.partial = match name {
            "default" => 1.0,
            _ => r.partial_rotary_factor.unwrap_or(1.0),
        };
        rope.factor = r.factor.unwrap_or(1.0);
    }
    // Frequencies are fp32, from 1 down to about the inverse of both together.
    let slowest = (rope.theta * rope.factor) as f32;
    let sane = rope.theta >= 1.0
        && (0.0..=1.0).contains(&rope.partial)
        && rope.factor >= 1.0
        && slowest.is_finite();
    if !sane {
        return Err(field(
            "rope_parameters",
            format!("{} {rope:?} makes no sense", kind.name()),
        ));
    }
    Ok(rope)
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
