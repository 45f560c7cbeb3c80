//! A journal in memory that knows what a power cut would take. For tests, and runs nobody keeps.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    Durability, Head, History, Journal, JournalError, Record, RunListing,
    codec::{self, Stamp},
};
use crate::run::entry::{Entry, RunId};

#[derive(Default)]
struct Log {
    records: Vec<Vec<u8>>,
    heads: Vec<Head>,
    /// Records that a power cut leaves.
    synced: usize,
}

impl Log {
    fn head(&self) -> Head {
        self.heads.last().copied().unwrap_or(Head::EMPTY)
    }
}

/// Encoded records by run.
#[derive(Default)]
pub struct MemoryJournal {
    logs: Mutex<BTreeMap<RunId, Log>>,
}

impl MemoryJournal {
    /// Forgets what was appended lazily since the last synced append, as a power cut would.
    pub fn cut_power(&self) {
        for log in self.logs().values_mut() {
            log.records.truncate(log.synced);
            log.heads.truncate(log.synced);
        }
    }

    fn logs(&self) -> MutexGuard<'_, BTreeMap<RunId, Log>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What errors call the place.
const PLACE: &str = "(memory)";

impl History for MemoryJournal {
    fn runs(&self) -> Result<Vec<RunListing>, JournalError> {
        let logs = self.logs();
        let list = |(run, log): (&RunId, &Log)| RunListing {
            run: run.clone(),
            head: Ok(log.head()),
        };
        Ok(logs.iter().map(list).collect())
    }

    fn load(&self, run: &RunId) -> Result<Vec<Record>, JournalError> {
        let logs = self.logs();
        let log = logs
            .get(run)
            .ok_or_else(|| JournalError::UnknownRun(run.to_string()))?;
        let mut head = Head::EMPTY;
        let mut records = Vec::new();
        for bytes in &log.records {
            let (record, next) =
                codec::decode(run, head, bytes).map_err(|error| error.of_store(PLACE.as_ref()))?;
            head = next;
            records.push(record);
        }
        Ok(records)
    }
}

impl Journal for MemoryJournal {
    fn head(&self, run: &RunId) -> Result<Head, JournalError> {
        Ok(self.logs().get(run).map_or(Head::EMPTY, Log::head))
    }

    fn append(
        &self,
        run: &RunId,
        expected: Head,
        entries: &[Entry],
        durability: Durability,
    ) -> Result<Head, JournalError> {
        let mut logs = self.logs();
        let log = logs.entry(run.clone()).or_default();
        let mut head = log.head();
        if head != expected {
            let (expected, found) = (expected.next, head.next);
            return Err(JournalError::Conflict {
                run: run.clone(),
                expected,
                found,
            });
        }
        let stamp = Stamp {
            epoch: 0,
            wall_ms: 0,
        };
        let mut encoded = Vec::new();
        for entry in entries {
            let (bytes, next) = codec::encode(run, head, stamp, entry)
                .map_err(|error| error.of_store(PLACE.as_ref()))?;
            encoded.push((bytes, next));
            head = next;
        }
        for (bytes, head) in encoded {
            log.records.push(bytes);
            log.heads.push(head);
        }
        if durability == Durability::Synced {
            log.synced = log.records.len();
        }
        Ok(head)
    }
}
