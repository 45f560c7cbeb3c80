//! One snapshot file: a header that says what it is, then bytes with their hash.
//!
//! ```text
//! magic, 8 bytes | header length, u32 | CRC-32C of the header, u32 | header | data
//! ```
//! Numbers are little endian; the header is postcard. A file is written under another name, made
//! durable and moved into place: under its own name it is whole, or the disk is at fault.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::Identity;
use crate::sched::{image::AnchorImage, tokens::PrefixKey};

const MAGIC: &[u8; 8] = b"MBRAINKV";
const LARGEST_HEADER: u32 = 64 << 20;

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Units that follow each other; their blocks, in order.
    Units {
        /// What comes before the first; `None` for the beginning of a prompt.
        parent: Option<PrefixKey>,
        /// Their keys.
        keys: Vec<PrefixKey>,
    },
    /// The blocks of an anchor's tail, then those of its window.
    Anchor(AnchorImage),
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    identity: Identity,
    content: Content,
    data_len: u64,
    data_hash: [u8; 32],
}

/// A file that is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system's own.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Its bytes are wrong.
    #[error("{0}")]
    Damaged(&'static str),
    /// It belongs to another model, or to another shape of the same.
    #[error("it belongs to another model or layout")]
    Foreign,
    /// It is not there any more.
    #[error("it was given up to keep the quota")]
    Gone,
}

impl FileError {
    /// Whether the file itself is at fault, and not the system that was asked for it.
    pub fn is_the_files(&self) -> bool {
        match self {
            Self::Damaged(_) | Self::Foreign => true,
            Self::Io(_) | Self::Gone => false,
        }
    }
}

/// What a file that ends too soon is; other errors are the system's.
fn cut_off(error: io::Error, what: &'static str) -> FileError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => FileError::Damaged(what),
        _ => FileError::Io(error),
    }
}

/// Writes a file, whole or not at all. Returns its length.
///
/// # Errors
/// The system's, such as a full disk. Nothing is left behind then.
pub fn write(path: &Path, identity: &Identity, content: &Content, data: &[u8]) -> io::Result<u64> {
    let header = Header {
        identity: identity.clone(),
        content: content.clone(),
        data_len: data.len() as u64,
        data_hash: *blake3::hash(data).as_bytes(),
    };
    let header = postcard::to_stdvec(&header).map_err(io::Error::other)?;
    let partial = path.with_extension("part");
    if let Err(error) =
        write_parts(&partial, &header, data).and_then(|()| fs::rename(&partial, path))
    {
        // What is there of it is of no use; the first error is what matters.
        let _ = fs::remove_file(&partial);
        return Err(error);
    }
    Ok((MAGIC.len() + 8 + header.len() + data.len()) as u64)
}

fn write_parts(path: &Path, header: &[u8], data: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(MAGIC)?;
    file.write_all(&(header.len() as u32).to_le_bytes())?;
    file.write_all(&crc32c::crc32c(header).to_le_bytes())?;
    file.write_all(header)?;
    file.write_all(data)?;
    file.sync_data()
}

/// Reads what a file holds, without its data.
///
/// # Errors
/// [`FileError`] when it is not a whole file of this identity.
pub fn read_header(path: &Path, identity: &Identity) -> Result<Content, FileError> {
    let (header, _) = open(path, identity)?;
    Ok(header.content)
}

/// Reads a file and checks every byte of it.
///
/// # Errors
/// [`FileError`] when it is not a whole file of this identity.
pub fn read(path: &Path, identity: &Identity) -> Result<(Content, Vec<u8>), FileError> {
    let (header, mut file) = open(path, identity)?;
    let mut data = Vec::with_capacity(usize::try_from(header.data_len).unwrap_or(0));
    file.read_to_end(&mut data)?;
    if data.len() as u64 != header.data_len {
        return Err(FileError::Damaged("its length is wrong"));
    }
    if *blake3::hash(&data).as_bytes() != header.data_hash {
        return Err(FileError::Damaged("its bytes do not have their hash"));
    }
    Ok((header.content, data))
}

fn open(path: &Path, identity: &Identity) -> Result<(Header, File), FileError> {
    let mut file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FileError::Gone,
        _ => FileError::Io(error),
    })?;
    let mut fixed = [0; 16];
    file.read_exact(&mut fixed)
        .map_err(|error| cut_off(error, "it is too short"))?;
    let word = |at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(&fixed[at..at + 4]);
        u32::from_le_bytes(word)
    };
    if &fixed[..8] != MAGIC {
        return Err(FileError::Damaged("it is no snapshot file"));
    }
    let (length, crc) = (word(8), word(12));
    let left = file.metadata()?.len().saturating_sub(fixed.len() as u64);
    if length > LARGEST_HEADER || u64::from(length) > left {
        return Err(FileError::Damaged("its header is cut off"));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact(&mut bytes)
        .map_err(|error| cut_off(error, "its header is cut off"))?;
    if crc32c::crc32c(&bytes) != crc {
        return Err(FileError::Damaged("its header does not have its checksum"));
    }
    let header: Header = postcard::from_bytes(&bytes)
        .map_err(|_| FileError::Damaged("its header cannot be understood"))?;
    if header.identity != *identity {
        return Err(FileError::Foreign);
    }
    if left - u64::from(length) != header.data_len {
        return Err(FileError::Damaged("its length is wrong"));
    }
    Ok((header, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            fingerprint: "f".into(),
            layout: "l".into(),
        }
    }

    fn content() -> Content {
        Content::Units {
            parent: None,
            keys: vec![PrefixKey::root("a", "b", "c")],
        }
    }

    #[test]
    fn what_was_written_is_read_and_every_changed_byte_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("units-a.kv");
        let length = write(&path, &identity(), &content(), b"some blocks").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), length);
        let (read_content, data) = read(&path, &identity()).unwrap();
        assert_eq!((read_content, &data[..]), (content(), &b"some blocks"[..]));
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x20;
            fs::write(&path, &damaged).unwrap();
            assert!(read(&path, &identity()).is_err(), "byte {at}");
            fs::write(&path, &bytes[..at]).unwrap();
            assert!(read(&path, &identity()).is_err(), "cut at {at}");
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        assert!(read_header(&path, &identity()).is_err(), "a byte too many");
    }

    #[test]
    fn a_file_of_another_model_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("units-a.kv");
        write(&path, &identity(), &content(), b"some blocks").unwrap();
        let other = Identity {
            fingerprint: "g".into(),
            ..identity()
        };
        assert!(matches!(read(&path, &other), Err(FileError::Foreign)));
    }

    #[test]
    fn a_disk_that_takes_nothing_leaves_nothing() {
        // A device that is always full stands in for a full disk.
        let full = write_parts(Path::new("/dev/full"), b"header", b"data").unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("units-a.kv");
        fs::create_dir_all(taken.join("in the way")).unwrap();
        assert!(write(&taken, &identity(), &content(), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
