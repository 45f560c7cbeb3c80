//! The tensors of a target and of an assistant, each checked against the plan.

use std::collections::BTreeSet;

pub use super::weight::{Form, Weight};
use super::{
    checkpoint::{Checkpoint, Dtype, Tensor},
    kv_scales::KvScaleTensors,
    names::{NameError, Unused},
    plan::{DraftHead, DraftPlan, KvSource, LayerPlan, Plan},
    weight::{experts, linear, plain},
};

/// Self-attention of a layer.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// `[heads * head_dim, hidden]`
    pub q: Weight,
    /// `[kv_heads * head_dim, hidden]`, where the layer owns its cache.
    pub k: Option<Weight>,
    /// Likewise; absent where values come from the key projection.
    pub v: Option<Weight>,
    /// `[hidden, heads * head_dim]`
    pub o: Weight,
    /// `[head_dim]`
    pub q_norm: Weight,
    /// `[head_dim]`, where the layer owns its cache.
    pub k_norm: Option<Weight>,
    /// Calibrated scales of an FP8 cache, if the file has any.
    pub kv_scales: KvScaleTensors,
}

/// Per-layer input of a layer.
#[derive(Clone, Debug)]
pub struct PerLayerWeights {
    /// `[dim, hidden]`
    pub gate: Weight,
    /// `[hidden, dim]`
    pub projection: Weight,
    /// `[hidden]`
    pub norm: Weight,
}

/// One expert of a layer.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// `[2 * intermediate, hidden]`, gate rows first: one matrix, or the two that make it.
    pub gate_up: Vec<Weight>,
    /// `[hidden, intermediate]`
    pub down: Weight,
}

/// Router and experts of a layer.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// `[experts, hidden]`
    pub router: Weight,
    /// `[hidden]`
    pub router_scale: Weight,
    /// `[experts]`
    pub expert_scale: Weight,
    /// The experts, by number.
    pub experts: Vec<ExpertWeights>,
    /// `[hidden]`, before the experts.
    pub pre_norm: Weight,
    /// `[hidden]`, after the dense block.
    pub post_norm_dense: Weight,
    /// `[hidden]`, after the experts.
    pub post_norm_experts: Weight,
}

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// Its attention.
    pub attention: AttentionWeights,
    /// `[hidden]`, before attention.
    pub input_norm: Weight,
    /// `[hidden]`, after attention.
    pub post_attention_norm: Weight,
    /// `[hidden]`, before the feed-forward block.
    pub pre_feedforward_norm: Weight,
    /// `[hidden]`, after it.
    pub post_feedforward_norm: Weight,
    /// `[intermediate, hidden]`
    pub gate: Weight,
    /// `[intermediate, hidden]`
    pub up: Weight,
    /// `[hidden, intermediate]`
    pub down: Weight,
    /// Multiplies the whole residual stream at the layer's end.
    pub scalar: Weight,
    /// Per-layer input, if the model has any.
    pub per_layer: Option<PerLayerWeights>,
    /// Experts, if the model has any.
    pub moe: Option<MoeWeights>,
}

/// Per-layer embeddings of the whole model.
#[derive(Clone, Debug)]
pub struct PerLayerTable {
    /// `[vocab, layers * dim]`
    pub table: Weight,
    /// `[layers * dim, hidden]`
    pub projection: Weight,
    /// `[dim]`
    pub norm: Weight,
}

/// A target.
#[derive(Clone, Debug)]
pub struct TargetWeights {
    /// `[vocab, hidden]`
    pub embed: Weight,
    /// `[vocab, hidden]`, where it is not the embedding itself.
    pub head: Option<Weight>,
    /// Per-layer embeddings, if any.
    pub per_layer: Option<PerLayerTable>,
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`
    pub norm: Weight,
}

/// Clusters of an assistant's vocabulary.
#[derive(Clone, Debug)]
pub struct CentroidWeights {
    /// `[count, hidden]`
    pub centroids: Weight,
    /// Token ids, cluster by cluster; a permutation of the vocabulary.
    pub ordering: Vec<u32>,
    /// Its tensor, for error messages and digests.
    pub ordering_tensor: Tensor,
}

/// An assistant.
#[derive(Clone, Debug)]
pub struct DraftWeights {
    /// `[hidden, 2 * backbone]`
    pub pre_projection: Weight,
    /// `[backbone, hidden]`
    pub post_projection: Weight,
    /// `[vocab, hidden]`, the output head.
    pub embed: Weight,
    /// The layers; none has keys or values.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`
    pub norm: Weight,
    /// Clusters, if its head uses them.
    pub centroids: Option<CentroidWeights>,
}

