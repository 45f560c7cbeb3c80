//! Stores and runs as commands need them.

use crate::{
    config::Config,
    error::Error,
    journal::{History, JournalError, Record, share::View, sled::SledJournal},
    run::{
        entry::{Entry, RunId},
        state::State,
    },
};

/// Everything about one run in a store.
pub(super) struct Stored {
    /// Its state.
    pub(super) state: State,
    /// Its journal.
    pub(super) records: Vec<Record>,
}

impl Stored {
    /// The run of this name.
    pub(super) fn load(config: &Config, journal: &dyn History, run: &RunId) -> Result<Self, Error> {
        let records = journal.load(run)?;
        if records.is_empty() {
            return Err(JournalError::UnknownRun(run.to_string()).into());
        }
        let state = State::fold(records.iter().map(|r| &r.entry)).map_err(|(at, error)| {
            JournalError::Damaged {
                path: config.store.clone(),
                what: format!("run {run}, entry {at}: {}", error.reason),
            }
        })?;
        Ok(Self { state, records })
    }

    /// The entries alone.
    pub(super) fn entries(&self) -> Vec<Entry> {
        self.records
            .iter()
            .map(|record| record.entry.clone())
            .collect()
    }

    /// When it was last written to.
    pub(super) fn changed_ms(&self) -> u64 {
        self.records.last().map_or(0, |record| record.wall_ms)
    }
}

/// A run in a store.
pub(super) struct Found {
    /// Its name.
    pub(super) run: RunId,
    /// Its journal, or what is wrong with it.
    pub(super) stored: Result<Stored, String>,
}

/// The store, which must exist, to be looked at: the files, or the pilot that holds them.
pub(super) fn view(config: &Config) -> Result<Box<dyn History>, Error> {
    match SledJournal::open(&config.store) {
        Ok(journal) => Ok(Box::new(journal)),
        Err(held @ JournalError::Locked { .. }) => match View::of(&config.store) {
            Some(view) => Ok(Box::new(view)),
            None => Err(held.into()),
        },
        Err(error) => Err(error.into()),
    }
}

/// The store, which must exist, to be written to.
pub(super) fn open(config: &Config) -> Result<SledJournal, Error> {
    Ok(SledJournal::open(&config.store)?)
}

/// Every run.
pub(super) fn all(config: &Config, journal: &dyn History) -> Result<Vec<Found>, Error> {
    let mut runs = Vec::new();
    for listing in journal.runs()? {
        let stored = match listing.head {
            Err(reason) => Err(reason),
            Ok(_) => Stored::load(config, journal, &listing.run).map_err(|error| error.to_string()),
        };
        runs.push(Found {
            run: listing.run,
            stored,
        });
    }
    Ok(runs)
}

/// A name of a run as the user typed it. A form that no run can have is a run that is not there.
pub(super) fn named(text: &str) -> Result<RunId, Error> {
    RunId::new(text).map_err(|_| JournalError::UnknownRun(text.to_owned()).into())
}
