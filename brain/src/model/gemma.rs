//! The forward pass of a Gemma 4 text decoder, once for every device.

use super::{
    checkpoint::Dtype,
    plan::{Kind, KvSource, LayerPlan, Plan},
    weights::{LayerWeights, TargetWeights, Weight},
};
use crate::backend::ops::{HeadShape, Ops, Rows};

/// `sqrt(width)` in the precision of the table that it scales.
pub fn root_scale(width: usize, table: &Weight) -> f32 {
    let root = (width as f64).sqrt() as f32;
    match table.dtype() {
        Dtype::BF16 => half::bf16::from_f32(root).to_f32(),
        Dtype::F16 => half::f16::from_f32(root).to_f32(),
        _ => root,
    }
}

/// Buffers that a stack of layers works in, for one set of rows.
pub(super) struct Stream<O: Ops> {
    pub(super) rows: Rows,
    /// The residual stream.
    pub(super) x: O::Buf,
    /// The stream after the norm that comes next.
    pub(super) normed: O::Buf,
    /// Queries, and behind them keys and values.
    pub(super) qkv: O::Buf,
    attended: O::Buf,
    branch: O::Buf,
    gated_room: O::Buf,
    activated: O::Buf,
    expert_in: Option<O::Buf>,
    expert_out: Option<O::Buf>,
    layer_inputs: Option<O::Buf>,
    layer_gate: Option<O::Buf>,
}

impl<O: Ops> Stream<O> {
    pub(super) fn new(ops: &mut O, plan: &Plan, rows: Rows) -> Self {
        let q = |l: &LayerPlan| plan.heads * l.head_dim;
        let qkv = |l: &LayerPlan| q(l) + 2 * l.kv_heads * l.head_dim;
        let widest = |f: &dyn Fn(&LayerPlan) -> usize| plan.layers.iter().map(f).max().unwrap_or(0);
        let intermediate = plan.max_intermediate();
        let per_layer = plan.per_layer_input;
        Self {
            rows,
            x: ops.buffer(rows, plan.hidden),
            normed: ops.buffer(rows, plan.hidden),
            qkv: ops.buffer(rows, widest(&qkv)),
            attended: ops.buffer(rows, widest(&q)),
            branch: ops.buffer(rows, plan.hidden),
            gated_room: ops.gated_room(rows, intermediate),
            activated: ops.buffer(rows, intermediate),
            expert_in: plan.moe.map(|_| ops.buffer(rows, plan.hidden)),
            expert_out: plan.moe.map(|_| ops.buffer(rows, plan.hidden)),
            layer_inputs: per_layer.map(|p| ops.buffer(rows, plan.layers.len() * p.dim)),
            layer_gate: per_layer.map(|p| ops.buffer(rows, p.dim)),
        }
    }
}

struct PerLayer<O: Ops> {
    width: usize,
    gate: O::Matrix,
    projection: O::Matrix,
    norm: O::Norm,
}

struct MoeBlock<O: Ops> {
    experts: O::Experts,
    pre_norm: O::Norm,
    post_norm_dense: O::Norm,
    post_norm_experts: O::Norm,
}

/// A decoder layer's weights in the device's form.
pub(super) struct Layer<O: Ops> {
    shape: HeadShape,
    intermediate: usize,
    qkv: O::Matrix,
    o: O::Matrix,
    q_norm: O::Norm,
    k_norm: Option<O::Norm>,
    pub(super) input_norm: O::Norm,
    post_attention_norm: O::Norm,
    pre_feedforward_norm: O::Norm,
    post_feedforward_norm: O::Norm,
    gate_up: O::Matrix,
    down: O::Matrix,
    scalar: f32,
    per_layer: Option<PerLayer<O>>,
    moe: Option<MoeBlock<O>>,
}

