//! Why a model could not be had. Every message says what to do.

use std::{io, path::PathBuf};

use super::{name::NameError, progress::size};

/// A model that could not be fetched, or is not in the cache.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A text that is no name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// An `HF_` variable or its file.
    #[error("{setting} cannot be used: {problem}")]
    Setting {
        /// The variable or file.
        setting: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The hub does not know it, or does not show it to us.
    #[error(
        "{endpoint} has no model {repository}{}: check the name, or give a folder that is there",
        if *.token { ", or the access token may not see it" }
        else { ", or it is private and needs an access token in HF_TOKEN" }
    )]
    NoRepository {
        /// `OWNER/NAME`.
        repository: String,
        /// The hub.
        endpoint: String,
        /// Whether we sent a token.
        token: bool,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repository} has no revision {revision:?}: check it, or leave it out for the newest")]
    NoRevision {
        /// `OWNER/NAME`.
        repository: String,
        /// As asked.
        revision: String,
    },
    /// A licence has to be accepted first.
    #[error(
        "{repository} is gated: accept its licence at {endpoint}/{repository}{}",
        if *.token { " with the account that the access token belongs to" }
        else { ", make an access token, and set HF_TOKEN or log in with `hf auth login`" }
    )]
    Gated {
        /// `OWNER/NAME`.
        repository: String,
        /// The hub.
        endpoint: String,
        /// Whether we sent a token.
        token: bool,
    },
    /// The token is wrong or may not do this.
    #[error(
        "{endpoint} refuses the access token for {repository}{reason}: make one that may read it"
    )]
    Refused {
        /// `OWNER/NAME`.
        repository: String,
        /// The hub.
        endpoint: String,
        /// What the hub said, with a colon in front; may be empty.
        reason: String,
    },
    /// The repository holds no checkpoint that brain could serve.
    #[error("{repository} holds no {file}: brain needs a checkpoint of safetensors with it")]
    NoFile {
        /// `OWNER/NAME`.
        repository: String,
        /// What is missing.
        file: String,
    },
    /// Offline, and the cache does not hold it all.
    #[error(
        "{name} is not whole in the cache {cache} ({missing} is not there) and HF_HUB_OFFLINE \
         forbids to fetch it: run `brain pull {name}` where the network is"
    )]
    Offline {
        /// The model.
        name: String,
        /// The cache's folder.
        cache: PathBuf,
        /// The first thing that is missing.
        missing: String,
    },
    /// The hub could not be reached, or the connection broke again and again.
    #[error(
        "cannot fetch {url}: {problem}; what has come is kept, so try again when the network is \
         there, or give a folder"
    )]
    Network {
        /// What was asked for.
        url: String,
        /// What the system said.
        problem: String,
    },
    /// The hub answered with an error that trying again did not cure.
    #[error("{url} answers with the status {status}{reason}: try again later")]
    Status {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
        /// What the hub said, with a colon in front; may be empty.
        reason: String,
    },
    /// An answer that is not the hub's protocol.
    #[error("{url} does not answer as a model hub does ({problem}): check HF_ENDPOINT")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A whole file that is not the one announced.
    #[error(
        "{file} of {repository} came damaged ({problem}) and was thrown away: fetch it again; if \
         that does not help, something between here and the hub changes it"
    )]
    Damaged {
        /// `OWNER/NAME`.
        repository: String,
        /// The file.
        file: String,
        /// How it differs.
        problem: String,
    },
    /// No room.
    #[error(
        "{folder} has room for {} and {} are needed: make room, or set HF_HOME to another disk",
        size(*.free),
        size(*.needed)
    )]
    DiskFull {
        /// Where.
        folder: PathBuf,
        /// Bytes still to come.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// No room any more, while writing.
    #[error(
        "{folder} is full{}: make room, or set HF_HOME to another disk",
        .missing.map_or(String::new(), |bytes| format!(" with {} still to come", size(bytes)))
    )]
    Full {
        /// Where.
        folder: PathBuf,
        /// Bytes still to come, where that is known.
        missing: Option<u64>,
    },
    /// The disk.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl HubError {
    /// Whether the hub could not be asked at all, so that what the cache holds is the best there is.
    pub(super) fn is_unreachable(&self) -> bool {
        match self {
            Self::Network { .. } => true,
            Self::Status { status, .. } => *status >= 500 || *status == 429,
            _ => false,
        }
    }
}

/// An I/O error at a path; a full disk is its own error.
pub(super) fn io(action: &'static str, path: &std::path::Path, source: io::Error) -> HubError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::Full {
            folder: path.parent().unwrap_or(path).to_owned(),
            missing: None,
        },
        _ => HubError::Io {
            action,
            path: path.to_owned(),
            source,
        },
    }
}
