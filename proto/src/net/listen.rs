//! Listening addresses: bind first, so that a taken port is an error before weights are loaded.

use std::{
    fmt, fs, io,
    net::{IpAddr, SocketAddr},
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
};

use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, UnixListener, UnixStream};

use super::incoming::{Incoming, Socket};

/// A TCP address or the path of a unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ListenAddr {
    /// `IP:PORT` or `localhost:PORT`; port 0 takes a free one.
    Tcp(SocketAddr),
    /// `unix:/path/to/socket`.
    Unix(PathBuf),
}

/// Why a server could not listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The text is no address.
    #[error("`{0}` is no address to listen on: write IP:PORT, localhost:PORT or unix:PATH")]
    Syntax(String),
    /// Another process has it.
    #[error("{0} is in use by another process: stop that process or choose another address")]
    InUse(ListenAddr),
    /// Reachable from other machines, without a secret.
    #[error("{0} can be reached from other machines: give a token file, or listen on 127.0.0.1")]
    Exposed(ListenAddr),
    /// Any other failure.
    #[error("cannot listen on {addr}: {source}")]
    Bind {
        /// The address asked for.
        addr: ListenAddr,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => addr.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for ListenAddr {
    type Err = ListenError;

    fn from_str(text: &str) -> Result<Self, ListenError> {
        let syntax = || ListenError::Syntax(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            let path = Path::new(path.strip_prefix("//").unwrap_or(path));
            return if path.is_absolute() {
                Ok(Self::Unix(path.to_owned()))
            } else {
                Err(syntax())
            };
        }
        if let Some(port) = text.strip_prefix("localhost:") {
            let port: u16 = port.parse().map_err(|_| syntax())?;
            return Ok(Self::Tcp(SocketAddr::from(([127, 0, 0, 1], port))));
        }
        text.parse().map(Self::Tcp).map_err(|_| syntax())
    }
}

impl TryFrom<String> for ListenAddr {
    type Error = ListenError;

    fn try_from(text: String) -> Result<Self, ListenError> {
        text.parse()
    }
}

impl From<ListenAddr> for String {
    fn from(addr: ListenAddr) -> Self {
        addr.to_string()
    }
}

impl ListenAddr {
    /// Whether only this machine can reach it.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(addr) => match addr.ip() {
                IpAddr::V4(ip) => ip.is_loopback(),
                IpAddr::V6(ip) => {
                    ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback())
                }
            },
            Self::Unix(_) => true,
        }
    }

    /// The rule of the house: an address that other machines can reach needs a token.
    ///
    /// # Errors
    /// [`ListenError::Exposed`] when it has none.
    pub fn check_exposure(&self, has_token: bool) -> Result<(), ListenError> {
        if has_token || self.is_local() {
            return Ok(());
        }
        Err(ListenError::Exposed(self.clone()))
    }

    /// Takes the address. A socket file that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// [`ListenError::InUse`] when another process has it, [`ListenError::Bind`] otherwise.
    pub async fn bind(&self) -> Result<Listener, ListenError> {
        let failed = |source: io::Error| {
            if source.kind() == io::ErrorKind::AddrInUse {
                return ListenError::InUse(self.clone());
            }
            ListenError::Bind {
                addr: self.clone(),
                source,
            }
        };
        match self {
            Self::Tcp(addr) => Ok(Listener::Tcp(
                TcpListener::bind(addr).await.map_err(failed)?,
            )),
            Self::Unix(path) => {
                remove_stale_socket(path).await.map_err(failed)?;
                let listener = UnixListener::bind(path).map_err(failed)?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
                Ok(Listener::Unix {
                    listener,
                    path: path.clone(),
                })
            }
        }
    }
}

async fn remove_stale_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {}
        // Not ours to remove; bind reports it.
        _ => return Ok(()),
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        _ => Ok(()),
    }
}

/// A bound address, not yet serving. A unix socket's file is removed with it.
#[derive(Debug)]
pub enum Listener {
    /// A TCP port.
    Tcp(TcpListener),
    /// A unix socket and its file.
    Unix {
        /// The socket.
        listener: UnixListener,
        /// Its file.
        path: PathBuf,
    },
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, .. } = self {
            // It may be gone already, which is what is wanted.
            let _ = fs::remove_file(path);
        }
    }
}

impl Listener {
    /// The address that was taken, with the real port.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn local_addr(&self) -> io::Result<ListenAddr> {
        match self {
            Self::Tcp(listener) => Ok(ListenAddr::Tcp(listener.local_addr()?)),
            Self::Unix { path, .. } => Ok(ListenAddr::Unix(path.clone())),
        }
    }

    /// The connections, over TLS if there is a configuration of it; for
    /// `serve_with_incoming_shutdown`, among others.
    pub fn incoming(self, tls: Option<Arc<rustls::ServerConfig>>) -> Incoming {
        Incoming::new(self, tls)
    }

    pub(super) fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Socket>> {
        match self {
            Self::Tcp(listener) => listener.poll_accept(cx).map(|accepted| {
                let (stream, _) = accepted?;
                // Tokens are small messages that must not wait for one another.
                stream.set_nodelay(true)?;
                Ok(Socket::Tcp(stream))
            }),
            Self::Unix { listener, .. } => listener
                .poll_accept(cx)
                .map(|accepted| Ok(Socket::Unix(accepted?.0))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> ListenAddr {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_parse_and_print() {
        for text in [
            "127.0.0.1:7411",
            "[::1]:0",
            "0.0.0.0:80",
            "unix:/run/brain/brain.sock",
        ] {
            assert_eq!(addr(text).to_string(), text);
        }
        assert_eq!(addr("localhost:7411"), addr("127.0.0.1:7411"));
        for text in [
            "",
            "7411",
            ":7411",
            "127.0.0.1",
            "example.org:80",
            "unix:",
            "unix:rel",
            "localhost:x",
        ] {
            let error = text.parse::<ListenAddr>().unwrap_err().to_string();
            assert!(error.contains("IP:PORT"), "{error}");
        }
    }

    #[test]
    fn only_a_reachable_address_needs_a_token() {
        for text in [
            "127.0.0.1:1",
            "127.9.9.9:1",
            "[::1]:1",
            "[::ffff:127.0.0.1]:1",
            "unix:/x",
        ] {
            addr(text).check_exposure(false).unwrap();
        }
        for text in ["0.0.0.0:1", "[::]:1", "192.168.0.7:1"] {
            assert!(matches!(
                addr(text).check_exposure(false),
                Err(ListenError::Exposed(_))
            ));
            addr(text).check_exposure(true).unwrap();
        }
    }

    #[tokio::test]
    async fn a_taken_port_says_so() {
        let first = addr("127.0.0.1:0").bind().await.unwrap();
        let error = first.local_addr().unwrap().bind().await.unwrap_err();
        assert!(matches!(error, ListenError::InUse(_)), "{error}");
    }

    #[tokio::test]
    async fn a_socket_file_is_private_reused_when_stale_and_removed_at_the_end() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("brain.sock");
        let wanted = ListenAddr::Unix(path.clone());
        // A process that was killed leaves its file behind.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = wanted.bind().await.unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(matches!(wanted.bind().await, Err(ListenError::InUse(_))));
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_plain_file_in_the_way_is_left_alone() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("precious");
        fs::write(&path, "data").unwrap();
        assert!(ListenAddr::Unix(path.clone()).bind().await.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }
}
