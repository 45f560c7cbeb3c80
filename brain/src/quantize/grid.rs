//! Recognises weights that were trained to lie on the grid of Q4_0: blocks of 32, each of them a
//! step times a whole number from -8 to 8.
//!
//! Such weights lose nothing in Q4_0 and something in any other form of four bits: E2M1 has no 5,
//! no 7 and no 8 in those steps. The report says so where it is the case.

/// Weights of a block.
pub const BLOCK: usize = 32;
/// How far a weight may be from its grid, in steps: rounding to bf16 moves an 8 by 0.02.
const TOLERANCE: f32 = 0.05;

/// Whether all weights of a block are whole multiples, up to 8, of one step.
pub fn on_grid(block: &[f32]) -> bool {
    let largest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    if largest == 0.0 {
        return true;
    }
    (1..=8).rev().any(|steps| {
        let inverse = steps as f32 / largest;
        block
            .iter()
            .all(|x| (x * inverse - (x * inverse).round()).abs() <= TOLERANCE)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(x: f32) -> f32 {
        half::bf16::from_f32(x).to_f32()
    }

    #[test]
    fn a_trained_grid_is_recognised_and_noise_is_not() {
        for step in [0.0031, 0.7, 1e-20] {
            for most in [1, 3, 7, 8] {
                let grid: Vec<f32> = (0..BLOCK as i32)
                    .map(|i| bf16((i * 7 % (2 * most + 1) - most) as f32 * step))
                    .collect();
                assert!(on_grid(&grid), "{step} {most}");
            }
        }
        assert!(on_grid(&[0.0; BLOCK]));
        let noise: Vec<f32> = (0..BLOCK).map(|i| (i as f32 * 12.9898).sin()).collect();
        assert!(!on_grid(&noise));
    }
}
