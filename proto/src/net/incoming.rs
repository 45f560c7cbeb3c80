//! Connections as a server takes them: a bounded number at a time, over TLS or not, each ready to be
//! spoken with, and none held for a peer that says nothing.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_core::Stream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{Sleep, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls, server::TlsStream};
use tokio_util::sync::PollSemaphore;
use tonic::transport::server::Connected;

use super::listen::Listener;

/// Connections of one listener at a time; more wait in the system's queue.
const MAX_CONNECTIONS: usize = 4096;

/// Time for a TLS handshake, and then for a peer's first [`OPENING`] bytes.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that a peer sends before anything is done for it: HTTP/2's preface. A request of HTTP/1.1
/// has about as many. Whoever sent them is watched by the protocol's own time limits.
const OPENING: usize = 24;

/// A pause after the system refused a connection: it has no descriptor left, say, and asking again
/// at once would keep a core busy.
const BREATH: Duration = Duration::from_millis(50);

/// Connections of a listener, in the order in which they are ready. Never ends and never fails.
pub struct Incoming {
    listener: Listener,
    tls: Option<TlsAcceptor>,
    patience: Duration,
    places: PollSemaphore,
    /// For the next connection.
    place: Option<OwnedSemaphorePermit>,
    pause: Option<Pin<Box<Sleep>>>,
    handshakes: JoinSet<Option<Connection>>,
}

impl Incoming {
    /// The connections of `listener`, over TLS if there is a configuration of it.
    pub(super) fn new(listener: Listener, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        Self::bounded(listener, tls, MAX_CONNECTIONS, PATIENCE)
    }

    fn bounded(
        listener: Listener,
        tls: Option<Arc<rustls::ServerConfig>>,
        connections: usize,
        patience: Duration,
    ) -> Self {
        Self {
            listener,
            tls: tls.map(TlsAcceptor::from),
            patience,
            places: PollSemaphore::new(Arc::new(Semaphore::new(connections))),
            place: None,
            pause: None,
            handshakes: JoinSet::new(),
        }
    }

    fn poll_accept(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<(Socket, Option<OwnedSemaphorePermit>)> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            if self.place.is_none() {
                // Nobody closes the semaphore; a connection without a place would only be uncounted.
                self.place = ready!(self.places.poll_acquire(cx));
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok(socket) => return Poll::Ready((socket, self.place.take())),
                Err(error) => {
                    tracing::debug!(%error, "a connection was not taken");
                    self.pause = Some(Box::pin(sleep(BREATH)));
                }
            }
        }
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            match this.handshakes.poll_join_next(cx) {
                Poll::Ready(Some(Ok(Some(connection)))) => {
                    return Poll::Ready(Some(Ok(connection)));
                }
                Poll::Ready(Some(_)) => continue,
                Poll::Ready(None) | Poll::Pending => {}
            }
            let (socket, place) = ready!(this.poll_accept(cx));
            let patience = this.patience;
            let Some(tls) = this.tls.clone() else {
                let connection = Connection::new(Channel::Plain(socket), patience, place);
                return Poll::Ready(Some(Ok(connection)));
            };
            this.handshakes.spawn(async move {
                let stream = handshake(&tls, socket, patience).await?;
                let channel = Channel::Tls(Box::new(stream));
                Some(Connection::new(channel, patience, place))
            });
        }
    }
}

async fn handshake(
    tls: &TlsAcceptor,
    socket: Socket,
    patience: Duration,
) -> Option<TlsStream<Socket>> {
    match timeout(patience, tls.accept(socket)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("a TLS handshake was not done in time");
            None
        }
    }
}

/// One connection. It has one of its listener's places until it is dropped.
#[derive(Debug)]
pub struct Connection {
    channel: Channel,
    peer: Option<SocketAddr>,
    opening: Option<Opening>,
    _place: Option<OwnedSemaphorePermit>,
}

/// Bytes that are still to come, and until when.
#[derive(Debug)]
struct Opening {
    left: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    fn new(channel: Channel, patience: Duration, place: Option<OwnedSemaphorePermit>) -> Self {
        let socket = match &channel {
            Channel::Plain(socket) => socket,
            Channel::Tls(stream) => stream.get_ref().0,
        };
        Self {
            peer: match socket {
                Socket::Tcp(stream) => stream.peer_addr().ok(),
                Socket::Unix(_) => None,
            },
            channel,
            opening: Some(Opening {
                left: OPENING,
                deadline: Box::pin(sleep(patience)),
            }),
            _place: place,
        }
    }
}

