//! A repository's files from the hub into the cache, or from the cache alone.

use std::{collections::BTreeSet, path::PathBuf};

use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::{
    HubError, HubSettings, ModelName,
    cache::RepoCache,
    client::{Client, Listing, Patience, RemoteFile},
    download::Fetch,
    error::io as io_error,
    files::{self, ASSISTANT, Part, Weights},
    progress::{Progress, size},
};

/// Files that are fetched at a time: enough to fill a link that is slow per connection.
const AT_A_TIME: usize = 4;
/// Questions that are asked at a time.
const QUESTIONS: usize = 8;

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Its files, as a checkpoint folder.
    pub folder: PathBuf,
    /// What the revision meant.
    pub commit: String,
    /// The hub could not be asked.
    pub from_cache: bool,
}

/// The hub and its cache.
#[derive(Debug)]
pub struct Hub {
    settings: HubSettings,
    client: Option<Client>,
}

impl Hub {
    /// A hub with these settings; offline it only reads the cache.
    pub fn new(settings: HubSettings, patience: Patience) -> Result<Self, HubError> {
        let client = (!settings.offline)
            .then(|| Client::new(&settings, patience))
            .transpose()?;
        Ok(Self { settings, client })
    }

    /// Has every file of `part` in the cache when it returns, whole and checked.
    pub async fn pull(
        &self,
        name: &ModelName,
        part: Part,
        progress: &Progress,
    ) -> Result<Pulled, HubError> {
        let cache = RepoCache::new(&self.settings.cache, name);
        let cached = |from_cache| -> Result<Pulled, String> {
            let commit = cache
                .commit(name)
                .ok_or_else(|| format!("revision {}", name.revision()))?;
            check_whole(&cache, &commit, part)?;
            Ok(Pulled {
                folder: cache.snapshot(&commit),
                commit,
                from_cache,
            })
        };
        let Some(client) = &self.client else {
            return cached(true).map_err(|missing| HubError::Offline {
                name: name.to_string(),
                cache: self.settings.cache.clone(),
                missing,
            });
        };
        if name.commit().is_some()
            && let Ok(pulled) = cached(false)
        {
            return Ok(pulled);
        }
        let listing = match client.listing(name).await {
            Ok(listing) => listing,
            Err(error) if error.is_unreachable() => match cached(true) {
                Ok(pulled) => {
                    progress.note(&format!("{error}. Taking {name} as it is in the cache"));
                    return Ok(pulled);
                }
                Err(_) => return Err(error),
            },
            Err(error) => return Err(error),
        };
        let fetching = Fetching {
            client,
            cache: &cache,
            name,
            listing: &listing,
            progress,
        };
        fetching.part("", part).await?;
        if part == Part::Target && files::has_assistant(&listing.files) {
            fetching.part(ASSISTANT, Part::Drafter).await?;
        }
        cache.remember(name, &listing.commit)?;
        progress.done();
        Ok(Pulled {
            folder: cache.snapshot(&listing.commit),
            commit: listing.commit,
            from_cache: false,
        })
    }

    /// The drafter that belongs to a model that was pulled: in its own repository, or in the one
    /// that is named after it or after the model it was made from.
    pub async fn drafter_of(
        &self,
        name: &ModelName,
        target: &Pulled,
        progress: &Progress,
    ) -> Result<Option<PathBuf>, HubError> {
        let inside = target.folder.join(ASSISTANT.trim_end_matches('/'));
        if inside.exists() {
            return Ok(Some(inside));
        }
        let card = std::fs::read_to_string(target.folder.join("README.md")).unwrap_or_default();
        let candidates = drafter_names(name.repository(), &card);
        for candidate in &candidates {
            match self.pull(candidate, Part::Drafter, progress).await {
                Ok(drafter) => {
                    progress.note(&format!("{candidate} drafts for {name}"));
                    return Ok(Some(drafter.folder));
                }
                Err(HubError::NoRepository { .. } | HubError::Offline { .. }) => {}
                // Without the hub, the model itself came from the cache.
                Err(error) if target.from_cache && error.is_unreachable() => {}
                Err(error) => return Err(error),
            }
        }
        let looked: Vec<String> = candidates.iter().map(ModelName::to_string).collect();
        let place = if target.from_cache {
            "in the cache"
        } else {
            "on the hub"
        };
        progress.note(&format!(
            "no drafter for {name}: {} is not {place}; give one with --drafter",
            looked.join(" or ")
        ));
        Ok(None)
    }
}

/// Repositories that would hold the drafter of a model, the likeliest first.
fn drafter_names(repository: &str, card: &str) -> Vec<ModelName> {
    let mut names: Vec<ModelName> = Vec::new();
    for base in std::iter::once(repository.to_owned()).chain(files::base_models(card)) {
        let candidate = ModelName::newest(&format!("{base}-assistant"));
        if let Ok(candidate) = candidate
            && !names.contains(&candidate)
        {
            names.push(candidate);
        }
    }
    names
}

