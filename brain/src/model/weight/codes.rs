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

/// Where the first E4M3 code is that is not a number.
pub fn first_nan(codes: &[u8]) -> Option<usize> {
    /// Codes that are looked at together, without a branch.
    const STRETCH: usize = 256;
    let is_nan = |code: &u8| code & 0x7f == 0x7f;
    let stretches = codes.chunks(STRETCH);
    let hit = |stretch: &[u8]| stretch.iter().fold(false, |hit, c| hit | is_nan(c));
    let (i, stretch) = stretches.enumerate().find(|(_, s)| hit(s))?;
    Some(i * STRETCH + stretch.iter().position(is_nan)?)
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
    fn the_first_code_that_is_no_number_is_found() {
        let mut codes: Vec<u8> = (0..1000).map(|i| (i % 127) as u8).collect();
        assert_eq!((first_nan(&codes), first_nan(&[])), (None, None));
        for at in [999, 512, 300, 255, 0] {
            codes[at] = if at % 2 == 0 { 0x7f } else { 0xff };
            assert_eq!(first_nan(&codes), Some(at));
        }
    }

    #[test]
    fn nibbles_are_low_first() {
        assert_eq!((nibble(&[0x21, 0x43], 0), nibble(&[0x21, 0x43], 3)), (1, 4));
        assert!((0..8).all(|c| E2M1[c] == -E2M1[c + 8]));
    }
}
