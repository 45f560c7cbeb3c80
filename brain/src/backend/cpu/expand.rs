//! Stored codes to numbers: bf16 pairs for bf16 rows, fp32 for fp32 rows. Every step is exact.

#![allow(unsafe_code, reason = "vector kernels")]

use std::ops::Range;

use super::{
    memory::Region,
    panel::{Form, PANEL, word_place},
};
use crate::model::weight::Nvfp4;

/// Codes of panels of 32 outputs, input by input or pair by pair of inputs.
pub(super) enum Code {
    /// bf16 in words of two inputs, as [`super::panel`] packs plain matrices.
    Words(Region<u16>),
    /// fp32, `[panel, input, 32]`.
    Singles(Region<f32>),
    /// bf16 or fp16 to be widened, `[panel, input, 32]`.
    Halves { codes: Region<u16>, fp16: bool },
    /// E4M3, `[panel, input, 32]`.
    Fp8(Region<u8>),
    /// E2M1, a byte for a pair of inputs, `[panel, pair, 32]`; E4M3 scales `[panel, block, 32]`.
    Nvfp4 {
        codes: Region<u8>,
        scales: Region<u8>,
    },
    /// Integers plus 8, a byte for a pair of inputs.
    Int4(Region<u8>),
}

/// A form that codes are expanded to.
pub(super) trait Sheet: Form {
    /// Puts the numbers of inputs `2 * pair` and `2 * pair + 1` of 32 outputs.
    ///
    /// # Safety
    /// There is room for the pair behind `to`.
    unsafe fn put_pair(to: *mut Self, pair: usize, even: &[f32; PANEL], odd: &[f32; PANEL]);
}

impl Sheet for u16 {
    #[inline(always)]
    unsafe fn put_pair(to: *mut u16, pair: usize, even: &[f32; PANEL], odd: &[f32; PANEL]) {
        let words: [u32; PANEL] =
            std::array::from_fn(|j| even[j].to_bits() & 0xffff_0000 | odd[j].to_bits() >> 16);
        // SAFETY: the caller's word: a pair is 32 words.
        unsafe {
            to.cast::<[u32; PANEL]>().add(pair).write_unaligned(words);
        }
    }
}

impl Sheet for f32 {
    #[inline(always)]
    unsafe fn put_pair(to: *mut f32, pair: usize, even: &[f32; PANEL], odd: &[f32; PANEL]) {
        // SAFETY: the caller's word: a pair is twice 32 numbers.
        unsafe {
            let to = to.cast::<[f32; PANEL]>().add(2 * pair);
            to.write_unaligned(*even);
            to.add(1).write_unaligned(*odd);
        }
    }
}

/// E4M3, without a subnormal on the way: those are taken for 2^-6 too much.
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let (code, magnitude) = (u32::from(code), u32::from(code & 0x7f));
    let small = magnitude < 8;
    let bits = (magnitude | if small { 8 } else { 0 }) << 20;
    let value = f32::from_bits(bits + (120 << 23)) - if small { 1.0 / 64.0 } else { 0.0 };
    f32::from_bits(value.to_bits() | (code & 0x80) << 24)
}

/// fp16, likewise.
#[inline(always)]
fn fp16(code: u16) -> f32 {
    let magnitude = u32::from(code & 0x7fff);
    let small = magnitude < 0x400;
    let bits = (magnitude | if small { 0x400 } else { 0 }) << 13;
    // Infinity and NaN have an exponent of their own.
    let offset = if magnitude >= 0x7c00 { 224 } else { 112 };
    let below = if small { 1.0 / 16384.0 } else { 0.0 };
    let value = f32::from_bits(bits + (offset << 23)) - below;
    f32::from_bits(value.to_bits() | u32::from(code & 0x8000) << 16)
}

/// Twice the magnitudes of E2M1, four bits each.
const E2M1_TWICE: u32 = 0xc864_3210;

/// E2M1 times twice `half`, which leaves its sign alone.
#[inline(always)]
fn e2m1(code: u32, half: f32) -> f32 {
    let twice = E2M1_TWICE >> (4 * (code & 7)) & 15;
    f32::from_bits((twice as f32 * half).to_bits() ^ (code & 8) << 28)
}

