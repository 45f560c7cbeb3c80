//! A client's channel to brain: lazy, so that a brain that is away is found out by the first call
//! and not by the constructor, and watched by keepalive, so that a half-open link is noticed.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};
use tonic::{
    Request, Status,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, ClientTlsConfig, Endpoint},
};

use super::{KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};
use crate::{
    auth::{self, Token},
    trace,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Where a brain is, as a user writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RemoteAddr {
    /// `HOST:PORT` or `http://HOST:PORT`: no TLS.
    Plain(String),
    /// `https://HOST:PORT`.
    Tls(String),
    /// `unix:/path/to/socket`.
    Unix(String),
}

/// Why no channel could be made. An unreachable brain is none of these: that is a call's error.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The text is no address.
    #[error("`{0}` is no address of a brain: write HOST:PORT, https://HOST:PORT or unix:/PATH")]
    Syntax(String),
    /// `https` without an authority, or TLS settings for an address that does not use it.
    #[error("{addr}: {problem}")]
    Tls {
        /// The address.
        addr: RemoteAddr,
        /// What does not fit.
        problem: String,
    },
}

impl fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(authority) => f.write_str(authority),
            Self::Tls(authority) => write!(f, "https://{authority}"),
            Self::Unix(path) => write!(f, "unix:{path}"),
        }
    }
}

impl FromStr for RemoteAddr {
    type Err = ConnectError;

    fn from_str(text: &str) -> Result<Self, ConnectError> {
        let syntax = || ConnectError::Syntax(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Self::Unix(path.to_owned()))
            } else {
                Err(syntax())
            };
        }
        let (tls, authority) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some(_) => return Err(syntax()),
            None => (false, text),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let parsed: http::uri::Authority = authority.parse().map_err(|_| syntax())?;
        if parsed.host().is_empty() || parsed.port_u16().is_none() || authority.contains('@') {
            return Err(syntax());
        }
        let authority = authority.to_owned();
        Ok(if tls {
            Self::Tls(authority)
        } else {
            Self::Plain(authority)
        })
    }
}

impl TryFrom<String> for RemoteAddr {
    type Error = ConnectError;

    fn try_from(text: String) -> Result<Self, ConnectError> {
        text.parse()
    }
}

impl From<RemoteAddr> for String {
    fn from(addr: RemoteAddr) -> Self {
        addr.to_string()
    }
}

/// What a channel needs besides the address.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// Sent with every call.
    pub token: Option<Token>,
    /// Needed for `https`, refused otherwise.
    pub tls: Option<ClientTlsConfig>,
    /// A link over which the peer's HTTP/2 says nothing for this long, though asked, is given up and
    /// its calls fail; `None`: 25 seconds.
    pub silence: Option<Duration>,
}

/// A channel whose calls carry the token and the trace context.
pub type BrainChannel = InterceptedService<Channel, Outgoing>;

/// Makes a channel that connects at its first call and again whenever it must.
///
/// # Errors
/// [`ConnectError`] when address and TLS settings do not fit each other.
pub fn channel(addr: &RemoteAddr, options: ConnectOptions) -> Result<BrainChannel, ConnectError> {
    let misfit = |problem: &str| ConnectError::Tls {
        addr: addr.clone(),
        problem: problem.to_owned(),
    };
    let uri = match addr {
        RemoteAddr::Plain(authority) => format!("http://{authority}"),
        RemoteAddr::Tls(authority) => format!("https://{authority}"),
        RemoteAddr::Unix(path) => format!("unix:{path}"),
    };
    let (ask_after, wait) = match options.silence {
        Some(silence) => (silence / 2, silence / 2),
        None => (KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT),
    };
    let mut endpoint = Endpoint::from_shared(uri)
        .map_err(|_| ConnectError::Syntax(addr.to_string()))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .tcp_keepalive(Some(TCP_KEEPALIVE))
        .http2_keep_alive_interval(ask_after)
        .keep_alive_timeout(wait)
        .keep_alive_while_idle(true);
    match (addr, options.tls) {
        (RemoteAddr::Tls(_), Some(tls)) => {
            endpoint = endpoint
                .tls_config(tls)
                .map_err(|error| misfit(&error.to_string()))?;
        }
        (RemoteAddr::Tls(_), None) => {
            return Err(misfit("https needs the certificate authority to trust"));
        }
        (_, Some(_)) => return Err(misfit("TLS settings are only for an https:// address")),
        (_, None) => {}
    }
    let outgoing = Outgoing {
        token: options.token,
    };
    Ok(InterceptedService::new(endpoint.connect_lazy(), outgoing))
}

/// Adds what every call to a brain carries: the token and the current trace context.
#[derive(Clone, Debug, Default)]
pub struct Outgoing {
    token: Option<Token>,
}

impl Interceptor for Outgoing {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        auth::attach(self.token.as_ref(), &mut request)?;
        trace::inject_current(request.metadata_mut());
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;
    use tokio_util::sync::CancellationToken;
    use tonic::Code;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

    use super::*;
    use crate::{
        auth::Guard,
        net::{ListenAddr, server},
        tls,
    };

