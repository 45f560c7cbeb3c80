//! Where a run stops and asks for more.

use super::{
    entry::{Limits, PauseReason},
    event::Totals,
};

/// The first limit that is used up, if any.
pub fn exhausted(limits: &Limits, totals: &Totals) -> Option<PauseReason> {
    let reached = |used: u64, limit: u64| limit > 0 && used >= limit;
    if reached(totals.answers + totals.calls, limits.steps) {
        Some(PauseReason::StepBudget)
    } else if reached(totals.generated, limits.tokens) {
        Some(PauseReason::TokenBudget)
    } else if reached(totals.active_ms, limits.active_ms) {
        Some(PauseReason::TimeBudget)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_reached_at_its_number_and_zero_is_none() {
        let none = Limits {
            steps: 0,
            tokens: 0,
            active_ms: 0,
        };
        let used = Totals {
            answers: 3,
            calls: 2,
            generated: 70,
            active_ms: 900,
            ..Totals::default()
        };
        assert_eq!(exhausted(&none, &used), None);
        assert_eq!(
            exhausted(
                &Limits {
                    steps: 6,
                    ..none.clone()
                },
                &used
            ),
            None
        );
        let steps = Limits {
            steps: 5,
            ..none.clone()
        };
        assert_eq!(exhausted(&steps, &used), Some(PauseReason::StepBudget));
        let tokens = Limits {
            tokens: 70,
            ..none.clone()
        };
        assert_eq!(exhausted(&tokens, &used), Some(PauseReason::TokenBudget));
        let time = Limits {
            active_ms: 900,
            ..none
        };
        assert_eq!(exhausted(&time, &used), Some(PauseReason::TimeBudget));
    }
}
