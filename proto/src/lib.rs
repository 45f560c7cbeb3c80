//! The contract between `brain` and its clients: the generated gRPC types.

/// `marathon.brain.v1`: messages, client and server of the Brain service.
pub mod brain {
    #![allow(missing_docs, unreachable_pub, clippy::all)]
    tonic::include_proto!("marathon.brain.v1");
}

/// The encoded `FileDescriptorSet` of every proto file, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