impl Code {
    /// Expands inputs `range` of a panel, which begin with an even one, to the start of `to`. The
    /// partner of an odd last input is whatever number, which no row has an input for.
    ///
    /// # Safety
    /// There is room for the inputs, rounded up to pairs, behind `to`.
    #[inline(always)]
    pub(super) unsafe fn expand<F: Sheet>(
        &self,
        panel: usize,
        inputs: usize,
        range: Range<usize>,
        to: *mut F,
    ) {
        let pairs = inputs.div_ceil(2);
        let first = range.start / 2;
        let count = range.len().div_ceil(2);
        match self {
            Code::Words(all) => {
                let words = &all[(panel * pairs + first) * 2 * PANEL..][..count * 2 * PANEL];
                for pair in 0..count {
                    let at = |k: usize, j: usize| {
                        f32::from_bits(u32::from(words[pair * 2 * PANEL + word_place(k, j)]) << 16)
                    };
                    let (even, odd) = (from_fn(|j| at(0, j)), from_fn(|j| at(1, j)));
                    // SAFETY: the caller's word.
                    unsafe { F::put_pair(to, pair, &even, &odd) };
                }
            }
            Code::Singles(all) => {
                let numbers = &all[(panel * inputs + range.start) * PANEL..];
                // SAFETY: the caller's word.
                unsafe { put_rows(to, numbers, range.len(), |x| x) };
            }
            Code::Halves { codes, fp16: true } => {
                let codes = &codes[(panel * inputs + range.start) * PANEL..];
                // SAFETY: the caller's word.
                unsafe { put_rows(to, codes, range.len(), fp16) };
            }
            Code::Halves { codes, fp16: false } => {
                let codes = &codes[(panel * inputs + range.start) * PANEL..];
                let widen = |code: u16| f32::from_bits(u32::from(code) << 16);
                // SAFETY: the caller's word.
                unsafe { put_rows(to, codes, range.len(), widen) };
            }
            Code::Fp8(all) => {
                let codes = &all[(panel * inputs + range.start) * PANEL..];
                // SAFETY: the caller's word.
                unsafe { put_rows(to, codes, range.len(), e4m3) };
            }
            Code::Nvfp4 { codes, scales } => {
                const PAIRS: usize = Nvfp4::BLOCK / 2;
                let blocks = inputs.div_ceil(Nvfp4::BLOCK);
                let codes = &codes[(panel * pairs + first) * PANEL..][..count * PANEL];
                let mut half = [0.0; PANEL];
                for pair in 0..count {
                    if pair == 0 || (first + pair).is_multiple_of(PAIRS) {
                        let block = panel * blocks + (first + pair) / PAIRS;
                        let scales = &scales[block * PANEL..][..PANEL];
                        half = from_fn(|j| 0.5 * e4m3(scales[j]));
                    }
                    let codes = &codes[pair * PANEL..][..PANEL];
                    let even = from_fn(|j| e2m1(u32::from(codes[j] & 15), half[j]));
                    let odd = from_fn(|j| e2m1(u32::from(codes[j] >> 4), half[j]));
                    // SAFETY: the caller's word.
                    unsafe { F::put_pair(to, pair, &even, &odd) };
                }
            }
            Code::Int4(all) => {
                let codes = &all[(panel * pairs + first) * PANEL..][..count * PANEL];
                for pair in 0..count {
                    let codes = &codes[pair * PANEL..][..PANEL];
                    let number = |code: u8| (i32::from(code) - 8) as f32;
                    let even = from_fn(|j| number(codes[j] & 15));
                    let odd = from_fn(|j| number(codes[j] >> 4));
                    // SAFETY: the caller's word.
                    unsafe { F::put_pair(to, pair, &even, &odd) };
                }
            }
        }
    }
}

#[inline(always)]
fn from_fn(f: impl FnMut(usize) -> f32) -> [f32; PANEL] {
    std::array::from_fn(f)
}

/// Puts the first `count` inputs of `codes`, which are stored one by one.
///
/// # Safety
/// There is room for the inputs, rounded up to pairs, behind `to`.
#[inline(always)]
unsafe fn put_rows<F: Sheet, T: Copy>(
    to: *mut F,
    codes: &[T],
    count: usize,
    number: impl Fn(T) -> f32,
) {
    for pair in 0..count / 2 {
        let codes = &codes[2 * pair * PANEL..][..2 * PANEL];
        let even = from_fn(|j| number(codes[j]));
        let odd = from_fn(|j| number(codes[PANEL + j]));
        // SAFETY: the caller's word.
        unsafe { F::put_pair(to, pair, &even, &odd) };
    }
    if !count.is_multiple_of(2) {
        let codes = &codes[(count - 1) * PANEL..][..PANEL];
        let even = from_fn(|j| number(codes[j]));
        // SAFETY: the caller's word.
        unsafe { F::put_pair(to, count / 2, &even, &[0.0; PANEL]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weight::codes::{E2M1, E4M3};

    #[test]
    fn every_code_is_its_number() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                let expected = E4M3[usize::from(code)];
                assert_eq!(e4m3(code).to_bits(), expected.to_bits(), "{code:#x}");
            }
        }
        for code in 0..16 {
            let value = e2m1(code, 0.5 * 7.0);
            assert_eq!(
                value.to_bits(),
                (E2M1[code as usize] * 7.0).to_bits(),
                "{code}"
            );
        }
        for code in 0..=u16::MAX {
            let expected = half::f16::from_bits(code).to_f32();
            let same = fp16(code).to_bits() == expected.to_bits();
            assert!(
                same || expected.is_nan() && fp16(code).is_nan(),
                "{code:#x}"
            );
        }
    }
}