impl LayerWeights {
    /// Its matrices and vectors.
    fn all(&self) -> Vec<&Weight> {
        let a = &self.attention;
        let mut all = vec![&a.q, &a.o, &a.q_norm];
        all.extend(a.k.iter().chain(&a.v).chain(&a.k_norm));
        all.extend([&self.input_norm, &self.post_attention_norm]);
        all.extend([&self.pre_feedforward_norm, &self.post_feedforward_norm]);
        all.extend([&self.gate, &self.up, &self.down, &self.scalar]);
        if let Some(p) = &self.per_layer {
            all.extend([&p.gate, &p.projection, &p.norm]);
        }
        if let Some(m) = &self.moe {
            all.extend([&m.router, &m.router_scale, &m.expert_scale]);
            all.extend(
                m.experts
                    .iter()
                    .flat_map(|e| e.gate_up.iter().chain([&e.down])),
            );
            all.extend([&m.pre_norm, &m.post_norm_dense, &m.post_norm_experts]);
        }
        all
    }
}

impl TargetWeights {
    /// Every matrix and vector.
    pub fn all(&self) -> Vec<&Weight> {
        let mut all = vec![&self.embed, &self.norm];
        all.extend(&self.head);
        if let Some(p) = &self.per_layer {
            all.extend([&p.table, &p.projection, &p.norm]);
        }
        all.extend(self.layers.iter().flat_map(LayerWeights::all));
        all
    }

    /// The forms in which its matrices are stored, each once, as a fingerprint names them.
    pub fn forms(&self) -> Vec<Form> {
        let matrices = self.all().into_iter().filter(|w| w.cols() > 1);
        let forms: BTreeSet<Form> = matrices.map(Weight::form).collect();
        forms.into_iter().collect()
    }
}

impl DraftWeights {
    /// Every matrix and vector.
    pub fn all(&self) -> Vec<&Weight> {
        let mut all = vec![&self.pre_projection, &self.post_projection];
        all.extend([&self.embed, &self.norm]);
        all.extend(self.layers.iter().flat_map(LayerWeights::all));
        all.extend(self.centroids.iter().map(|c| &c.centroids));
        all
    }
}

/// Finds every tensor of a target. No byte of a weight is read.
pub fn target(checkpoint: &Checkpoint, plan: &Plan) -> Result<TargetWeights, NameError> {
    let mut unused = Unused::new(checkpoint)?;
    let u = &mut unused;
    let table = [plan.vocab, plan.hidden];
    let embed = linear(u, "embed_tokens", table)?;
    let head = match u.has_prefix("lm_head.") {
        true => Some(linear(u, "lm_head", table)?),
        false => None,
    };
    let per_layer = match plan.per_layer_input {
        None => None,
        Some(p) => {
            let width = plan.layers.len() * p.dim;
            Some(PerLayerTable {
                table: linear(u, "embed_tokens_per_layer", [p.vocab, width])?,
                projection: linear(u, "per_layer_model_projection", [width, plan.hidden])?,
                norm: plain(u, "per_layer_projection_norm.weight", &[p.dim])?,
            })
        }
    };
    let layers = layers(u, plan)?;
    let norm = plain(u, "norm.weight", &[plan.hidden])?;
    unused.finish()?;
    Ok(TargetWeights {
        embed,
        head,
        per_layer,
        layers,
        norm,
    })
}

/// Finds every tensor of an assistant.
pub fn assistant(checkpoint: &Checkpoint, plan: &DraftPlan) -> Result<DraftWeights, NameError> {
    let mut unused = Unused::new(checkpoint)?;
    let u = &mut unused;
    let text = &plan.text;
    let pre_projection = linear(u, "pre_projection", [text.hidden, 2 * plan.backbone])?;
    let post_projection = linear(u, "post_projection", [plan.backbone, text.hidden])?;
    let embed = linear(u, "embed_tokens", [text.vocab, text.hidden])?;
    // Some exports repeat the tied head.
    u.drop_prefix("lm_head.");
    let layers = layers(u, text)?;
    let norm = plain(u, "norm.weight", &[text.hidden])?;
    let centroids = match plan.head {
        DraftHead::Dense => {
            u.drop_prefix("masked_embedding.");
            None
        }
        DraftHead::Centroids { count, .. } => Some(centroids(u, text, count)?),
    };
    unused.finish()?;
    Ok(DraftWeights {
        pre_projection,
        post_projection,
        embed,
        layers,
        norm,
        centroids,
    })
}

fn layers(unused: &mut Unused, plan: &Plan) -> Result<Vec<LayerWeights>, NameError> {
    (0..plan.layers.len())
        .map(|i| layer(unused, plan, i))
        .collect()
}

/// The unused tensors of one layer.
struct Scope<'a> {
    unused: &'a mut Unused,
    layer: usize,
}

impl Scope<'_> {
    fn matrix(&mut self, module: &str, shape: [usize; 2]) -> Result<Weight, NameError> {
        linear(
            self.unused,
            &format!("layers.{}.{module}", self.layer),
            shape,
        )
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Weight, NameError> {
        plain(
            self.unused,
            &format!("layers.{}.{name}", self.layer),
            &[length],
        )
    }
}

