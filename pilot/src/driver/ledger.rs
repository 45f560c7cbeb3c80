//! A run's journal and the state it folds into, kept in step: commit first, then the state.

use std::sync::Arc;

use super::DriverError;
use crate::{
    journal::{Durability, Head, Journal},
    run::{
        entry::{Created, Entry, RunId},
        state::State,
    },
};

/// One run, open for appending.
pub(super) struct Ledger {
    journal: Arc<dyn Journal>,
    run: RunId,
    head: Head,
    state: State,
}

impl Ledger {
    /// Begins the journal of a new run, whose answers are kept to calls that its tools take if
    /// `constrain_calls`.
    pub(super) async fn create(
        journal: Arc<dyn Journal>,
        created: Created,
        constrain_calls: bool,
    ) -> Result<Self, DriverError> {
        let run = created.run.clone();
        let mut ledger = Self {
            journal,
            run,
            head: Head::EMPTY,
            state: State::new(created.clone()),
        };
        let mut first = vec![Entry::Created(Box::new(created))];
        if constrain_calls {
            first.push(Entry::CallsConstrained);
            ledger.state.calls_constrained = true;
        }
        ledger.head = ledger.append(first, Durability::Synced).await?;
        Ok(ledger)
    }

    /// Reads a run's journal.
    pub(super) async fn open(journal: Arc<dyn Journal>, run: RunId) -> Result<Self, DriverError> {
        let (reader, name) = (Arc::clone(&journal), run.clone());
        let (records, head) =
            blocking(move || Ok((reader.load(&name)?, reader.head(&name)?))).await?;
        let state = State::fold(records.iter().map(|record| &record.entry)).map_err(
            |(sequence, error)| DriverError::History {
                run: run.clone(),
                sequence: sequence as u64,
                reason: error.to_string(),
            },
        )?;
        Ok(Self {
            journal,
            run,
            head,
            state,
        })
    }

    /// What the run has come to.
    pub(super) fn state(&self) -> &State {
        &self.state
    }

    /// The run.
    pub(super) fn run(&self) -> &RunId {
        &self.run
    }

    /// Appends the entries, all or none. An entry that does not follow is refused before anything is
    /// written. After an error the ledger must not be used any more: its state may be ahead.
    pub(super) async fn commit(
        &mut self,
        entries: Vec<Entry>,
        durability: Durability,
    ) -> Result<(), DriverError> {
        for (at, entry) in entries.iter().enumerate() {
            self.state
                .apply(entry)
                .map_err(|error| DriverError::History {
                    run: self.run.clone(),
                    sequence: self.head.next + at as u64,
                    reason: error.to_string(),
                })?;
        }
        self.head = self.append(entries, durability).await?;
        Ok(())
    }

    async fn append(
        &self,
        entries: Vec<Entry>,
        durability: Durability,
    ) -> Result<Head, DriverError> {
        let (journal, run, head) = (Arc::clone(&self.journal), self.run.clone(), self.head);
        blocking(move || Ok(journal.append(&run, head, &entries, durability)?)).await
    }
}

/// Runs blocking `work` off the async threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
) -> Result<T, DriverError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(DriverError::Internal(error.to_string())),
    }
}
