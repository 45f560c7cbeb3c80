//! How long to wait before asking again, as a function of the attempt alone.

/// Longest wait between two attempts, in milliseconds.
pub const LONGEST_WAIT_MS: u64 = 5_000;

/// Times in a row that a brain may fail *inside* one answer without a new token before the run is
/// paused. A brain that is away is waited for without limit.
pub const FAILURES_WITHOUT_PROGRESS: u32 = 8;

/// Milliseconds before attempt `attempt` (from 1): 50, 100, 200 … up to [`LONGEST_WAIT_MS`], less up
/// to a quarter that depends on `salt`, so that many runs do not knock at the same moment.
pub fn wait_ms(attempt: u32, salt: u64) -> u64 {
    let doublings = attempt.saturating_sub(1).min(16);
    let full = (50_u64 << doublings).min(LONGEST_WAIT_MS);
    let mut mixed = salt ^ u64::from(attempt).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    mixed ^= mixed >> 32;
    full - mixed % (full / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_limit_and_never_pass_it() {
        for salt in [0, 1, u64::MAX] {
            for attempt in 0..200 {
                let wait = wait_ms(attempt, salt);
                let full = (50_u64 << attempt.saturating_sub(1).min(7)).min(LONGEST_WAIT_MS);
                assert!(
                    wait <= full && wait * 4 >= full * 3,
                    "{attempt}: {wait} of {full}"
                );
            }
        }
        assert_ne!(wait_ms(5, 1), wait_ms(5, 2));
    }
}
