//! The hub's protocol: what is in a repository, what a file is, and its bytes from an offset.

use std::{collections::BTreeSet, error::Error as _, time::Duration};

use reqwest::{Method, Response, StatusCode, Url, header, redirect};
use serde::Deserialize;

use super::{HubError, HubSettings, ModelName, files, name::is_commit, settings::AccessToken};

/// How long and how often to try.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Attempts without any progress before giving up.
    pub attempts: u32,
    /// Wait before the second attempt; doubled before each further one.
    pub first_wait: Duration,
    /// Longest silence of a peer.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            attempts: 6,
            first_wait: Duration::from_millis(500),
            silence: Duration::from_secs(60),
        }
    }
}

const CONNECT: Duration = Duration::from_secs(20);
/// The longest wait between two attempts, whatever the hub asks for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const MAX_REDIRECTS: usize = 10;
/// Largest answer that is held in memory: listings of repositories are far smaller.
const MAX_ANSWER: usize = 32 << 20;

/// What a repository holds at a commit.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Its hash.
    pub commit: String,
    /// Paths of its files.
    pub files: BTreeSet<String>,
}

/// What the hub says of a file.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    /// Where it is resolved.
    pub url: Url,
    /// Names its content; SHA-256 for large files, git's hash for small ones.
    pub etag: String,
    /// Bytes.
    pub size: u64,
}

/// Asks one hub.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    endpoint: Url,
    endpoint_text: String,
    token: Option<AccessToken>,
    pub(super) patience: Patience,
}

