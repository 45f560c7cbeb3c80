//! The forward pass of an MTP assistant, once for every device.
//!
//! It has no keys or values of its own: every layer reads the target's last cache of its kind.
//! Position and visible keys stay the same within a round; only token and state move.

use super::{
    gemma::{Gemma, Layer, Stream},
    plan::{DraftHead, DraftPlan, Kind},
    weights::DraftWeights,
};
use crate::backend::ops::{Ops, Rows};

enum Head<O: Ops> {
    Dense(O::Matrix),
    Centroids {
        centroids: O::Matrix,
        scores: O::Buf,
        clusters: O::Clusters,
    },
}

/// An assistant on a device.
pub struct Drafter<O: Ops> {
    plan: DraftPlan,
    pre_projection: O::Matrix,
    post_projection: O::Matrix,
    layers: Vec<Layer<O>>,
    norm: O::Norm,
    head: Head<O>,
    rope_sliding: Option<O::Rope>,
    rope_full: Option<O::Rope>,
    stream: Stream<O>,
    input: O::Buf,
    state: O::Buf,
    logits: O::Buf,
}

impl<O: Ops> Drafter<O> {
    /// Puts the weights on the device.
    pub fn new(ops: &mut O, plan: &DraftPlan, weights: &DraftWeights) -> Self {
        let text = &plan.text;
        let (head, width) = match (plan.head, &weights.centroids) {
            (DraftHead::Centroids { count, top_k }, Some(c)) => {
                let head = Head::Centroids {
                    centroids: ops.matrix(&[&c.centroids]),
                    scores: ops.buffer(Rows::Draft, count),
                    clusters: ops.clusters(&weights.embed, &c.ordering, count, top_k),
                };
                (head, text.vocab / count * top_k)
            }
            _ => (Head::Dense(ops.matrix(&[&weights.embed])), text.vocab),
        };
        let layers = (0..text.layers.len())
            .map(|i| Layer::new(ops, text, i, &weights.layers[i]))
            .collect();
        let rope = |ops: &mut O, kind| text.head_dim(kind).map(|d| ops.rope(text.rope(kind), d));
        Self {
            pre_projection: ops.matrix(&[&weights.pre_projection]),
            post_projection: ops.matrix(&[&weights.post_projection]),
            layers,
            norm: ops.norm_weights(&weights.norm, text.eps),
            head,
            rope_sliding: rope(ops, Kind::Sliding),
            rope_full: rope(ops, Kind::Full),
            stream: Stream::new(ops, text, Rows::Draft),
            input: ops.buffer(Rows::Draft, 2 * plan.backbone),
            state: ops.buffer(Rows::Draft, plan.backbone),
            logits: ops.logits_buffer(Rows::Draft, width),
            plan: plan.clone(),
        }
    }

    /// Starts a round from the target's hidden states of the step in the arena.
    pub fn begin(&mut self, ops: &mut O, target: &Gemma<O>) {
        ops.draft_begin(target.hidden(), self.plan.backbone, &mut self.state);
    }

    /// Drafts one token more for every row that is still drafting, for the time `pass`, from 0.
    ///
    /// A later pass makes its state itself from what the one before it left: so that its launches
    /// depend on its own rows and on nothing else.
    pub fn step(&mut self, ops: &mut O, target: &Gemma<O>, pass: usize) {
        let (table, scale) = target.embedding();
        let width = self.plan.backbone;
        if pass > 0 {
            let (normed, state) = (&self.stream.normed, &mut self.state);
            ops.linear(Rows::Draft, normed, &self.post_projection, state);
        }
        ops.draft_input(table, scale, &self.state, width, &mut self.input);
        let s = &mut self.stream;
        ops.linear(Rows::Draft, &self.input, &self.pre_projection, &mut s.x);
        ops.norm(Rows::Draft, &s.x, &self.layers[0].input_norm, &mut s.normed);
        for i in 0..self.layers.len() {
            let (head, tail) = self.layers.split_at_mut(i + 1);
            let layer = &mut head[i];
            let next = tail.first().map_or(&self.norm, |l| &l.input_norm);
            let kind = self.plan.text.layers[i].kind;
            let rope = match kind {
                Kind::Sliding => &self.rope_sliding,
                Kind::Full => &self.rope_full,
            };
            let (Some(rope), Some(cache)) = (rope, target.draft_cache(kind)) else {
                continue;
            };
            layer.project(ops, s, rope, cache);
            layer.finish(ops, s, i, cache, next);
        }
        let softcap = self.plan.text.softcap;
        match &mut self.head {
            Head::Dense(matrix) => {
                ops.logits(Rows::Draft, &s.normed, matrix, softcap, &mut self.logits);
                ops.draft_sample(&self.logits, None);
            }
            Head::Centroids {
                centroids,
                scores,
                clusters,
            } => {
                ops.linear(Rows::Draft, &s.normed, centroids, scores);
                ops.cluster_logits(scores, &s.normed, clusters, &mut self.logits);
                ops.draft_sample(&self.logits, Some(clusters));
            }
        }
    }
}
