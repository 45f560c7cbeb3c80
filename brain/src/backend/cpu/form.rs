//! How a step of sixteen chains takes inputs and weights, and how rows of weights are stored.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{memory::Plain, simd::Lanes};

/// What a step of sixteen chains takes.
pub(super) trait Step: Copy + Sync + 'static {
    /// Inputs of a step.
    const INPUTS: usize;
    /// How an input is held.
    type Number: Plain;
    /// The inputs or the weights of a step.
    type Taken<V: Lanes>: Copy;

    /// # Safety
    /// The inputs of a step lie behind `p`.
    unsafe fn take<V: Lanes>(p: *const Self::Number) -> Self::Taken<V>;
    /// The step.
    fn add<V: Lanes>(sum: V, x: Self::Taken<V>, weights: Self::Taken<V>) -> V;
}

/// bf16 inputs: lane `i` takes input `2 * i + 1`, then `2 * i`.
#[derive(Clone, Copy)]
pub(super) struct Pairs;

impl Step for Pairs {
    const INPUTS: usize = 32;
    type Number = u16;
    type Taken<V: Lanes> = V::Words;

    #[inline(always)]
    unsafe fn take<V: Lanes>(p: *const u16) -> V::Words {
        // SAFETY: the caller's word.
        unsafe { V::words(p) }
    }
    #[inline(always)]
    fn add<V: Lanes>(sum: V, x: V::Words, weights: V::Words) -> V {
        sum.dot(x, weights)
    }
}

/// fp32 inputs: lane `i` takes input `i`.
#[derive(Clone, Copy)]
pub(super) struct Singles;

impl Step for Singles {
    const INPUTS: usize = 16;
    type Number = f32;
    type Taken<V: Lanes> = V;

    #[inline(always)]
    unsafe fn take<V: Lanes>(p: *const f32) -> V {
        // SAFETY: the caller's word.
        unsafe { V::load(p) }
    }
    #[inline(always)]
    fn add<V: Lanes>(sum: V, x: V, weights: V) -> V {
        sum.fma(x, weights)
    }
}

/// A form of stored weights that steps take as it is, unit by unit of a row.
pub(super) trait Stored: Copy + Sync + 'static {
    /// What its steps take.
    type Step: Step;
    /// Steps of a unit.
    const STEPS: usize;
    /// Bytes of a unit, at most [`MOST_BYTES`].
    const BYTES: usize;
    /// A unit, read.
    type Unit<V: Lanes>: Copy;

    /// # Safety
    /// A unit's bytes lie behind `p`.
    unsafe fn unit<V: Lanes>(p: *const u8) -> Self::Unit<V>;
    /// The weights of a step.
    fn step<V: Lanes>(unit: &Self::Unit<V>, step: usize) -> <Self::Step as Step>::Taken<V>;
}

/// Bytes of the largest unit.
pub(super) const MOST_BYTES: usize = 128;

/// bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Stored for Bf16 {
    type Step = Pairs;
    const STEPS: usize = 1;
    const BYTES: usize = 64;
    type Unit<V: Lanes> = V::Words;

    #[inline(always)]
    unsafe fn unit<V: Lanes>(p: *const u8) -> V::Words {
        // SAFETY: the caller's word.
        unsafe { V::weights(p.cast()) }
    }
    #[inline(always)]
    fn step<V: Lanes>(unit: &V::Words, _: usize) -> V::Words {
        *unit
    }
}

/// E4M3.
#[derive(Clone, Copy)]
pub(super) struct Fp8;

impl Stored for Fp8 {
    type Step = Pairs;
    const STEPS: usize = 1;
    const BYTES: usize = 32;
    type Unit<V: Lanes> = V::Words;

    #[inline(always)]
    unsafe fn unit<V: Lanes>(p: *const u8) -> V::Words {
        // SAFETY: the caller's word.
        unsafe { V::e4m3(p) }
    }
    #[inline(always)]
    fn step<V: Lanes>(unit: &V::Words, _: usize) -> V::Words {
        *unit
    }
}

/// E2M1 of NVFP4, without scales: inputs are dealt out ([`super::decode::dealt`]).
#[derive(Clone, Copy)]
pub(super) struct E2m1;

impl Stored for E2m1 {
    type Step = Pairs;
    const STEPS: usize = 8;
    const BYTES: usize = 128;
    type Unit<V: Lanes> = V::Block;

    #[inline(always)]
    unsafe fn unit<V: Lanes>(p: *const u8) -> V::Block {
        // SAFETY: the caller's word.
        unsafe { V::block(p) }
    }
    #[inline(always)]
    fn step<V: Lanes>(unit: &V::Block, step: usize) -> V::Words {
        V::e2m1(unit, step)
    }
}

/// fp32.
#[derive(Clone, Copy)]
pub(super) struct F32;

impl Stored for F32 {
    type Step = Singles;
    const STEPS: usize = 1;
    const BYTES: usize = 64;
    type Unit<V: Lanes> = V;

    #[inline(always)]
    unsafe fn unit<V: Lanes>(p: *const u8) -> V {
        // SAFETY: the caller's word.
        unsafe { V::load(p.cast()) }
    }
    #[inline(always)]
    fn step<V: Lanes>(unit: &V, _: usize) -> V {
        *unit
    }
}