impl Client {
    /// A client with these settings.
    pub fn new(settings: &HubSettings, patience: Patience) -> Result<Self, HubError> {
        let unusable = |problem: String| HubError::Setting {
            setting: "HF_ENDPOINT".into(),
            problem,
        };
        let endpoint =
            Url::parse(&settings.endpoint).map_err(|error| unusable(error.to_string()))?;
        // One provider for the process; whoever came first has installed the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = || {
            let builder = reqwest::Client::builder()
                .user_agent(concat!("marathon-brain/", env!("CARGO_PKG_VERSION")))
                .redirect(redirect::Policy::none())
                .connect_timeout(CONNECT)
                .read_timeout(patience.silence);
            // What runs on this machine is never behind a proxy.
            match endpoint.host_str() {
                Some("localhost" | "127.0.0.1" | "[::1]") => builder.no_proxy(),
                _ => builder,
            }
        };
        // A machine without certificates can still use a hub that needs none.
        let http = match (builder().build(), endpoint.scheme()) {
            (Ok(client), _) => client,
            (Err(_), "http") => builder()
                .tls_certs_only([])
                .build()
                .map_err(|error| unusable(chain(&error)))?,
            (Err(error), _) => {
                return Err(unusable(format!(
                    "{}; install the system's CA certificates",
                    chain(&error)
                )));
            }
        };
        Ok(Self {
            http,
            endpoint_text: settings.endpoint.clone(),
            endpoint,
            token: settings.token.clone(),
            patience,
        })
    }

    /// What a repository holds at a revision.
    pub async fn listing(&self, name: &ModelName) -> Result<Listing, HubError> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let url = self.url(&[
            "api",
            "models",
            name.repository(),
            "revision",
            &escape(name.revision()),
        ])?;
        let answer = self.ask(Method::GET, &url, name, "").await?;
        let wrong = |problem: String| HubError::Answer {
            url: url.to_string(),
            problem,
        };
        let body = self.body(answer, &url).await?;
        let info: Info = serde_json::from_slice(&body).map_err(|error| wrong(error.to_string()))?;
        if !is_commit(&info.sha) {
            return Err(wrong("its commit is no hash".into()));
        }
        let files = info
            .siblings
            .into_iter()
            .map(|sibling| sibling.rfilename)
            .filter(|file| files::is_inside(file))
            .collect();
        Ok(Listing {
            commit: info.sha,
            files,
        })
    }

    /// What the hub says of a file of a commit.
    pub async fn file(
        &self,
        name: &ModelName,
        commit: &str,
        file: &str,
    ) -> Result<RemoteFile, HubError> {
        let url = self.url(&[name.repository(), "resolve", commit, file])?;
        let answer = self.ask(Method::HEAD, &url, name, file).await?;
        let text = |name: &str| {
            let value = answer.headers().get(name)?.to_str().ok()?;
            Some(value.trim().to_owned())
        };
        let wrong = |problem: &str| HubError::Answer {
            url: url.to_string(),
            problem: problem.to_owned(),
        };
        let etag = text("x-linked-etag")
            .or_else(|| text("etag"))
            .map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned())
            .filter(|etag| is_usable(etag))
            .ok_or_else(|| wrong("it gives no ETag that can name a file"))?;
        let size = text("x-linked-size")
            .or_else(|| text("content-length"))
            .and_then(|size| size.parse().ok())
            .ok_or_else(|| wrong("it does not say how large the file is"))?;
        Ok(RemoteFile { url, etag, size })
    }

    /// The bytes of a file from an offset on: 206 with the rest, 200 with the whole, or 416.
    pub(super) async fn bytes(
        &self,
        remote: &RemoteFile,
        from: u64,
        name: &ModelName,
        file: &str,
    ) -> Result<Response, Failure> {
        let range = (from > 0).then(|| format!("bytes={from}-"));
        let answer = self
            .follow(Method::GET, &remote.url, range.as_deref())
            .await?;
        match answer.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                Ok(answer)
            }
            _ => Err(self.refusal(&answer, &remote.url, name, file)),
        }
    }

    fn url(&self, parts: &[&str]) -> Result<Url, HubError> {
        let text = format!("{}/{}", self.endpoint_text, parts.join("/"));
        Url::parse(&text).map_err(|error| HubError::Answer {
            url: text,
            problem: error.to_string(),
        })
    }

    /// Asks until there is an answer or patience ends. Success is a 2xx, or a redirect away that
    /// already says what the file is.
    async fn ask(
        &self,
        method: Method,
        url: &Url,
        name: &ModelName,
        file: &str,
    ) -> Result<Response, HubError> {
        let mut attempt = 0;
        loop {
            let failure = match self.follow(method.clone(), url, None).await {
                Ok(answer) if answer.status().is_success() || answer.status().is_redirection() => {
                    return Ok(answer);
                }
                Ok(answer) => self.refusal(&answer, url, name, file),
                Err(failure) => failure,
            };
            attempt += 1;
            self.wait_or_give_up(failure, attempt).await?;
        }
    }

    /// Waits before attempt number `attempt`, or gives the error back when there is none.
    pub(super) async fn wait_or_give_up(
        &self,
        failure: Failure,
        attempt: u32,
    ) -> Result<(), HubError> {
        match failure {
            Failure::Passing { wait, error } if attempt < self.patience.attempts => {
                let doubled = self.patience.first_wait * 2u32.saturating_pow(attempt - 1);
                let wait = wait.unwrap_or(doubled).min(LONGEST_WAIT);
                let of = self.patience.attempts;
                tracing::warn!(%error, ?wait, attempt, of, "the hub is asked again after a while");
                tokio::time::sleep(wait).await;
                Ok(())
            }
            Failure::Passing { error, .. } | Failure::Final(error) => Err(error),
        }
    }

    /// Sends a request and follows redirects. The token goes to the hub alone. A HEAD stops at
    /// the redirect that names the content.
    async fn follow(
        &self,
        method: Method,
        url: &Url,
        range: Option<&str>,
    ) -> Result<Response, Failure> {
        let mut at = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.http.request(method.clone(), at.clone());
            if let Some(token) = self.token.as_ref().filter(|_| self.is_hub(&at)) {
                request = request.bearer_auth(token.secret());
            }
            if let Some(range) = range {
                request = request.header(header::RANGE, range);
            }
            let answer = request
                .send()
                .await
                .map_err(|error| unreachable(&at, &error))?;
            let named = method == Method::HEAD && answer.headers().contains_key("x-linked-etag");
            if !answer.status().is_redirection() || named {
                return Ok(answer);
            }
            let wrong = |problem: &str| {
                Failure::Final(HubError::Answer {
                    url: shown(&at),
                    problem: problem.to_owned(),
                })
            };
            let next = answer
                .headers()
                .get(header::LOCATION)
                .and_then(|location| location.to_str().ok())
                .and_then(|location| at.join(location).ok())
                .ok_or_else(|| wrong("it redirects to nowhere"))?;
            if !matches!(next.scheme(), "http" | "https")
                || (at.scheme() == "https" && next.scheme() != "https")
            {
                return Err(wrong("it redirects to an address that is not safe"));
            }
            at = next;
        }
        Err(Failure::Final(HubError::Answer {
            url: shown(url),
            problem: "it redirects without end".into(),
        }))
    }

    fn is_hub(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }

    /// What an answer other than success means.
    fn refusal(&self, answer: &Response, url: &Url, name: &ModelName, file: &str) -> Failure {
        let status = answer.status();
        let text = |header: &str| {
            let value = answer.headers().get(header)?.to_str().ok()?;
            Some(value.to_owned())
        };
        let code = text("x-error-code").unwrap_or_default();
        let reason = match text("x-error-message") {
            Some(message) => format!(": {}", one_line(&message)),
            None => String::new(),
        };
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            let wait = text("retry-after").and_then(|seconds| seconds.trim().parse().ok());
            return Failure::Passing {
                error: HubError::Status {
                    url: shown(url),
                    status: status.as_u16(),
                    reason,
                },
                wait: wait.map(Duration::from_secs),
            };
        }
        Failure::Final(self.meaning(status, &code, reason, url, name, file))
    }

    /// What a status means that trying again does not change.
    fn meaning(
        &self,
        status: StatusCode,
        code: &str,
        reason: String,
        url: &Url,
        name: &ModelName,
        file: &str,
    ) -> HubError {
        let repository = name.repository().to_owned();
        let endpoint = self.endpoint_text.clone();
        let token = self.token.is_some();
        match (status.as_u16(), code) {
            (401 | 403, "GatedRepo") => HubError::Gated {
                repository,
                endpoint,
                token,
            },
            (404, "RevisionNotFound") => HubError::NoRevision {
                repository,
                revision: name.revision().to_owned(),
            },
            (404, "EntryNotFound") => HubError::NoFile {
                repository,
                file: file.to_owned(),
            },
            (404, _) if !file.is_empty() && code.is_empty() => HubError::NoFile {
                repository,
                file: file.to_owned(),
            },
            // To those who show no token the hub says 401 for what does not exist, too.
            (401 | 404, "RepoNotFound") | (404, _) => HubError::NoRepository {
                repository,
                endpoint,
                token,
            },
            (401, _) if !token => HubError::NoRepository {
                repository,
                endpoint,
                token,
            },
            (401 | 403, _) => HubError::Refused {
                repository,
                endpoint,
                reason,
            },
            (status, _) => HubError::Status {
                url: shown(url),
                status,
                reason,
            },
        }
    }

    /// A whole answer, up to [`MAX_ANSWER`].
    async fn body(&self, mut answer: Response, url: &Url) -> Result<Vec<u8>, HubError> {
        let mut body = Vec::new();
        loop {
            match answer.chunk().await {
                Ok(Some(chunk)) if body.len() + chunk.len() <= MAX_ANSWER => {
                    body.extend_from_slice(&chunk);
                }
                Ok(Some(_)) => {
                    return Err(HubError::Answer {
                        url: shown(url),
                        problem: format!("it is larger than {MAX_ANSWER} bytes"),
                    });
                }
                Ok(None) => return Ok(body),
                Err(error) => return Err(unreachable(url, &error).into_error()),
            }
        }
    }
}