impl Connected for Connection {
    /// The peer's address; `None` over a unix socket.
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.peer
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = match &mut this.channel {
            Channel::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Channel::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        let Some(opening) = &mut this.opening else {
            return read;
        };
        if read.is_pending() {
            ready!(opening.deadline.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        opening.left = opening.left.saturating_sub(buf.filled().len() - before);
        if opening.left == 0 {
            this.opening = None;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().channel {
            Channel::Plain(socket) => Pin::new(socket).poll_write(cx, buf),
            Channel::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().channel {
            Channel::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Channel::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().channel {
            Channel::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Channel::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[derive(Debug)]
enum Channel {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

/// What the system hands over.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::{net::ListenAddr, tls};

    /// Connections to a free port, and where that is.
    async fn listen(
        tls: Option<Arc<rustls::ServerConfig>>,
        connections: usize,
        patience: Duration,
    ) -> (Incoming, SocketAddr) {
        let any: ListenAddr = "127.0.0.1:0".parse().unwrap();
        let listener = any.bind().await.unwrap();
        let ListenAddr::Tcp(address) = listener.local_addr().unwrap() else {
            panic!("no port");
        };
        let incoming = Incoming::bounded(listener, tls, connections, patience);
        (incoming, address)
    }

    async fn next(incoming: &mut Incoming) -> Connection {
        let mut incoming = Pin::new(incoming);
        let next = poll_fn(|cx| incoming.as_mut().poll_next(cx)).await;
        next.unwrap().unwrap()
    }

    #[tokio::test]
    async fn more_connections_than_there_are_places_wait_for_one() {
        let (mut incoming, address) = listen(None, 2, PATIENCE).await;
        let mut peers = Vec::new();
        for _ in 0..3 {
            peers.push(TcpStream::connect(address).await.unwrap());
        }
        let first = next(&mut incoming).await;
        let _second = next(&mut incoming).await;
        let third = poll_fn(|cx| Poll::Ready(Pin::new(&mut incoming).poll_next(cx))).await;
        assert!(third.is_pending());
        drop(first);
        next(&mut incoming).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_begin_is_given_up_and_one_that_did_is_not() {
        let (mut incoming, address) = listen(None, 2, PATIENCE).await;
        for sent in [0, OPENING - 1, OPENING] {
            let mut peer = TcpStream::connect(address).await.unwrap();
            peer.write_all(&vec![7; sent]).await.unwrap();
            let mut connection = next(&mut incoming).await;
            connection.read_exact(&mut vec![0; sent]).await.unwrap();
            let mut more = [0];
            tokio::select! {
                // Time runs on its own here whenever nothing else does.
                read = connection.read(&mut more) => {
                    assert!(sent < OPENING, "{read:?} after {sent} bytes");
                    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
                }
                () = sleep(2 * PATIENCE) => assert_eq!(sent, OPENING),
            }
        }
    }

    fn tls_config() -> (
        tls::IdentityFiles,
        Arc<rustls::ServerConfig>,
        tempfile::TempDir,
    ) {
        let dir = tempfile::TempDir::new().unwrap();
        let files = tls::tests::localhost_identity(&dir);
        let config = tls::server(&files, None).unwrap();
        (files, config, dir)
    }

    #[tokio::test]
    async fn a_handshake_that_stands_still_holds_up_nobody() {
        let (files, config, _dir) = tls_config();
        let (mut incoming, address) = listen(Some(config), 2, PATIENCE).await;
        let _silent = TcpStream::connect(address).await.unwrap();
        let client = tls::tests::trusting(&files);
        let speaking = tokio::spawn(async move {
            let socket = TcpStream::connect(address).await.unwrap();
            let name = "localhost".try_into().unwrap();
            client.connect(name, socket).await.unwrap()
        });
        let mut connection = next(&mut incoming).await;
        let mut speaking = speaking.await.unwrap();
        speaking.write_all(b"hello").await.unwrap();
        let mut heard = [0; 5];
        connection.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"hello");
        assert_eq!(connection.connect_info().unwrap().ip(), address.ip());
    }

    #[tokio::test]
    async fn a_handshake_that_is_not_done_in_time_is_hung_up_on() {
        let (_, config, _dir) = tls_config();
        let patience = Duration::from_millis(20);
        let (mut incoming, address) = listen(Some(config), 1, patience).await;
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut nothing = [0];
        let hung_up = tokio::select! {
            read = silent.read(&mut nothing) => read,
            _ = next(&mut incoming) => panic!("nobody spoke"),
        };
        assert_eq!(hung_up.unwrap_or(0), 0);
    }
}
