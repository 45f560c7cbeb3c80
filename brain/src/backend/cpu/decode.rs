//! The numbers that stored codes stand for, in bf16 or fp32, which hold each of them exactly: so it
//! does not matter how they are found, and the ways here differ only in their speed.

#![allow(unsafe_code, reason = "vector kernels")]

/// E4M3, without a subnormal on the way: those are taken for 2^-6 too much.
#[inline(always)]
pub(super) fn e4m3(code: u8) -> f32 {
    let (code, magnitude) = (u32::from(code), u32::from(code & 0x7f));
    let small = magnitude < 8;
    let bits = (magnitude | if small { 8 } else { 0 }) << 20;
    let value = f32::from_bits(bits + (120 << 23)) - if small { 1.0 / 64.0 } else { 0.0 };
    f32::from_bits(value.to_bits() | (code & 0x80) << 24)
}

/// fp16, likewise.
#[inline(always)]
pub(super) fn fp16(code: u16) -> f32 {
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

/// E2M1.
#[inline(always)]
pub(super) fn e2m1(code: u32) -> f32 {
    let twice = E2M1_TWICE >> (4 * (code & 7)) & 15;
    f32::from_bits((twice as f32 * 0.5).to_bits() | (code & 8) << 28)
}

/// The scales of sixteen blocks of NVFP4. None is negative; a zero may have a sign, which goes.
#[inline(always)]
pub(super) fn scales(codes: &[u8; 16]) -> [f32; 16] {
    let mut scales = [0.0; 16];
    for (scale, code) in scales.iter_mut().zip(codes) {
        *scale = e4m3(code & 0x7f);
    }
    scales
}

/// bf16 numbers of E4M3 codes.
#[inline(always)]
pub(super) fn e4m3_words(codes: &[u8; 32]) -> [u16; 32] {
    let mut words = [0; 32];
    for (word, code) in words.iter_mut().zip(codes) {
        *word = (e4m3(*code).to_bits() >> 16) as u16;
    }
    words
}

/// Codes of E2M1 that lie together: sixteen blocks of sixteen, two codes a byte, low four bits first.
pub(super) const DEAL: usize = 256;

/// Where input `k` of [`DEAL`] lies when they are dealt out: every step of 32 takes two of each block,
/// the pair of block `i` at `2 * i`. So a lane of sixteen sums the products of one block.
#[inline(always)]
pub(super) const fn dealt(k: usize) -> usize {
    let (block, code) = (k / 16, k % 16);
    let (word, high, step) = (code / 8, code / 4 % 2, code % 4);
    32 * (4 * word + step) + 2 * block + high
}

/// bf16 numbers of step `step` of eight, of dealt codes.
#[inline(always)]
pub(super) fn e2m1_words(codes: &[u8; DEAL / 2], step: usize) -> [u16; 32] {
    let (blocks, _) = codes.as_chunks::<8>();
    let shift = 32 * (step / 4) + 4 * (step % 4);
    let mut words = [[0; 2]; 16];
    for (pair, block) in words.iter_mut().zip(blocks) {
        let codes = (u64::from_le_bytes(*block) >> shift) as u32;
        for (word, code) in pair.iter_mut().zip([codes & 15, codes >> 16 & 15]) {
            *word = (e2m1(code).to_bits() >> 16) as u16;
        }
    }
    flat(words)
}

/// bf16 numbers of four-bit integers that stand for eight less, two a byte.
#[inline(always)]
pub(super) fn int4_words(codes: &[u8; 16]) -> [u16; 32] {
    let mut words = [[0; 2]; 16];
    for (pair, codes) in words.iter_mut().zip(codes) {
        for (word, code) in pair.iter_mut().zip([codes & 15, codes >> 4]) {
            *word = ((f32::from(code) - 8.0).to_bits() >> 16) as u16;
        }
    }
    flat(words)
}

#[inline(always)]
fn flat(pairs: [[u16; 2]; 16]) -> [u16; 32] {
    let mut words = [0; 32];
    words.copy_from_slice(pairs.as_flattened());
    words
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    use std::arch::x86_64::*;

    // SAFETY of every block below: callers vouch for AVX-512 F, BW, DQ and VL and for the codes.

    /// What to add to a code's sign and magnitude, the latter shifted by 4, where the magnitude is
    /// below 2^-6: bits of a bf16 number less the shifted magnitude.
    const SUBNORMALS: [i16; 32] = {
        let bits = [0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60];
        let mut table = [0; 32];
        let mut i = 0;
        while i < bits.len() {
            table[i] = bits[i] - ((i as i16) << 4);
            i += 1;
        }
        table
    };

    /// Numbers of E2M1 as bf16, twice, for whatever the fifth bit is.
    const E2M1: [i16; 32] = {
        let bits = [0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0];
        let mut table = [0i16; 32];
        let mut i = 0;
        while i < table.len() {
            table[i] = bits[i & 7] | if i & 8 == 0 { 0 } else { i16::MIN };
            i += 1;
        }
        table
    };

    /// 32 numbers as bf16.
    #[inline(always)]
    pub(in super::super) unsafe fn e4m3(codes: *const u8) -> __m512i {
        unsafe {
            let subnormals = _mm512_loadu_si512(SUBNORMALS.as_ptr().cast());
            let code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(codes.cast()));
            let wanted = _mm512_set1_epi16(0x87f0u16 as i16);
            let value = _mm512_and_si512(_mm512_slli_epi16::<4>(code), wanted);
            let small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
            let bias = _mm512_set1_epi16(120 << 7);
            let offset = _mm512_mask_permutexvar_epi16(bias, small, code, subnormals);
            _mm512_add_epi16(value, offset)
        }
    }

    /// The first and the second four bytes of sixteen blocks of codes.
    pub(in super::super) type Block = (__m512i, __m512i);

    #[inline(always)]
    pub(in super::super) unsafe fn block(codes: *const u8) -> Block {
        unsafe {
            let low = _mm512_loadu_si512(codes.cast());
            let high = _mm512_loadu_si512(codes.add(64).cast());
            let evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
            let odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
            (
                _mm512_permutex2var_epi32(low, evens, high),
                _mm512_permutex2var_epi32(low, odds, high),
            )
        }
    }

    /// Step `step` of eight.
    #[inline(always)]
    pub(in super::super) unsafe fn e2m1(block: &Block, step: usize) -> __m512i {
        unsafe {
            let codes = if step < 4 { block.0 } else { block.1 };
            let codes = match step % 4 {
                0 => codes,
                1 => _mm512_srli_epi16::<4>(codes),
                2 => _mm512_srli_epi16::<8>(codes),
                _ => _mm512_srli_epi16::<12>(codes),
            };
            _mm512_permutexvar_epi16(codes, _mm512_loadu_si512(E2M1.as_ptr().cast()))
        }
    }

    /// Scales of sixteen blocks. fp16 has a bias of 15 where E4M3 has 7, and room for its fraction.
    #[inline(always)]
    pub(in super::super) unsafe fn scales(codes: *const u8) -> __m512 {
        unsafe {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes.cast()));
            let codes = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
            let small = _mm512_cvtph_ps(_mm256_slli_epi16::<7>(codes));
            _mm512_mul_ps(small, _mm512_set1_ps(256.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weight::codes::{E2M1, E4M3, nibble};

    #[test]
    fn every_code_is_its_number() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                let expected = E4M3[usize::from(code)];
                assert_eq!(e4m3(code).to_bits(), expected.to_bits(), "{code:#x}");
            }
        }
        for code in 0..16 {
            let expected = E2M1[code as usize];
            assert_eq!(e2m1(code).to_bits(), expected.to_bits(), "{code}");
        }
        for code in 0..=u16::MAX {
            let expected = half::f16::from_bits(code).to_f32();
            let same = fp16(code).to_bits() == expected.to_bits();
            assert!(
                same || expected.is_nan() && fp16(code).is_nan(),
                "{code:#x}"
            );
        }
        let bytes: [u8; 16] = std::array::from_fn(|i| (i * 16 + (15 - i)) as u8);
        for (j, word) in int4_words(&bytes).into_iter().enumerate() {
            assert_eq!(number(word), f32::from(nibble(&bytes, j)) - 8.0, "{j}");
        }
    }

    fn number(word: u16) -> f32 {
        f32::from_bits(u32::from(word) << 16)
    }

    #[test]
    fn dealing_is_a_permutation_that_keeps_blocks_in_lanes() {
        let mut seen = [false; DEAL];
        for k in 0..DEAL {
            assert!(!std::mem::replace(&mut seen[dealt(k)], true), "{k}");
            assert_eq!(dealt(k) % 32 / 2, k / 16, "{k}");
        }
    }

    #[test]
    fn e4m3_to_bf16_in_every_way() {
        let check = |decode: &dyn Fn(&[u8; 32]) -> [u16; 32]| {
            for start in (0..256).step_by(32) {
                let codes: [u8; 32] = std::array::from_fn(|j| (start + j) as u8);
                let words = decode(&codes);
                for (code, word) in codes.iter().zip(words).filter(|(c, _)| *c & 0x7f != 0x7f) {
                    let expected = E4M3[usize::from(*code)].to_bits();
                    assert_eq!(number(word).to_bits(), expected, "{code:#x}");
                }
            }
        };
        check(&e4m3_words);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn run(codes: &[u8; 32]) -> [u16; 32] {
                // SAFETY: there are 32 codes; both types are 64 plain bytes.
                unsafe { std::mem::transmute(avx512::e4m3(codes.as_ptr())) }
            }
            // SAFETY: the instructions were found just now.
            check(&|codes| unsafe { run(codes) });
        }
    }

    #[test]
    fn e2m1_to_bf16_in_every_way() {
        // Every code at every place of a block.
        let codes: [u8; DEAL / 2] = std::array::from_fn(|byte| {
            let (block, first) = (byte / 8, byte % 8 * 2);
            let code = |k: usize| ((block + 3 * k) % 16) as u8;
            code(first) | (code(first + 1) << 4)
        });
        let check = |decode: &dyn Fn(&[u8; DEAL / 2], usize) -> [u16; 32]| {
            for k in 0..DEAL {
                let word = decode(&codes, dealt(k) / 32)[dealt(k) % 32];
                let expected = E2M1[usize::from(nibble(&codes, k))];
                assert_eq!(number(word).to_bits(), expected.to_bits(), "{k}");
            }
        };
        check(&e2m1_words);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn run(codes: &[u8; DEAL / 2], step: usize) -> [u16; 32] {
                // SAFETY: there are 256 codes; both types are 64 plain bytes.
                unsafe {
                    let block = avx512::block(codes.as_ptr());
                    std::mem::transmute(avx512::e2m1(&block, step))
                }
            }
            // SAFETY: the instructions were found just now.
            check(&|codes, step| unsafe { run(codes, step) });
        }
    }

    #[test]
    fn scales_of_blocks_in_every_way() {
        let check = |decode: &dyn Fn(&[u8; 16]) -> [f32; 16]| {
            for first in (0..0x80u8).step_by(16) {
                let codes: [u8; 16] = std::array::from_fn(|i| match first + i as u8 {
                    0 | 0x7f => 0x80,
                    code => code,
                });
                for (code, scale) in codes.iter().zip(decode(&codes)) {
                    let expected = E4M3[usize::from(code & 0x7f)];
                    assert_eq!(scale.to_bits(), expected.to_bits(), "{code:#x}");
                }
            }
        };
        check(&scales);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn run(codes: &[u8; 16]) -> [f32; 16] {
                // SAFETY: there are 16 codes; both types are 64 plain bytes.
                unsafe { std::mem::transmute(avx512::scales(codes.as_ptr())) }
            }
            // SAFETY: the instructions were found just now.
            check(&|codes| unsafe { run(codes) });
        }
    }
}
