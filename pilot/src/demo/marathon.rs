//! One marathon, with or without kills: starts both programs, hears them, kills and restarts them.

use std::{
    collections::VecDeque,
    io,
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

use super::{
    processes::{BrainProgram, Heard, PilotProgram, Process, last_words, was_killed},
    random::Random,
    record::{How, Record},
    schedule::{BrainKill, Due, PilotKill, Schedule},
};
use crate::{
    run::event::RunEvent,
    ui::{Happening, Screen, Side, Stage},
};

/// A marathon in which nothing happens for so long has failed.
const PATIENCE: Duration = Duration::from_secs(120);
/// Random kills of pilot come within so many milliseconds after they are due.
const RANDOM_SPAN_MS: usize = 150;

/// Why a marathon did not come to its end.
#[derive(Debug)]
pub enum Failure {
    /// The user stopped it.
    Stopped,
    /// Something is wrong; what, in words.
    Broken(String),
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Self::Broken(e.to_string())
    }
}

/// The programs of one marathon.
pub struct Programs {
    /// The brain.
    pub brain: BrainProgram,
    /// The pilot.
    pub pilot: PilotProgram,
}

/// A marathon in progress.
pub struct Marathon<'a> {
    programs: &'a Programs,
    screen: &'a Screen,
    told: &'a Sender<Heard>,
    heard: &'a Receiver<Heard>,
    brain_kills: VecDeque<Due<BrainKill>>,
    pilot_kills: VecDeque<Due<PilotKill>>,
    random: Random,
    brain: Process,
    pilot: Option<Process>,
    /// When the pilot dies at random.
    pilot_dies: Option<Instant>,
    record: Record,
    first_life: u32,
}

impl<'a> Marathon<'a> {
    /// Starts a brain, and a pilot once the brain is ready. Processes are numbered from
    /// `first_life` on, so that late words of an earlier marathon are nobody's.
    pub fn start(
        programs: &'a Programs,
        schedule: Schedule,
        random: Random,
        screen: &'a Screen,
        told: &'a Sender<Heard>,
        heard: &'a Receiver<Heard>,
        first_life: u32,
    ) -> Result<Self, Failure> {
        let brain = programs.brain.start(first_life, told)?;
        let mut marathon = Self {
            programs,
            screen,
            told,
            heard,
            brain_kills: schedule.brain.into(),
            pilot_kills: schedule.pilot.into(),
            random,
            brain,
            pilot: None,
            pilot_dies: None,
            record: Record::default(),
            first_life,
        };
        marathon.await_brain()?;
        marathon.record.begin();
        marathon.start_pilot()?;
        Ok(marathon)
    }

    /// Goes on to the end of the run and says what happened.
    pub fn finish(mut self) -> Result<Record, Failure> {
        loop {
            let wait = match self.pilot_dies {
                Some(at) => at.saturating_duration_since(Instant::now()).min(PATIENCE),
                None => PATIENCE,
            };
            match self.heard.recv_timeout(wait) {
                Ok(Heard::Stop) => return Err(Failure::Stopped),
                Ok(Heard::Pilot { life, event }) if self.is_pilot(life) => self.take(*event)?,
                Ok(Heard::PilotGone { life }) if self.is_pilot(life) => {
                    if self.pilot_ended()? {
                        self.record.end();
                        self.record.brain_memory = self.brain.peak_memory();
                        return Ok(self.record);
                    }
                }
                Ok(Heard::BrainGone { life }) if life == self.brain.life => {
                    return Err(self.brain_failed());
                }
                // From a process that was killed since.
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if self.pilot_dies.is_some() => {
                    self.pilot_dies = None;
                    self.pilot_kills.pop_front();
                    self.stop_pilot(How::AtRandom, "at a random moment")?;
                    self.restart_pilot()?;
                }
                Err(_) => {
                    let log = self.words(&self.programs.pilot.log);
                    return Err(Failure::Broken(format!(
                        "nothing happened for {} s; {log}",
                        PATIENCE.as_secs()
                    )));
                }
            }
        }
    }

    fn await_brain(&mut self) -> Result<(), Failure> {
        loop {
            match self.heard.recv_timeout(PATIENCE) {
                Ok(Heard::BrainReady { life }) if life == self.brain.life => return Ok(()),
                Ok(Heard::BrainGone { life }) if life == self.brain.life => {
                    return Err(self.brain_failed());
                }
                Ok(Heard::Stop) => return Err(Failure::Stopped),
                Ok(_) => {}
                Err(_) => return Err(Failure::Broken("the brain does not get ready".to_owned())),
            }
        }
    }

