//! The numbers of E4M3 and NVFP4 codes as bf16, which holds each of them exactly: so it does not
//! matter how they are found, and the ways here differ only in their speed.

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

/// E2M1 times twice `half`, which leaves its sign alone.
#[inline(always)]
pub(super) fn e2m1(code: u32, half: f32) -> f32 {
    let twice = E2M1_TWICE >> (4 * (code & 7)) & 15;
    f32::from_bits((twice as f32 * half).to_bits() ^ (code & 8) << 28)
}

/// Half of each scale of a block of NVFP4.
#[inline(always)]
pub(super) fn halves(scales: &[u8; 32]) -> [f32; 32] {
    std::array::from_fn(|j| 0.5 * e4m3(scales[j]))
}

/// Inputs `2 * pair` and `2 * pair + 1` of eight, of 32 outputs: [`eight`] says where they are.
#[inline(always)]
pub(super) fn e2m1_pair(codes: &[u32; 32], pair: usize, half: &[f32; 32]) -> [[f32; 32]; 2] {
    let number =
        |shift: usize| std::array::from_fn(|j| e2m1(codes[j] >> (shift + 4 * pair) & 15, half[j]));
    [number(16), number(0)]
}

/// Four bytes of a file, which hold the codes of eight inputs, the low four bits first, as they
/// are packed: the even inputs in the high half of a word, the odd ones in the low half, the first
/// lowest.
#[inline(always)]
pub(super) fn eight(bytes: [u8; 4]) -> u32 {
    let squeezed = |codes: u32| {
        let codes = codes & 0x0f0f_0f0f;
        let codes = (codes | codes >> 4) & 0x00ff_00ff;
        (codes | codes >> 8) & 0xffff
    };
    let codes = u32::from_le_bytes(bytes);
    squeezed(codes) << 16 | squeezed(codes >> 4)
}

/// bf16 numbers of E4M3 codes.
///
/// # Safety
/// Room for 32 numbers lies behind `to`.
#[inline(always)]
pub(super) unsafe fn e4m3_words(codes: &[u8; 32], to: *mut u16) {
    let words: [u16; 32] = std::array::from_fn(|j| (e4m3(codes[j]).to_bits() >> 16) as u16);
    // SAFETY: the caller's word.
    unsafe { to.cast::<[u16; 32]>().write_unaligned(words) };
}

