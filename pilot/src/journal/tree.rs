//! How a run's records lie in a sled tree, and the small values beside them.

use std::path::Path;

use sled::Tree;

use super::{Head, JournalError, Record, codec};
use crate::run::entry::RunId;

/// What names of trees with runs begin with.
pub(super) const RUN_PREFIX: &[u8] = b"run/";

/// Bytes of a record under one key. Sixteen of them, sled's largest page, stay inline.
pub(super) const CHUNK: usize = 4096;

/// Name of the tree that holds the records of `run`.
pub(super) fn name(run: &RunId) -> Vec<u8> {
    [RUN_PREFIX, run.as_str().as_bytes()].concat()
}

/// A record cut into what goes under one key each.
pub(super) fn chunks(sequence: u64, record: &[u8]) -> impl Iterator<Item = ([u8; 12], &[u8])> {
    (0_u32..)
        .zip(record.chunks(CHUNK))
        .map(move |(at, chunk)| (record_key(sequence, at), chunk))
}

/// Key of chunk `chunk` of record `sequence`.
pub(super) fn record_key(sequence: u64, chunk: u32) -> [u8; 12] {
    let mut key = [0; 12];
    key[..8].copy_from_slice(&sequence.to_be_bytes());
    key[8..].copy_from_slice(&chunk.to_be_bytes());
    key
}

fn decode_key(key: &[u8]) -> Option<(u64, u32)> {
    let (sequence, chunk) = key.split_at_checked(8)?;
    let sequence = u64::from_be_bytes(sequence.try_into().ok()?);
    Some((sequence, u32::from_be_bytes(chunk.try_into().ok()?)))
}

/// A head as it is stored, with a checksum.
pub(super) fn encode_head(head: Head) -> Vec<u8> {
    let mut bytes = head.next.to_le_bytes().to_vec();
    bytes.extend_from_slice(&head.hash);
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// The head that was stored, if these are its bytes.
pub(super) fn decode_head(bytes: &[u8]) -> Option<Head> {
    let bytes: &[u8; 44] = bytes.try_into().ok()?;
    if crc32c::crc32c(&bytes[..40]).to_le_bytes() != bytes[40..] {
        return None;
    }
    let mut hash = [0; 32];
    hash.copy_from_slice(&bytes[8..40]);
    Some(Head {
        next: u64::from_le_bytes(bytes[..8].try_into().ok()?),
        hash,
    })
}

/// A big-endian number of eight bytes.
pub(super) fn decode_u64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// How many records the tree holds, by its last key; `None`: the key is none of ours.
pub(super) fn count(tree: &Tree) -> sled::Result<Option<u64>> {
    Ok(match tree.last()? {
        None => Some(0),
        Some((key, _)) => decode_key(&key).map(|(sequence, _)| sequence.saturating_add(1)),
    })
}

/// A failure of sled while `doing` something with the store at `path`: damage if it says so, trouble
/// with the disk otherwise.
pub(super) fn failed(path: &Path, doing: &str, error: sled::Error) -> JournalError {
    match error {
        sled::Error::Corruption { .. } => JournalError::Damaged {
            path: path.to_owned(),
            what: format!("{doing}: sled finds corruption"),
        },
        other => JournalError::io(doing, other),
    }
}

/// Reads the records `0..count` of a run, verifying each. What is being written behind them is not
/// looked at.
pub(super) fn read_run(
    path: &Path,
    tree: &Tree,
    run: &RunId,
    count: u64,
) -> Result<(Vec<Record>, Head), JournalError> {
    let damaged = |what: String| JournalError::Damaged {
        path: path.to_owned(),
        what,
    };
    let mut head = Head::EMPTY;
    let mut records = Vec::new();
    let mut bytes: Vec<u8> = Vec::new();
    let mut expected = (0_u64, 0_u32);
    let mut finish = |bytes: &mut Vec<u8>, head: &mut Head| -> Result<(), JournalError> {
        let (record, next) =
            codec::decode(run, *head, bytes).map_err(|error| error.of_store(path))?;
        records.push(record);
        *head = next;
        bytes.clear();
        Ok(())
    };
    for item in tree.range(..record_key(count, 0)) {
        let (key, chunk) =
            item.map_err(|error| failed(path, &format!("reading run {run}"), error))?;
        let place = decode_key(&key).ok_or_else(|| damaged(format!("run {run}: an odd key")))?;
        if place.0 == expected.0 + 1 && place.1 == 0 && !bytes.is_empty() {
            finish(&mut bytes, &mut head)?;
            expected = (place.0, 0);
        }
        if place != expected {
            return Err(damaged(format!(
                "run {run}: record {} is missing",
                expected.0
            )));
        }
        bytes.extend_from_slice(&chunk);
        expected.1 += 1;
    }
    if !bytes.is_empty() {
        finish(&mut bytes, &mut head)?;
    }
    if head.next != count {
        return Err(damaged(format!(
            "run {run} has {} records of {count}",
            head.next
        )));
    }
    Ok((records, head))
}
