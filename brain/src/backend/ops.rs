//! The model's seam to a device: about twenty fused operations, dispatched statically.
//!
//! Rules every implementation keeps, so that recording a graph is running the same Rust once:
//! an operation allocates nothing but what it hands out (tokens, log-probabilities), waits for
//! nothing and reads nothing back; buffers are made before the first step; what changes from step to step (tokens, positions, block tables,
//! lengths, sampling parameters) lies in the implementation's step arena; the scalars passed here
//! are constants of the model or depend on the number of rows alone.
//!
//! Numbers: a row's result depends on that row alone, in one fixed order of arithmetic. Sums and
//! products are fp32; where the checkpoint is bf16, an operation rounds to bf16 once at its end,
//! and inside only where its comment says so.

use crate::model::{
    kv_scales::KvScales,
    plan::{Kind, Moe, Rope},
    weights::{MoeWeights, Weight},
};

/// The rows that an operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Every input row of the step.
    All,
    /// The rows that emit a token: all that the layers above the last cache still need.
    Out,
    /// One row per sequence that is drafting.
    Draft,
}

/// Heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; query head `h` reads number `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Which keys are seen, and which pool holds them.
    pub kind: Kind,
}

/// Fused operations on rows. A buffer is `[rows, width]`.
pub trait Ops {
    /// Activations at a fixed address.
    type Buf;
    /// A matrix, or several stacked by rows, ready for products.
    type Matrix;
    /// A table read by token.
    type Table;
    /// Weights of a norm, with its epsilon.
    type Norm;
    /// Sines and cosines by position.
    type Rope;
    /// A layer of the KV pools.
    type Cache;
    /// Router and experts of a layer.
    type Experts;
    /// Clusters of a vocabulary, with room for the tokens chosen in a step.
    type Clusters;

    // Before the first step.

    /// A buffer of `width` columns for as many rows as `rows` can ever be.
    fn buffer(&mut self, rows: Rows, width: usize) -> Self::Buf;
    /// Likewise for logits, which are fp32 whatever other activations are.
    fn logits_buffer(&mut self, rows: Rows, width: usize) -> Self::Buf {
        self.buffer(rows, width)
    }
    /// Prepares matrices of one input width, stacked in order.
    fn matrix(&mut self, parts: &[&Weight]) -> Self::Matrix;
    /// Prepares gate and up for [`Ops::gated_linear`].
    fn gated_matrix(&mut self, gate: &Weight, up: &Weight) -> Self::Matrix;
    /// Room that gated products of `width` columns work in.
    fn gated_room(&mut self, rows: Rows, width: usize) -> Self::Buf;
    /// Prepares a table.
    fn table(&mut self, weight: &Weight) -> Self::Table;
    /// Prepares a norm.
    fn norm_weights(&mut self, weight: &Weight, eps: f32) -> Self::Norm;
    /// Tabulates a rotary embedding for heads of `head_dim` elements.
    fn rope(&mut self, rope: &Rope, head_dim: usize) -> Self::Rope;
    /// The next layer of the pool of `shape.kind`; `values_only` layers form their keys from the
    /// values, with the weights of the key norm and the rotary embedding. `scales` are for a cache
    /// in FP8, others take no notice of them.
    fn cache(
        &mut self,
        shape: HeadShape,
        values_only: Option<(&Weight, &Rope)>,
        scales: KvScales,
    ) -> Self::Cache;
    /// Prepares router and experts.
    fn experts_weights(&mut self, weights: &MoeWeights, moe: &Moe, eps: f32) -> Self::Experts;
    /// Prepares clusters: `head` row `ordering[c * n + i]` is token `i` of cluster `c`.
    fn clusters(
        &mut self,
        head: &Weight,
        ordering: &[u32],
        count: usize,
        top_k: usize,
    ) -> Self::Clusters;

    // The layers.

