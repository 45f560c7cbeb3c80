//! Panels of 32 numbers side by side, as keys and values are stored, and the forms they have.

#![allow(unsafe_code, reason = "vector kernels")]

use super::simd::Lanes;
use crate::sched::math::round_bf16;

/// Outputs of a panel.
pub(super) const PANEL: usize = 32;

/// Where a bf16 number lies in a panel: of input `k`, output `j` of 32. Pairs of inputs share a
/// word, the first in its high half.
#[inline(always)]
pub(super) fn word_place(k: usize, j: usize) -> usize {
    (k / 2 * PANEL + j) * 2 + 1 - k % 2
}

/// A number stored as bf16; subnormals are zero.
#[inline(always)]
pub(super) fn narrow(x: f32) -> u16 {
    (round_bf16(x).to_bits() >> 16) as u16
}

/// Pairs of bf16 numbers, the first in the high half; an odd one gets a zero for company.
///
/// Rounds on the way, which changes nothing where numbers were rounded before.
#[inline(always)]
pub(super) fn pack_words(x: &[f32], words: &mut [u32]) {
    let pairs = x.chunks_exact(2);
    if let Some(last) = pairs.remainder().first() {
        words[x.len() / 2] = round_bf16(*last).to_bits();
    }
    for (word, pair) in words.iter_mut().zip(pairs) {
        let (first, second) = (round_bf16(pair[0]).to_bits(), round_bf16(pair[1]).to_bits());
        *word = first | second >> 16;
    }
}

/// A stored form of keys and values.
pub(super) trait Form: Copy + Sync {
    /// Inputs that one step takes.
    const STEP: usize;
    /// The inputs of a step.
    type Input: Copy + Sync;
    /// Those of one row, for all lanes.
    type Spread<V: Lanes>: Copy;
    /// The weights of 16 outputs for a step.
    type Weights<V: Lanes>: Copy;

    /// # Safety
    /// One element lies behind `p`.
    unsafe fn spread<V: Lanes>(p: *const Self::Input) -> Self::Spread<V>;
    /// Weights of 16 outputs.
    ///
    /// # Safety
    /// `16 * STEP` elements lie behind `p`.
    unsafe fn half<V: Lanes>(p: *const Self) -> Self::Weights<V>;
    /// A step of 16 chains.
    fn step<V: Lanes>(sum: V, x: Self::Spread<V>, weights: Self::Weights<V>) -> V;
    /// The step's first or second input alone.
    fn part<V: Lanes>(sum: V, second: bool, x: Self::Spread<V>, weights: Self::Weights<V>) -> V;

    /// Weights of outputs 0 to 15 and 16 to 31.
    ///
    /// # Safety
    /// `32 * STEP` elements lie behind `p`.
    #[inline(always)]
    unsafe fn weights<V: Lanes>(p: *const Self) -> (Self::Weights<V>, Self::Weights<V>) {
        // SAFETY: the caller's word.
        unsafe { (Self::half(p), Self::half(p.add(16 * Self::STEP))) }
    }
}

impl Form for u16 {
    const STEP: usize = 2;
    type Input = u32;
    type Spread<V: Lanes> = V::Words;
    type Weights<V: Lanes> = V::Words;

    #[inline(always)]
    unsafe fn spread<V: Lanes>(p: *const u32) -> V::Words {
        // SAFETY: the caller's word.
        unsafe { V::spread(p) }
    }
    #[inline(always)]
    unsafe fn half<V: Lanes>(p: *const Self) -> V::Words {
        // SAFETY: the caller's word.
        unsafe { V::words(p) }
    }
    #[inline(always)]
    fn step<V: Lanes>(sum: V, x: V::Words, weights: V::Words) -> V {
        sum.dot(x, weights)
    }
    #[inline(always)]
    fn part<V: Lanes>(sum: V, second: bool, x: V::Words, weights: V::Words) -> V {
        match second {
            false => sum.fma(V::first(x), V::first(weights)),
            true => sum.fma(V::second(x), V::second(weights)),
        }
    }
}

impl Form for f32 {
    const STEP: usize = 1;
    type Input = f32;
    type Spread<V: Lanes> = V;
    type Weights<V: Lanes> = V;

    #[inline(always)]
    unsafe fn spread<V: Lanes>(p: *const f32) -> V {
        // SAFETY: the caller's word.
        V::splat(unsafe { *p })
    }
    #[inline(always)]
    unsafe fn half<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's word.
        unsafe { V::load(p) }
    }
    #[inline(always)]
    fn step<V: Lanes>(sum: V, x: V, weights: V) -> V {
        sum.fma(x, weights)
    }
    #[inline(always)]
    fn part<V: Lanes>(sum: V, _: bool, x: V, weights: V) -> V {
        sum.fma(x, weights)
    }
}
