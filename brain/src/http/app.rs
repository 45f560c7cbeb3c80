//! What every handler works with.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::http::Uri;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{blocking::blocking, error::ApiError, metrics::Metrics, responses::Store};
use crate::{callers::Keys, engine::Health, serving::Serving};

/// How long a request waits for the model to be loaded. Large checkpoints take minutes.
const LOADING_PATIENCE: Duration = Duration::from_secs(15 * 60);

/// Between two looks at what has expired.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// The front end's state. Cheap to clone.
#[derive(Clone)]
pub(super) struct App(Arc<Inner>);

struct Inner {
    model: watch::Receiver<Option<Serving>>,
    keys: Keys,
    cors_origins: Vec<String>,
    /// A browser can reach the listener.
    browsable: bool,
    model_name: String,
    store: Option<Arc<Store>>,
    ending: CancellationToken,
    metrics: OnceLock<Metrics>,
}

/// How the whole is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The model is not there yet.
    Loading,
    /// No new work is taken on.
    Ending,
    /// The model is there.
    Loaded(Health),
}

impl App {
    pub(super) fn new(
        model: watch::Receiver<Option<Serving>>,
        keys: Keys,
        cors_origins: Vec<String>,
        browsable: bool,
        model_name: String,
        store: Option<Arc<Store>>,
        ending: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            model,
            keys,
            cors_origins,
            browsable,
            model_name,
            store,
            ending,
            metrics: OnceLock::new(),
        }))
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.0.keys
    }

    pub(super) fn cors_origins(&self) -> &[String] {
        &self.0.cors_origins
    }

    /// Whether this server goes by this name: any name does where no browser comes (a socket in a
    /// folder), and those of the origins that are allowed.
    pub(super) fn is_reached_as(&self, host: &str) -> bool {
        let named = |origin: &String| {
            let uri: Option<Uri> = origin.parse().ok();
            uri.is_some_and(|uri| {
                uri.host()
                    .is_some_and(|name| name.eq_ignore_ascii_case(host))
            })
        };
        let mut origins = self.0.cors_origins.iter();
        !self.0.browsable || origins.any(|origin| origin == "*" || named(origin))
    }

    /// Where responses are stored, if they are.
    pub(super) fn store(&self) -> Option<Arc<Store>> {
        self.0.store.clone()
    }

    /// What is measured; nothing before the model is loaded.
    pub(super) fn metrics(&self) -> Option<&Metrics> {
        let serving = self.loaded()?;
        Some(self.0.metrics.get_or_init(|| Metrics::of(&serving)))
    }

    /// Removes stored responses whose lease is over, now and then, for ever.
    pub(super) async fn sweep_store(&self) {
        let Some(store) = self.store() else {
            return;
        };
        loop {
            let store = store.clone();
            // Said where it happened when it failed; the next one may be well.
            let _ = blocking(move || store.sweep()).await;
            sleep(SWEEP_EVERY).await;
        }
    }

    /// Begins to measure as soon as the model is loaded.
    pub(super) async fn measure(&self) {
        let mut model = self.0.model.clone();
        if model.wait_for(Option::is_some).await.is_ok() {
            self.metrics();
        }
    }

    /// The model, if it is loaded.
    pub(super) fn loaded(&self) -> Option<Serving> {
        self.0.model.borrow().clone()
    }

    /// The model, once it is loaded.
    pub(super) async fn serving(&self) -> Result<Serving, ApiError> {
        let mut model = self.0.model.clone();
        let loaded = tokio::select! {
            loaded = timeout(LOADING_PATIENCE, model.wait_for(Option::is_some)) => {
                loaded.ok().and_then(Result::ok).and_then(|model| model.clone())
            }
            () = self.0.ending.cancelled() => return Err(ApiError::ending()),
        };
        loaded.ok_or_else(ApiError::loading)
    }

    /// Refuses a model that is not served. Without a name the one that is served is meant.
    pub(super) fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            None | Some("") => Ok(()),
            Some(name) if name == self.0.model_name => Ok(()),
            Some(name) => Err(ApiError::no_such_model(name, &self.0.model_name)),
        }
    }

    pub(super) fn state(&self) -> State {
        if self.0.ending.is_cancelled() {
            return State::Ending;
        }
        match self.loaded() {
            None => State::Loading,
            Some(serving) => State::Loaded(serving.engine.health()),
        }
    }
}
