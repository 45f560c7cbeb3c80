//! The seed of each answer, a function of the run's seed and the answer's place.

/// `H(run seed, step, attempt, choice)`; pilot asks for one choice, number 0. A dropped answer gets
/// a new `attempt`, so that asking again does not give the same tokens.
pub fn answer_seed(run_seed: u64, step: u64, attempt: u32) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("marathon pilot 2026 answer seed v1");
    hasher.update(&run_seed.to_le_bytes());
    hasher.update(&step.to_le_bytes());
    hasher.update(&attempt.to_le_bytes());
    hasher.update(&0_u32.to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_in_every_argument() {
        let seeds = [
            answer_seed(0, 0, 0),
            answer_seed(1, 0, 0),
            answer_seed(0, 1, 0),
            answer_seed(0, 0, 1),
            answer_seed(0, 1, 1),
        ];
        for (at, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..at].contains(seed));
        }
    }
}
