//! Philox 4x32-10: random words as a function of (seed, position, token), with no state to keep.

use super::math::gumbel;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds of Philox on a 128-bit counter under a 64-bit key.
#[inline]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(a);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(c);
        (a, b, c, d) = (
            (second >> 32) as u32 ^ b ^ k0,
            second as u32,
            (first >> 32) as u32 ^ d ^ k1,
            first as u32,
        );
        k0 = k0.wrapping_add(KEY_STEPS[0]);
        k1 = k1.wrapping_add(KEY_STEPS[1]);
    }
    [a, b, c, d]
}

/// The noise of one position of one request.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    key: [u32; 2],
    position: [u32; 2],
}

impl Noise {
    /// Noise of the token at absolute position `position` under `seed`.
    pub fn new(seed: u64, position: u64) -> Self {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        Self {
            key: halves(seed),
            position: halves(position),
        }
    }

    /// The words of tokens `4 * group .. 4 * group + 4`.
    #[inline]
    pub fn words(&self, group: u32) -> [u32; 4] {
        philox([group, self.position[0], self.position[1], 0], self.key)
    }

    /// Gumbel noise of a token.
    #[inline]
    pub fn gumbel(&self, token: u32) -> f32 {
        gumbel(self.words(token / 4)[(token % 4) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let base = Noise::new(7, 1000).gumbel(42);
        for other in [
            Noise::new(8, 1000).gumbel(42),
            Noise::new(7 | 1 << 40, 1000).gumbel(42),
            Noise::new(7, 1001).gumbel(42),
            Noise::new(7, 1000 | 1 << 33).gumbel(42),
            Noise::new(7, 1000).gumbel(43),
            Noise::new(7, 1000).gumbel(46),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn the_noise_has_the_moments_of_a_gumbel() {
        let mut sum = 0.0;
        let mut squares = 0.0;
        let n = 400_000;
        for token in 0..n {
            let g = f64::from(Noise::new(1, u64::from(token / 1000)).gumbel(token % 1000));
            sum += g;
            squares += g * g;
        }
        let mean = sum / f64::from(n);
        let variance = squares / f64::from(n) - mean * mean;
        assert!((mean - 0.577_215_66).abs() < 0.01, "{mean}");
        assert!(
            (variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.02,
            "{variance}"
        );
    }
}
