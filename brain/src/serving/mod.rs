//! What every front end needs: a request's way down to the engine, and a generation's way up.
//!
//! A front end translates its own shapes to the contract's [`GenerationSpec`] and opens it
//! ([`Serving::open`]). Down: the specification becomes tokens and resolved parameters ([`lower`],
//! [`sampling`]). Up: a [`Reader`] is a cursor over the generation's log that makes text and turn
//! deltas of its tokens. What is wrong with a request is a [`Problem`] whose field is a path in the
//! contract.
//!
//! [`GenerationSpec`]: marathon_proto::brain::GenerationSpec

pub(crate) mod conversation;
mod form;
pub(crate) mod lower;
mod open;
pub(crate) mod problem;
mod reader;
pub mod sampling;
mod size;

use std::sync::Arc;

use marathon_proto::status::{Problem, Reason};
use tokio::sync::Semaphore;

use crate::{
    callers::Owner,
    engine::Engine,
    sched::types::{DraftDepth, TokenId},
    text::model::TextModel,
};

pub use open::{Opened, Return};
pub use reader::{Ending, Read, Reader, Round};
pub(crate) use size::LONGEST_RUN_ID;

/// What is served, for clients that ask and for lowering requests.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Name that clients see.
    pub name: String,
    /// Identity of model and numerics.
    pub fingerprint: String,
    /// "cpu", "cuda" or "fake".
    pub device: &'static str,
    /// What drafts; empty when nothing does.
    pub drafter: String,
    /// Drafts per round of requests that do not say.
    pub draft: DraftDepth,
    /// Sampling of requests that leave fields unset.
    pub defaults: sampling::Defaults,
    /// Never emitted.
    pub suppressed: Vec<TokenId>,
    /// The model's own stop tokens.
    pub stop_tokens: Vec<TokenId>,
}

/// What every call works with. Cheap to clone.
#[derive(Clone)]
pub struct Serving {
    /// Computes.
    pub engine: Engine,
    /// Translates.
    pub text: Arc<TextModel>,
    /// Describes.
    pub facts: Arc<ModelFacts>,
    /// As many slow pieces of work at a time as there are cores.
    slow: Arc<Semaphore>,
}

impl Serving {
    /// Puts the three together.
    pub fn new(engine: Engine, text: Arc<TextModel>, facts: Arc<ModelFacts>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            engine,
            text,
            facts,
            slow: Arc::new(Semaphore::new(cores)),
        }
    }

    /// The same for one caller: what it makes belongs to it alone.
    pub fn owned_by(&self, owner: &Owner) -> Self {
        Self {
            engine: self.engine.owned_by(owner.name()),
            ..self.clone()
        }
    }

    /// Runs work that takes long in proportion to its input on a thread that may block.
    ///
    /// # Errors
    /// The work's own, or [`Reason::Internal`] when it panicked.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let serving = self.clone();
        // The semaphore is never closed; without a permit the work is only less polite.
        let permit = self.slow.clone().acquire_owned().await.ok();
        let work = move || {
            // Work goes on when whoever asked for it is gone: it gives its place back itself.
            let _permit = permit;
            work(&serving)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "work on a call failed");
                Err(Problem::new(
                    Reason::Internal,
                    "the call failed; brain's log says how",
                ))
            }
        }
    }

    /// Refuses token ids that the vocabulary does not have; `field` is their path in the request.
    ///
    /// # Errors
    /// [`Reason::InvalidField`] with the first such id.
    pub fn check_ids(&self, field: &str, ids: &[TokenId]) -> Result<(), Problem> {
        let vocab = self.engine.limits().vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab) {
            None => Ok(()),
            Some(index) => Err(Problem::invalid(
                field,
                format!(
                    "token {} (number {index}) is not below the vocabulary's size, {vocab}",
                    ids[index]
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use clap::Parser as _;

    use super::*;
    use crate::{
        bringup,
        cli::{Cli, Command},
        config::Loaded,
    };

    fn serving() -> Serving {
        let cli = Cli::parse_from(["brain", "serve", "--device", "fake"]);
        let Command::Serve(args) = cli.command else {
            panic!("not serve")
        };
        let config = Loaded::new(None, &args.settings).unwrap().check().unwrap();
        Serving {
            slow: Arc::new(Semaphore::new(1)),
            ..bringup::bring_up(&config).unwrap()
        }
    }

    #[tokio::test]
    async fn work_has_its_place_until_it_is_done_though_its_caller_is_gone() {
        let serving = serving();
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may) = mpsc::channel::<()>();
        let mut call = Box::pin(serving.blocking(move |_| {
            begun.send(()).unwrap();
            may.recv_timeout(Duration::from_secs(60)).unwrap();
            Ok(())
        }));
        assert!(futures::poll!(call.as_mut()).is_pending());
        has_begun.recv().unwrap();
        drop(call);
        assert_eq!(serving.slow.available_permits(), 0);
        go_on.send(()).unwrap();
        assert_eq!(serving.blocking(|_| Ok(7)).await, Ok(7));
    }
}