fn layer(unused: &mut Unused, plan: &Plan, i: usize) -> Result<LayerWeights, NameError> {
    let layer = &plan.layers[i];
    let (hidden, wide) = (plan.hidden, layer.intermediate);
    let mut scope = Scope { unused, layer: i };
    let attention = attention(&mut scope, plan, layer)?;
    let s = &mut scope;
    let input_norm = s.vector("input_layernorm.weight", hidden)?;
    let post_attention_norm = s.vector("post_attention_layernorm.weight", hidden)?;
    let pre_feedforward_norm = s.vector("pre_feedforward_layernorm.weight", hidden)?;
    let post_feedforward_norm = s.vector("post_feedforward_layernorm.weight", hidden)?;
    let gate = s.matrix("mlp.gate_proj", [wide, hidden])?;
    let up = s.matrix("mlp.up_proj", [wide, hidden])?;
    let down = s.matrix("mlp.down_proj", [hidden, wide])?;
    let scalar = s.vector("layer_scalar", 1)?;
    let per_layer = match plan.per_layer_input {
        None => None,
        Some(p) => Some(PerLayerWeights {
            gate: s.matrix("per_layer_input_gate", [p.dim, hidden])?,
            projection: s.matrix("per_layer_projection", [hidden, p.dim])?,
            norm: s.vector("post_per_layer_input_norm.weight", hidden)?,
        }),
    };
    let moe = match plan.moe {
        None => None,
        Some(m) => Some(MoeWeights {
            router: s.matrix("router.proj", [m.experts, hidden])?,
            router_scale: s.vector("router.scale", hidden)?,
            expert_scale: s.vector("router.per_expert_scale", m.experts)?,
            experts: experts(s.unused, &format!("layers.{i}.experts"), &m, hidden)?,
            pre_norm: s.vector("pre_feedforward_layernorm_2.weight", hidden)?,
            post_norm_dense: s.vector("post_feedforward_layernorm_1.weight", hidden)?,
            post_norm_experts: s.vector("post_feedforward_layernorm_2.weight", hidden)?,
        }),
    };
    Ok(LayerWeights {
        attention,
        input_norm,
        post_attention_norm,
        pre_feedforward_norm,
        post_feedforward_norm,
        gate,
        up,
        down,
        scalar,
        per_layer,
        moe,
    })
}

fn attention(
    s: &mut Scope<'_>,
    plan: &Plan,
    layer: &LayerPlan,
) -> Result<AttentionWeights, NameError> {
    let head_dim = layer.head_dim;
    let (q_width, kv_width) = (plan.heads * head_dim, layer.kv_heads * head_dim);
    let kv_scales = KvScaleTensors::take(s.unused, s.layer)?;
    let q = s.matrix("self_attn.q_proj", [q_width, plan.hidden])?;
    let o = s.matrix("self_attn.o_proj", [plan.hidden, q_width])?;
    let q_norm = s.vector("self_attn.q_norm.weight", head_dim)?;
    let (mut k, mut v, mut k_norm) = (None, None, None);
    if let KvSource::Own { values_only } = layer.kv {
        k = Some(s.matrix("self_attn.k_proj", [kv_width, plan.hidden])?);
        k_norm = Some(s.vector("self_attn.k_norm.weight", head_dim)?);
        if !values_only {
            v = Some(s.matrix("self_attn.v_proj", [kv_width, plan.hidden])?);
        }
    } else {
        // Files of models with shared caches may carry these all the same.
        for part in ["k_proj", "v_proj", "k_norm", "v_norm"] {
            let prefix = format!("layers.{}.self_attn.{part}.", s.layer);
            s.unused.drop_prefix(&prefix);
        }
    }
    Ok(AttentionWeights {
        q,
        k,
        v,
        o,
        q_norm,
        k_norm,
        kv_scales,
    })
}

fn centroids(unused: &mut Unused, text: &Plan, count: usize) -> Result<CentroidWeights, NameError> {
    let centroids = linear(unused, "masked_embedding.centroids", [count, text.hidden])?;
    let tensor = unused.take("masked_embedding.token_ordering", &[text.vocab])?;
    let ids: Vec<i64> = match tensor.dtype() {
        Dtype::I64 => tensor
            .bytes()
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
            .collect(),
        Dtype::I32 => tensor
            .bytes()
            .chunks_exact(4)
            .map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
        _ => return Err(NameError::dtype(&tensor, "int64 or int32")),
    };
    let mut seen = vec![false; text.vocab];
    let mut ordering = Vec::with_capacity(text.vocab);
    for id in ids {
        let slot = usize::try_from(id).ok().and_then(|i| seen.get_mut(i));
        match slot {
            Some(slot) if !*slot => *slot = true,
            _ => {
                let problem = format!("token {id} is repeated or outside the vocabulary");
                return Err(NameError::value(&tensor, problem));
            }
        }
        ordering.push(id as u32);
    }
    Ok(CentroidWeights {
        centroids,
        ordering,
        ordering_tensor: tensor,
    })
}
