//! A stand-in for a model hub: the part of its protocol that a download meets, and its faults.
//!
//! Small files are answered by the hub itself, large ones by a redirect to a second address with a
//! signature, as the real one does.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses its own part"
)]

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use ring::digest;

/// One repository.
#[derive(Clone, Debug, Default)]
pub struct Repository {
    /// Its only commit.
    pub commit: String,
    /// Contents by path.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Who shows no token of an account that accepted the licence gets none of it.
    pub gated: bool,
}

/// What goes wrong, and what was seen.
#[derive(Debug, Default)]
pub struct Scene {
    /// By `OWNER/NAME`.
    pub repositories: HashMap<String, Repository>,
    /// Each answer with a file's bytes ends after so many of them, first entry first.
    pub cuts: Vec<usize>,
    /// So many answers are a 503 first.
    pub busy: usize,
    /// Ranges are not understood: always the whole file.
    pub no_ranges: bool,
    /// What is sent for a range says that it begins elsewhere.
    pub wrong_ranges: bool,
    /// Bytes are sent with one of them changed.
    pub corrupt: bool,
    /// Announced instead of the real size of large files.
    pub announced_size: Option<u64>,
    /// The token that is good for gated repositories.
    pub token: Option<String>,
    /// Everything is answered with this page.
    pub page: Option<&'static str>,
    /// Requests as they came.
    pub seen: Vec<Seen>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// GET or HEAD.
    pub method: String,
    /// With its query.
    pub path: String,
    /// First byte asked for.
    pub from: Option<usize>,
    /// Whether it carried a token.
    pub authorised: bool,
}

/// A hub and the address that its large files come from.
pub struct StandIn {
    pub hub: SocketAddr,
    scene: Arc<Mutex<Scene>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

#[derive(Clone)]
struct Shared {
    scene: Arc<Mutex<Scene>>,
    store: SocketAddr,
}

impl StandIn {
    /// Listens on two loopback ports.
    pub async fn start(scene: Scene) -> Self {
        let scene = Arc::new(Mutex::new(scene));
        let bind = async || tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (hub, store) = (bind().await, bind().await);
        let shared = Shared {
            scene: scene.clone(),
            store: store.local_addr().unwrap(),
        };
        let address = hub.local_addr().unwrap();
        let tasks = [
            (hub, Router::new().fallback(answer)),
            (store, Router::new().fallback(stored)),
        ]
        .map(|(listener, router)| {
            let router = router.with_state(shared.clone());
            tokio::spawn(async move { axum::serve(listener, router).await.unwrap() })
        });
        Self {
            hub: address,
            scene,
            tasks: tasks.into(),
        }
    }

    /// For `HF_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.hub)
    }

    pub fn scene(&self) -> MutexGuard<'_, Scene> {
        self.scene.lock().unwrap()
    }

    /// Requests for large files since the last call, as (first byte, carried a token).
    pub fn store_requests(&self) -> Vec<(Option<usize>, bool)> {
        let seen = std::mem::take(&mut self.scene().seen);
        seen.iter()
            .filter(|seen| seen.path.starts_with("/store/"))
            .map(|seen| (seen.from, seen.authorised))
            .collect()
    }

    /// The network is gone.
    pub async fn stop(self) {
        for task in self.tasks {
            task.abort();
            let _ = task.await;
        }
    }
}

fn hex(digest: &digest::Digest) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&digest::digest(&digest::SHA256, bytes))
}

pub fn git_hash(bytes: &[u8]) -> String {
    let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0", bytes.len()).as_bytes());
    context.update(bytes);
    hex(&context.finish())
}

fn note(scene: &mut Scene, request: &Request) {
    let from = request.headers().get(header::RANGE).and_then(|range| {
        range
            .to_str()
            .ok()?
            .strip_prefix("bytes=")?
            .split('-')
            .next()?
            .parse()
            .ok()
    });
    scene.seen.push(Seen {
        method: request.method().to_string(),
        path: request.uri().to_string(),
        from,
        authorised: request.headers().contains_key(header::AUTHORIZATION),
    });
}

fn refuse(status: StatusCode, code: &'static str, message: &'static str) -> Response {
    (
        status,
        [("x-error-code", code), ("x-error-message", message)],
    )
        .into_response()
}

