//! Reads prefixes from the snapshot store beside the engine's work.
//!
//! A sequence whose prefix is on disk is held until it has been read: others are computed in the
//! meantime, and no step waits for the disk.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::{
    clock::Clock,
    fill::{FromStore, Source as _},
};
use crate::{
    sched::{below::Found, tokens::PrefixKey, types::SeqId},
    snapshot::kv::KvStore,
};

/// What is to be read for whom.
#[derive(Debug)]
pub(super) struct Job {
    /// Who waits for it.
    pub(super) seq: SeqId,
    /// The prefix.
    pub(super) found: Found,
    /// Its units that are nowhere else, each with the one before it.
    pub(super) units: Vec<(PrefixKey, Option<PrefixKey>)>,
}

/// What was read.
#[derive(Debug)]
pub(super) struct Fetched {
    pub(super) job: Job,
    /// The bytes of the units, then those of the anchor; why not, if not.
    pub(super) read: Result<(Vec<Vec<u8>>, Vec<u8>), String>,
    pub(super) elapsed: Duration,
}

/// See the module's description.
#[derive(Debug)]
pub(super) struct Fetcher {
    jobs: Sender<Job>,
    done: Receiver<Fetched>,
    thread: JoinHandle<()>,
    /// Jobs under way.
    pending: usize,
}

impl Fetcher {
    /// Starts the thread.
    pub(super) fn start(store: Arc<KvStore>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let (jobs, inbox) = channel::<Job>();
        let (outbox, done) = channel();
        let thread = std::thread::Builder::new()
            .name("prefetch".into())
            .spawn(move || {
                for job in inbox {
                    let begun = clock.now();
                    let read = read(&store, &job);
                    let elapsed = clock.now().saturating_sub(begun);
                    if outbox.send(Fetched { job, read, elapsed }).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            jobs,
            done,
            thread,
            pending: 0,
        })
    }

    /// Ends the thread, once it has read what it is at: then the store is nobody's any more.
    pub(super) fn end(self) {
        drop((self.jobs, self.done));
        if self.thread.join().is_err() {
            tracing::error!("the thread that reads snapshots panicked");
        }
    }

    /// Whether something is being read.
    pub(super) fn is_busy(&self) -> bool {
        self.pending > 0
    }

    /// Reads this; false when nobody reads any more.
    pub(super) fn begin(&mut self, job: Job) -> bool {
        let begun = self.jobs.send(job).is_ok();
        self.pending += usize::from(begun);
        begun
    }

    /// What has been read; waits for it at most that long.
    pub(super) fn next(&mut self, patience: Duration) -> Option<Fetched> {
        match self.done.recv_timeout(patience) {
            Ok(fetched) => {
                self.pending -= 1;
                Some(fetched)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // The thread is gone: nothing more will come.
                self.pending = 0;
                None
            }
        }
    }
}

fn read(store: &KvStore, job: &Job) -> Result<(Vec<Vec<u8>>, Vec<u8>), String> {
    let mut source = FromStore::new(store);
    let mut units = Vec::with_capacity(job.units.len());
    for (key, _) in &job.units {
        units.push(source.unit(key)?.to_vec());
    }
    let anchor = source.anchor(&job.found.image)?.into_owned();
    Ok((units, anchor))
}
