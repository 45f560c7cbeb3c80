//! What happens to one row between products: norms, gates, rotations. No lanes by hand: the loops
//! are plain, branch-free and vectorise under every level.

#![allow(unsafe_code, reason = "rows are stored by several threads")]

use super::{
    kv::Writer,
    rope::RopeTable,
    simd::{Kernel, Lanes},
};
use crate::{
    model::config::MAX_HEAD,
    sched::math::{gelu, round_bf16, tanh},
};

/// A norm's weights.
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) eps: f32,
}

#[inline(always)]
fn rounded(x: f32, round: bool) -> f32 {
    if round { round_bf16(x) } else { x }
}

/// `1 / sqrt(mean(x^2) + eps)`: sixteen sums by index, added as a tree.
#[inline(always)]
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    let chunks = x.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    1.0 / (sums[0] / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn norm_into(x: &[f32], norm: &Norm, round: bool, out: &mut [f32]) {
    let scale = inverse_rms(x, norm.eps);
    for ((o, x), w) in out.iter_mut().zip(x).zip(&norm.weight) {
        *o = rounded(x * scale * w, round);
    }
}

/// `out = norm(x)`
pub(super) struct NormRow<'a> {
    pub(super) x: &'a [f32],
    pub(super) norm: &'a Norm,
    pub(super) round: bool,
    pub(super) out: &'a mut [f32],
}

impl Kernel for NormRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        norm_into(self.x, self.norm, self.round, self.out);
    }
}

/// `x = (x + norm(branch)) * scale; out = next(x)`
pub(super) struct AddNormRow<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) branch: &'a [f32],
    pub(super) post: &'a Norm,
    pub(super) scale: f32,
    pub(super) next: Option<&'a Norm>,
    pub(super) round: bool,
    pub(super) out: &'a mut [f32],
}

impl Kernel for AddNormRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let round = self.round;
        let inverse = inverse_rms(self.branch, self.post.eps);
        for ((x, b), w) in self.x.iter_mut().zip(self.branch).zip(&self.post.weight) {
            let sum = rounded(*x + rounded(b * inverse * w, round), round);
            *x = rounded(sum * self.scale, round);
        }
        if let Some(next) = self.next {
            norm_into(self.x, next, round, self.out);
        }
    }
}

/// `a = norm_a(a) + norm_b(b)`
pub(super) struct SumNormsRow<'a> {
    pub(super) a: &'a mut [f32],
    pub(super) norm_a: &'a Norm,
    pub(super) b: &'a [f32],
    pub(super) norm_b: &'a Norm,
    pub(super) round: bool,
}

impl Kernel for SumNormsRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let round = self.round;
        let scale_a = inverse_rms(self.a, self.norm_a.eps);
        let scale_b = inverse_rms(self.b, self.norm_b.eps);
        let weights = self.norm_a.weight.iter().zip(&self.norm_b.weight);
        for ((a, b), (wa, wb)) in self.a.iter_mut().zip(self.b).zip(weights) {
            let sum = rounded(*a * scale_a * wa, round) + rounded(b * scale_b * wb, round);
            *a = rounded(sum, round);
        }
    }
}

/// `out = gelu(gate) * up`
pub(super) struct GatedRow<'a> {
    pub(super) gate: &'a [f32],
    pub(super) up: &'a [f32],
    pub(super) round: bool,
    pub(super) out: &'a mut [f32],
}

impl Kernel for GatedRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for ((o, g), u) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *o = rounded(gelu(*g) * u, self.round);
        }
    }
}

/// `gate = gelu(gate) * input`
pub(super) struct GateRow<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) input: &'a [f32],
    pub(super) round: bool,
}

impl Kernel for GateRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (g, x) in self.gate.iter_mut().zip(self.input) {
            *g = rounded(gelu(*g) * x, self.round);
        }
    }
}

/// `out = (norm(context * scale) + identity) / sqrt(2)`, one layer's part
pub(super) struct LayerInputRow<'a> {
    pub(super) context: &'a [f32],
    pub(super) context_scale: f32,
    pub(super) norm: &'a Norm,
    pub(super) identity_scale: f32,
    pub(super) round: bool,
    /// Holds the table's row, and then the result.
    pub(super) out: &'a mut [f32],
}

