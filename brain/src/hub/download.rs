//! One file from the hub into the cache: whole and checked, or not there.
//!
//! The bytes go into `ETAG.incomplete`; a later attempt, of this program or of Python's, goes on
//! where it ends. Only what has the announced size, and the hash if the ETag is one that can be
//! checked, becomes a blob.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    path::Path,
};

use reqwest::{StatusCode, header};
use ring::digest;

use super::{
    HubError, ModelName,
    cache::RepoCache,
    client::{Client, Failure, RemoteFile, unreachable},
    error::io as io_error,
    progress::Progress,
};
use crate::model::file;

/// A file to fetch.
pub(super) struct Fetch<'a> {
    pub(super) client: &'a Client,
    pub(super) cache: &'a RepoCache,
    pub(super) name: &'a ModelName,
    pub(super) commit: &'a str,
    pub(super) file: &'a str,
    pub(super) remote: &'a RemoteFile,
    pub(super) progress: &'a Progress,
}

/// The hash that an ETag promises.
enum Check {
    /// SHA-256 of the content.
    Sha256,
    /// Git's hash of the content as a blob.
    Git,
    /// None that can be checked.
    Nothing,
}

impl Check {
    fn of(etag: &str) -> Self {
        let hex = etag
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        match etag.len() {
            64 if hex => Self::Sha256,
            40 if hex => Self::Git,
            _ => Self::Nothing,
        }
    }

    fn start(&self, size: u64) -> Option<digest::Context> {
        match self {
            Self::Sha256 => Some(digest::Context::new(&digest::SHA256)),
            Self::Git => {
                let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Some(context)
            }
            Self::Nothing => None,
        }
    }
}

/// What has come of a file so far.
struct Partial {
    file: File,
    have: u64,
    hash: Option<digest::Context>,
    /// More came than was announced.
    too_long: bool,
}

impl Partial {
    fn open(path: &Path, remote: &RemoteFile) -> std::io::Result<Self> {
        let mut file = file::open_to_append(path)?;
        let mut have = file.metadata()?.len();
        let mut hash = Check::of(&remote.etag).start(remote.size);
        if have > remote.size {
            file.set_len(0)?;
            have = 0;
        }
        if let Some(hash) = hash.as_mut() {
            let mut buffer = vec![0; 1 << 20];
            let mut left = have;
            while left > 0 {
                let most = buffer
                    .len()
                    .min(usize::try_from(left).unwrap_or(usize::MAX));
                let read = file.read(&mut buffer[..most])?;
                if read == 0 {
                    break;
                }
                hash.update(&buffer[..read]);
                left -= read as u64;
            }
        }
        Ok(Self {
            file,
            have,
            hash,
            too_long: false,
        })
    }
}

