//! The frame around each entry: who wrote it, where it belongs, and how to tell that it is whole.
//!
//! All integers are little-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic `MRec` |
//! | 4 | version of this frame |
//! | 5 | version of the entry's encoding |
//! | 6..8 | zero |
//! | 8..16 | sequence in the run, from 0 |
//! | 16..24 | epoch: which opening of the store wrote it |
//! | 24..32 | wall clock, milliseconds since 1970 |
//! | 32..64 | BLAKE3 of the run's previous record (zeros for the first) |
//! | 64..80 | first half of the BLAKE3 of the run id |
//! | 80..84 | payload length |
//! | 84.. | payload: postcard of the entry |
//! | last 4 | CRC32C of everything before |
//!
//! The hash chain ties each record to all before it; the CRC tells damage from a wrong order.

use std::path::Path;

use super::{Head, JournalError, Record};
use crate::run::entry::{ENTRY_VERSION, Entry, RunId};

const MAGIC: [u8; 4] = *b"MRec";
const FRAME_VERSION: u8 = 1;
const HEADER: usize = 84;
const TRAILER: usize = 4;

/// Largest payload, in bytes. Tools cap their results far below.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// What sets a record apart besides its entry.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// Which opening of the store writes.
    pub epoch: u64,
    /// Wall clock, milliseconds since 1970.
    pub wall_ms: u64,
}

/// Why bytes are not the record that was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// Not what was written.
    #[error("{0}")]
    Damaged(String),
    /// Written by a newer pilot.
    #[error("{0}")]
    Newer(String),
    /// The payload is over [`MAX_PAYLOAD`].
    #[error("a payload of {0} bytes is too large")]
    TooLarge(usize),
    /// The entry cannot be encoded.
    #[error("cannot encode: {0}")]
    Unencodable(String),
}

impl CodecError {
    /// The same in the terms of a store at `path`.
    pub(super) fn of_store(self, path: &Path) -> JournalError {
        let path = path.to_owned();
        match self {
            Self::Damaged(what) => JournalError::Damaged { path, what },
            Self::Newer(what) => JournalError::Newer { path, what },
            Self::TooLarge(size) => JournalError::TooLarge {
                size,
                limit: MAX_PAYLOAD,
            },
            Self::Unencodable(reason) => JournalError::io("encoding an entry", reason),
        }
    }
}

/// Encodes `entry` as the record that follows `head`. Returns the bytes and the head after it.
pub fn encode(
    run: &RunId,
    head: Head,
    stamp: Stamp,
    entry: &Entry,
) -> Result<(Vec<u8>, Head), CodecError> {
    let payload =
        postcard::to_stdvec(entry).map_err(|error| CodecError::Unencodable(error.to_string()))?;
    if payload.len() > MAX_PAYLOAD {
        return Err(CodecError::TooLarge(payload.len()));
    }
    let mut bytes = Vec::with_capacity(HEADER + payload.len() + TRAILER);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[FRAME_VERSION, entry.version(), 0, 0]);
    bytes.extend_from_slice(&head.next.to_le_bytes());
    bytes.extend_from_slice(&stamp.epoch.to_le_bytes());
    bytes.extend_from_slice(&stamp.wall_ms.to_le_bytes());
    bytes.extend_from_slice(&head.hash);
    bytes.extend_from_slice(&run_tag(run));
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&payload);
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    let hash = *blake3::hash(&bytes).as_bytes();
    Ok((
        bytes,
        Head {
            next: head.next + 1,
            hash,
        },
    ))
}

/// Decodes the record that is to follow `head`, checking everything. Returns it and the head after.
pub fn decode(run: &RunId, head: Head, bytes: &[u8]) -> Result<(Record, Head), CodecError> {
    let damaged =
        |what: &str| CodecError::Damaged(format!("record {} of run {run}: {what}", head.next));
    if bytes.len() < HEADER + TRAILER {
        return Err(damaged(&format!("only {} bytes", bytes.len())));
    }
    if bytes[..4] != MAGIC {
        return Err(damaged("no record begins like this"));
    }
    if bytes[4] > FRAME_VERSION {
        return Err(CodecError::Newer(format!("frame version {}", bytes[4])));
    }
    let (body, crc) = bytes.split_at(bytes.len() - TRAILER);
    if crc32c::crc32c(body).to_le_bytes() != crc {
        return Err(damaged("its checksum does not fit"));
    }
    let found = u64_at(body, 8);
    if found != head.next {
        return Err(damaged(&format!("it says that it is number {found}")));
    }
    if body[64..80] != run_tag(run) {
        return Err(damaged("it belongs to another run"));
    }
    if body[32..64] != head.hash {
        return Err(damaged("it does not follow the record before it"));
    }
    let payload = &body[HEADER..];
    if u32_at(body, 80) as usize != payload.len() {
        return Err(damaged("its length does not fit"));
    }
    if body[5] > ENTRY_VERSION {
        return Err(CodecError::Newer(format!("entry version {}", body[5])));
    }
    let (entry, rest) = postcard::take_from_bytes::<Entry>(payload)
        .map_err(|error| damaged(&format!("its entry cannot be read ({error})")))?;
    if !rest.is_empty() {
        return Err(damaged("bytes follow its entry"));
    }
    let record = Record {
        sequence: head.next,
        epoch: u64_at(body, 16),
        wall_ms: u64_at(body, 24),
        entry,
    };
    Ok((
        record,
        Head {
            next: head.next + 1,
            hash: *blake3::hash(bytes).as_bytes(),
        },
    ))
}

