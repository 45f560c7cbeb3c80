//! The engine thread's pulse: whether it gets on.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::error::Health;

const IDLE: u64 = u64::MAX;

/// Written by the engine thread, read by health checks. Neither waits for the other.
#[derive(Debug)]
pub(super) struct Pulse {
    /// When the step at hand began, in microseconds of the engine's clock.
    busy_since: AtomicU64,
    stopped: Mutex<Option<String>>,
}

impl Pulse {
    pub(super) fn new() -> Self {
        Self {
            busy_since: AtomicU64::new(IDLE),
            stopped: Mutex::new(None),
        }
    }

    /// A step begins.
    pub(super) fn begin(&self, now: Duration) {
        self.busy_since
            .store(now.as_micros() as u64, Ordering::Relaxed);
    }

    /// The step is over.
    pub(super) fn end(&self) {
        self.busy_since.store(IDLE, Ordering::Relaxed);
    }

    /// The thread ends. The first reason stays.
    pub(super) fn stop(&self, reason: &str) {
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        stopped.get_or_insert_with(|| reason.to_owned());
    }

    /// How the thread is; a step longer than `patience` is suspicious.
    pub(super) fn health(&self, now: Duration, patience: Duration) -> Health {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &*stopped {
            return Health::Stopped(reason.clone());
        }
        match self.busy_since.load(Ordering::Relaxed) {
            IDLE => Health::Well,
            since => {
                let busy = now.saturating_sub(Duration::from_micros(since));
                if busy > patience {
                    Health::Stuck(busy)
                } else {
                    Health::Well
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_step_is_stuck_an_idle_engine_is_well_and_a_stopped_one_says_why() {
        let pulse = Pulse::new();
        let (second, patience) = (Duration::from_secs(1), Duration::from_secs(10));
        assert_eq!(pulse.health(second * 100, patience), Health::Well);
        pulse.begin(second * 100);
        assert_eq!(pulse.health(second * 110, patience), Health::Well);
        assert_eq!(
            pulse.health(second * 111, patience),
            Health::Stuck(second * 11)
        );
        pulse.end();
        assert_eq!(pulse.health(second * 111, patience), Health::Well);
        pulse.stop("first");
        pulse.stop("second");
        assert_eq!(
            pulse.health(second, patience),
            Health::Stopped("first".into())
        );
    }
}
