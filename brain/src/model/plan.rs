//! What the forward pass needs to know of a model, layer by layer, every field resolved.

use super::kv_scales::KvScales;

/// How a layer's queries see the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The newest `window` keys, the query's own included.
    Sliding,
    /// Every key.
    Full,
}

impl Kind {
    /// The name that config.json uses.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Sliding => "sliding_attention",
            Kind::Full => "full_attention",
        }
    }
}

/// Where a layer's keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// Computed here and cached.
    Own {
        /// One projection serves both: only the value is stored, the key is formed from it.
        values_only: bool,
    },
    /// The cache of an earlier layer of the same kind.
    Shared {
        /// That layer.
        owner: usize,
    },
    /// The cache of another model (drafter layers).
    Target,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPlan {
    /// Sliding or full.
    pub kind: Kind,
    /// Size of a head.
    pub head_dim: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Whose keys and values it reads.
    pub kv: KvSource,
    /// Width of the dense feed-forward block.
    pub intermediate: usize,
    /// Scales of its cache where that is FP8: calibrated ones of the file, else 1. A layer that
    /// reads another's cache uses the owner's.
    pub kv_scales: KvScales,
}

/// Rotary embedding of one kind of layer: pair `j` turns by `position * frequencies[j]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Share of the pairs that turn; the others stay as they are.
    pub partial: f64,
    /// Divides every frequency.
    pub factor: f64,
}

/// Per-layer embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerInput {
    /// Width per layer.
    pub dim: usize,
    /// Rows of the table.
    pub vocab: usize,
}

/// Mixture of experts beside the dense block of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moe {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Width of an expert.
    pub intermediate: usize,
}

/// A text decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads of every layer.
    pub heads: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Keys that a sliding layer sees, the query's own included.
    pub window: usize,
    /// Longest sequence the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in every norm.
    pub eps: f32,
    /// Logits are `cap * tanh(z / cap)`.
    pub softcap: Option<f32>,
    /// Per-layer embeddings, if any.
    pub per_layer_input: Option<PerLayerInput>,
    /// Experts, if any.
    pub moe: Option<Moe>,
    /// Rotary embedding of sliding layers.
    pub rope_sliding: Rope,
    /// Rotary embedding of full layers.
    pub rope_full: Rope,
    /// The layers, first to last.
    pub layers: Vec<LayerPlan>,
}

impl Plan {
    /// Rotary embedding of a kind of layer.
    pub fn rope(&self, kind: Kind) -> &Rope {
        match kind {
            Kind::Sliding => &self.rope_sliding,
            Kind::Full => &self.rope_full,
        }
    }

    /// The layer whose cache layer `i` reads; `None` if it reads another model's.
    pub fn owner(&self, i: usize) -> Option<usize> {
        match self.layers[i].kv {
            KvSource::Own { .. } => Some(i),
            KvSource::Shared { owner } => Some(owner),
            KvSource::Target => None,
        }
    }

    /// The last layer of a kind that caches keys and values: what a drafter reads.
    pub fn last_owner(&self, kind: Kind) -> Option<usize> {
        self.layers
            .iter()
            .rposition(|l| l.kind == kind && matches!(l.kv, KvSource::Own { .. }))
    }

    /// The last layer that caches anything: later ones run for emitting rows alone.
    pub fn last_storing(&self) -> Option<usize> {
        self.layers
            .iter()
            .rposition(|l| matches!(l.kv, KvSource::Own { .. }))
    }

    /// Widest dense feed-forward block.
    pub fn max_intermediate(&self) -> usize {
        self.layers
            .iter()
            .map(|l| l.intermediate)
            .max()
            .unwrap_or(0)
    }

    /// Size of a layer's heads of a kind, if the model has such layers.
    pub fn head_dim(&self, kind: Kind) -> Option<usize> {
        self.layers
            .iter()
            .find(|l| l.kind == kind)
            .map(|l| l.head_dim)
    }
}

/// How an assistant turns its state into logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftHead {
    /// A product with its whole table.
    Dense,
    /// Only the tokens of the likeliest clusters.
    Centroids {
        /// Clusters; each owns `vocab / count` tokens.
        count: usize,
        /// Clusters looked at.
        top_k: usize,
    },
}

/// An MTP assistant.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftPlan {
    /// Its own decoder: every layer reads the target's cache.
    pub text: Plan,
    /// The target's width.
    pub backbone: usize,
    /// Its head.
    pub head: DraftHead,
}
