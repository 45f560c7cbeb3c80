//! Waiting for a brain that is away, for as long as it takes.

use std::time::Duration;

use super::{Driver, Halt};
use crate::{
    brain::{BrainClient, BrainError, Model},
    run::{entry::PauseReason, event::RunEvent, retry},
};

/// Failed attempts in a row.
#[derive(Default)]
pub(super) struct Attempts {
    away: u32,
    faults: u32,
}

impl Attempts {
    /// Something new came: whatever failed before is over.
    pub(super) fn progress(&mut self) {
        *self = Self::default();
    }
}

impl Driver {
    /// Deals with a failed call: waits if asking again makes sense, halts otherwise.
    pub(super) async fn after_failure(
        &mut self,
        error: BrainError,
        attempts: &mut Attempts,
    ) -> Result<(), Halt> {
        // Whoever answers next may be somebody else.
        self.greeted = false;
        match error {
            BrainError::Away { reason, .. } => {
                attempts.away += 1;
                self.back_off(attempts.away, reason).await
            }
            BrainError::Protocol { .. } => self.after_fault(error.to_string(), attempts).await,
            BrainError::OtherModel { .. } => {
                // Its own words come second: ask what it serves and say both names.
                let found = match self.parts.brain.model().await {
                    Ok(model) => model.fingerprint,
                    Err(_) => error.to_string(),
                };
                let expected = self.state().created.model.fingerprint.clone();
                Err(Halt::Pause(PauseReason::OtherModel { expected, found }))
            }
            BrainError::Refused { reason, .. } | BrainError::Config(reason) => {
                Err(Halt::Pause(PauseReason::Refused(reason)))
            }
        }
    }

    /// The brain is there but fails: patience ends without progress.
    pub(super) async fn after_fault(
        &mut self,
        reason: String,
        attempts: &mut Attempts,
    ) -> Result<(), Halt> {
        attempts.faults += 1;
        if attempts.faults >= retry::FAILURES_WITHOUT_PROGRESS {
            return Err(Halt::Pause(PauseReason::Refused(reason)));
        }
        self.back_off(attempts.faults, reason).await
    }

    async fn back_off(&self, attempt: u32, reason: String) -> Result<(), Halt> {
        let wait_ms = retry::wait_ms(attempt, self.state().created.seed);
        self.tell(&RunEvent::BrainAway {
            attempt,
            wait_ms,
            reason,
        });
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(wait_ms)) => Ok(()),
            () = self.parts.cancel.cancelled() => Err(Halt::Stop),
        }
    }

    /// Makes a call again and again until it is answered or refused.
    pub(super) async fn ask<T, F>(&mut self, call: impl Fn(BrainClient) -> F) -> Result<T, Halt>
    where
        F: Future<Output = Result<T, BrainError>>,
    {
        let mut attempts = Attempts::default();
        loop {
            let cancel = self.parts.cancel.clone();
            let outcome = tokio::select! {
                outcome = call(self.parts.brain.clone()) => outcome,
                () = cancel.cancelled() => return Err(Halt::Stop),
            };
            match outcome {
                Ok(value) => return Ok(value),
                Err(error) => self.after_failure(error, &mut attempts).await?,
            }
        }
    }

    /// What the brain serves, as soon as it says.
    pub(super) async fn model(&mut self) -> Result<Model, Halt> {
        self.ask(|brain| async move { brain.model().await }).await
    }

    /// Makes sure that the brain serves the run's model, template included, before it renders: a
    /// rendering carries no fingerprint, and a channel that reconnected by itself does not say so.
    pub(super) async fn check_model(&mut self) -> Result<(), Halt> {
        let model = self.model().await?;
        let pin = &self.state().created.model;
        let differs = |expected: &str, found: &str| {
            let (expected, found) = (expected.to_owned(), found.to_owned());
            Err(Halt::Pause(PauseReason::OtherModel { expected, found }))
        };
        if model.fingerprint != pin.fingerprint {
            return differs(&pin.fingerprint, &model.fingerprint);
        }
        if model.template_hash != pin.template_hash {
            let template = |hash: &str| format!("{} with template {hash}", pin.fingerprint);
            return differs(
                &template(&pin.template_hash),
                &template(&model.template_hash),
            );
        }
        if std::mem::replace(&mut self.greeted, true) {
            return Ok(());
        }
        self.tell(&RunEvent::BrainReached {
            model: model.name,
            fingerprint: model.fingerprint,
            device: model.device,
            drafter: model.drafter,
        });
        Ok(())
    }
}
