//! Random inputs, number formats, and how near a result must be.

use std::sync::LazyLock;

use half::bf16;

/// SplitMix64.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// In (0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.word() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    pub(crate) fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// bf16 bits of normal numbers.
    pub(crate) fn normals(&mut self, len: usize, deviation: f64) -> Vec<u16> {
        (0..len)
            .map(|_| round(self.normal() * deviation).1)
            .collect()
    }

    /// fp32 norm weights around one.
    pub(crate) fn norm_weights(&mut self, len: usize) -> Vec<f32> {
        (0..len)
            .map(|_| (1.0 + 0.3 * self.normal()) as f32)
            .collect()
    }
}

/// The nearest bf16, as a number and as bits.
pub(crate) fn round(x: f64) -> (f64, u16) {
    let r = bf16::from_f64(x);
    (r.to_f64(), r.to_bits())
}

pub(crate) fn wide(bits: u16) -> f64 {
    bf16::from_bits(bits).to_f64()
}

/// Distance of bf16 numbers near `x`.
pub(crate) fn ulp(x: f64) -> f64 {
    let exponent = if x == 0.0 {
        -126
    } else {
        x.abs().log2().floor() as i32
    };
    2f64.powi(exponent.max(-126) - 7)
}

/// Counts results further from their reference than allowed.
#[derive(Default)]
pub(crate) struct Score {
    pub(crate) count: usize,
    pub(crate) bad: usize,
    pub(crate) worst: f64,
}

impl Score {
    pub(crate) fn add(&mut self, got: f64, reference: f64, tolerance: f64) {
        let off = (got - reference).abs() / tolerance;
        self.count += 1;
        self.bad += usize::from(off.is_nan() || off > 1.0);
        self.worst = if off.is_nan() {
            f64::INFINITY
        } else {
            self.worst.max(off)
        };
    }

    /// Counts places where two results differ in any bit.
    pub(crate) fn same<T: PartialEq>(&mut self, a: &[T], b: &[T]) {
        self.count += a.len().max(b.len());
        let differing = a.iter().zip(b).filter(|(x, y)| x != y).count();
        self.bad += differing + a.len().abs_diff(b.len());
    }
}

pub(crate) fn gelu(z: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (z + 0.044715 * z * z * z);
    0.5 * z * (1.0 + inner.tanh())
}

/// Value of an E4M3 code.
pub(crate) fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        e => (1.0 + mantissa / 8.0) * 2f64.powi(e - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The E4M3 code nearest to a number, ties to even, 448 from there on.
pub(crate) fn e4m3_code(x: f64) -> u8 {
    static NUMBERS: LazyLock<[f64; 127]> = LazyLock::new(|| std::array::from_fn(|i| e4m3(i as u8)));
    let size = x.abs().min(448.0);
    // Codes are ordered as their numbers are.
    let above = NUMBERS.partition_point(|n| *n < size).clamp(1, 126);
    let (up, down) = (NUMBERS[above] - size, size - NUMBERS[above - 1]);
    let upper = up < down || up == down && above % 2 == 0;
    let code = if upper { above } else { above - 1 } as u8;
    code | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Codes of two elements of a head in a half word, as `cuda/include/codes.cuh` has them.
pub(crate) fn pack_codes(first: u8, second: u8) -> u16 {
    let (a, b) = (u16::from(first), u16::from(second));
    (a & 0x80) << 8 | (a & 0x7f) << 4 | (b & 0x80) << 4 | (b & 0x70) << 8 | (b & 0x0f)
}

/// The two codes of a half word.
pub(crate) fn unpack_codes(pair: u16) -> [u8; 2] {
    let first = (pair >> 8 & 0x80) | (pair >> 4 & 0x7f);
    let second = (pair >> 4 & 0x80) | (pair >> 8 & 0x70) | (pair & 0x0f);
    [first as u8, second as u8]
}

/// Value of an E2M1 code.
pub(crate) fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}
