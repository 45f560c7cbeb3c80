//! The hash of a shard, taken from the bytes as they are handed to the file, and held against what
//! the file has when a run goes on.
//!
//! Threads write the tensors of a shard in any order, so each tensor is hashed by itself; the
//! seal is the hash of the header and of those hashes in the order of the layout.

use std::{fs::File, io, os::unix::fs::FileExt as _, path::Path};

use super::layout::{Job, Output, Shard};
use crate::model::{file, spread::spread};

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// Hashes the tensors of a job while they are written, each from its first byte to its last.
pub(super) struct Sealing<'a> {
    outputs: &'a [Output],
    hashers: Vec<blake3::Hasher>,
}

impl<'a> Sealing<'a> {
    pub(super) fn new(job: &'a Job) -> Self {
        Self {
            outputs: &job.outputs,
            hashers: vec![blake3::Hasher::new(); job.outputs.len()],
        }
    }

    /// Takes in what is written at `offset` of the file, which follows what was written of the
    /// same tensor before.
    pub(super) fn wrote(&mut self, offset: u64, bytes: &[u8]) {
        let within = |o: &Output| (o.offset..o.offset + o.bytes).contains(&offset);
        if let Some(i) = self.outputs.iter().position(within) {
            self.hashers[i].update(bytes);
        }
    }

    /// The hashes, in the order of the job's tensors.
    pub(super) fn finish(&self) -> Vec<blake3::Hash> {
        self.hashers.iter().map(blake3::Hasher::finalize).collect()
    }
}

/// The seal of a shard: of its header, and of its tensors' hashes in the order of its jobs.
pub(super) fn seal(header: &[u8], tensors: impl IntoIterator<Item = blake3::Hash>) -> String {
    let mut hash = blake3::Hasher::new_derive_key("marathon brain quantized shard v1");
    hash.update(blake3::hash(header).as_bytes());
    for tensor in tensors {
        hash.update(tensor.as_bytes());
    }
    hash.finalize().to_hex().to_string()
}

/// Reads the file of a shard: whether it has the length of the layout and this seal.
/// `advance` hears how many bytes were read.
pub(super) fn holds(
    folder: &Path,
    shard: &Shard,
    expected: &str,
    advance: &(dyn Fn(u64) + Sync),
) -> bool {
    let read = || -> io::Result<bool> {
        let file = file::open(&folder.join(&shard.file))?;
        if file.metadata()?.len() != shard.bytes {
            return Ok(false);
        }
        let mut header = vec![0; shard.header.len()];
        file.read_exact_at(&mut header, 0)?;
        let outputs: Vec<&Output> = shard.jobs.iter().flat_map(|j| &j.outputs).collect();
        let tensors = spread(&outputs, |o| hash_of(&file, o, advance));
        let tensors = tensors.into_iter().collect::<io::Result<Vec<_>>>()?;
        Ok(seal(&header, tensors) == expected)
    };
    // What cannot be read is not what it should be: it is made again, which then says why not.
    read().unwrap_or(false)
}

fn hash_of(
    file: &File,
    output: &Output,
    advance: &(dyn Fn(u64) + Sync),
) -> io::Result<blake3::Hash> {
    let mut hash = blake3::Hasher::new();
    let (mut at, end) = (output.offset, output.offset + output.bytes);
    let mut piece = vec![0; PIECE];
    while at < end {
        let length = usize::try_from(end - at).map_or(PIECE, |left| left.min(PIECE));
        file.read_exact_at(&mut piece[..length], at)?;
        hash.update(&piece[..length]);
        at += length as u64;
        advance(length as u64);
    }
    Ok(hash.finalize())
}
