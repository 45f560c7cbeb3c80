//! The tensors of a target and of an assistant, each checked against the plan.

use super::{
    checkpoint::{Checkpoint, Dtype, Tensor},
    names::{NameError, Unused},
    plan::{DraftHead, DraftPlan, KvSource, LayerPlan, Plan},
};

/// A matrix or vector in the form it is stored in. A back end turns it into its own.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Plain numbers: bf16, fp16 or fp32.
    Float(Tensor),
}

impl Weight {
    /// Rows (outputs) of a matrix; the length of a vector.
    pub fn rows(&self) -> usize {
        let Weight::Float(t) = self;
        t.shape()[0]
    }

    /// Elements of a row: the product of all sizes but the first.
    pub fn cols(&self) -> usize {
        let Weight::Float(t) = self;
        t.shape()[1..].iter().product()
    }

    /// The stored element type.
    pub fn dtype(&self) -> Dtype {
        let Weight::Float(t) = self;
        t.dtype()
    }

    /// The tensors behind it, for the fingerprint.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let Weight::Float(t) = self;
        std::iter::once(t)
    }

    /// Writes row `row` as fp32, which holds every stored form exactly.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        self.read_part(row, 1, out);
    }

    /// Likewise, where each row is seen as `split` shorter ones and those are numbered through.
    pub fn read_part(&self, row: usize, split: usize, out: &mut [f32]) {
        let Weight::Float(t) = self;
        let cols = self.cols() / split;
        let size = t.dtype().bitsize() / 8;
        let bytes = &t.bytes()[row * cols * size..(row + 1) * cols * size];
        expand(t.dtype(), bytes, out);
    }

    /// Every element as fp32.
    pub fn to_vec(&self) -> Vec<f32> {
        let Weight::Float(t) = self;
        let mut out = vec![0.0; self.rows() * self.cols()];
        expand(t.dtype(), t.bytes(), &mut out);
        out
    }
}

fn expand(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        Dtype::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
    }
}

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

/// Experts of a layer.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// `[experts, hidden]`
    pub router: Weight,
    /// `[hidden]`
    pub router_scale: Weight,
    /// `[experts]`
    pub expert_scale: Weight,
    /// `[experts, 2 * intermediate, hidden]`, gate rows first.
    pub gate_up: Weight,
    /// `[experts, hidden, intermediate]`
    pub down: Weight,
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

