//! The HTTP front end: OpenAI's and Anthropic's shapes over the same [`Serving`] as gRPC.
//!
//! The listener is up before the model is, so that a client that comes early is held instead of
//! turned away. A request goes through [`listen`] (connections, TLS, time limits), [`router`]
//! (routes and what all of them share: request ids, keys, cross-origin rules) and [`body`] (JSON
//! with the place of an error in it) to the file of its endpoint, which translates it to the
//! contract's specification and what is generated to its own shape. Errors are [`error::ApiError`]s.

mod app;
mod auth;
mod blocking;
mod body;
mod chat;
mod completions;
mod content;
mod deliver;
mod error;
mod fields;
mod finish;
mod form;
mod generation;
mod health;
mod identity;
mod listen;
mod logprobs;
mod messages;
mod metrics;
mod models;
mod openapi;
mod pairing;
mod pump;
pub mod reading;
mod responses;
mod router;
mod runs;
mod span;
mod sse;
mod tokenize;
mod turn;
mod usage;

use std::{io, net::SocketAddr, path::PathBuf, pin::pin, sync::Arc, time::Duration};

use marathon_proto::net::{ListenAddr, ListenError, Listener};
use tokio::sync::watch;
use tokio_rustls::rustls;
use tokio_util::sync::CancellationToken;

use crate::{callers::Keys, serving::Serving};
use app::App;
use responses::Store;

/// Port that is taken when nothing is said.
const DEFAULT_PORT: u16 = 8000;

/// Where to serve HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HttpAddr {
    /// Port 8000 of this machine alone, or nowhere when another program has it.
    Auto,
    /// Nowhere.
    None,
    /// Here.
    At(ListenAddr),
}

/// What the front end is told about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpOptions {
    /// Where to listen.
    pub addr: HttpAddr,
    /// Folder of stored responses; nothing is stored without one.
    pub response_dir: Option<PathBuf>,
    /// How long a response stays stored.
    pub response_lease: Duration,
    /// Origins whose pages may call: `*` for all; none by default.
    pub cors_origins: Vec<String>,
}

/// Why the front end did not start.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The address.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The folder of stored responses.
    #[error("responses cannot be stored in {dir}: {source}", dir = dir.display())]
    Store {
        /// The folder.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Everything it starts with besides its options.
pub struct Setup {
    /// Who may call, as on the gRPC server.
    pub keys: Keys,
    /// TLS, as on the gRPC server.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// Name that clients see.
    pub model_name: String,
    /// No new work is taken on once it is cancelled.
    pub ending: CancellationToken,
}

/// A bound listener that does not serve yet.
pub struct HttpServer {
    listener: Listener,
    app: App,
    tls: Option<Arc<rustls::ServerConfig>>,
    model: watch::Sender<Option<Serving>>,
}

impl HttpServer {
    /// Takes the address. `None` when there is nowhere to listen.
    ///
    /// # Errors
    /// [`HttpError`]
    pub async fn bind(options: &HttpOptions, setup: Setup) -> Result<Option<Self>, HttpError> {
        let listener = match &options.addr {
            HttpAddr::None => return Ok(None),
            HttpAddr::At(addr) => {
                addr.check_exposure(!setup.keys.is_empty())?;
                addr.bind().await?
            }
            HttpAddr::Auto => {
                let addr = ListenAddr::Tcp(SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)));
                match addr.bind().await {
                    Ok(listener) => listener,
                    Err(error) => {
                        tracing::warn!(%error, "no HTTP: give --http-addr to choose an address");
                        return Ok(None);
                    }
                }
            }
        };
        let store = match &options.response_dir {
            None => None,
            Some(dir) => {
                let store = Store::open(dir, options.response_lease);
                let failed = |source| HttpError::Store {
                    dir: dir.clone(),
                    source,
                };
                Some(Arc::new(store.map_err(failed)?))
            }
        };
        let (model, loaded) = watch::channel(None);
        let browsable = !matches!(listener.local_addr(), Ok(ListenAddr::Unix(_)));
        Ok(Some(Self {
            listener,
            app: App::new(
                loaded,
                setup.keys,
                options.cors_origins.clone(),
                browsable,
                setup.model_name,
                store,
                setup.ending,
            ),
            tls: setup.tls,
            model,
        }))
    }

    /// The address that was taken, with the real port.
    pub fn local_addr(&self) -> Option<ListenAddr> {
        self.listener.local_addr().ok()
    }

    /// Hands the model over once it is loaded; requests are held until then.
    pub fn model(&self) -> watch::Sender<Option<Serving>> {
        self.model.clone()
    }

    /// Serves until `closing` is cancelled and the open requests have ended.
    pub async fn serve(self, closing: CancellationToken) {
        let routes = router::routes(self.app.clone());
        let mut serving = pin!(listen::serve(self.listener, self.tls, routes, closing));
        let upkeep = async { tokio::join!(self.app.measure(), self.app.sweep_store()) };
        tokio::select! {
            () = &mut serving => return,
            ((), ()) = upkeep => {}
        }
        serving.await;
    }
}
