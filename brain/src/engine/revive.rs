//! What a predecessor left: its generations are known again, and those that had not ended go on.

use std::{path::Path, sync::Arc};

use super::{
    error::EngineError,
    generation::{Generation, Started},
    handle::Engine,
    persist::TakenIn,
    saver::{Revival, Storage},
};
use crate::{
    sched::{
        request::{FinishReason, Request, ValidRequest},
        sequence::{Outcome, Timings, Usage},
    },
    snapshot::log::{self, Begin, LogWriter, Record, Saved},
};

impl Engine {
    /// Makes known what a predecessor's logs tell; what had not ended goes on. Returns the logs,
    /// which are gone on with.
    pub(super) fn take_in(&self, storage: &Storage) -> Vec<TakenIn> {
        let mut all = Vec::new();
        for (path, saved) in log::read_all(&storage.folder) {
            if let Some(outcome) = ending(&saved, self.config().retries) {
                all.push(TakenIn {
                    log: go_on(&path, &saved),
                    ended: saved.outcome.is_some(),
                    generation: self.known(storage, &saved, outcome),
                });
                continue;
            }
            let revived = self
                .revived(storage, &saved)
                .and_then(|(generation, valid)| {
                    self.submit(&mut self.shared.registry(), generation, valid)
                });
            match revived {
                // Nothing is computed before all are taken in: should it take brain down, that is
                // on disk by then.
                Ok(generation) => all.push(TakenIn {
                    log: go_on(&path, &saved).map(|log| counted(log, saved.attempts + 1)),
                    generation,
                    ended: false,
                }),
                Err(error @ EngineError::Refused(_)) => {
                    storage.folder.quarantine(&path, &error.to_string());
                }
                // There may be room for it at the next start.
                Err(error) => {
                    let id = saved.begin.id;
                    tracing::warn!(id, %error, "a generation of an earlier brain does not go on now");
                }
            }
        }
        all
    }

    /// A generation that has ended, to be read.
    fn known(&self, storage: &Storage, saved: &Saved, outcome: Outcome) -> Arc<Generation> {
        let mut request = request(&saved.begin);
        (storage.revive)(&mut request, Revival::ToRead);
        let (started, now) = (
            Started::of(&request, request.hash()),
            self.shared.clock.now(),
        );
        let (id, tokens) = (saved.begin.id.clone(), saved.tokens.clone());
        let generation = Generation::new(id, &request, started, tokens, now).tried(saved.attempts);
        generation.finish(now, outcome);
        let generation = Arc::new(generation);
        self.shared.registry().insert(generation.clone());
        generation
    }

    /// A generation that goes on.
    fn revived(
        &self,
        storage: &Storage,
        saved: &Saved,
    ) -> Result<(Generation, ValidRequest), EngineError> {
        let mut request = request(&saved.begin);
        (storage.revive)(&mut request, Revival::ToGoOn);
        let (id, hash) = (&saved.begin.id, request.hash());
        let (generation, valid) = self.new_generation(id, hash, request, saved.tokens.clone())?;
        Ok((generation.tried(saved.attempts + 1).awaited(), valid))
    }
}

/// The log of a generation to go on with.
fn go_on(path: &Path, saved: &Saved) -> Option<LogWriter> {
    let log = LogWriter::go_on(path, saved).inspect_err(|error| {
        tracing::warn!(file = %path.display(), %error, "a log cannot be gone on with");
    });
    log.ok()
}

/// A log that says for good how many brains took its generation up.
fn counted(mut log: LogWriter, attempts: u32) -> LogWriter {
    let appended = log.append(&Record::Attempts(attempts));
    if let Err(error) = appended.and_then(|()| log.sync()) {
        tracing::warn!(%error, "that a generation is taken up cannot be counted");
    }
    log
}

fn request(begin: &Begin) -> Request {
    Request {
        draft: begin.draft,
        run_id: begin.run_id.clone(),
        priority: begin.priority,
        owner: begin.owner.clone(),
        cache_salt: begin.cache_salt.clone(),
        stop_strings: begin.stop_strings.clone(),
        grammar: begin.grammar.as_str().into(),
        note: begin.note.as_slice().into(),
        ..Request::new(begin.prompt.clone(), begin.params.clone())
    }
}

/// How a generation ended, if it is not to go on. One that brain after brain took up and none gave a
/// token of may be what ends them: it waits for a client that asks for it.
fn ending(saved: &Saved, retries: u32) -> Option<Outcome> {
    if saved.outcome.is_some() || saved.attempts <= retries {
        return saved.outcome.clone();
    }
    let reason = format!(
        "brain ended {} times while it was computed and gave no token of it: ask again to continue it",
        saved.attempts
    );
    Some(Outcome {
        reason: FinishReason::Failed(reason),
        usage: Usage {
            prompt: saved.begin.prompt.len(),
            generated: saved.tokens.len(),
            ..Usage::default()
        },
        timings: Timings::default(),
    })
}
