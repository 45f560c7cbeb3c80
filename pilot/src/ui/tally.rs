//! The numbers a view shows, folded from what happens. It knows no clock: it is told the time.

use std::{collections::VecDeque, time::Duration};

use super::{Happening, Side, Stage, words};
use crate::run::event::{RunEvent, Totals};

/// How far back the shown speed looks.
const WINDOW: Duration = Duration::from_secs(5);

/// Numbers of a run as it goes.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Sums, from the journal and what came since.
    pub totals: Totals,
    /// What is being done, in words.
    pub doing: String,
    /// Tokens in the context now.
    pub context: u32,
    /// Tokens that it may have.
    pub context_limit: u32,
    /// Calls that the run will take; 0: not known.
    pub expected_calls: u64,
    /// Times that a brain was started again.
    pub brain_restarts: u64,
    /// Times that a pilot was started again.
    pub pilot_restarts: u64,
    began: Option<Duration>,
    /// Calls before the first event: they tell nothing about the speed.
    calls_before: Option<u64>,
    recent: VecDeque<(Duration, u32)>,
    /// Tokens of the answer that is being made: its rounds are not known yet.
    unfinished: u64,
}

impl Tally {
    /// Takes one happening into account, at `now` on any clock that does not go back.
    pub fn take(&mut self, now: Duration, happening: &Happening) {
        self.began.get_or_insert(now);
        match happening {
            Happening::Run(event) => self.take_run(now, event),
            Happening::Stage(stage) => self.take_stage(stage),
        }
    }

    fn take_stage(&mut self, stage: &Stage) {
        match stage {
            Stage::Chapter {
                title,
                expected_calls,
            } => {
                *self = Self {
                    doing: title.clone(),
                    expected_calls: *expected_calls,
                    ..Self::default()
                };
            }
            Stage::Restarted { side: Side::Brain } => self.brain_restarts += 1,
            Stage::Restarted { side: Side::Pilot } => self.pilot_restarts += 1,
            Stage::Killed { side, .. } => self.doing = format!("{} was killed", side.name()),
            Stage::Dropped { .. } => {}
        }
    }

    fn take_run(&mut self, now: Duration, event: &RunEvent) {
        match event {
            RunEvent::Opened {
                totals,
                context_limit,
                ..
            } => {
                self.totals = *totals;
                self.unfinished = 0;
                self.context_limit = *context_limit;
                self.calls_before.get_or_insert(totals.calls);
                self.doing = "asking the brain".into();
            }
            RunEvent::BrainReached { .. } => self.doing = "brain reached".into(),
            RunEvent::BrainAway { attempt, .. } => {
                self.doing = format!("waiting for the brain (attempt {attempt})");
            }
            RunEvent::Compacted { to_tokens, .. } => {
                self.context = *to_tokens;
                self.totals.prompts += 1;
            }
            RunEvent::AnswerStarted {
                prompt_tokens,
                continued_from,
                ..
            } => {
                self.context = prompt_tokens + continued_from;
                self.doing = "answering".into();
            }
            RunEvent::Tokens { ids, .. } => {
                let count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
                self.context = self.context.saturating_add(count);
                self.totals.generated += u64::from(count);
                self.unfinished += u64::from(count);
                self.recent.push_back((now, count));
                self.forget(now);
            }
            RunEvent::AnswerEnded { usage, .. } => {
                self.totals.answers += 1;
                self.totals.drafted += u64::from(usage.drafted);
                self.totals.accepted += u64::from(usage.accepted);
                self.totals.rounds += u64::from(usage.rounds);
                self.unfinished = 0;
            }
            RunEvent::ToolStarted {
                name, arguments, ..
            } => {
                self.doing = words::call(name, arguments, 60);
            }
            RunEvent::ToolEnded { error, origin, .. } => {
                self.totals.calls += 1;
                self.totals.errors += u64::from(*error);
                self.totals.recovered += u64::from(!words::settled(*origin).is_empty());
            }
            RunEvent::Nudged { .. } => self.doing = "asking for a tool call".into(),
            RunEvent::Paused { totals, .. } => {
                self.totals = *totals;
                self.doing = "paused".into();
            }
            RunEvent::Finished { totals, .. } => {
                self.totals = *totals;
                self.doing = "finished".into();
            }
        }
    }

    fn forget(&mut self, now: Duration) {
        while self
            .recent
            .front()
            .is_some_and(|(at, _)| *at + WINDOW < now)
        {
            self.recent.pop_front();
        }
    }

