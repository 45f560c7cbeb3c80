//! Keys and values in FP8: codes of E4M3, expanded as they are read.
//!
//! A code's number is exact in bf16 and in fp32, so chains are computed over the numbers, and the
//! scale of the layer's keys or values multiplies what comes out, once.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{decode::e4m3, kv::Stored, memory::Plain, panel::Form, simd::Lanes};
use crate::quantize::e4m3::encode_signed;

/// A code that is multiplied as bf16.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(super) struct WordCode(u8);

/// A code that is multiplied as fp32.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(super) struct SingleCode(u8);

impl WordCode {
    /// What no number is stored as.
    pub(super) const POISON: Self = Self(0x7f);
}

impl SingleCode {
    /// What no number is stored as.
    pub(super) const POISON: Self = Self(0x7f);
}

impl Plain for WordCode {}
impl Plain for SingleCode {}

impl Form for WordCode {
    const STEP: usize = u16::STEP;
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
        // SAFETY: the caller vouches for 32 codes.
        unsafe { V::e4m3(p.cast()) }
    }
    #[inline(always)]
    fn step<V: Lanes>(sum: V, x: V::Words, weights: V::Words) -> V {
        u16::step(sum, x, weights)
    }
    #[inline(always)]
    fn part<V: Lanes>(sum: V, second: bool, x: V::Words, weights: V::Words) -> V {
        u16::part(sum, second, x, weights)
    }
}

impl Form for SingleCode {
    const STEP: usize = f32::STEP;
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
        // SAFETY: the caller vouches for 16 codes.
        let codes = unsafe { p.cast::<[u8; 16]>().read_unaligned() };
        let numbers: [f32; 16] = codes.map(e4m3);
        // SAFETY: sixteen numbers are there.
        unsafe { V::load(numbers.as_ptr()) }
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

/// A code and its number, for one of the two.
macro_rules! stored {
    ($code:ident, $number:ty) => {
        impl Stored for $code {
            type Formed = $number;
            #[inline(always)]
            fn wide(self) -> f32 {
                e4m3(self.0)
            }
            #[inline(always)]
            fn stored(x: f32, scale: f32) -> Self {
                Self(encode_signed(x / scale))
            }
            #[inline(always)]
            fn key_place(d: usize, slot: usize) -> usize {
                <$number>::key_place(d, slot)
            }
            #[inline(always)]
            fn value_place(slot: usize, d: usize, width: usize) -> usize {
                <$number>::value_place(slot, d, width)
            }
            #[inline(always)]
            fn inputs<'a>(x: &'a [f32], words: &'a mut [u32]) -> &'a [Self::Input] {
                <$number>::inputs(x, words)
            }
            #[inline(always)]
            fn keys<'a>(bf16: &'a mut [u16], f32: &'a mut [f32]) -> &'a mut [$number] {
                <$number>::keys(bf16, f32)
            }
        }
    };
}

stored!(WordCode, u16);
stored!(SingleCode, f32);