/// Why a request brought nothing.
pub(super) enum Failure {
    /// Trying again may help, after `wait` if the hub said so.
    Passing {
        /// What to say if it does not.
        error: HubError,
        /// What the hub asked for.
        wait: Option<Duration>,
    },
    /// It will not.
    Final(HubError),
}

impl Failure {
    fn into_error(self) -> HubError {
        match self {
            Self::Passing { error, .. } | Self::Final(error) => error,
        }
    }
}

/// A connection that failed.
pub(super) fn unreachable(url: &Url, error: &reqwest::Error) -> Failure {
    Failure::Passing {
        error: HubError::Network {
            url: shown(url),
            problem: chain(error),
        },
        wait: None,
    }
}

/// An address without what follows `?`: redirects carry signatures there.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.to_string()
}

/// An error with its causes, the address left out.
fn chain(error: &reqwest::Error) -> String {
    let mut causes = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        causes.push(cause.to_string());
        next = cause.source();
    }
    // The innermost causes say what happened; the outer ones repeat that something did.
    match causes.len() {
        0 => error.to_string(),
        count => causes.split_off(count.saturating_sub(2)).join(": "),
    }
}

fn one_line(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(200)
        .collect::<String>()
}

/// A revision as one part of a path.
fn escape(revision: &str) -> String {
    revision
        .replace('%', "%25")
        .replace('/', "%2F")
        .replace('#', "%23")
}

/// Whether an ETag can be the name of a file.
fn is_usable(etag: &str) -> bool {
    !etag.is_empty()
        && etag.len() <= 128
        && !etag.starts_with('.')
        && etag
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_become_file_names_only_if_they_can() {
        assert!(is_usable("0123abcd-1"));
        for bad in ["", ".x", "a/b", "a b", "é", &"a".repeat(129)] {
            assert!(!is_usable(bad), "{bad:?}");
        }
    }

    #[test]
    fn addresses_are_shown_without_signatures() {
        let url = Url::parse("https://cdn.example/x?Signature=secret").unwrap();
        assert_eq!(shown(&url), "https://cdn.example/x");
        assert_eq!(escape("refs/pr/1"), "refs%2Fpr%2F1");
    }
}
