//! What happened in a marathon: counts, moments and speeds, from the events alone.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::run::{
    entry::{ResultOrigin, Usage},
    event::RunEvent,
};

/// How a pilot was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// At a random moment, from outside.
    AtRandom,
    /// At a named place, by itself.
    At(&'static str),
    /// In the same moment as the brain.
    WithBrain,
}

/// Something for the timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A tool call is done.
    Call,
    /// The brain was killed.
    BrainKilled,
    /// The brain answers again.
    BrainBack,
    /// Pilot was killed.
    PilotKilled,
    /// Pilot has taken the run up again.
    PilotBack,
}

/// What is known of an answer that nothing disturbed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Its cost.
    pub usage: Usage,
    /// Milliseconds.
    pub elapsed_ms: u64,
}

/// The record of one marathon.
#[derive(Debug, Clone, Default)]
pub struct Record {
    began: Option<Instant>,
    /// How long it took.
    pub elapsed: Duration,
    /// When what happened.
    pub marks: Vec<(Duration, Mark)>,
    /// Undisturbed answers by number.
    pub timings: BTreeMap<u64, Timing>,
    /// Brains killed in the middle of an answer that then went on.
    pub brain_in_answer: u32,
    /// Brains killed whose answer turned out to be complete.
    pub brain_between: u32,
    /// Pilots killed at random moments.
    pub pilot_at_random: u32,
    /// Pilots killed at named places.
    pub pilot_at: BTreeMap<&'static str, u32>,
    /// Kills of both in the same moment.
    pub both_at_once: u32,
    /// Pilots that found a call whose intent was there and whose result was not.
    pub between_intent_and_result: u32,
    /// How such calls were settled.
    pub settled: BTreeMap<&'static str, u32>,
    /// Why the run stands still, if it does.
    pub paused: Option<String>,
    /// Context compactions.
    pub compactions: u32,
    /// Bytes of memory that the last brain needed at most.
    pub brain_memory: Option<u64>,
    /// Calls that failed and were dealt with.
    pub errors: u32,
    calls: u64,
    lives: u32,
    /// The answer now being made, and whether something disturbed it.
    answering: Option<(u64, bool)>,
    /// A brain was killed in this answer, and the answer has not gone on yet.
    cut_answer: Option<u64>,
    /// A brain was killed and no answer has begun since.
    brain_down: bool,
    /// The pilot has not begun a call since it was started.
    first_call_of_life: bool,
}

impl Record {
    /// The clock starts.
    pub fn begin(&mut self) {
        self.began = Some(Instant::now());
    }

    /// The clock stops.
    pub fn end(&mut self) {
        self.elapsed = self.now();
        self.settle_cut(false);
    }

    fn now(&self) -> Duration {
        self.began.map_or(Duration::ZERO, |began| began.elapsed())
    }

    fn mark(&mut self, mark: Mark) {
        let now = self.now();
        self.marks.push((now, mark));
    }

    /// Tool calls done.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Pilots started.
    pub fn pilot_lives(&self) -> u32 {
        self.lives
    }

    /// Kills that happened.
    pub fn kills(&self) -> u32 {
        self.brain_kills() + self.pilot_kills()
    }

    /// Of these, of brains.
    pub fn brain_kills(&self) -> u32 {
        self.brain_in_answer + self.brain_between + u32::from(self.cut_answer.is_some())
    }

    /// Of these, of pilots.
    pub fn pilot_kills(&self) -> u32 {
        self.pilot_at_random + self.pilot_at.values().sum::<u32>() + self.both_at_once
    }