impl<O: Ops> Layer<O> {
    pub(super) fn new(ops: &mut O, plan: &Plan, i: usize, w: &LayerWeights) -> Self {
        let layer = &plan.layers[i];
        let shape = HeadShape {
            heads: plan.heads,
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            kind: layer.kind,
        };
        let attention = &w.attention;
        let mut projections = vec![&attention.q];
        projections.extend(attention.k.iter());
        projections.extend(attention.v.iter());
        let mut scalar = [1.0];
        w.scalar.read_row(0, &mut scalar);
        let eps = plan.eps;
        let width = plan.per_layer_input.map_or(0, |p| p.dim);
        let per_layer = w.per_layer.as_ref().map(|p| PerLayer {
            width,
            gate: ops.matrix(&[&p.gate]),
            projection: ops.matrix(&[&p.projection]),
            norm: ops.norm_weights(&p.norm, eps),
        });
        let moe = w.moe.as_ref().zip(plan.moe).map(|(m, shape)| MoeBlock {
            experts: ops.experts_weights(m, &shape, eps),
            pre_norm: ops.norm_weights(&m.pre_norm, eps),
            post_norm_dense: ops.norm_weights(&m.post_norm_dense, eps),
            post_norm_experts: ops.norm_weights(&m.post_norm_experts, eps),
        });
        Self {
            shape,
            intermediate: layer.intermediate,
            qkv: ops.matrix(&projections),
            o: ops.matrix(&[&attention.o]),
            q_norm: ops.norm_weights(&attention.q_norm, eps),
            k_norm: attention.k_norm.as_ref().map(|k| ops.norm_weights(k, eps)),
            input_norm: ops.norm_weights(&w.input_norm, eps),
            post_attention_norm: ops.norm_weights(&w.post_attention_norm, eps),
            pre_feedforward_norm: ops.norm_weights(&w.pre_feedforward_norm, eps),
            post_feedforward_norm: ops.norm_weights(&w.post_feedforward_norm, eps),
            gate_up: ops.gated_matrix(&w.gate, &w.up),
            down: ops.matrix(&[&w.down]),
            scalar: scalar[0],
            per_layer,
            moe,
        }
    }

    /// Queries of the normed stream; keys and values too where the layer owns its cache.
    pub(super) fn project(&self, ops: &mut O, s: &mut Stream<O>, rope: &O::Rope, cache: &O::Cache) {
        let (rows, shape) = (s.rows, self.shape);
        ops.linear(rows, &s.normed, &self.qkv, &mut s.qkv);
        match &self.k_norm {
            None => ops.query(rows, shape, &mut s.qkv, &self.q_norm, rope),
            Some(k_norm) => {
                let q_norm = &self.q_norm;
                ops.query_and_store(rows, shape, &mut s.qkv, q_norm, k_norm, rope, cache);
            }
        }
    }

    /// Attention, feed-forward and per-layer input; leaves the stream normed by `next`.
    pub(super) fn finish(
        &mut self,
        ops: &mut O,
        s: &mut Stream<O>,
        i: usize,
        cache: &O::Cache,
        next: &O::Norm,
    ) {
        let rows = s.rows;
        ops.attention(rows, self.shape, &s.qkv, cache, &mut s.attended);
        ops.linear(rows, &s.attended, &self.o, &mut s.branch);
        // Where per-layer inputs follow, they are what ends the layer.
        match self.per_layer {
            None => self.feed_forward(ops, s, self.scalar, Some(next)),
            Some(_) => self.feed_forward(ops, s, 1.0, None),
        }
        let inputs = s.layer_inputs.as_ref().zip(s.layer_gate.as_mut());
        if let Some((per_layer, (inputs, gate))) = self.per_layer.as_ref().zip(inputs) {
            let width = per_layer.width;
            ops.gated_inputs(rows, &s.x, &per_layer.gate, inputs, i, width, gate);
            ops.linear(rows, gate, &per_layer.projection, &mut s.branch);
            let (post, scale) = (&per_layer.norm, self.scalar);
            ops.add_norm(
                rows,
                &mut s.x,
                &s.branch,
                post,
                scale,
                Some(next),
                &mut s.normed,
            );
        }
    }

