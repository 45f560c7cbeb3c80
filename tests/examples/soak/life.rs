//! The brain's lives: each ends with SIGKILL at a random moment, now and then with SIGTERM, and the
//! next one finds what the last one left. The last one is let live: what grows with the requests of a
//! life shows in a long one.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use marathon_proto::{brain::brain_client::BrainClient, net::BrainChannel};
use marathon_tests::{Brain, BrainOptions};
use tokio::sync::watch;

use crate::runs::Chance;

/// Where the brain is now; `None` between two lives.
pub(crate) type Address = watch::Receiver<Option<BrainClient<BrainChannel>>>;

/// A look at the brain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// When.
    pub(crate) at: Duration,
    /// Its resident memory in bytes; `None` when it was not there.
    pub(crate) resident: Option<u64>,
    /// Tokens that clients received since the last look.
    pub(crate) tokens: u64,
    /// Bytes of its snapshots.
    pub(crate) disk: u64,
    /// In the last life.
    pub(crate) last: bool,
}

/// The end of a life.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kill {
    /// When.
    pub(crate) at: Duration,
    /// SIGKILL, not SIGTERM.
    pub(crate) hard: bool,
}

/// See the module's description.
pub(crate) struct Lives {
    brain: Option<Brain>,
    folder: PathBuf,
    began: Instant,
    born: Instant,
    /// When this life ends; `None` for the last one.
    due: Option<Instant>,
    /// When the last life begins.
    last_from: Instant,
    chance: Chance,
    kills: Vec<Kill>,
    address: watch::Sender<Option<BrainClient<BrainChannel>>>,
}

impl Lives {
    /// The first life. The one that begins after `striking` is the last.
    pub(crate) fn begin(folder: &Path, seed: u64, striking: Duration) -> Self {
        let now = Instant::now();
        let mut lives = Self {
            brain: None,
            folder: folder.to_owned(),
            began: now,
            born: now,
            due: None,
            last_from: now + striking,
            chance: Chance::new(seed ^ 0xdead),
            kills: Vec::new(),
            address: watch::Sender::new(None),
        };
        lives.start();
        lives
    }

    /// Where it is to be found.
    pub(crate) fn address(&self) -> Address {
        self.address.subscribe()
    }

    fn start(&mut self) {
        let folder = self.folder.to_str().expect("a folder with a name");
        let flags = [
            "--device",
            "cpu",
            "--max-model-len",
            "2048",
            // Not enough for the clients at work, so that they take blocks from each other.
            "--kv-cache-memory",
            KV_MEMORY,
            "--host-cache-memory",
            HOST_MEMORY,
            "--snapshot-dir",
            folder,
            "--snapshot-interval",
            "500ms",
            "--snapshot-quota",
            "64MiB",
        ];
        let brain = Brain::start(BrainOptions {
            flags: flags.map(str::to_owned).to_vec(),
            ..BrainOptions::default()
        });
        self.address.send_replace(Some(brain.client()));
        self.brain = Some(brain);
        self.born = Instant::now();
        // Mostly short lives, some of minutes in which memory could grow.
        let seconds = match self.chance.below(4) {
            0 => 60 + self.chance.below(180),
            _ => 3 + self.chance.below(40),
        };
        let due = self.born + Duration::from_secs(seconds);
        self.due = (self.born < self.last_from).then(|| due.min(self.last_from));
    }

    /// Whether this life is the last.
    pub(crate) fn is_last(&self) -> bool {
        self.due.is_none()
    }

    /// Ends this life and begins the next, if it is time.
    pub(crate) async fn strike_when_due(&mut self) {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return;
        }
        let hard = !self.chance.once_in(6);
        self.kills.push(Kill {
            at: self.began.elapsed(),
            hard,
        });
        self.stop(hard);
        self.start();
    }

    fn stop(&mut self, hard: bool) {
        self.address.send_replace(None);
        let Some(mut brain) = self.brain.take() else {
            return;
        };
        if hard {
            brain.program.kill();
            return;
        }
        brain.program.terminate();
        let status = brain.program.wait();
        assert!(status.success(), "{status}{}", brain.program.printed());
    }

    /// The resident memory of a brain that has been there for some seconds.
    pub(crate) fn resident(&self) -> Option<u64> {
        let brain = self.brain.as_ref()?;
        if self.born.elapsed() < Duration::from_secs(3) {
            return None;
        }
        let status = fs::read_to_string(format!("/proc/{}/status", brain.program.pid())).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    }

    /// The last life ends cleanly.
    pub(crate) fn end(mut self) -> Vec<Kill> {
        self.stop(false);
        self.kills
    }
}

/// Memory for keys and values: two of the longest runs fit, and a little more.
const KV_MEMORY: &str = "20MiB";

/// Memory for what has no room there: some of the runs.
const HOST_MEMORY: &str = "16MiB";

/// Bytes of all files below a folder.
pub(crate) fn size(folder: &Path) -> u64 {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // What is removed in the meantime counts nothing.
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        bytes += match metadata.is_dir() {
            true => size(&entry.path()),
            false => metadata.len(),
        };
    }
    bytes
}