    /// Takes an event of the run into account.
    pub fn take(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Opened {
                totals, resumed, ..
            } => {
                self.calls = totals.calls;
                if *resumed && self.lives > 1 {
                    self.mark(Mark::PilotBack);
                }
            }
            RunEvent::AnswerStarted {
                step,
                continued_from,
                ..
            } => {
                self.settle_cut(self.cut_answer == Some(*step));
                if std::mem::take(&mut self.brain_down) {
                    self.mark(Mark::BrainBack);
                }
                let again = self.answering.is_some_and(|(answer, _)| answer == *step);
                self.answering = Some((*step, again || *continued_from > 0));
            }
            RunEvent::AnswerEnded {
                step,
                usage,
                elapsed_ms,
                ..
            } => {
                if self.cut_answer == Some(*step) {
                    self.settle_cut(false);
                }
                if self.answering.take() == Some((*step, false)) {
                    let timing = Timing {
                        usage: *usage,
                        elapsed_ms: *elapsed_ms,
                    };
                    self.timings.insert(*step, timing);
                }
            }
            RunEvent::ToolStarted { in_doubt, .. } => {
                if *in_doubt && self.first_call_of_life {
                    self.between_intent_and_result += 1;
                }
                self.first_call_of_life = false;
            }
            RunEvent::ToolEnded { origin, error, .. } => {
                self.calls += 1;
                self.errors += u32::from(*error);
                if let Some(how) = settled(*origin) {
                    *self.settled.entry(how).or_default() += 1;
                }
                self.mark(Mark::Call);
            }
            RunEvent::Compacted { .. } => self.compactions += 1,
            RunEvent::Paused { reason, .. } => self.paused = Some(reason.clone()),
            _ => {}
        }
    }

    /// A brain was killed while an answer came.
    pub fn brain_killed(&mut self) {
        self.settle_cut(false);
        self.mark(Mark::BrainKilled);
        self.brain_down = true;
        match &mut self.answering {
            Some((step, disturbed)) => {
                *disturbed = true;
                self.cut_answer = Some(*step);
            }
            None => self.brain_between += 1,
        }
    }

    fn settle_cut(&mut self, in_answer: bool) {
        if self.cut_answer.take().is_some() {
            match in_answer {
                true => self.brain_in_answer += 1,
                false => self.brain_between += 1,
            }
        }
    }

    /// A pilot was started.
    pub fn pilot_started(&mut self) {
        self.lives += 1;
        self.first_call_of_life = true;
        if let Some((_, disturbed)) = &mut self.answering {
            *disturbed = true;
        }
    }

    /// A pilot was killed.
    pub fn pilot_killed(&mut self, how: How) {
        self.mark(Mark::PilotKilled);
        match how {
            How::At(place) => *self.pilot_at.entry(place).or_default() += 1,
            How::AtRandom => self.pilot_at_random += 1,
            How::WithBrain => self.both_at_once += 1,
        }
    }

    /// Tokens a second over the undisturbed answers.
    pub fn speed(&self) -> Option<f64> {
        let tokens: u64 = self
            .timings
            .values()
            .map(|t| u64::from(t.usage.generated))
            .sum();
        let ms: u64 = self.timings.values().map(|t| t.elapsed_ms).sum();
        (ms > 0).then(|| tokens as f64 * 1000.0 / ms as f64)
    }

    /// Tokens a round, over the undisturbed answers.
    pub fn per_round(&self) -> Option<f64> {
        let tokens: u64 = self
            .timings
            .values()
            .map(|t| u64::from(t.usage.generated))
            .sum();
        let rounds: u64 = self
            .timings
            .values()
            .map(|t| u64::from(t.usage.rounds))
            .sum();
        (rounds > 0).then(|| tokens as f64 / rounds as f64)
    }

    /// Median over the answers undisturbed in both of how much faster this one was.
    pub fn faster_than(&self, other: &Self) -> Option<f64> {
        let mut ratios: Vec<f64> = self
            .timings
            .iter()
            .filter_map(|(step, mine)| Some((mine, other.timings.get(step)?)))
            .filter(|(mine, theirs)| mine.elapsed_ms > 0 && theirs.elapsed_ms > 0)
            .map(|(mine, theirs)| theirs.elapsed_ms as f64 / mine.elapsed_ms as f64)
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied()
    }
}

