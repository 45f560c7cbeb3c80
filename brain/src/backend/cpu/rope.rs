//! Rotary embeddings: sines and cosines by position, computed once in fp64.
//!
//! Positions are shared among threads: a row of the table depends on its position alone.
//!
//! The angle is the fp32 product of position and frequency, as the model was trained with; its
//! sine and cosine come from series of our own, so that every machine has the same table.

use crate::model::plan::Rope;

/// Cosines and sines of the turning pairs of a head, for every position.
pub(in crate::backend) struct RopeTable {
    half: usize,
    pairs: usize,
    /// `[positions, pairs]` of (cosine, sine).
    turns: Vec<(f32, f32)>,
}

impl RopeTable {
    /// Computed by up to `threads` threads.
    pub(in crate::backend) fn new(
        rope: &Rope,
        head_dim: usize,
        positions: usize,
        threads: usize,
    ) -> Self {
        let half = head_dim / 2;
        let pairs = Self::pairs_of(rope, head_dim);
        let frequencies: Vec<f32> = (0..pairs)
            .map(|j| {
                let power = 2.0 * j as f64 / head_dim as f64;
                (exp(-power * ln(rope.theta)) / rope.factor) as f32
            })
            .collect();
        let mut turns = vec![(0.0, 0.0); positions * pairs];
        let threads = threads.min(positions / WORTH_A_THREAD).max(1);
        let share = positions.div_ceil(threads).max(1);
        // A model whose pairs all stay has no table.
        let parts = turns.chunks_mut((share * pairs).max(1)).enumerate();
        let frequencies = &frequencies;
        if threads == 1 {
            parts.for_each(|(i, part)| fill(part, i * share, frequencies));
        } else {
            std::thread::scope(|scope| {
                for (i, part) in parts {
                    scope.spawn(move || fill(part, i * share, frequencies));
                }
            });
        }
        Self { half, pairs, turns }
    }

    /// What a table takes in memory.
    pub(super) fn bytes(rope: &Rope, head_dim: usize, positions: usize) -> u64 {
        let turns = positions as u64 * Self::pairs_of(rope, head_dim) as u64;
        turns.saturating_mul(size_of::<(f32, f32)>() as u64)
    }

    /// Pairs of a head that turn.
    pub(in crate::backend) fn pairs_of(rope: &Rope, head_dim: usize) -> usize {
        ((rope.partial * head_dim as f64) as usize / 2).min(head_dim / 2)
    }

    /// Cosines and sines, `[positions, pairs]`.
    pub(in crate::backend) fn turns(&self) -> &[(f32, f32)] {
        &self.turns
    }

