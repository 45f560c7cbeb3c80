//! What people and scripts see: one stream of happenings, and views of it.

pub mod history;
pub mod json;
pub mod live;
pub mod plain;
pub mod tally;
pub mod words;

use std::{
    io::{self, IsTerminal},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, SyncSender, TrySendError},
    },
    thread::{self, JoinHandle},
};

use serde::Serialize;

use crate::run::event::{Observer, RunEvent};

/// Happenings that wait for a slow reader before the next one is dropped and counted.
const BACKLOG: usize = 1 << 16;

/// One of the two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The model.
    Brain,
    /// The agent.
    Pilot,
}

impl Side {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Brain => "brain",
            Self::Pilot => "pilot",
        }
    }
}

/// Everything a view is told.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Happening {
    /// From a run.
    Run(RunEvent),
    /// From around it.
    Stage(Stage),
}

/// What happens to the processes, seen from outside of them.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Stage {
    /// A new chapter.
    Chapter {
        /// What it is about.
        title: String,
        /// Tool calls that it will take, as far as that is known.
        expected_calls: u64,
    },
    /// A process was killed.
    Killed {
        /// Which.
        side: Side,
        /// When, in words.
        moment: String,
    },
    /// A process was started again.
    Restarted {
        /// Which.
        side: Side,
    },
    /// The reader of the events was too slow for this many of them.
    Dropped {
        /// Events lost to the view; the run lost nothing.
        count: u64,
    },
}

/// Shows happenings.
pub trait View: Send {
    /// One more. An error means that nobody can see the view any more.
    fn show(&mut self, happening: &Happening) -> io::Result<()>;

    /// No more will come.
    fn close(&mut self) {}
}

/// Which view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Live on a terminal, else plain.
    Auto,
    /// A few lines that are redrawn.
    Live,
    /// One line for each thing that happened.
    Plain,
    /// One JSON object a line.
    Json,
    /// Nothing but the end.
    Quiet,
}

impl Mode {
    /// The view itself.
    pub fn view(self) -> Box<dyn View> {
        let terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
        match self {
            Self::Live => Box::new(live::Live::new()),
            Self::Auto if terminal => Box::new(live::Live::new()),
            Self::Auto | Self::Plain => Box::new(plain::Plain::new(io::stdout())),
            Self::Json => Box::new(json::Json::new(io::stdout())),
            Self::Quiet => Box::new(Quiet),
        }
    }
}

struct Quiet;

impl View for Quiet {
    fn show(&mut self, _: &Happening) -> io::Result<()> {
        Ok(())
    }
}

/// A view on a thread of its own: whoever tells it something never waits for a terminal or a pipe.
pub struct Screen {
    told: Mutex<Option<SyncSender<Happening>>>,
    dropped: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Screen {
    /// Starts the view.
    pub fn new(mut view: Box<dyn View>) -> Self {
        let (told, happenings) = mpsc::sync_channel::<Happening>(BACKLOG);
        let thread = thread::spawn(move || {
            for happening in happenings {
                // A reader that went away (`| head`) must not end the run.
                if view.show(&happening).is_err() {
                    return;
                }
            }
            view.close();
        });
        Self {
            told: Mutex::new(Some(told)),
            dropped: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
        }
    }

    /// Tells the view.
    pub fn tell(&self, happening: Happening) {
        let Ok(told) = self.told.lock() else { return };
        let Some(told) = told.as_ref() else { return };
        let missed = self.dropped.swap(0, Ordering::Relaxed);
        if missed > 0 {
            let note = Happening::Stage(Stage::Dropped { count: missed });
            if let Err(TrySendError::Full(_)) = told.try_send(note) {
                self.dropped.fetch_add(missed, Ordering::Relaxed);
            }
        }
        if let Err(TrySendError::Full(_)) = told.try_send(happening) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until everything told was shown.
    pub fn close(&self) {
        if let Ok(mut told) = self.told.lock() {
            told.take();
        }
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread {
            // A view that panicked has nothing left to show.
            let _ = thread.join();
        }
    }
}

impl Observer for Screen {
    fn observe(&self, event: &RunEvent) {
        self.tell(Happening::Run(event.clone()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Slow(Arc<Mutex<Vec<String>>>, mpsc::Receiver<()>);

    impl View for Slow {
        fn show(&mut self, happening: &Happening) -> io::Result<()> {
            let _ = self.1.recv();
            self.0
                .lock()
                .unwrap()
                .push(serde_json::to_string(happening).unwrap());
            Ok(())
        }
    }

    #[test]
    fn a_stuck_reader_stops_nobody_and_learns_what_it_missed() {
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (gate, closed) = mpsc::channel();
        let screen = Screen::new(Box::new(Slow(shown.clone(), closed)));
        for count in 0..BACKLOG as u32 + 100 {
            screen.observe(&RunEvent::Nudged { count });
        }
        drop(gate);
        // Once there is room, the loss is reported, then the next event.
        while screen.dropped.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
            screen.observe(&RunEvent::Nudged { count: 7 });
        }
        screen.close();
        let shown = shown.lock().unwrap();
        assert!(
            shown
                .iter()
                .any(|line| line.starts_with(r#"{"event":"dropped","count":"#))
        );
        assert_eq!(shown.last().unwrap(), r#"{"event":"nudged","count":7}"#);
    }

    #[test]
    fn a_reader_that_left_is_not_written_to_again() {
        struct Gone(Arc<AtomicU64>);
        impl View for Gone {
            fn show(&mut self, _: &Happening) -> io::Result<()> {
                self.0.fetch_add(1, Ordering::Relaxed);
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let tries = Arc::new(AtomicU64::new(0));
        let screen = Screen::new(Box::new(Gone(tries.clone())));
        for count in 0..3 {
            screen.observe(&RunEvent::Nudged { count });
        }
        screen.close();
        assert_eq!(tries.load(Ordering::Relaxed), 1);
    }
}