impl Fetch<'_> {
    /// Fetches the file and links it into the snapshot.
    pub(super) async fn run(&self) -> Result<(), HubError> {
        let RemoteFile { etag, size, .. } = self.remote;
        let blob = self.cache.blob(etag);
        let is_whole = || fs::metadata(&blob).is_ok_and(|found| found.len() == *size);
        if is_whole() {
            self.progress.kept(*size);
            return self.cache.link(self.commit, self.file, etag);
        }
        let lock = {
            let (cache, etag) = (self.cache.clone(), etag.clone());
            let (note, noted) = tokio::sync::oneshot::channel();
            let waiting = tokio::task::spawn_blocking(move || {
                cache.lock(&etag, || {
                    // Nobody listens any more when the fetch was given up.
                    let _ = note.send(());
                })
            });
            if noted.await.is_ok() {
                let text = format!("another program is fetching {}; waiting for it", self.file);
                self.progress.note(&text);
            }
            waiting.await.map_err(|error| HubError::Io {
                action: "lock",
                path: blob.clone(),
                source: std::io::Error::other(error),
            })??
        };
        if is_whole() {
            self.progress.kept(*size);
        } else {
            self.fetch(&blob).await?;
        }
        drop(lock);
        self.cache.link(self.commit, self.file, etag)
    }

    async fn fetch(&self, blob: &Path) -> Result<(), HubError> {
        let incomplete = self.cache.incomplete(&self.remote.etag);
        let mut partial = self.open(&incomplete).await?;
        let mut resumed = partial.have > 0;
        loop {
            self.fill(&mut partial, &incomplete).await?;
            match self.mismatch(&mut partial) {
                None => break,
                Some(_) if resumed => {
                    // What was there before was not the beginning of this file.
                    self.restart(&mut partial, &incomplete)?;
                    resumed = false;
                }
                Some(problem) => {
                    // The next attempt must not go on from this.
                    self.restart(&mut partial, &incomplete)?;
                    return Err(HubError::Damaged {
                        repository: self.name.repository().to_owned(),
                        file: self.file.to_owned(),
                        problem,
                    });
                }
            }
        }
        partial
            .file
            .sync_all()
            .map_err(|error| io_error("write", &incomplete, error))?;
        fs::rename(&incomplete, blob).map_err(|error| io_error("write", blob, error))
    }

    /// Opens what an earlier attempt left and hashes it, beside the other downloads: it may be many
    /// gigabytes.
    async fn open(&self, path: &Path) -> Result<Partial, HubError> {
        let (remote, at) = (self.remote.clone(), path.to_owned());
        let opening = tokio::task::spawn_blocking(move || {
            Partial::open(&at, &remote).map_err(|error| io_error("open", &at, error))
        });
        let partial = opening
            .await
            .map_err(|error| io_error("open", path, std::io::Error::other(error)))??;
        self.progress.kept(partial.have);
        Ok(partial)
    }

    /// Throws away what has come.
    fn restart(&self, partial: &mut Partial, path: &Path) -> Result<(), HubError> {
        self.progress.lost(partial.have);
        partial
            .file
            .set_len(0)
            .map_err(|error| io_error("write", path, error))?;
        partial.have = 0;
        partial.too_long = false;
        partial.hash = Check::of(&self.remote.etag).start(self.remote.size);
        Ok(())
    }

    /// Asks until every byte is there. An attempt that came further than all before is not counted.
    async fn fill(&self, partial: &mut Partial, path: &Path) -> Result<(), HubError> {
        let (mut attempt, mut furthest) = (0, partial.have);
        while partial.have < self.remote.size && !partial.too_long {
            match self.receive(partial, path).await {
                Ok(()) => return Ok(()),
                Err(failure) => {
                    attempt = match partial.have > furthest {
                        true => 1,
                        false => attempt + 1,
                    };
                    furthest = furthest.max(partial.have);
                    self.client.wait_or_give_up(failure, attempt).await?;
                }
            }
        }
        Ok(())
    }

    /// One request, read to its end.
    async fn receive(&self, partial: &mut Partial, path: &Path) -> Result<(), Failure> {
        let remote = self.remote;
        let mut answer = self
            .client
            .bytes(remote, partial.have, self.name, self.file)
            .await?;
        let continues = answer.status() == StatusCode::PARTIAL_CONTENT
            && range_start(answer.headers().get(header::CONTENT_RANGE)) == Some(partial.have);
        if !continues && partial.have > 0 {
            self.restart(partial, path).map_err(Failure::Final)?;
        }
        if !continues && answer.status() != StatusCode::OK {
            return Err(self.cut("it sends another range than the one asked for"));
        }
        loop {
            let chunk = match answer.chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) if partial.have == remote.size => return Ok(()),
                Ok(None) => return Err(self.cut("it ended early")),
                Err(error) => return Err(unreachable(&remote.url, &error)),
            };
            let have = partial.have + chunk.len() as u64;
            if have > remote.size {
                partial.too_long = true;
                return Ok(());
            }
            partial
                .file
                .write_all(&chunk)
                .map_err(|error| Failure::Final(self.disk(path, partial.have, error)))?;
            if let Some(hash) = partial.hash.as_mut() {
                hash.update(&chunk);
            }
            partial.have = have;
            self.progress.came(chunk.len() as u64);
        }
    }

    /// A disk that is full says how much was still to come.
    fn disk(&self, path: &Path, have: u64, error: std::io::Error) -> HubError {
        match io_error("write", path, error) {
            HubError::Full { folder, .. } => HubError::Full {
                folder,
                missing: Some(self.remote.size - have),
            },
            other => other,
        }
    }

    fn cut(&self, problem: &str) -> Failure {
        Failure::Passing {
            error: HubError::Network {
                url: self.remote.url.to_string(),
                problem: problem.to_owned(),
            },
            wait: None,
        }
    }

    /// How the file differs from what was announced. Takes the hash.
    fn mismatch(&self, partial: &mut Partial) -> Option<String> {
        if partial.too_long {
            return Some(format!("it is longer than {} bytes", self.remote.size));
        }
        let found: String = partial
            .hash
            .take()?
            .finish()
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        (found != self.remote.etag)
            .then(|| format!("its hash is {found}, not {}", self.remote.etag))
    }
}

/// The first byte of `bytes FIRST-LAST/SIZE`.
fn range_start(value: Option<&header::HeaderValue>) -> Option<u64> {
    let text = value?.to_str().ok()?;
    text.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etag_promises_a_hash_or_none() {
        let sha256 = "a".repeat(64);
        assert!(matches!(Check::of(&sha256), Check::Sha256));
        assert!(matches!(Check::of(&sha256[..40]), Check::Git));
        for other in ["", "abc-1", &"g".repeat(64), &"A".repeat(40)] {
            assert!(matches!(Check::of(other), Check::Nothing), "{other}");
        }
    }

    #[test]
    fn gits_hash_of_a_known_blob() {
        let mut hash = Check::Git.start(6).unwrap();
        hash.update(b"hello\n");
        let hex: String = hash
            .finish()
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hex, "ce013625030ba8dba906f756967f9e9ca394464a");
    }

    #[test]
    fn ranges() {
        let start = |text: &str| range_start(Some(&text.parse().unwrap()));
        assert_eq!(start("bytes 10-19/20"), Some(10));
        assert_eq!(start("bytes */20"), None);
        assert_eq!(start("items 1-2/3"), None);
        assert_eq!(range_start(None), None);
    }
}