/// A block of NVFP4: words of 32 outputs for each eight inputs, a scale for each output. The
/// result is words of two inputs, the even one in the high half, `[pair, 32]`.
///
/// # Safety
/// Room for the block's numbers lies behind `to`.
#[inline(always)]
pub(super) unsafe fn nvfp4_words(codes: &[[u32; 32]], scales: &[u8; 32], to: *mut u16) {
    let half = halves(scales);
    for (i, codes) in codes.iter().enumerate() {
        for pair in 0..4 {
            let [even, odd] = e2m1_pair(codes, pair, &half);
            let words: [u32; 32] =
                std::array::from_fn(|j| even[j].to_bits() | odd[j].to_bits() >> 16);
            // SAFETY: the caller's word.
            unsafe {
                to.cast::<[u32; 32]>()
                    .add(4 * i + pair)
                    .write_unaligned(words)
            };
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    use std::arch::x86_64::*;

    use super::e4m3 as e4m3_number;

    // SAFETY of every block below: callers vouch for AVX-512 F and BW and for the room.

    /// Magnitudes below 2^-6.
    const SUBNORMALS: [i16; 32] = {
        let mut table = [0; 32];
        let bits = [0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60];
        let mut i = 0;
        while i < bits.len() {
            table[i] = bits[i];
            i += 1;
        }
        table
    };

    /// What to add to the bits of a scale to multiply it by a code of E2M1, the sign included. Codes
    /// whose numbers are 1.5 times a power of two have a 1 as their lowest bit: they add to the bits
    /// of 1.5 times the scale, less one. The codes stand here twice, for whatever the fifth bit is.
    const STEPS: [i16; 32] = {
        let steps = [0, -0x80, 0, 1, 0x80, 0x81, 0x100, 0x101];
        let mut table = [0i16; 32];
        let mut i = 0;
        while i < table.len() {
            let sign = if i & 8 == 0 { 0 } else { i16::MIN };
            table[i] = sign.wrapping_add(steps[i & 7]);
            i += 1;
        }
        table
    };

    #[inline(always)]
    pub(in super::super) unsafe fn e4m3(codes: &[u8; 32], to: *mut u16) {
        unsafe {
            let subnormals = _mm512_loadu_si512(SUBNORMALS.as_ptr().cast());
            let code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(codes.as_ptr().cast()));
            let magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
            let bias = _mm512_set1_epi16(120 << 7);
            let normal = _mm512_add_epi16(_mm512_slli_epi16::<4>(magnitude), bias);
            let small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
            let value = _mm512_mask_permutexvar_epi16(normal, small, magnitude, subnormals);
            let sign = _mm512_and_si512(_mm512_slli_epi16::<8>(code), _mm512_set1_epi16(i16::MIN));
            _mm512_storeu_si512(to.cast(), _mm512_or_si512(value, sign));
        }
    }

    #[inline(always)]
    pub(in super::super) unsafe fn nvfp4(codes: &[[u32; 32]], scales: &[u8; 32], to: *mut u16) {
        // Of each output twice, for an even and an odd input.
        let twice = |x: f32| x.to_bits() >> 16 | x.to_bits() & 0xffff_0000;
        let once: [u32; 32] = std::array::from_fn(|j| twice(e4m3_number(scales[j])));
        let more: [u32; 32] = std::array::from_fn(|j| twice(1.5 * e4m3_number(scales[j])));
        unsafe {
            let steps = _mm512_loadu_si512(STEPS.as_ptr().cast());
            let (one, seven) = (_mm512_set1_epi16(1), _mm512_set1_epi16(7));
            for half in 0..2 {
                let scale = _mm512_loadu_si512(once.as_ptr().add(16 * half).cast());
                let more = _mm512_loadu_si512(more.as_ptr().add(16 * half).cast());
                let more = _mm512_sub_epi16(more, one);
                let some = _mm512_test_epi16_mask(scale, _mm512_set1_epi16(0x7fff));
                for (i, codes) in codes.iter().enumerate() {
                    let mut codes = _mm512_loadu_si512(codes.as_ptr().add(16 * half).cast());
                    for pair in 0..4 {
                        let step = _mm512_permutexvar_epi16(codes, steps);
                        let other = _mm512_mask_test_epi16_mask(some, step, one);
                        let filled = _mm512_mask_test_epi16_mask(some, codes, seven);
                        let value = _mm512_maskz_add_epi16(filled, scale, step);
                        let value = _mm512_mask_add_epi16(value, other, more, step);
                        let at = to.add(64 * (4 * i + pair) + 32 * half);
                        _mm512_storeu_si512(at.cast(), value);
                        codes = _mm512_srli_epi16::<4>(codes);
                    }
                }
            }
        }
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

    fn number(word: u16) -> f32 {
        f32::from_bits(u32::from(word) << 16)
    }

    #[test]
    fn e4m3_to_bf16_in_every_way() {
        let check = |decode: &dyn Fn(&[u8; 32], *mut u16)| {
            for start in (0..256).step_by(32) {
                let codes: [u8; 32] = std::array::from_fn(|j| (start + j) as u8);
                let mut words = [0; 32];
                decode(&codes, words.as_mut_ptr());
                for (code, word) in codes.iter().zip(words).filter(|(c, _)| *c & 0x7f != 0x7f) {
                    let expected = E4M3[usize::from(*code)].to_bits();
                    assert_eq!(number(word).to_bits(), expected, "{code:#x}");
                }
            }
        };
        // SAFETY: there is room for 32.
        check(&|codes, to| unsafe { e4m3_words(codes, to) });
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") {
            #[target_feature(enable = "avx512f,avx512bw")]
            fn run(codes: &[u8; 32], to: *mut u16) {
                // SAFETY: there is room for 32.
                unsafe { avx512::e4m3(codes, to) }
            }
            // SAFETY: the instructions were found just now.
            check(&|codes, to| unsafe { run(codes, to) });
        }
    }

    #[test]
    fn nvfp4_to_bf16_in_every_way() {
        type Decode<'a> = &'a dyn Fn(&[[u32; 32]], &[u8; 32], *mut u16);
        let check = |decode: Decode<'_>| {
            // Every scale that a file may have, with every code at every place.
            for first in (0..=0x80u8).step_by(32) {
                let scales: [u8; 32] = std::array::from_fn(|j| match first + j as u8 {
                    0x7f => 0x7e,
                    scale @ 0..=0x80 => scale,
                    _ => 0,
                });
                let file = |j: usize, k: usize| (j * 7 + k * 5 + k / 8) % 16;
                let codes: Vec<[u32; 32]> = (0..2)
                    .map(|octet| {
                        std::array::from_fn(|j| {
                            eight(std::array::from_fn(|byte| {
                                let k = 8 * octet + 2 * byte;
                                (file(j, k) | file(j, k + 1) << 4) as u8
                            }))
                        })
                    })
                    .collect();
                for codes in [&codes[..], &codes[..1]] {
                    let mut words = [0u16; 16 * 32];
                    decode(codes, &scales, words.as_mut_ptr());
                    for k in 0..8 * codes.len() {
                        for j in 0..32 {
                            let word = words[(k / 2 * 32 + j) * 2 + 1 - k % 2];
                            let expected = E2M1[file(j, k)] * E4M3[usize::from(scales[j])];
                            assert_eq!(number(word), expected, "{j} {k} {:#x}", scales[j]);
                        }
                    }
                }
            }
        };
        // SAFETY: there is room for a block.
        check(&|codes, scales, to| unsafe { nvfp4_words(codes, scales, to) });
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") {
            #[target_feature(enable = "avx512f,avx512bw")]
            fn run(codes: &[[u32; 32]], scales: &[u8; 32], to: *mut u16) {
                // SAFETY: there is room for a block.
                unsafe { avx512::nvfp4(codes, scales, to) }
            }
            // SAFETY: the instructions were found just now.
            check(&|codes, scales, to| unsafe { run(codes, scales, to) });
        }
    }
}
