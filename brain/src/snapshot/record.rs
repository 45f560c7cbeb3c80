//! Records that are appended to a file: each is its length and its CRC-32C (u32 each, little
//! endian), then postcard. A process that was killed may have left half a record at the end; what
//! comes before it counts.

use std::io::{self, Write};

use serde::{Serialize, de::DeserializeOwned};

/// Appends a record: it survives the process, though not a power cut.
///
/// # Errors
/// The system's. What was appended before stands.
pub(super) fn append(file: &mut impl Write, record: &impl Serialize) -> io::Result<()> {
    file.write_all(&framed(record)?)
}

/// A record as it stands in a file.
pub(super) fn framed(record: &impl Serialize) -> io::Result<Vec<u8>> {
    let payload = postcard::to_stdvec(record).map_err(io::Error::other)?;
    let mut bytes = Vec::with_capacity(8 + payload.len());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(crc32c::crc32c(&payload).to_le_bytes());
    bytes.extend(payload);
    Ok(bytes)
}

/// Takes the next whole record off; `None` behind the last one.
pub(super) fn next<T: DeserializeOwned>(rest: &mut &[u8]) -> Option<T> {
    let (length, behind) = rest.split_first_chunk::<4>()?;
    let (crc, behind) = behind.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let (payload, behind) = behind.split_at_checked(length)?;
    if crc32c::crc32c(payload) != u32::from_le_bytes(*crc) {
        return None;
    }
    *rest = behind;
    postcard::from_bytes(payload).ok()
}
