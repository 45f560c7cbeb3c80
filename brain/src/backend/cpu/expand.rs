//! Stored codes to numbers: bf16 pairs for bf16 rows, fp32 for fp32 rows. Every step is exact.

#![allow(unsafe_code, reason = "vector kernels")]

use std::ops::Range;

use super::{
    decode::{e2m1_pair, e4m3, fp16, halves},
    memory::Region,
    panel::{Form, PANEL, word_place},
    simd::Lanes,
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
    /// E4M3, a byte where bf16 would have a word of 16 bits.
    Fp8(Region<u8>),
    /// E2M1, a word for eight inputs ([`super::decode::eight`]), `[panel, eight, 32]`; E4M3 scales
    /// `[panel, block, 32]`.
    Nvfp4 {
        codes: Region<u32>,
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

    /// Puts the numbers of a pair of inputs, of E4M3 codes.
    ///
    /// # Safety
    /// There is room for the pair behind `to`.
    unsafe fn put_e4m3<V: Lanes>(to: *mut Self, pair: usize, codes: &[[u8; PANEL]; 2]);

    /// Puts the numbers of a block of NVFP4, a word for each eight inputs of an output.
    ///
    /// # Safety
    /// There is room for them behind `to`.
    unsafe fn put_nvfp4<V: Lanes>(
        to: *mut Self,
        pair: usize,
        codes: &[[u32; PANEL]],
        scales: &[u8; PANEL],
    );
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

    #[inline(always)]
    unsafe fn put_e4m3<V: Lanes>(to: *mut u16, pair: usize, codes: &[[u8; PANEL]; 2]) {
        // SAFETY: the caller's word: a pair is twice 32 numbers.
        unsafe {
            V::put_e4m3(&codes[0], to.add(2 * PANEL * pair));
            V::put_e4m3(&codes[1], to.add(2 * PANEL * pair + PANEL));
        }
    }

    #[inline(always)]
    unsafe fn put_nvfp4<V: Lanes>(
        to: *mut u16,
        pair: usize,
        codes: &[[u32; PANEL]],
        scales: &[u8; PANEL],
    ) {
        // SAFETY: the caller's word.
        unsafe { V::put_nvfp4(codes, scales, to.add(2 * PANEL * pair)) };
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

    #[inline(always)]
    unsafe fn put_e4m3<V: Lanes>(to: *mut f32, pair: usize, codes: &[[u8; PANEL]; 2]) {
        let codes = codes.as_flattened();
        let (even, odd) = (
            from_fn(|j| e4m3(codes[word_place(0, j)])),
            from_fn(|j| e4m3(codes[word_place(1, j)])),
        );
        // SAFETY: the caller's word.
        unsafe { Self::put_pair(to, pair, &even, &odd) };
    }

    #[inline(always)]
    unsafe fn put_nvfp4<V: Lanes>(
        to: *mut f32,
        pair: usize,
        codes: &[[u32; PANEL]],
        scales: &[u8; PANEL],
    ) {
        let half = halves(scales);
        for (i, codes) in codes.iter().enumerate() {
            for four in 0..4 {
                let [even, odd] = e2m1_pair(codes, four, &half);
                // SAFETY: the caller's word.
                unsafe { Self::put_pair(to, pair + 4 * i + four, &even, &odd) };
            }
        }
    }
}

impl Code {
    /// Expands inputs `range` of a panel, which begin with a multiple of 16 or of a group, to the
    /// start of `to`. Behind the last input stands whatever number, which no row has an input for.
    ///
    /// # Safety
    /// There is room for the inputs, rounded up to blocks of 16, behind `to`.
    #[inline(always)]
    pub(super) unsafe fn expand<F: Sheet, V: Lanes>(
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
                let (codes, _) = all.as_chunks::<PANEL>();
                let (codes, _) = codes.as_chunks::<2>();
                let codes = &codes[panel * pairs + first..][..count];
                for (pair, codes) in codes.iter().enumerate() {
                    // SAFETY: the caller's word.
                    unsafe { F::put_e4m3::<V>(to, pair, codes) };
                }
            }
            Code::Nvfp4 { codes, scales } => {
                const EIGHTS: usize = Nvfp4::BLOCK / 8;
                let (eights, blocks) = (inputs.div_ceil(8), inputs.div_ceil(Nvfp4::BLOCK));
                let (codes, _) = codes.as_chunks::<PANEL>();
                let codes = &codes[panel * eights + range.start / 8..(panel + 1) * eights];
                let (scales, _) = scales.as_chunks::<PANEL>();
                let scales = &scales[panel * blocks + range.start / Nvfp4::BLOCK..];
                let wanted = range.len().div_ceil(Nvfp4::BLOCK);
                let all = codes.chunks(EIGHTS).zip(scales).take(wanted);
                for (i, (codes, scales)) in all.enumerate() {
                    let pair = i * Nvfp4::BLOCK / 2;
                    // SAFETY: the caller's word.
                    unsafe { F::put_nvfp4::<V>(to, pair, codes, scales) };
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