fn run_tag(run: &RunId) -> [u8; 16] {
    let mut tag = [0; 16];
    tag.copy_from_slice(&blake3::hash(run.as_str().as_bytes()).as_bytes()[..16]);
    tag
}

/// `at + 8` must be inside `bytes`.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// `at + 4` must be inside `bytes`.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAMP: Stamp = Stamp {
        epoch: 3,
        wall_ms: 1_700_000_000_000,
    };

    fn run() -> RunId {
        RunId::new("run-1").unwrap()
    }

    fn tokens(index: u32, ids: Vec<u32>) -> Entry {
        Entry::TokensReceived { index, ids }
    }

    #[test]
    fn another_runs_record_does_not_pass() {
        let (bytes, _) = encode(&run(), Head::EMPTY, STAMP, &tokens(0, vec![1])).unwrap();
        let other = RunId::new("run-2").unwrap();
        let error = decode(&other, Head::EMPTY, &bytes).unwrap_err().to_string();
        assert!(error.contains("another run"), "{error}");
    }

    #[test]
    fn newer_versions_are_told_from_damage() {
        let (bytes, _) = encode(&run(), Head::EMPTY, STAMP, &tokens(0, vec![1])).unwrap();
        let mut newer = bytes.clone();
        newer[5] = ENTRY_VERSION + 1;
        let end = newer.len() - TRAILER;
        let crc = crc32c::crc32c(&newer[..end]);
        newer[end..].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(
            decode(&run(), Head::EMPTY, &newer),
            Err(CodecError::Newer(_))
        ));
        let mut frame = bytes;
        frame[4] = FRAME_VERSION + 1;
        assert!(matches!(
            decode(&run(), Head::EMPTY, &frame),
            Err(CodecError::Newer(_))
        ));
    }

    #[test]
    fn oversized_entries_are_refused_before_they_are_written() {
        let entry = Entry::Finished {
            summary: "x".repeat(MAX_PAYLOAD),
        };
        assert!(matches!(
            encode(&run(), Head::EMPTY, STAMP, &entry),
            Err(CodecError::TooLarge(_))
        ));
    }

    proptest! {
        #[test]
        fn records_come_back_and_chain(all in proptest::collection::vec(
            (any::<u32>(), proptest::collection::vec(any::<u32>(), 0..40)), 1..20)) {
            let mut head = Head::EMPTY;
            let mut stored = Vec::new();
            for (index, ids) in &all {
                let (bytes, next) = encode(&run(), head, STAMP, &tokens(*index, ids.clone())).unwrap();
                stored.push(bytes);
                head = next;
            }
            let mut read = Head::EMPTY;
            for (at, bytes) in stored.iter().enumerate() {
                let (record, next) = decode(&run(), read, bytes).unwrap();
                prop_assert_eq!(record.sequence, at as u64);
                prop_assert_eq!(record.entry, tokens(all[at].0, all[at].1.clone()));
                read = next;
            }
            prop_assert_eq!(read, head);
            if stored.len() > 1 {
                prop_assert!(decode(&run(), Head::EMPTY, &stored[1]).is_err());
            }
        }

        #[test]
        fn any_flipped_bit_or_cut_is_an_error(
            ids in proptest::collection::vec(any::<u32>(), 0..60),
            place in any::<prop::sample::Index>(),
            bit in 0_u8..8,
        ) {
            let (bytes, _) = encode(&run(), Head::EMPTY, STAMP, &tokens(0, ids)).unwrap();
            let mut flipped = bytes.clone();
            let at = place.index(bytes.len());
            flipped[at] ^= 1 << bit;
            prop_assert!(decode(&run(), Head::EMPTY, &flipped).is_err());
            prop_assert!(decode(&run(), Head::EMPTY, &bytes[..at]).is_err());
        }

        #[test]
        fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(decode(&run(), Head::EMPTY, &noise).is_err());
        }

        #[test]
        fn noise_behind_a_good_frame_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (mut bytes, _) = encode(&run(), Head::EMPTY, STAMP, &tokens(0, vec![])).unwrap();
            bytes.truncate(HEADER);
            bytes[80..84].copy_from_slice(&(noise.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&noise);
            let crc = crc32c::crc32c(&bytes);
            bytes.extend_from_slice(&crc.to_le_bytes());
            let _ = decode(&run(), Head::EMPTY, &bytes);
        }
    }
}