    /// Adds attention's branch to the stream, then the feed-forward block's; after the latter the
    /// stream is scaled, and normed by `next`.
    fn feed_forward(&mut self, ops: &mut O, s: &mut Stream<O>, scale: f32, next: Option<&O::Norm>) {
        let rows = s.rows;
        let (post, pre) = (&self.post_attention_norm, &self.pre_feedforward_norm);
        let expert_rooms = s.expert_in.as_mut().zip(s.expert_out.as_mut());
        let mut moe = self.moe.as_mut().zip(expert_rooms);
        match &mut moe {
            None => ops.add_norm(
                rows,
                &mut s.x,
                &s.branch,
                post,
                1.0,
                Some(pre),
                &mut s.normed,
            ),
            Some((moe, (expert_in, _))) => ops.add_norm_for_experts(
                rows,
                &mut s.x,
                &s.branch,
                post,
                pre,
                &mut s.normed,
                &mut moe.experts,
                &moe.pre_norm,
                expert_in,
            ),
        }
        ops.gated_linear(
            rows,
            &s.normed,
            &self.gate_up,
            self.intermediate,
            &mut s.gated_room,
            &mut s.activated,
        );
        ops.linear(rows, &s.activated, &self.down, &mut s.branch);
        let post = &self.post_feedforward_norm;
        match moe {
            None => ops.add_norm(rows, &mut s.x, &s.branch, post, scale, next, &mut s.normed),
            Some((moe, (expert_in, expert_out))) => {
                ops.experts(rows, &s.x, expert_in, &mut moe.experts, expert_out);
                ops.join_experts(
                    rows,
                    &mut s.x,
                    &mut s.branch,
                    &moe.post_norm_dense,
                    &moe.experts,
                    expert_out,
                    &moe.post_norm_experts,
                    post,
                    scale,
                    next,
                    &mut s.normed,
                );
            }
        }
    }
}

struct LayerInputs<O: Ops> {
    table: O::Table,
    table_scale: f32,
    projection: O::Matrix,
    projection_scale: f32,
    norm: O::Norm,
    context: O::Buf,
}

/// A target on a device: weights, caches and the buffers of a step.
pub struct Gemma<O: Ops> {
    plan: Plan,
    embed: O::Table,
    embed_scale: f32,
    inputs: Option<LayerInputs<O>>,
    layers: Vec<Layer<O>>,
    norm: O::Norm,
    head: O::Matrix,
    rope_sliding: Option<O::Rope>,
    rope_full: Option<O::Rope>,
    caches: Vec<Option<O::Cache>>,
    all: Stream<O>,
    out: Stream<O>,
    logits: O::Buf,
}

impl<O: Ops> Gemma<O> {
    /// Puts the weights on the device.
    pub fn new(ops: &mut O, plan: &Plan, weights: &TargetWeights) -> Self {
        let caches = (0..plan.layers.len())
            .map(|i| {
                let layer = &plan.layers[i];
                let KvSource::Own { values_only } = layer.kv else {
                    return None;
                };
                let shape = HeadShape {
                    heads: plan.heads,
                    kv_heads: layer.kv_heads,
                    head_dim: layer.head_dim,
                    kind: layer.kind,
                };
                let k_norm = weights.layers[i].attention.k_norm.as_ref();
                let key = k_norm
                    .filter(|_| values_only)
                    .map(|k| (k, plan.rope(layer.kind)));
                Some(ops.cache(shape, key, layer.kv_scales))
            })
            .collect();
        let inputs = weights
            .per_layer
            .as_ref()
            .zip(plan.per_layer_input)
            .map(|(w, p)| LayerInputs {
                table: ops.table(&w.table),
                table_scale: root_scale(p.dim, &w.table),
                projection: ops.matrix(&[&w.projection]),
                projection_scale: 1.0 / (plan.hidden as f32).sqrt(),
                norm: ops.norm_weights(&w.norm, plan.eps),
                context: ops.buffer(Rows::All, plan.layers.len() * p.dim),
            });
        let layers = (0..plan.layers.len())
            .map(|i| Layer::new(ops, plan, i, &weights.layers[i]))
            .collect();
        let rope = |ops: &mut O, kind| plan.head_dim(kind).map(|d| ops.rope(plan.rope(kind), d));
        Self {
            embed: ops.table(&weights.embed),
            embed_scale: root_scale(plan.hidden, &weights.embed),
            inputs,
            layers,
            norm: ops.norm_weights(&weights.norm, plan.eps),
            head: ops.matrix(&[weights.head.as_ref().unwrap_or(&weights.embed)]),
            rope_sliding: rope(ops, Kind::Sliding),
            rope_full: rope(ops, Kind::Full),
            caches,
            all: Stream::new(ops, plan, Rows::All),
            out: Stream::new(ops, plan, Rows::Out),
            logits: ops.logits_buffer(Rows::Out, plan.vocab),
            plan: plan.clone(),
        }
    }

