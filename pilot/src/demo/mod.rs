//! `pilot demo`: a marathon on the small built-in model that is killed again and again, beside the
//! same marathon left alone, and the proof that both did the same and the right thing.

pub mod bound;
pub mod folder;
pub mod marathon;
pub mod oracle;
pub mod processes;
pub mod random;
pub mod record;
pub mod report;
pub mod schedule;
pub mod snapshot;
pub mod timeline;
pub mod verdict;
pub mod workspace;

use std::{
    io::{self, Write},
    path::PathBuf,
    sync::mpsc::{self, Receiver, Sender},
    thread,
};

use marathon_proto::shutdown::Shutdown;

use crate::{
    cli::DemoArgs,
    error::{Error, exit},
    ui::{Happening, Mode, Screen, Stage},
};
use folder::Folder;
use marathon::{Failure, Marathon, Programs};
use processes::{BrainProgram, Heard, PilotProgram};
use random::Random;
use record::Record;
use report::Report;
use schedule::Schedule;
use snapshot::Snapshot;
use verdict::{Outcome, Verdict};
use workspace::Plan;

/// Exit status after a stop by the user.
const STOPPED: u8 = 130;
/// Processes of the second marathon are numbered from here on.
const SECOND: u32 = 1000;

/// Runs the demo. The exit status is 0 only if the tokens are the same, the workspaces are the
/// same, and the oracle finds every file right.
pub fn run(args: &DemoArgs) -> Result<u8, Error> {
    let program = BrainProgram::find(args.brain_program.as_deref()).map_err(Error::Usage)?;
    let making = |source| Error::Io {
        what: "making the demo's folder".to_owned(),
        source,
    };
    let mut folder = Folder::new(args.keep).map_err(making)?;
    let screen = Screen::new(args.view.mode().view());
    let (told, heard) = mpsc::channel();
    stop_on_signals(told.clone());
    let demo = Demo {
        args,
        program,
        plan: Plan::new(args.seed, args.files as usize),
        root: folder.path().to_owned(),
        screen: &screen,
        told,
        heard,
    };
    let ended = demo.run();
    screen.close();
    let held = match ended {
        Ok(held) => held,
        Err(End::Failed(Failure::Stopped)) => return Ok(STOPPED),
        Err(End::Failed(Failure::Broken(why))) => {
            folder.keep();
            let place = folder.path().display();
            return Err(Error::Demo(format!("{why}; see {place}")));
        }
        Err(End::Error(error)) => return Err(error),
    };
    if args.keep || !held {
        folder.keep();
        let mut words = io::stderr();
        // Beside the report; losing it loses nothing.
        let _ = writeln!(words, "kept: {}", folder.path().display());
    }
    Ok(if held { 0 } else { exit::OTHER })
}

enum End {
    Failed(Failure),
    Error(Error),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

struct Demo<'a> {
    args: &'a DemoArgs,
    program: PathBuf,
    plan: Plan,
    root: PathBuf,
    screen: &'a Screen,
    told: Sender<Heard>,
    heard: Receiver<Heard>,
}

impl Demo<'_> {
    fn run(&self) -> Result<bool, End> {
        let mut random = Random::new(self.args.seed ^ 0x6b69_6c6c);
        let schedule = Schedule::new(&mut random, self.args.kills, self.plan.expected_calls());
        let (killed, before) = self.marathon("with-kills", schedule, random.clone(), true)?;
        let none = Schedule::new(&mut random, 0, 0);
        let (calm, _) = self.marathon("undisturbed", none, random, false)?;
        let read = |name: &str| {
            let place = self.root.join(name);
            Outcome::read(&place.join("store"), &place.join("workspace"))
        };
        let (with, without) = (read("with-kills")?, read("undisturbed")?);
        let verdict = Verdict::new(&before, &self.plan.heading, &with, &without);
        let report = Report {
            seed: self.args.seed,
            asked: self.args.kills,
            killed: (&killed, &with),
            calm: (&calm, &without),
            verdict: &verdict,
        };
        // After the last event, so that nothing is drawn over it.
        self.screen.close();
        let text = match self.args.view.mode() {
            Mode::Json => format!("{}\n", report.json()),
            _ => report.text(),
        };
        let printing = |source| Error::Io {
            what: "printing the report".to_owned(),
            source,
        };
        io::stdout().write_all(text.as_bytes()).map_err(printing)?;
        Ok(verdict.holds())
    }

    /// One marathon in a folder of its own; with it, the workspace as it was before.
    fn marathon(
        &self,
        name: &str,
        schedule: Schedule,
        random: Random,
        first: bool,
    ) -> Result<(Record, Snapshot), End> {
        let place = self.root.join(name);
        let workspace = place.join("workspace");
        let make = || -> io::Result<(Snapshot, String)> {
            std::fs::create_dir(&place)?;
            self.plan.build(&workspace)?;
            Ok((snapshot::take(&workspace)?, BrainProgram::free_address()?))
        };
        let making = |source| Error::Io {
            what: "making the workspace".to_owned(),
            source,
        };
        let (before, address) = make().map_err(making)?;
        let programs = Programs {
            brain: BrainProgram {
                program: self.program.clone(),
                address: address.clone(),
                drafter: first,
                log: place.join("brain.log"),
            },
            pilot: PilotProgram {
                program: PathBuf::from("/proc/self/exe"),
                brain: address,
                store: place.join("store"),
                workspace,
                seed: Random::new(self.args.seed).bits().max(1),
                goal: self.plan.goal.clone(),
                log: place.join("pilot.log"),
            },
        };
        self.screen.tell(Happening::Stage(Stage::Chapter {
            title: self.title(first),
            expected_calls: self.plan.expected_calls(),
        }));
        let marathon = Marathon::start(
            &programs,
            schedule,
            random,
            self.screen,
            &self.told,
            &self.heard,
            if first { 0 } else { SECOND },
        )?;
        Ok((marathon.finish()?, before))
    }

    fn title(&self, first: bool) -> String {
        let files = self.args.files;
        match first {
            true => format!(
                "A marathon over {files} records, drafter on, {} kills",
                self.args.kills
            ),
            false => "The same marathon, drafter off, undisturbed".to_owned(),
        }
    }
}

/// A signal is heard like everything else, so that the processes are ended and the folder goes.
fn stop_on_signals(told: Sender<Heard>) {
    thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
        else {
            return;
        };
        runtime.block_on(async {
            if let Ok(shutdown) = Shutdown::on_signals() {
                shutdown.graceful().cancelled().await;
                // The demo may be over.
                let _ = told.send(Heard::Stop);
            }
        });
    });
}