impl Kernel for LayerInputRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let round = self.round;
        let width = self.norm.weight.len();
        let mut scaled = [0.0; MAX_HEAD];
        let scaled = &mut scaled[..width];
        for (out, context) in self
            .out
            .chunks_exact_mut(width)
            .zip(self.context.chunks_exact(width))
        {
            for (s, c) in scaled.iter_mut().zip(context) {
                *s = rounded(c * self.context_scale, round);
            }
            let inverse = inverse_rms(scaled, self.norm.eps);
            for ((o, s), w) in out.iter_mut().zip(scaled.iter()).zip(&self.norm.weight) {
                let identity = rounded(*o * self.identity_scale, round);
                let sum = rounded(rounded(s * inverse * w, round) + identity, round);
                *o = rounded(sum * std::f32::consts::FRAC_1_SQRT_2, round);
            }
        }
    }
}

/// Norms and turns heads that lie one behind the other.
pub(super) struct TurnHeads<'a> {
    pub(super) heads: &'a mut [f32],
    pub(super) norm: &'a Norm,
    pub(super) rope: &'a RopeTable,
    pub(super) position: usize,
    pub(super) round: bool,
}

impl Kernel for TurnHeads<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for head in self.heads.chunks_exact_mut(self.norm.weight.len()) {
            normed_head(head, self.norm, self.round);
            self.rope.turn(self.position, head);
            for x in head.iter_mut() {
                *x = rounded(*x, self.round);
            }
        }
    }
}

#[inline(always)]
fn normed_head(head: &mut [f32], norm: &Norm, round: bool) {
    let inverse = inverse_rms(head, norm.eps);
    for (x, w) in head.iter_mut().zip(&norm.weight) {
        *x = rounded(*x * inverse * w, round);
    }
}

/// Where a row's keys and values go.
pub(super) struct StoreRow<'a> {
    /// `[k | v]`, or `[k]` where keys come from values.
    pub(super) keys_and_values: &'a mut [f32],
    pub(super) norm: &'a Norm,
    pub(super) rope: &'a RopeTable,
    pub(super) position: usize,
    pub(super) block: usize,
    pub(super) slot: usize,
    pub(super) round: bool,
    pub(super) cache: &'a Writer,
}

impl Kernel for StoreRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let dim = self.norm.weight.len();
        let width = self.cache.shape.kv_heads * dim;
        let values_only = self.cache.values_only;
        // Where one projection serves both, values are its raw result.
        let (keys, values) = match values_only {
            true => self.keys_and_values[..width].split_at_mut(0),
            false => self.keys_and_values[..2 * width].split_at_mut(width),
        };
        for head in 0..self.cache.shape.kv_heads {
            let value = &mut values[head * dim..(head + 1) * dim];
            let inverse = inverse_rms(value, self.norm.eps);
            for v in value.iter_mut() {
                *v = rounded(*v * inverse, self.round);
            }
            let key = (!values_only).then(|| {
                let key = &mut keys[head * dim..(head + 1) * dim];
                normed_head(key, self.norm, self.round);
                self.rope.turn(self.position, key);
                for k in key.iter_mut() {
                    *k = rounded(*k, self.round);
                }
                &*key
            });
            // SAFETY: the arena checked the block, and the slot belongs to this row alone.
            unsafe { self.cache.store(self.block, self.slot, head, key, value) };
        }
    }
}

/// `out = out * scale`, rounded
pub(super) struct ScaleRow<'a> {
    pub(super) scale: f32,
    pub(super) round: bool,
    pub(super) out: &'a mut [f32],
}

impl Kernel for ScaleRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for x in self.out.iter_mut() {
            *x = rounded(*x * self.scale, self.round);
        }
    }
}

/// `out = cap * tanh(out / cap)`
pub(super) struct CapRow<'a> {
    pub(super) cap: f32,
    pub(super) out: &'a mut [f32],
}

impl Kernel for CapRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for x in self.out.iter_mut() {
            *x = self.cap * tanh(*x / self.cap);
        }
    }
}