    fn is_pilot(&self, life: u32) -> bool {
        self.pilot.as_ref().is_some_and(|pilot| pilot.life == life)
    }

    fn take(&mut self, event: RunEvent) -> Result<(), Failure> {
        self.record.take(&event);
        let in_answer = matches!(&event, RunEvent::Tokens { .. });
        self.screen.tell(Happening::Run(event));
        let calls = self.record.calls();
        if in_answer
            && self
                .brain_kills
                .front()
                .is_some_and(|due| due.calls <= calls)
        {
            self.kill_brain()?;
        }
        let due = |due: &Due<PilotKill>| due.kill == PilotKill::AtRandom && due.calls <= calls;
        if self.pilot_dies.is_none() && self.pilot_kills.front().is_some_and(due) {
            let wait = self.random.below(RANDOM_SPAN_MS) as u64;
            self.pilot_dies = Some(Instant::now() + Duration::from_millis(wait));
        }
        Ok(())
    }

    fn kill_brain(&mut self) -> Result<(), Failure> {
        let Some(due) = self.brain_kills.pop_front() else {
            return Ok(());
        };
        self.brain.kill()?;
        let both = due.kill == BrainKill::WithPilot;
        self.record.brain_killed();
        let moment = "while an answer comes in".to_owned();
        self.stage(Stage::Killed {
            side: Side::Brain,
            moment,
        });
        if both {
            self.stop_pilot(How::WithBrain, "in the same moment")?;
        }
        self.brain = self.programs.brain.start(self.brain.life + 1, self.told)?;
        self.stage(Stage::Restarted { side: Side::Brain });
        if both {
            self.restart_pilot()?;
        }
        Ok(())
    }

    fn stop_pilot(&mut self, how: How, moment: &str) -> Result<(), Failure> {
        if let Some(mut pilot) = self.pilot.take() {
            pilot.kill()?;
        }
        self.record.pilot_killed(how);
        self.stage(Stage::Killed {
            side: Side::Pilot,
            moment: moment.to_owned(),
        });
        Ok(())
    }

    fn restart_pilot(&mut self) -> Result<(), Failure> {
        self.start_pilot()?;
        self.stage(Stage::Restarted { side: Side::Pilot });
        Ok(())
    }

    fn start_pilot(&mut self) -> Result<(), Failure> {
        let lives = self.record.pilot_lives();
        let next = self.pilot_kills.front();
        let fail_at = next.and_then(|due| due.kill.passes(self.record.calls(), due.calls));
        self.pilot = Some(self.programs.pilot.start(
            self.first_life + lives,
            lives == 0,
            fail_at,
            self.told,
        )?);
        self.pilot_dies = None;
        self.record.pilot_started();
        Ok(())
    }

    /// The pilot is gone by itself: the run is over (true), it met its fail point, or it failed.
    fn pilot_ended(&mut self) -> Result<bool, Failure> {
        let Some(mut pilot) = self.pilot.take() else {
            return Ok(false);
        };
        let status = pilot.wait()?;
        if status.success() {
            return Ok(true);
        }
        let planned = self.pilot_kills.front().map(|due| due.kill);
        let Some(PilotKill::At(place)) = planned.filter(|_| was_killed(status)) else {
            let why = match &self.record.paused {
                Some(reason) => format!("the run paused: {reason}"),
                None => format!(
                    "pilot ended with {status}; {}",
                    self.words(&self.programs.pilot.log)
                ),
            };
            return Err(Failure::Broken(why));
        };
        self.pilot_kills.pop_front();
        self.record.pilot_killed(How::At(place));
        self.stage(Stage::Killed {
            side: Side::Pilot,
            moment: format!("at {place}"),
        });
        self.restart_pilot()?;
        Ok(false)
    }

    fn brain_failed(&mut self) -> Failure {
        let how = self
            .brain
            .wait()
            .map_or_else(|e| e.to_string(), |status| status.to_string());
        let words = self.words(&self.programs.brain.log);
        Failure::Broken(format!("the brain ended by itself ({how}); {words}"))
    }

    fn words(&self, log: &Path) -> String {
        format!("its last words: {}", last_words(log))
    }

    fn stage(&self, stage: Stage) {
        self.screen.tell(Happening::Stage(stage));
    }
}
