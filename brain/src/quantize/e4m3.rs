//! Rounds to E4M3: four bits of exponent, three of mantissa, nothing beyond 448.

/// Code of the largest number, 448.
pub const MAX_CODE: u32 = 0x7e;
/// The largest number.
pub const MAX: f32 = 448.0;

/// The nearest code of a number that is not negative, ties to even; 448 from there on.
///
/// Written without branches, so that loops over it become vector code.
#[inline(always)]
pub fn encode(x: f32) -> u32 {
    let x = x.min(MAX);
    let bits = x.to_bits();
    let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Below 2^-6 codes count steps of 2^-9; adding 2^23 rounds to a whole number of them.
    const ROUND: f32 = (1u32 << 23) as f32;
    let steps = (x * 512.0 + ROUND).to_bits() & 0xff;
    if x < 1.0 / 64.0 { steps } else { normal }
}

/// The nearest code of any number, likewise; never a NaN's.
#[inline(always)]
pub fn encode_signed(x: f32) -> u8 {
    (encode(x.abs()) | (x.to_bits() >> 24 & 0x80)) as u8
}

/// The number of a code from 0 to 126.
#[inline(always)]
pub fn decode(code: u32) -> f32 {
    let normal = f32::from_bits((code + (120 << 3)) << 20);
    let subnormal = code as f32 / 512.0;
    if code < 8 { subnormal } else { normal }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weight::codes::E4M3;

    #[test]
    fn codes_are_the_formats() {
        for code in 0..=MAX_CODE {
            assert_eq!(decode(code), E4M3[code as usize], "{code:#x}");
            assert_eq!(encode(decode(code)), code, "{code:#x}");
        }
        assert_eq!(encode(f32::MAX), MAX_CODE);
        assert_eq!(encode(1e-30), 0);
        for (x, code) in [
            (-1.0, 0xb8),
            (-0.0, 0x80),
            (-500.0, 0xfe),
            (f32::NEG_INFINITY, 0xfe),
            (f32::INFINITY, 0x7e),
        ] {
            assert_eq!(encode_signed(x), code, "{x}");
        }
        assert!(encode_signed(f32::NAN) & 0x7f != 0x7f);
    }

    #[test]
    fn the_nearest_code_is_taken_and_ties_are_even() {
        for code in 0..MAX_CODE {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(encode(middle), code + code % 2, "{middle}");
            assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
    }
}