    #[test]
    fn addresses_parse_and_print() {
        for (text, printed) in [
            ("127.0.0.1:7411", "127.0.0.1:7411"),
            ("http://brain.lan:7411/", "brain.lan:7411"),
            ("https://brain.lan:7411", "https://brain.lan:7411"),
            ("[::1]:7411", "[::1]:7411"),
            ("unix:/run/b.sock", "unix:/run/b.sock"),
            ("unix:///run/b.sock", "unix:/run/b.sock"),
        ] {
            assert_eq!(text.parse::<RemoteAddr>().unwrap().to_string(), printed);
        }
        for text in [
            "",
            "brain",
            "ftp://x:1",
            "http://",
            "https://x",
            "user@x:1",
            "unix:x",
            "x:1/p",
            "a b:1",
        ] {
            let error = text.parse::<RemoteAddr>().unwrap_err().to_string();
            assert!(error.contains("HOST:PORT"), "{text}: {error}");
        }
    }

    #[tokio::test]
    async fn tls_and_address_must_fit() {
        let dir = TempDir::new().unwrap();
        let files = tls::tests::localhost_identity(&dir);
        let tls = Some(tls::client(&files.cert).unwrap());
        let secure: RemoteAddr = "https://localhost:1".parse().unwrap();
        let plain: RemoteAddr = "localhost:1".parse().unwrap();
        assert!(channel(&secure, ConnectOptions::default()).is_err());
        let with_tls = ConnectOptions {
            tls,
            ..ConnectOptions::default()
        };
        assert!(channel(&plain, with_tls).is_err());
    }

    /// Serves health behind the guard until the token is cancelled; returns the address.
    async fn serve(
        addr: ListenAddr,
        guard: Guard<()>,
        tls: Option<std::sync::Arc<rustls::ServerConfig>>,
        stop: CancellationToken,
    ) -> ListenAddr {
        let listener = addr.bind().await.unwrap();
        let bound = listener.local_addr().unwrap();
        let (_, health) = tonic_health::server::health_reporter();
        let router = server().add_service(InterceptedService::new(health, guard));
        tokio::spawn(
            router.serve_with_incoming_shutdown(listener.incoming(tls), stop.cancelled_owned()),
        );
        bound
    }

    async fn check(addr: &str, options: ConnectOptions) -> Result<(), Status> {
        let channel = channel(&addr.parse().unwrap(), options).unwrap();
        HealthClient::new(channel)
            .check(HealthCheckRequest::default())
            .await
            .map(drop)
    }

    fn token(dir: &TempDir, name: &str, text: &str) -> Token {
        use std::os::unix::fs::PermissionsExt as _;
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        Token::from_file(&path).unwrap()
    }

    #[tokio::test]
    async fn a_call_passes_with_the_token_only_over_tcp_tls_and_unix() {
        let dir = TempDir::new().unwrap();
        let good = token(&dir, "good", "the-right-secret-of-this-test");
        let bad = token(&dir, "bad", "another-secret-of-this-very-test");
        let files = tls::tests::localhost_identity(&dir);
        let stop = CancellationToken::new();
        let _stop_at_end = stop.clone().drop_guard();
        let expected = good.clone();
        let guard = Guard::new(move |given| expected.matches(given?).then_some(()));
        let any: ListenAddr = "127.0.0.1:0".parse().unwrap();
        let socket = ListenAddr::Unix(dir.path().join("brain.sock"));
        let server_tls = tls::server(&files, None).unwrap();
        let client_tls = tls::client(&files.cert).unwrap();
        let plain = serve(any.clone(), guard.clone(), None, stop.clone())
            .await
            .to_string();
        let unix = serve(socket, guard.clone(), None, stop.clone())
            .await
            .to_string();
        let secure = serve(any, guard, Some(server_tls), stop.clone())
            .await
            .to_string();
        let secure = format!("https://{secure}");
        for (addr, tls) in [(plain, None), (unix, None), (secure, Some(client_tls))] {
            let options = |token| ConnectOptions {
                token,
                tls: tls.clone(),
                silence: None,
            };
            check(&addr, options(Some(good.clone()))).await.unwrap();
            for refused in [None, Some(bad.clone())] {
                let status = check(&addr, options(refused)).await.unwrap_err();
                assert_eq!(status.code(), Code::Unauthenticated, "{addr}: {status}");
            }
        }
    }

    #[tokio::test]
    async fn a_peer_that_falls_silent_is_the_call_s_error() {
        // The system takes the connection, and nobody ever reads from it.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let options = ConnectOptions {
            silence: Some(Duration::from_millis(100)),
            ..ConnectOptions::default()
        };
        let address = silent.local_addr().unwrap().to_string();
        let status = check(&address, options).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert_eq!(crate::status::retry(&status), crate::status::Retry::Later);
    }

    #[tokio::test]
    async fn a_brain_that_is_away_is_the_call_s_error() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = free.local_addr().unwrap().to_string();
        drop(free);
        let status = check(&addr, ConnectOptions::default()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert_eq!(crate::status::retry(&status), crate::status::Retry::Later);
    }
}