fn settled(origin: ResultOrigin) -> Option<&'static str> {
    match origin {
        ResultOrigin::Executed | ResultOrigin::Refused => None,
        ResultOrigin::Reran => Some("run again"),
        ResultOrigin::VerifiedMissing => Some("found not done"),
        ResultOrigin::VerifiedDone => Some("found done"),
        ResultOrigin::Repaired => Some("found half done"),
        ResultOrigin::Unknown => Some("unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Class;

    fn started(step: u64, continued_from: u32) -> RunEvent {
        RunEvent::AnswerStarted {
            step,
            prompt_tokens: 10,
            continued_from,
        }
    }

    fn ended(step: u64, elapsed_ms: u64) -> RunEvent {
        let usage = Usage {
            generated: 30,
            rounds: 10,
            ..Usage::default()
        };
        RunEvent::AnswerEnded {
            step,
            usage,
            content: String::new(),
            calls: 1,
            elapsed_ms,
        }
    }

    fn tool(in_doubt: bool, origin: ResultOrigin) -> [RunEvent; 2] {
        let name = || "append".to_owned();
        [
            RunEvent::ToolStarted {
                call: 0,
                name: name(),
                arguments: "{}".into(),
                class: Class::Verifiable,
                in_doubt,
            },
            RunEvent::ToolEnded {
                call: 0,
                name: name(),
                text: "x".into(),
                error: false,
                origin,
                elapsed_ms: 1,
            },
        ]
    }

    fn take(record: &mut Record, events: &[RunEvent]) {
        events.iter().for_each(|event| record.take(event));
    }

    #[test]
    fn a_cut_answer_counts_when_it_goes_on_and_is_not_timed() {
        let mut record = Record::default();
        record.pilot_started();
        take(&mut record, &[started(0, 0), ended(0, 100), started(1, 0)]);
        record.brain_killed();
        take(&mut record, &[started(1, 12), ended(1, 900)]);
        assert_eq!((record.brain_in_answer, record.brain_between), (1, 0));
        take(&mut record, &[started(2, 0)]);
        record.brain_killed();
        // All of it was on its way already.
        take(&mut record, &[ended(2, 50), started(3, 0)]);
        assert_eq!((record.brain_in_answer, record.brain_between), (1, 1));
        assert_eq!(record.timings.keys().copied().collect::<Vec<_>>(), [0]);
        assert_eq!(record.per_round(), Some(3.0));
        assert_eq!(record.speed(), Some(300.0));
        let marks: Vec<Mark> = record.marks.iter().map(|(_, mark)| *mark).collect();
        let [down, back] = [Mark::BrainKilled, Mark::BrainBack];
        assert_eq!(marks, [down, back, down, back]);
    }

    #[test]
    fn a_pilot_that_finds_a_call_in_doubt_was_killed_between_intent_and_result() {
        let mut record = Record::default();
        record.pilot_started();
        take(&mut record, &tool(false, ResultOrigin::Executed));
        record.pilot_killed(How::At("after-intent"));
        record.pilot_started();
        take(&mut record, &tool(true, ResultOrigin::Repaired));
        take(&mut record, &tool(false, ResultOrigin::Executed));
        record.pilot_killed(How::AtRandom);
        record.pilot_started();
        take(&mut record, &tool(false, ResultOrigin::Executed));
        assert_eq!(record.between_intent_and_result, 1);
        assert_eq!(record.settled, BTreeMap::from([("found half done", 1)]));
        assert_eq!((record.kills(), record.calls()), (2, 4));
    }

    #[test]
    fn speeds_are_compared_answer_by_answer() {
        let timed = |ms: [u64; 3]| {
            let mut record = Record::default();
            for (step, ms) in ms.into_iter().enumerate() {
                let step = step as u64;
                take(&mut record, &[started(step, 0), ended(step, ms)]);
            }
            record
        };
        let (fast, slow) = (timed([10, 20, 100]), timed([20, 40, 100]));
        assert_eq!(fast.faster_than(&slow), Some(2.0));
        assert_eq!(fast.faster_than(&Record::default()), None);
    }
}
