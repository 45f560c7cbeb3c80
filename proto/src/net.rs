//! Where a server listens and how a client reaches it.

mod connect;
mod incoming;
mod listen;

pub use connect::{BrainChannel, ConnectError, ConnectOptions, Outgoing, RemoteAddr, channel};
pub use incoming::{Connection, Incoming};
pub use listen::{ListenAddr, ListenError, Listener};

use std::time::Duration;

/// Largest message accepted in either direction, in bytes. A prompt of a million tokens as
/// varints is under 4 MiB; text prompts of the same length stay under 16 MiB.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Either side asks "are you there?" after this much silence…
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// …and gives the connection up after this much more, so that a half-open link is noticed.
pub(crate) const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A gRPC server with the limits both programs' servers have: HTTP/2 keepalive (a dead peer frees
/// its streams), bounded streams per connection and bounded header lists.
pub fn server() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(256)
        .http2_max_header_list_size(16 << 10)
}
