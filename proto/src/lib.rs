//! The contract between `brain` and its clients, and what both programs must do alike.
//!
//! The generated gRPC types are in [`brain`]. The other modules are small and independent: each
//! holds one thing that would be wrong if the two programs did it differently.

pub mod auth;
pub mod net;
pub mod shutdown;
pub mod status;
pub mod telemetry;
pub mod tls;
pub mod trace;

/// `marathon.brain.v1`: messages, client and server of the Brain service.
pub mod brain {
    #![allow(missing_docs, unreachable_pub, clippy::all)]
    tonic::include_proto!("marathon.brain.v1");
}

/// The encoded `FileDescriptorSet` of every proto file, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