    /// `out = table[token] * scale`
    fn embed(&mut self, rows: Rows, table: &Self::Table, scale: f32, out: &mut Self::Buf);
    /// `out = (norm(context * context_scale) + table[token] * table_scale) / sqrt(2)`, the norm
    /// over each layer's part by itself; both terms are rounded before the sum.
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn layer_inputs(
        &mut self,
        rows: Rows,
        table: &Self::Table,
        table_scale: f32,
        context: &Self::Buf,
        context_scale: f32,
        norm: &Self::Norm,
        out: &mut Self::Buf,
    );
    /// `out = norm(x)`
    fn norm(&mut self, rows: Rows, x: &Self::Buf, norm: &Self::Norm, out: &mut Self::Buf);
    /// `x = (x + norm(branch)) * scale`, each of the three rounded; then `out = norm(x)` by `next`.
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn add_norm(
        &mut self,
        rows: Rows,
        x: &mut Self::Buf,
        branch: &Self::Buf,
        post: &Self::Norm,
        scale: f32,
        next: Option<&Self::Norm>,
        out: &mut Self::Buf,
    );
    /// `out = x * matrix^T`
    fn linear(&mut self, rows: Rows, x: &Self::Buf, matrix: &Self::Matrix, out: &mut Self::Buf);
    /// Norms and turns the queries in place: the first `heads * head_dim` columns.
    fn query(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        q: &mut Self::Buf,
        norm: &Self::Norm,
        rope: &Self::Rope,
    );
    /// Like [`Ops::query`], and caches keys and values: columns `[q | k | v]`, or `[q | k]` where
    /// the cache holds values only.
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn query_and_store(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        qkv: &mut Self::Buf,
        q_norm: &Self::Norm,
        k_norm: &Self::Norm,
        rope: &Self::Rope,
        cache: &Self::Cache,
    );
    /// Attention of the rows' queries over the cache, scale 1.
    fn attention(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        q: &Self::Buf,
        cache: &Self::Cache,
        out: &mut Self::Buf,
    );
    /// `out = gelu(x * gate^T) * (x * up^T)`, `width` columns, both products rounded; `room` was
    /// made for as many.
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn gated_linear(
        &mut self,
        rows: Rows,
        x: &Self::Buf,
        matrix: &Self::Matrix,
        width: usize,
        room: &mut Self::Buf,
        out: &mut Self::Buf,
    );
    /// `gate = gelu(x * matrix^T) * inputs[layer]`, `width` columns, the product rounded.
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn gated_inputs(
        &mut self,
        rows: Rows,
        x: &Self::Buf,
        matrix: &Self::Matrix,
        inputs: &Self::Buf,
        layer: usize,
        width: usize,
        gate: &mut Self::Buf,
    );
    /// [`Ops::add_norm`] with scale 1 in front of a dense block with experts beside it: from the
    /// same sum, `expert_in = norm(x)` by `expert_norm`, and what the router reads.
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn add_norm_for_experts(
        &mut self,
        rows: Rows,
        x: &mut Self::Buf,
        branch: &Self::Buf,
        post: &Self::Norm,
        next: &Self::Norm,
        out: &mut Self::Buf,
        experts: &mut Self::Experts,
        expert_norm: &Self::Norm,
        expert_in: &mut Self::Buf,
    );
    /// Chooses experts by the raw stream `x` and runs them on `expert_in`.
    fn experts(
        &mut self,
        rows: Rows,
        x: &Self::Buf,
        expert_in: &Self::Buf,
        experts: &mut Self::Experts,
        expert_out: &mut Self::Buf,
    );
    /// `branch = dense_norm(branch) + expert_norm(e)`, each rounded before the sum, where `e` is
    /// the experts' weighted sum by expert number; then [`Ops::add_norm`].
    #[allow(clippy::too_many_arguments, reason = "one fused operation")]
    fn join_experts(
        &mut self,
        rows: Rows,
        x: &mut Self::Buf,
        branch: &mut Self::Buf,
        dense_norm: &Self::Norm,
        experts: &Self::Experts,
        expert_out: &mut Self::Buf,
        expert_norm: &Self::Norm,
        post: &Self::Norm,
        scale: f32,
        next: Option<&Self::Norm>,
        out: &mut Self::Buf,
    );
    /// Copies the [`Rows::Out`] rows of a buffer of [`Rows::All`], `width` columns.
    fn gather(&mut self, all: &Self::Buf, width: usize, out: &mut Self::Buf);

    // Heads, sampling, verification, drafting.

    /// `out = cap * tanh(h * matrix^T / cap)` in fp32, or without a cap the product itself. The
    /// product is rounded as any other.
    fn logits(
        &mut self,
        rows: Rows,
        h: &Self::Buf,
        matrix: &Self::Matrix,
        softcap: Option<f32>,
        out: &mut Self::Buf,
    );
    /// Chooses the token that each [`Rows::Out`] row emits, accepts drafts by equality, and makes
    /// the [`Rows::Draft`] rows: last emitted token, its position, the keys before it.
    fn sample_and_verify(&mut self, logits: &Self::Buf);
    /// `state` = `hidden` of the row that emitted each drafting sequence's last token.
    fn draft_begin(&mut self, hidden: &Self::Buf, width: usize, state: &mut Self::Buf);
    /// `out = [table[token] * scale | state]`, `width` columns each.
    fn draft_input(
        &mut self,
        table: &Self::Table,
        scale: f32,
        state: &Self::Buf,
        width: usize,
        out: &mut Self::Buf,
    );
    /// Picks the `top_k` clusters by `scores` and writes the logits of their tokens.
    fn cluster_logits(
        &mut self,
        scores: &Self::Buf,
        h: &Self::Buf,
        clusters: &mut Self::Clusters,
        out: &mut Self::Buf,
    );
    /// Drafts a token per row of [`Rows::Draft`] by the request's own pipeline and noise; it is
    /// the rows' token from then on.
    fn draft_sample(&mut self, logits: &Self::Buf, clusters: Option<&Self::Clusters>);
}