    /// Turns one head in place.
    #[inline(always)]
    pub(super) fn turn(&self, position: usize, head: &mut [f32]) {
        let turns = &self.turns[position * self.pairs..(position + 1) * self.pairs];
        let (low, high) = head.split_at_mut(self.half);
        for ((a, b), (cos, sin)) in low.iter_mut().zip(high.iter_mut()).zip(turns) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Positions below which a thread is not worth starting.
const WORTH_A_THREAD: usize = 1024;

/// Cosines and sines of the positions from `first` on.
fn fill(turns: &mut [(f32, f32)], first: usize, frequencies: &[f32]) {
    let rows = turns.chunks_exact_mut(frequencies.len().max(1));
    for (position, row) in (first..).zip(rows) {
        for (turn, f) in row.iter_mut().zip(frequencies) {
            let (sin, cos) = sin_cos(f64::from(position as f32 * f));
            *turn = (cos as f32, sin as f32);
        }
    }
}

/// `ln x` for a positive number, within a few ulp of fp64.
fn ln(x: f64) -> f64 {
    let (mut m, mut e) = (x, 0.0);
    while m > std::f64::consts::SQRT_2 {
        m /= 2.0;
        e += 1.0;
    }
    while m < std::f64::consts::FRAC_1_SQRT_2 {
        m *= 2.0;
        e -= 1.0;
    }
    let s = (m - 1.0) / (m + 1.0);
    let mut sum = 0.0;
    for n in (0..16).rev() {
        sum = sum * (s * s) + 2.0 / f64::from(2 * n + 1);
    }
    e * std::f64::consts::LN_2 + sum * s
}

/// `e^x` for a moderate number, within a few ulp of fp64.
fn exp(x: f64) -> f64 {
    let n = (x / std::f64::consts::LN_2).round();
    let r = x - n * std::f64::consts::LN_2;
    let mut sum = 1.0;
    for k in (1..=20).rev() {
        sum = 1.0 + sum * r / f64::from(k);
    }
    let step: f64 = if n < 0.0 { 0.5 } else { 2.0 };
    (0..n.abs() as u32).fold(sum, |y, _| y * step)
}

/// Sine and cosine of an angle of up to some millions, to about 1e-10.
fn sin_cos(x: f64) -> (f64, f64) {
    use std::f64::consts::FRAC_PI_2;
    /// What `FRAC_PI_2` lacks of the true value.
    const REST: f64 = 6.123_233_995_736_766e-17;
    let quarter = (x / FRAC_PI_2).round();
    let r = (x - quarter * FRAC_PI_2) - quarter * REST;
    let z = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in (1..=10).rev() {
        let k = f64::from(k);
        sin = 1.0 - sin * z / ((2.0 * k) * (2.0 * k + 1.0));
        cos = 1.0 - cos * z / ((2.0 * k - 1.0) * (2.0 * k));
    }
    sin *= r;
    match (quarter as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_agree_with_the_library() {
        for i in 0..200_000 {
            let x = f64::from(i) * 1.310_7;
            let (sin, cos) = sin_cos(x);
            assert!(
                (sin - x.sin()).abs() < 1e-9 && (cos - x.cos()).abs() < 1e-9,
                "{x}"
            );
        }
        for i in 1..1000 {
            let x = f64::from(i) * 1234.5;
            assert!(
                (ln(x) - x.ln()).abs() < 1e-14 * x.ln().abs().max(1.0),
                "{x}"
            );
            let y = -f64::from(i) / 60.0;
            assert!((exp(y) / y.exp() - 1.0).abs() < 1e-14, "{y}");
        }
    }

    #[test]
    fn threads_change_no_bit_of_a_table() {
        let rope = Rope {
            theta: 10_000.0,
            partial: 0.5,
            factor: 1.0,
        };
        let positions = 4 * WORTH_A_THREAD + 13;
        let bits = |threads: usize| -> Vec<[u32; 2]> {
            let table = RopeTable::new(&rope, 8, positions, threads);
            let turns = table.turns().iter();
            turns.map(|(c, s)| [c.to_bits(), s.to_bits()]).collect()
        };
        let one = bits(1);
        assert_eq!(one.len(), positions * 2);
        assert_eq!(RopeTable::bytes(&rope, 8, positions), one.len() as u64 * 8);
        for threads in [2, 3, 4, 64] {
            assert!(bits(threads) == one, "{threads}");
        }
        let still = Rope {
            partial: 0.0,
            ..rope
        };
        assert!(RopeTable::new(&still, 8, positions, 3).turns().is_empty());
    }

    #[test]
    fn proportional_frequencies_divide_by_the_whole_head() {
        let rope = Rope {
            theta: 1_000_000.0,
            partial: 0.25,
            factor: 1.0,
        };
        let table = RopeTable::new(&rope, 512, 3, 1);
        assert_eq!(table.pairs, 64);
        let mut head = vec![0.0; 512];
        head[5] = 1.0;
        head[63] = 1.0;
        head[64] = 1.0;
        table.turn(2, &mut head);
        let angle = 2.0 * 1_000_000f64.powf(-10.0 / 512.0);
        assert!((f64::from(head[5]) - angle.cos()).abs() < 1e-6);
        assert!((f64::from(head[5 + 256]) - angle.sin()).abs() < 1e-6);
        assert!(
            head[63] < 1.0 && head[64] == 1.0,
            "pair 63 turns, pair 64 does not"
        );
    }
}
