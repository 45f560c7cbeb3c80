//! A real brain under everything at once: many runs, little memory, aborts, readers that come and
//! go, and SIGKILL at random moments. Every token is compared with that of an undisturbed brain as
//! it comes; memory and throughput are plotted. In the last third nobody kills it: what grows with
//! the requests of one life has the time to be seen.
//!
//! `soak MINUTES PICTURE.svg [SEED]`; `tests/long/soak` builds and runs it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a soak fails by panicking and says how it went"
)]

mod life;
mod plot;
mod runs;
mod worker;

use std::{
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use life::{Lives, Sample};
use runs::{Run, undisturbed};
use worker::{Counts, Worker};

/// Runs that are taken up again and again.
const RUNS: u64 = 24;
/// Clients at work at a time.
const WORKERS: u64 = 8;
/// Share of the time in which brain is killed.
const STRIKING: f64 = 2.0 / 3.0;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let minutes: f64 = arguments
        .next()
        .and_then(|text| text.parse().ok())
        .expect("how many minutes");
    let picture = PathBuf::from(arguments.next().expect("where the picture goes"));
    let seed = arguments.next().and_then(|text| text.parse().ok());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let length = Duration::from_secs_f64(minutes * 60.0);
    runtime.block_on(soak(length, &picture, seed.unwrap_or(1)));
}

async fn soak(length: Duration, picture: &std::path::Path, seed: u64) {
    let runs: Vec<Run> = undisturbed(RUNS, seed).await;
    let wanted: usize = runs.iter().map(Run::tokens).sum();
    println!("{RUNS} runs computed by an undisturbed brain: {wanted} tokens");

    let folder = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let mut lives = Lives::begin(folder.path(), seed, length.mul_f64(STRIKING));
    let counts = Arc::new(Counts::default());
    let runs = Arc::new(runs);
    let until = began + length;
    let workers: Vec<_> = (0..WORKERS)
        .map(|number| {
            let worker = Worker {
                number,
                runs: runs.clone(),
                brain: lives.address(),
                counts: counts.clone(),
                until,
                chance: runs::Chance::new(seed ^ (number + 1) << 32),
            };
            tokio::spawn(worker.work())
        })
        .collect();

    let mut samples: Vec<Sample> = Vec::new();
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    let mut tokens = 0;
    while Instant::now() < until {
        tick.tick().await;
        if let Some(failed) = workers.iter().position(|worker| worker.is_finished()) {
            println!("client {failed} ended early");
            break;
        }
        let now = counts.tokens.load(Relaxed);
        samples.push(Sample {
            at: began.elapsed(),
            resident: lives.resident(),
            tokens: now - tokens,
            disk: life::size(folder.path()),
            last: lives.is_last(),
        });
        tokens = now;
        lives.strike_when_due().await;
    }
    for worker in workers {
        worker
            .await
            .expect("a client's tokens were not those of an undisturbed brain");
    }
    let kills = lives.end();
    std::fs::write(picture, plot::svg(&samples, &kills)).unwrap();
    let verdict = Memory::of(&samples);
    println!(
        "{:.0} minutes: {} turns, {} tokens, every one as undisturbed; {} kills, {} clean restarts, \
         {} aborts, {} readers that left and came back, {} calls turned away; {:.0} % of the prompt \
         tokens came from the cache; {verdict}",
        began.elapsed().as_secs_f64() / 60.0,
        counts.turns.load(Relaxed),
        counts.tokens.load(Relaxed),
        kills.iter().filter(|kill| kill.hard).count(),
        kills.iter().filter(|kill| !kill.hard).count(),
        counts.aborts.load(Relaxed),
        counts.returns.load(Relaxed),
        counts.refusals.load(Relaxed),
        100.0 * counts.cached.load(Relaxed) as f64 / counts.prompt.load(Relaxed).max(1) as f64,
    );
    assert!(verdict.is_flat(), "memory grows");
}

/// How resident memory went: its level in the second and in the last quarter of the last life. Before
/// that, what is kept for those who may come back fills up to its bounds.
struct Memory {
    early: u64,
    late: u64,
    most: u64,
    disk: u64,
}

impl Memory {
    fn of(samples: &[Sample]) -> Self {
        let last: Vec<Sample> = samples.iter().filter(|one| one.last).copied().collect();
        let quarter = last.len() / 4;
        let level = |samples: &[Sample]| {
            let mut there: Vec<u64> = samples.iter().filter_map(|one| one.resident).collect();
            there.sort_unstable();
            there.get(there.len() / 2).copied().unwrap_or(0)
        };
        Self {
            early: level(&last[quarter..2 * quarter]),
            late: level(&last[last.len() - quarter..]),
            most: samples
                .iter()
                .filter_map(|one| one.resident)
                .max()
                .unwrap_or(0),
            disk: samples.iter().map(|one| one.disk).max().unwrap_or(0),
        }
    }

    fn is_flat(&self) -> bool {
        self.early > 0 && self.late <= self.early + self.early / 10
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        write!(
            f,
            "resident memory of the last life {:.0} MiB in its second quarter, {:.0} MiB in its last, \
             {:.0} MiB at most in any; snapshots {:.0} MiB at most",
            mib(self.early),
            mib(self.late),
            mib(self.most),
            mib(self.disk),
        )
    }
}