/// Finds every tensor of a target.
pub fn target(checkpoint: &Checkpoint, plan: &Plan) -> Result<TargetWeights, NameError> {
    let mut unused = Unused::new(checkpoint)?;
    let embed = float(
        &mut unused,
        "embed_tokens.weight",
        &[plan.vocab, plan.hidden],
    )?;
    let head = match unused.has("lm_head.weight") {
        true => Some(float(
            &mut unused,
            "lm_head.weight",
            &[plan.vocab, plan.hidden],
        )?),
        false => None,
    };
    let per_layer = match plan.per_layer_input {
        None => None,
        Some(p) => {
            let width = plan.layers.len() * p.dim;
            let u = &mut unused;
            Some(PerLayerTable {
                table: float(u, "embed_tokens_per_layer.weight", &[p.vocab, width])?,
                projection: float(
                    u,
                    "per_layer_model_projection.weight",
                    &[width, plan.hidden],
                )?,
                norm: float(u, "per_layer_projection_norm.weight", &[p.dim])?,
            })
        }
    };
    let layers = layers(&mut unused, plan)?;
    let norm = float(&mut unused, "norm.weight", &[plan.hidden])?;
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
    let pre_projection = float(
        u,
        "pre_projection.weight",
        &[text.hidden, 2 * plan.backbone],
    )?;
    let post_projection = float(u, "post_projection.weight", &[plan.backbone, text.hidden])?;
    let embed = float(u, "embed_tokens.weight", &[text.vocab, text.hidden])?;
    // Some exports repeat the tied head.
    u.drop_prefix("lm_head.");
    let layers = layers(u, text)?;
    let norm = float(u, "norm.weight", &[text.hidden])?;
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

fn float(unused: &mut Unused, name: &str, shape: &[usize]) -> Result<Weight, NameError> {
    let tensor = unused.take(name, shape)?;
    match tensor.dtype() {
        Dtype::BF16 | Dtype::F16 | Dtype::F32 => Ok(Weight::Float(tensor)),
        found => Err(NameError::Dtype {
            name: tensor.name().to_owned(),
            found,
            expected: "bf16, fp16 or fp32",
        }),
    }
}

fn layers(unused: &mut Unused, plan: &Plan) -> Result<Vec<LayerWeights>, NameError> {
    (0..plan.layers.len())
        .map(|i| layer(unused, plan, i))
        .collect()
}

fn layer(unused: &mut Unused, plan: &Plan, i: usize) -> Result<LayerWeights, NameError> {
    let layer = &plan.layers[i];
    let (hidden, wide) = (plan.hidden, layer.intermediate);
    let attention = attention(unused, plan, i)?;
    let mut get = |name: &str, shape: &[usize]| float(unused, &format!("layers.{i}.{name}"), shape);
    let input_norm = get("input_layernorm.weight", &[hidden])?;
    let post_attention_norm = get("post_attention_layernorm.weight", &[hidden])?;
    let pre_feedforward_norm = get("pre_feedforward_layernorm.weight", &[hidden])?;
    let post_feedforward_norm = get("post_feedforward_layernorm.weight", &[hidden])?;
    let gate = get("mlp.gate_proj.weight", &[wide, hidden])?;
    let up = get("mlp.up_proj.weight", &[wide, hidden])?;
    let down = get("mlp.down_proj.weight", &[hidden, wide])?;
    let scalar = get("layer_scalar", &[1])?;
    let per_layer = match plan.per_layer_input {
        None => None,
        Some(p) => Some(PerLayerWeights {
            gate: get("per_layer_input_gate.weight", &[p.dim, hidden])?,
            projection: get("per_layer_projection.weight", &[hidden, p.dim])?,
            norm: get("post_per_layer_input_norm.weight", &[hidden])?,
        }),
    };
    let moe = match plan.moe {
        None => None,
        Some(m) => Some(MoeWeights {
            router: get("router.proj.weight", &[m.experts, hidden])?,
            router_scale: get("router.scale", &[hidden])?,
            expert_scale: get("router.per_expert_scale", &[m.experts])?,
            gate_up: get(
                "experts.gate_up_proj",
                &[m.experts, 2 * m.intermediate, hidden],
            )?,
            down: get("experts.down_proj", &[m.experts, hidden, m.intermediate])?,
            pre_norm: get("pre_feedforward_layernorm_2.weight", &[hidden])?,
            post_norm_dense: get("post_feedforward_layernorm_1.weight", &[hidden])?,
            post_norm_experts: get("post_feedforward_layernorm_2.weight", &[hidden])?,
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

fn attention(unused: &mut Unused, plan: &Plan, i: usize) -> Result<AttentionWeights, NameError> {
    let LayerPlan {
        head_dim,
        kv_heads,
        kv,
        ..
    } = plan.layers[i];
    let (q_width, kv_width) = (plan.heads * head_dim, kv_heads * head_dim);
    let name = |part: &str| format!("layers.{i}.self_attn.{part}.weight");
    let q = float(unused, &name("q_proj"), &[q_width, plan.hidden])?;
    let o = float(unused, &name("o_proj"), &[plan.hidden, q_width])?;
    let q_norm = float(unused, &name("q_norm"), &[head_dim])?;
    let (mut k, mut v, mut k_norm) = (None, None, None);
    if let KvSource::Own { values_only } = kv {
        k = Some(float(unused, &name("k_proj"), &[kv_width, plan.hidden])?);
        k_norm = Some(float(unused, &name("k_norm"), &[head_dim])?);
        if !values_only {
            v = Some(float(unused, &name("v_proj"), &[kv_width, plan.hidden])?);
        }
    } else {
        // Files of models with shared caches may carry these all the same.
        for part in ["k_proj", "v_proj", "k_norm", "v_norm"] {
            unused.drop_prefix(&format!("layers.{i}.self_attn.{part}."));
        }
    }
    Ok(AttentionWeights {
        q,
        k,
        v,
        o,
        q_norm,
        k_norm,
    })
}

fn centroids(unused: &mut Unused, text: &Plan, count: usize) -> Result<CentroidWeights, NameError> {
    let centroids = float(
        unused,
        "masked_embedding.centroids.weight",
        &[count, text.hidden],
    )?;
    let tensor = unused.take("masked_embedding.token_ordering", &[text.vocab])?;
    let name = || tensor.name().to_owned();
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
        found => {
            return Err(NameError::Dtype {
                name: name(),
                found,
                expected: "int64 or int32",
            });
        }
    };
    let mut seen = vec![false; text.vocab];
    let mut ordering = Vec::with_capacity(text.vocab);
    for id in ids {
        let slot = usize::try_from(id).ok().and_then(|i| seen.get_mut(i));
        match slot {
            Some(slot) if !*slot => *slot = true,
            _ => {
                let problem = format!("token {id} is repeated or outside the vocabulary");
                return Err(NameError::Value {
                    name: name(),
                    problem,
                });
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
