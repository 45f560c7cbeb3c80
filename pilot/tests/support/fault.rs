//! A journal that fails on purpose.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use pilot::{
    journal::{
        Durability, Head, History, Journal, JournalError, Record, RunListing, memory::MemoryJournal,
    },
    run::entry::{Entry, RunId},
};

/// What happens at the chosen append. After a crash every call fails: the process is "dead".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Dies before anything of it is stored.
    CrashBefore,
    /// Stores it, then dies before the writer learns of it.
    CrashAfter,
    /// The power goes just before it: what was appended lazily is lost too.
    PowerCutBefore,
    /// The power goes just after it was stored.
    PowerCutAfter,
    /// This append fails once (disk full), nothing stored; later ones work.
    RefuseOnce,
}

/// Wraps a [`MemoryJournal`], which outlives the "process".
pub(crate) struct FaultJournal {
    inner: Arc<MemoryJournal>,
    at: u64,
    fault: Fault,
    appends: AtomicU64,
}

impl FaultJournal {
    /// Fails at append number `at`, from 0.
    pub(crate) fn new(inner: Arc<MemoryJournal>, at: u64, fault: Fault) -> Self {
        Self {
            inner,
            at,
            fault,
            appends: AtomicU64::new(0),
        }
    }

    /// Appends so far, failed ones included.
    pub(crate) fn appends(&self) -> u64 {
        self.appends.load(Ordering::SeqCst)
    }

    fn dead(&self) -> bool {
        self.fault != Fault::RefuseOnce && self.appends() > self.at
    }

    fn check(&self) -> Result<(), JournalError> {
        if self.dead() {
            Err(JournalError::io("injected fault", "crashed"))
        } else {
            Ok(())
        }
    }
}

impl History for FaultJournal {
    fn runs(&self) -> Result<Vec<RunListing>, JournalError> {
        self.check()?;
        self.inner.runs()
    }

    fn load(&self, run: &RunId) -> Result<Vec<Record>, JournalError> {
        self.check()?;
        self.inner.load(run)
    }
}

impl Journal for FaultJournal {
    fn head(&self, run: &RunId) -> Result<Head, JournalError> {
        self.check()?;
        self.inner.head(run)
    }

    fn append(
        &self,
        run: &RunId,
        expected: Head,
        entries: &[Entry],
        durability: Durability,
    ) -> Result<Head, JournalError> {
        self.check()?;
        let number = self.appends.fetch_add(1, Ordering::SeqCst);
        if number != self.at {
            return self.inner.append(run, expected, entries, durability);
        }
        match self.fault {
            Fault::CrashBefore | Fault::RefuseOnce => {}
            Fault::PowerCutBefore => self.inner.cut_power(),
            Fault::CrashAfter | Fault::PowerCutAfter => {
                self.inner.append(run, expected, entries, durability)?;
                if self.fault == Fault::PowerCutAfter {
                    self.inner.cut_power();
                }
            }
        }
        Err(JournalError::io(
            "injected fault",
            format!("{:?}", self.fault),
        ))
    }
}