async fn answer(State(shared): State<Shared>, request: Request) -> Response {
    let mut scene = shared.scene.lock().unwrap();
    note(&mut scene, &request);
    if let Some(page) = scene.page {
        return page.into_response();
    }
    if scene.busy > 0 {
        scene.busy -= 1;
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let bearer = bearer(request.headers());
    if bearer.is_some() && bearer != scene.token {
        return refuse(
            StatusCode::UNAUTHORIZED,
            "",
            "Invalid credentials in Authorization header",
        );
    }
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let parts: Vec<&str> = path.split('/').collect();
    let (name, revision, file) = match parts.as_slice() {
        ["api", "models", owner, name, "revision", revision] => (
            format!("{owner}/{name}"),
            revision.replace("%2F", "/"),
            None,
        ),
        [owner, name, "resolve", revision, file @ ..] => (
            format!("{owner}/{name}"),
            (*revision).to_owned(),
            Some(file.join("/")),
        ),
        _ => return StatusCode::NOT_FOUND.into_response(),
    };
    let Some(repository) = scene.repositories.get(&name).cloned() else {
        let status = match bearer {
            Some(_) => StatusCode::NOT_FOUND,
            None => StatusCode::UNAUTHORIZED,
        };
        return refuse(status, "RepoNotFound", "Repository not found");
    };
    if revision != "main" && revision != repository.commit {
        return refuse(StatusCode::NOT_FOUND, "RevisionNotFound", "Invalid rev id");
    }
    let Some(file) = file else {
        let siblings: Vec<_> = repository
            .files
            .keys()
            .map(|file| serde_json::json!({ "rfilename": file }))
            .collect();
        let info = serde_json::json!({ "sha": repository.commit, "siblings": siblings });
        return axum::Json(info).into_response();
    };
    if repository.gated && (scene.token.is_none() || bearer != scene.token) {
        let status = match bearer {
            Some(_) => StatusCode::FORBIDDEN,
            None => StatusCode::UNAUTHORIZED,
        };
        return refuse(status, "GatedRepo", "Access to this model is restricted");
    }
    let Some(bytes) = repository.files.get(&file) else {
        return refuse(StatusCode::NOT_FOUND, "EntryNotFound", "Entry not found");
    };
    if file.ends_with(".safetensors") {
        let hash = sha256(bytes);
        let size = scene.announced_size.unwrap_or(bytes.len() as u64);
        let location = format!(
            "http://{}/store/{name}/{file}?Signature=secret",
            shared.store
        );
        return (
            StatusCode::FOUND,
            [
                ("location", location),
                ("x-repo-commit", repository.commit),
                ("x-linked-etag", format!("\"{hash}\"")),
                ("x-linked-size", size.to_string()),
            ],
        )
            .into_response();
    }
    let mut answer = if request.method() == Method::HEAD {
        Response::builder()
            .header(header::CONTENT_LENGTH, bytes.len())
            .body(Body::empty())
            .unwrap()
    } else {
        Bytes::from(bytes.clone()).into_response()
    };
    let headers = answer.headers_mut();
    headers.insert("etag", format!("\"{}\"", git_hash(bytes)).parse().unwrap());
    headers.insert("x-repo-commit", repository.commit.parse().unwrap());
    answer
}

fn bearer(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    value.strip_prefix("Bearer ").map(str::to_owned)
}

async fn stored(State(shared): State<Shared>, request: Request) -> Response {
    let mut scene = shared.scene.lock().unwrap();
    note(&mut scene, &request);
    let path = request
        .uri()
        .path()
        .trim_start_matches("/store/")
        .to_owned();
    let mut parts = path.splitn(3, '/');
    let name = format!("{}/{}", parts.next().unwrap(), parts.next().unwrap());
    let mut bytes = scene.repositories[&name].files[parts.next().unwrap()].clone();
    if scene.corrupt {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    }
    let from = scene
        .seen
        .last()
        .and_then(|seen| seen.from)
        .filter(|_| !scene.no_ranges);
    let size = bytes.len();
    let start = from.unwrap_or(0);
    if start > size {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    let rest = Bytes::from(bytes).slice(start..);
    let builder = match from {
        Some(_) => Response::builder()
            .status(StatusCode::PARTIAL_CONTENT)
            .header(
                header::CONTENT_RANGE,
                format!(
                    "bytes {}-{}/{size}",
                    start + usize::from(scene.wrong_ranges),
                    size.max(1) - 1
                ),
            ),
        None => Response::builder(),
    };
    let builder = builder.header(header::CONTENT_LENGTH, rest.len());
    let body = if scene.cuts.is_empty() {
        Body::from(rest)
    } else {
        let cut = scene.cuts.remove(0).min(rest.len());
        let sent = futures::stream::iter([Ok(rest.slice(..cut))]);
        // What was sent so far leaves while this waits for its turn.
        let broken = futures::stream::once(async {
            for _ in 0..8 {
                tokio::task::yield_now().await;
            }
            Err(std::io::Error::other("the connection is cut"))
        });
        Body::from_stream(futures::StreamExt::chain(sent, broken))
    };
    builder.body(body).unwrap()
}