    /// Runs the step in the arena: caches every row, leaves hidden states and logits of the
    /// emitting rows.
    pub fn forward(&mut self, ops: &mut O) {
        let Some(last_storing) = self.plan.last_storing() else {
            return;
        };
        let all = &mut self.all;
        ops.embed(Rows::All, &self.embed, self.embed_scale, &mut all.x);
        if let (Some(p), Some(inputs)) = (&mut self.inputs, &mut all.layer_inputs) {
            ops.linear(Rows::All, &all.x, &p.projection, &mut p.context);
            let (scale, context_scale) = (p.table_scale, p.projection_scale);
            let context = &p.context;
            ops.layer_inputs(
                Rows::All,
                &p.table,
                scale,
                context,
                context_scale,
                &p.norm,
                inputs,
            );
        }
        ops.norm(
            Rows::All,
            &all.x,
            &self.layers[0].input_norm,
            &mut all.normed,
        );
        for i in 0..self.layers.len() {
            let (head, tail) = self.layers.split_at_mut(i + 1);
            let layer = &mut head[i];
            let next = tail.first().map_or(&self.norm, |l| &l.input_norm);
            let rope = match self.plan.layers[i].kind {
                Kind::Sliding => &self.rope_sliding,
                Kind::Full => &self.rope_full,
            };
            let cache = self.plan.owner(i).and_then(|o| self.caches[o].as_ref());
            let (Some(rope), Some(cache)) = (rope, cache) else {
                continue;
            };
            let stream = if i <= last_storing {
                &mut self.all
            } else {
                &mut self.out
            };
            layer.project(ops, stream, rope, cache);
            if i == last_storing {
                Self::keep_emitting(ops, &self.plan, i, &self.all, &mut self.out);
            }
            let stream = if i < last_storing {
                &mut self.all
            } else {
                &mut self.out
            };
            layer.finish(ops, stream, i, cache, next);
        }
        let (softcap, h) = (self.plan.softcap, &self.out.normed);
        ops.logits(Rows::Out, h, &self.head, softcap, &mut self.logits);
    }

    /// No later layer caches anything, so that only emitting rows go on.
    fn keep_emitting(ops: &mut O, plan: &Plan, i: usize, all: &Stream<O>, out: &mut Stream<O>) {
        ops.gather(&all.x, plan.hidden, &mut out.x);
        ops.gather(&all.qkv, plan.heads * plan.layers[i].head_dim, &mut out.qkv);
        let inputs = all.layer_inputs.as_ref().zip(out.layer_inputs.as_mut());
        if let (Some((from, to)), Some(p)) = (inputs, plan.per_layer_input) {
            ops.gather(from, plan.layers.len() * p.dim, to);
        }
    }

    /// Logits of the emitting rows.
    pub fn logits(&self) -> &O::Buf {
        &self.logits
    }

    /// Hidden states of the emitting rows, after the final norm.
    pub fn hidden(&self) -> &O::Buf {
        &self.out.normed
    }

    /// The embedding and its scale: a drafter's input.
    pub(super) fn embedding(&self) -> (&O::Table, f32) {
        (&self.embed, self.embed_scale)
    }

    /// The cache a drafter's layers of a kind read.
    pub(super) fn draft_cache(&self, kind: Kind) -> Option<&O::Cache> {
        self.plan
            .last_owner(kind)
            .and_then(|i| self.caches[i].as_ref())
    }

    /// The layers of the pools, first to last.
    pub fn caches(&self) -> impl Iterator<Item = &O::Cache> {
        self.caches.iter().flatten()
    }

    /// The plan it was made from.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
