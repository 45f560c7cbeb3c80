//! Which processes are killed when: a function of the seed.

use super::random::Random;

/// A way to kill pilot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PilotKill {
    /// From outside, at a random moment.
    AtRandom,
    /// By itself, at a place in its code that has this name.
    At(&'static str),
}

/// One kill, due when so many tool calls are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due<K> {
    /// Tool calls.
    pub calls: u64,
    /// What is killed, and how.
    pub kill: K,
}

/// A way to kill the brain, in the middle of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrainKill {
    /// It alone.
    Alone,
    /// Pilot in the same moment.
    WithPilot,
}

/// Every kill of a marathon, each list in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Of the brain.
    pub brain: Vec<Due<BrainKill>>,
    /// Of pilot.
    pub pilot: Vec<Due<PilotKill>>,
}

/// In this order, so that few kills already hit what is hardest: between a tool's intent and its
/// result, before, in the middle of and after the effect.
const PILOT_KILLS: [PilotKill; 8] = [
    PilotKill::At("after-intent"),
    PilotKill::At("mid-tool"),
    PilotKill::AtRandom,
    PilotKill::At("after-tool"),
    PilotKill::At("mid-answer"),
    PilotKill::AtRandom,
    PilotKill::At("after-result"),
    PilotKill::At("after-answer"),
];
/// With so many kills or more, both programs are once killed in the same moment.
const BOTH_FROM: u32 = 8;

impl Schedule {
    /// `kills` processes killed over a run of about `calls` tool calls.
    pub fn new(random: &mut Random, kills: u32, calls: u64) -> Self {
        let both = kills >= BOTH_FROM;
        let brains = kills.div_ceil(2) as usize;
        let pilots = kills as usize - brains - usize::from(both);
        let at_once = random.below(brains.max(1));
        let brain = (0..brains).map(|n| match both && n == at_once {
            true => BrainKill::WithPilot,
            false => BrainKill::Alone,
        });
        let pilot = (0..pilots).map(|n| PILOT_KILLS[n % PILOT_KILLS.len()]);
        Self {
            brain: spread(random, brain.collect(), calls),
            pilot: spread(random, pilot.collect(), calls),
        }
    }
}

/// Evenly over the run, each somewhere in its share; nothing in the last tenth, so that a run that
/// is a little shorter than thought still meets every kill.
fn spread<K: Copy>(random: &mut Random, kills: Vec<K>, calls: u64) -> Vec<Due<K>> {
    let span = calls * 9 / 10;
    let share = span as f64 / kills.len().max(1) as f64;
    let place = |random: &mut Random, at: usize| {
        let jitter = 0.15 + 0.7 * (random.below(1000) as f64 / 1000.0);
        (share * (at as f64 + jitter)) as u64
    };
    kills
        .iter()
        .enumerate()
        .map(|(n, kill)| Due {
            calls: place(random, n),
            kill: *kill,
        })
        .collect()
}

impl PilotKill {
    /// How often a pilot that starts after `done` calls passes the place until `due` calls are
    /// done; at least once. `None` for a kill from outside.
    pub fn passes(self, done: u64, due: u64) -> Option<(&'static str, u64)> {
        let Self::At(place) = self else { return None };
        let ahead = due.saturating_sub(done).max(1);
        let passes = match place {
            // Reading and listing have no middle.
            "mid-tool" => ahead * 6 / 10,
            // Several rounds an answer.
            "mid-answer" => ahead * 8,
            _ => ahead,
        };
        Some((place, passes.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::failpoint::NAMES;

    #[test]
    fn every_number_of_kills_is_met_within_the_run() {
        for kills in 0..=60 {
            let plan = Schedule::new(&mut Random::new(u64::from(kills)), kills, 125);
            let twice = plan
                .brain
                .iter()
                .filter(|d| d.kill == BrainKill::WithPilot)
                .count();
            assert_eq!(plan.brain.len() + plan.pilot.len() + twice, kills as usize);
            assert_eq!(twice, usize::from(kills >= BOTH_FROM));
            let brain: Vec<u64> = plan.brain.iter().map(|d| d.calls).collect();
            let pilot: Vec<u64> = plan.pilot.iter().map(|d| d.calls).collect();
            assert!(brain.is_sorted() && pilot.is_sorted());
            assert!(brain.iter().chain(&pilot).all(|calls| *calls <= 112));
        }
    }

    #[test]
    fn twelve_kills_hit_the_window_of_a_tool_three_times() {
        let plan = Schedule::new(&mut Random::new(1), 12, 125);
        let inside = ["after-intent", "mid-tool", "after-tool"].map(PilotKill::At);
        let hits = plan
            .pilot
            .iter()
            .filter(|d| inside.contains(&d.kill))
            .count();
        assert!(hits >= 3, "{hits}");
    }

    #[test]
    fn places_exist_and_are_passed_at_least_once() {
        for kill in PILOT_KILLS {
            if let PilotKill::At(place) = kill {
                assert!(NAMES.contains(&place), "{place}");
                assert_eq!(
                    kill.passes(50, 10),
                    Some((place, kill.passes(10, 11).unwrap().1))
                );
                assert!(kill.passes(10, 20).unwrap().1 >= 6);
            }
        }
        assert_eq!(PilotKill::AtRandom.passes(0, 10), None);
    }
}
