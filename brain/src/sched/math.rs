//! Exponential, logarithm and friends whose bits are the same everywhere.
//!
//! Plain multiplications and additions only (the compiler never fuses them), no branches: a loop
//! over them vectorises, and every machine and every vector width gives the same bits. Subnormal
//! results of [`exp`] are zero.

/// `ln 2`, cut after 9 bits so that a product with a small whole number is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
/// The rest of `ln 2`.
const LN2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
/// Adding it rounds a small number to a whole one.
const ROUND: f32 = 12_582_912.0;

/// `e^x`, within 2 ulp; 0 below -87.33, infinite above 88.72.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-87.336_54, 88.722_83);
    // After the addition the whole part lies in the low bits.
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let small = (p * r) * r + r;
    // Two factors, because neither 2^128 nor 2^-127 is a normal float.
    let first = whole >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let y = ((small + 1.0) * power(first)) * power(whole - first);
    let y = if x < -87.336_54 { 0.0 } else { y };
    let y = if x > 88.722_83 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// `2 atanh(f / (2 + f))`, which is `ln(1 + f)`, for `1 + f` in `[0.7, 1.42]`.
#[inline(always)]
fn ln_near_one(f: f32) -> f32 {
    let s = f / (2.0 + f);
    let z = s * s;
    let mut p = 2.0 / 11.0;
    p = p * z + 2.0 / 9.0;
    p = p * z + 2.0 / 7.0;
    p = p * z + 2.0 / 5.0;
    p = p * z + 2.0 / 3.0;
    (p * z) * s + 2.0 * s
}

/// `ln x` of a normal positive number, within 2 ulp.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    // Mantissa in [sqrt(1/2), sqrt(2)), so that the result near 1 does not cancel.
    let bits = x.to_bits().wrapping_sub(0x3f35_04f3);
    let e = (bits as i32) >> 23;
    let m = f32::from_bits((bits & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    let e = e as f32;
    e * LN2_HIGH + (e * LN2_LOW + ln_near_one(m - 1.0))
}

/// `tanh x`, within 1.2e-7.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let t = exp(-2.0 * x.abs());
    ((1.0 - t) / (1.0 + t)).copysign(x)
}

/// The tanh form of GELU.
#[inline(always)]
pub fn gelu(z: f32) -> f32 {
    /// `sqrt(2 / pi)`
    const ROOT: f32 = 0.797_884_6;
    let inner = ROOT * (z + 0.044_715 * ((z * z) * z));
    (0.5 * z) * (1.0 + tanh(inner))
}

/// Standard Gumbel noise from 32 random bits: `-ln(-ln(1 - u))`, `u = (x + 1/2) / 2^32`.
///
/// Finite for every `x`: near `u = 1` the logarithm is taken of `1 - u` formed from the
/// complement's bits, near `u = 0` of `1 - u` by its distance from 1.
#[inline(always)]
pub fn gumbel(x: u32) -> f32 {
    const SCALE: f32 = 1.0 / 4_294_967_296.0;
    let u = (x as f32 + 0.5) * SCALE;
    let rest = (!x as f32 + 0.5) * SCALE;
    let e = if u < 0.28 {
        -ln_near_one(-u)
    } else {
        -ln(rest)
    };
    -ln(e)
}

/// `x` rounded to bf16, ties to even; a NaN stays one, and what would be subnormal is zero, as
/// instructions on bf16 take it.
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let bits = if x.is_nan() {
        bits | 0x0040_0000
    } else {
        rounded
    };
    let zero = bits & 0x7f80_0000 == 0;
    f32::from_bits(bits & if zero { 0x8000_0000 } else { 0xffff_0000 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(a: f32, b: f64) -> f64 {
        let ulp =
            f64::from(f32::from_bits((b as f32).abs().to_bits() + 1)) - (b as f32).abs() as f64;
        (f64::from(a) - b).abs() / ulp
    }

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst: f64 = 0.0;
        for i in 0..200_000 {
            let x = -87.0 + 175.0 * (i as f32) / 200_000.0;
            worst = worst.max(ulps(exp(x), f64::from(x).exp()));
        }
        assert!(worst < 2.0, "{worst} ulp");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-90.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn ln_is_close_everywhere() {
        let mut worst: f64 = 0.0;
        for i in 0..400_000u32 {
            let x = f32::from_bits(0x0080_0000 + i * 5_300);
            worst = worst.max(ulps(ln(x), f64::from(x).ln()));
        }
        for i in 1..100_000 {
            let x = 0.5 + i as f32 / 100_000.0;
            if x != 1.0 {
                worst = worst.max(ulps(ln(x), f64::from(x).ln()));
            }
        }
        assert!(worst < 2.5, "{worst} ulp");
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn tanh_and_gelu_are_close() {
        for i in -40_000..=40_000 {
            let x = i as f32 / 2_000.0;
            assert!(
                (f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 1.2e-7,
                "{x}"
            );
            let wide = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
            let exact = 0.5 * wide * (1.0 + inner.tanh());
            assert!(
                (f64::from(gelu(x)) - exact).abs() < 1e-6 * wide.abs().max(1.0),
                "{x}"
            );
        }
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn gumbel_is_finite_monotone_and_close() {
        let exact = |x: u32| {
            let u = (f64::from(x) + 0.5) / 4_294_967_296.0;
            -(-(-u).ln_1p()).ln()
        };
        let edges = [0, 1, 2, 1 << 31, u32::MAX - 200, u32::MAX - 1, u32::MAX];
        let spread = (0..100_000u32).map(|i| i * 42_949);
        for x in edges
            .into_iter()
            .chain(spread)
            .chain(u32::MAX - 300..=u32::MAX)
        {
            let g = gumbel(x);
            assert!(g.is_finite(), "{x}");
            assert!(
                (f64::from(g) - exact(x)).abs() < 3e-6,
                "{x}: {g} {}",
                exact(x)
            );
        }
        // More of the word is more of u, hence a larger E and a smaller G.
        assert!(gumbel(0) > 22.8 && gumbel(u32::MAX) > -3.2 && gumbel(u32::MAX) < -3.1);
    }

    #[test]
    fn rounding_to_bf16_is_the_reference_rounding() {
        for i in 0..2_000_000u32 {
            // Every exponent, and those of subnormals more often.
            let mut bits = i.wrapping_mul(2_654_435_761);
            bits &= if i % 8 == 0 { 0x80ff_ffff } else { u32::MAX };
            let x = f32::from_bits(bits);
            let expected = half::bf16::from_f32(x).to_f32();
            let expected = if expected.is_subnormal() {
                0.0f32.copysign(x)
            } else {
                expected
            };
            assert!(
                round_bf16(x).to_bits() == expected.to_bits()
                    || (x.is_nan() && round_bf16(x).is_nan()),
                "{x}"
            );
        }
    }
}