/// Checks that a commit is whole in the cache; the error is the first file that is missing.
fn check_whole(cache: &RepoCache, commit: &str, part: Part) -> Result<(), String> {
    let listing = cache.listing(commit);
    let check = |prefix: &str, part: Part| {
        let wanted = files::wanted(&listing, prefix, part)?;
        let Weights::Indexed(index) = wanted.weights else {
            return Ok(());
        };
        let bytes = std::fs::read(cache.snapshot(commit).join(&index))
            .map_err(|error| format!("{index}: {error}"))?;
        let shards = files::shards(&bytes, prefix).map_err(|error| format!("{index}: {error}"))?;
        match shards.into_iter().find(|shard| !listing.contains(shard)) {
            None => Ok(()),
            Some(missing) => Err(missing),
        }
    };
    check("", part)?;
    if part == Part::Target && files::has_assistant(&listing) {
        check(ASSISTANT, Part::Drafter)?;
    }
    Ok(())
}

/// One pull from the hub.
struct Fetching<'a> {
    client: &'a Client,
    cache: &'a RepoCache,
    name: &'a ModelName,
    listing: &'a Listing,
    progress: &'a Progress,
}

impl Fetching<'_> {
    async fn part(&self, prefix: &str, part: Part) -> Result<(), HubError> {
        let missing = |file: String| HubError::NoFile {
            repository: self.name.repository().to_owned(),
            file,
        };
        let wanted = files::wanted(&self.listing.files, prefix, part).map_err(missing)?;
        self.files(&wanted.small).await?;
        let weights = match wanted.weights {
            Weights::Whole(file) => vec![file],
            Weights::Indexed(index) => {
                let path = self.cache.snapshot(&self.listing.commit).join(&index);
                let bytes = std::fs::read(&path).map_err(|error| io_error("read", &path, error))?;
                files::shards(&bytes, prefix).map_err(|problem| HubError::Damaged {
                    repository: self.name.repository().to_owned(),
                    file: index,
                    problem,
                })?
            }
        };
        if let Some(absent) = weights
            .iter()
            .find(|file| !self.listing.files.contains(*file))
        {
            return Err(missing(absent.clone()));
        }
        self.files(&weights).await
    }

    /// Fetches what is missing of these files.
    async fn files(&self, names: &[String]) -> Result<(), HubError> {
        let commit = &self.listing.commit;
        let asked: Vec<(&String, RemoteFile)> = stream::iter(names)
            .map(async |file| {
                let remote = self.client.file(self.name, commit, file).await?;
                Ok::<_, HubError>((file, remote))
            })
            .buffered(QUESTIONS)
            .try_collect()
            .await?;
        let coming: Vec<&(&String, RemoteFile)> = asked
            .iter()
            .filter(|(file, remote)| !self.cache.has(commit, file, &remote.etag, remote.size))
            .collect();
        self.check_room(coming.iter().map(|(_, remote)| remote))?;
        let bytes = coming.iter().map(|(_, remote)| remote.size).sum();
        self.progress.expect(bytes);
        if bytes > 1 << 20 {
            self.progress.note(&format!(
                "fetching {} of {} ({})",
                match coming.len() {
                    1 => "1 file".to_owned(),
                    files => format!("{files} files"),
                },
                self.name,
                size(bytes)
            ));
        }
        stream::iter(coming)
            .map(async |(file, remote)| {
                let fetch = Fetch {
                    client: self.client,
                    cache: self.cache,
                    name: self.name,
                    commit,
                    file,
                    remote,
                    progress: self.progress,
                };
                fetch.run().await
            })
            .buffer_unordered(AT_A_TIME)
            .try_collect()
            .await
    }

    /// Refuses what the disk cannot hold before the first byte comes.
    fn check_room<'f>(&self, coming: impl Iterator<Item = &'f RemoteFile>) -> Result<(), HubError> {
        let folder = self.cache.make_blobs()?;
        let mut seen = BTreeSet::new();
        let needed: u64 = coming
            .filter(|remote| seen.insert(&remote.etag))
            .map(|remote| {
                let there = [
                    self.cache.incomplete(&remote.etag),
                    self.cache.blob(&remote.etag),
                ];
                let have = there
                    .iter()
                    .filter_map(|path| Some(std::fs::metadata(path).ok()?.len()))
                    .max();
                remote.size.saturating_sub(have.unwrap_or(0))
            })
            .fold(0, u64::saturating_add);
        let Ok(disk) = rustix::fs::statvfs(&folder) else {
            return Ok(());
        };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if needed > free {
            return Err(HubError::DiskFull {
                folder,
                needed,
                free,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafters_are_named_after_their_targets() {
        let names = |repository: &str, card: &str| -> Vec<String> {
            drafter_names(repository, card)
                .iter()
                .map(ModelName::to_string)
                .collect()
        };
        assert_eq!(
            names("google/gemma-4-31B-it", ""),
            ["google/gemma-4-31B-it-assistant"]
        );
        assert_eq!(
            names(
                "nvidia/Gemma-4-31B-IT-NVFP4",
                "---\nbase_model:\n- google/gemma-4-31B-it\n---\n"
            ),
            [
                "nvidia/Gemma-4-31B-IT-NVFP4-assistant",
                "google/gemma-4-31B-it-assistant"
            ]
        );
        // A card may say anything.
        assert_eq!(
            names("a/b", "---\nbase_model: ../../x\n---\n"),
            ["a/b-assistant"]
        );
    }
}
