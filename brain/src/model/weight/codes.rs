//! The small number formats that weights are stored in, decoded exactly.

use crate::model::checkpoint::{Dtype, Tensor};

/// E2M1 by code: sign, two bits of exponent, one of mantissa.
pub const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// E4M3 ("fn": no infinities) by code. `0x7f` and `0xff` are NaN.
pub const E4M3: [f32; 256] = e4m3_table();

/// The largest E4M3 number.
pub const E4M3_MAX: f32 = 448.0;

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, (code & 7) as u32);
        let bits = if exponent == 0 {
            // Subnormal: the mantissa counts steps of 2^-9, exact in fp32.
            (mantissa as f32 / 512.0).to_bits()
        } else {
            (exponent as u32 + 120) << 23 | mantissa << 20
        };
        let magnitude = if code & 0x7f == 0x7f {
            f32::NAN.to_bits()
        } else {
            bits
        };
        table[code] = f32::from_bits(magnitude | (code as u32 >> 7) << 31);
        code += 1;
    }
    table
}

/// The low four bits of a byte hold the first of two codes, the high ones the second.
#[inline(always)]
pub fn nibble(bytes: &[u8], k: usize) -> u8 {
    bytes[k / 2] >> (4 * (k % 2)) & 15
}

/// Which element of plain numbers or of E4M3 codes is the first that is not a finite number. Other
/// types have none such.
pub fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
    // Infinities and NaNs have an exponent of ones, whatever the sign and the fraction are.
    match dtype {
        Dtype::BF16 => first(bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
        Dtype::F16 => first(bytes, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
        Dtype::F32 => first(bytes, |b| {
            u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000
        }),
        Dtype::F8_E4M3 => first(bytes, |[code]| code & 0x7f == 0x7f),
        _ => None,
    }
}

/// The first element of `N` bytes that is wrong.
#[inline(always)]
fn first<const N: usize>(bytes: &[u8], wrong: impl Fn([u8; N]) -> bool) -> Option<usize> {
    /// Elements that are looked at together, without a branch.
    const STRETCH: usize = 256;
    let (elements, _) = bytes.as_chunks::<N>();
    let hit = |stretch: &[[u8; N]]| stretch.iter().fold(false, |hit, e| hit | wrong(*e));
    let mut stretches = elements.chunks(STRETCH).enumerate();
    let (i, stretch) = stretches.find(|(_, s)| hit(s))?;
    Some(i * STRETCH + stretch.iter().position(|e| wrong(*e))?)
}

/// Plain numbers as fp32, as many as `out` holds.
pub(crate) fn expand(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        Dtype::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        Dtype::F8_E4M3 => {
            for (o, b) in out.iter_mut().zip(bytes) {
                *o = E4M3[usize::from(*b)];
            }
        }
        _ => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
    }
}

/// Element `i` of a tensor of plain numbers or E4M3 codes, in the order of its bytes.
pub(in crate::model) fn element(tensor: &Tensor, i: usize) -> f32 {
    let size = tensor.dtype().bitsize() / 8;
    let mut out = [0.0];
    expand(
        tensor.dtype(),
        &tensor.bytes()[i * size..(i + 1) * size],
        &mut out,
    );
    out[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_is_the_format() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 1.0 / 512.0),
            (0x07, 7.0 / 512.0),
            (0x08, 1.0 / 64.0),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, E4M3_MAX),
            (0xfe, -448.0),
            (0xb8, -1.0),
        ] {
            assert_eq!(E4M3[code], value, "{code:#x}");
        }
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        assert_eq!(E4M3.iter().filter(|x| x.is_nan()).count(), 2);
        // Positive codes are in order, and four significant bits go into bf16 unchanged.
        assert!(E4M3[..0x7f].windows(2).all(|w| w[0] < w[1]));
        assert!(E4M3[..0x7f].iter().all(|x| x.to_bits() & 0xffff == 0));
    }

    #[test]
    fn the_first_element_that_is_no_finite_number_is_found() {
        // Of each type the largest number, both infinities and NaNs of the smallest and the
        // largest fraction; E4M3 has no infinities.
        let two = |codes: &[u16]| codes.iter().map(|c| c.to_le_bytes().to_vec()).collect();
        let four = |codes: &[u32]| codes.iter().map(|c| c.to_le_bytes().to_vec()).collect();
        let kinds: [(Dtype, Vec<Vec<u8>>); 4] = [
            (Dtype::F8_E4M3, vec![vec![0xfe], vec![0x7f], vec![0xff]]),
            (
                Dtype::BF16,
                two(&[0xff7f, 0x7f80, 0xff80, 0x7f81, 0x7fc0, 0xffff]),
            ),
            (
                Dtype::F16,
                two(&[0xfbff, 0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xffff]),
            ),
            (
                Dtype::F32,
                four(&[
                    0xff7f_ffff,
                    0x7f80_0000,
                    0xff80_0000,
                    0x7f80_0001,
                    0xffff_ffff,
                ]),
            ),
        ];
        for (dtype, codes) in kinds {
            let (largest, wrong) = codes.split_first().unwrap();
            let size = largest.len();
            let mut bytes = largest.repeat(1000);
            assert_eq!(first_not_finite(dtype, &bytes), None, "{dtype:?}");
            assert_eq!(first_not_finite(dtype, &[]), None, "{dtype:?}");
            let places = [999, 512, 511, 300, 255, 0];
            for (at, wrong) in places.into_iter().zip(wrong.iter().cycle()) {
                bytes[at * size..][..size].copy_from_slice(wrong);
                let found = first_not_finite(dtype, &bytes);
                assert_eq!(found, Some(at), "{dtype:?} {wrong:x?}");
            }
        }
        // Every byte of these may be anything.
        assert_eq!(first_not_finite(Dtype::U8, &[0xff; 16]), None);
        assert_eq!(first_not_finite(Dtype::I32, &[0xff; 16]), None);
    }

    #[test]
    fn nibbles_are_low_first() {
        assert_eq!((nibble(&[0x21, 0x43], 0), nibble(&[0x21, 0x43], 3)), (1, 4));
        assert!((0..8).all(|c| E2M1[c] == -E2M1[c + 8]));
    }
}