    /// Tokens a second over the last seconds.
    pub fn speed(&self, now: Duration) -> f64 {
        let since = now.saturating_sub(WINDOW);
        let fresh: u32 = self
            .recent
            .iter()
            .filter(|(at, _)| *at >= since)
            .map(|(_, n)| n)
            .sum();
        let span = now.saturating_sub(since.max(self.began.unwrap_or(since)));
        if span.is_zero() {
            0.0
        } else {
            f64::from(fresh) / span.as_secs_f64()
        }
    }

    /// Share of the drafts that were right.
    pub fn acceptance(&self) -> Option<f64> {
        (self.totals.drafted > 0).then(|| self.totals.accepted as f64 / self.totals.drafted as f64)
    }

    /// Tokens emitted a round, in the answers that are complete.
    pub fn per_round(&self) -> Option<f64> {
        let tokens = self.totals.generated.saturating_sub(self.unfinished);
        (self.totals.rounds > 0).then(|| tokens as f64 / self.totals.rounds as f64)
    }

    /// Time since the first happening.
    pub fn elapsed(&self, now: Duration) -> Duration {
        now.saturating_sub(self.began.unwrap_or(now))
    }

    /// Time to the end at the pace so far, when the number of calls is known.
    pub fn left(&self, now: Duration) -> Option<Duration> {
        let done = self.totals.calls.checked_sub(self.calls_before?)?;
        let todo = self.expected_calls.checked_sub(self.totals.calls)?;
        if done == 0 || self.expected_calls == 0 {
            return None;
        }
        Some(self.elapsed(now).mul_f64(todo as f64 / done as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::entry::{ResultOrigin, RunId, Usage};

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn tokens(count: u32) -> Happening {
        Happening::Run(RunEvent::Tokens {
            step: 0,
            index: 0,
            ids: (0..count).collect(),
            text: String::new(),
            drafted: 0,
            accepted: 0,
        })
    }

    fn answered(drafted: u32, accepted: u32, rounds: u32) -> Happening {
        let usage = Usage {
            drafted,
            accepted,
            rounds,
            ..Usage::default()
        };
        let content = String::new();
        Happening::Run(RunEvent::AnswerEnded {
            step: 0,
            usage,
            content,
            calls: 1,
            elapsed_ms: 1,
        })
    }

    fn ended(origin: ResultOrigin) -> Happening {
        Happening::Run(RunEvent::ToolEnded {
            call: 0,
            name: "read".into(),
            text: "x".into(),
            error: false,
            origin,
            elapsed_ms: 1,
        })
    }

    fn opened(calls: u64) -> Happening {
        Happening::Run(RunEvent::Opened {
            run: RunId::new("r").unwrap(),
            goal: "g".into(),
            resumed: calls > 0,
            totals: Totals {
                calls,
                ..Totals::default()
            },
            context_limit: 4096,
        })
    }

    #[test]
    fn speed_is_of_the_last_seconds_and_falls_to_nothing() {
        let mut tally = Tally::default();
        tally.take(at(0), &opened(0));
        assert_eq!(tally.speed(at(0)), 0.0);
        for second in 1..=10 {
            tally.take(at(second), &tokens(20));
        }
        let speed = tally.speed(at(10));
        assert!((20.0..=24.0).contains(&speed), "{speed}");
        assert_eq!(tally.speed(at(60)), 0.0);
        tally.take(at(60), &answered(80, 60, 50));
        // What is still being made has no rounds yet and must not count.
        tally.take(at(61), &tokens(7));
        assert_eq!(tally.acceptance(), Some(0.75));
        assert_eq!(tally.per_round(), Some(4.0));
    }

    #[test]
    fn time_left_comes_from_the_calls_made_under_its_eyes() {
        let mut tally = Tally {
            expected_calls: 100,
            ..Tally::default()
        };
        tally.take(at(0), &opened(50));
        assert_eq!(tally.left(at(1)), None);
        for second in 1..=10 {
            tally.take(at(second), &ended(ResultOrigin::Executed));
        }
        assert_eq!(tally.left(at(10)), Some(at(40)));
        // A restart does not count the calls twice.
        tally.take(at(10), &opened(60));
        assert_eq!(tally.totals.calls, 60);
        assert_eq!(tally.left(at(10)), Some(at(40)));
    }

    #[test]
    fn only_results_that_were_in_doubt_count_as_settled() {
        let mut tally = Tally::default();
        for origin in [
            ResultOrigin::Executed,
            ResultOrigin::Refused,
            ResultOrigin::Repaired,
        ] {
            tally.take(at(0), &ended(origin));
        }
        assert_eq!((tally.totals.calls, tally.totals.recovered), (3, 1));
    }
}
