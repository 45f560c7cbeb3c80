//! Names of repositories: `OWNER/NAME`, with `@REVISION` behind it for another than the newest.

use std::{fmt, str::FromStr};

use serde::Serialize;

/// A repository and a revision of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelName {
    repository: String,
    revision: Option<String>,
}

/// Why a text is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no name of a model ({problem}): write OWNER/NAME or OWNER/NAME@REVISION")]
pub struct NameError {
    text: String,
    problem: &'static str,
}

/// What is taken when no revision is given.
const NEWEST: &str = "main";
/// Longest name of a repository that the hub accepts.
const MAX_REPOSITORY: usize = 96;
const MAX_REVISION: usize = 200;

impl ModelName {
    /// `OWNER/NAME`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// A branch, a tag or a commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(NEWEST)
    }

    /// The revision if it is a whole commit hash, which can never mean anything else.
    pub fn commit(&self) -> Option<&str> {
        self.revision
            .as_deref()
            .filter(|revision| is_commit(revision))
    }

    /// Whether a text is meant as a name rather than as a path: one slash, and no beginning that
    /// only paths have.
    pub fn looks_like(text: &str) -> bool {
        let repository = text.split('@').next().unwrap_or_default();
        repository.matches('/').count() == 1 && !text.starts_with(['/', '.', '~'])
    }

    /// Another repository, at its newest.
    pub(super) fn newest(repository: &str) -> Result<Self, NameError> {
        repository.parse()
    }
}

/// Whether a text is a whole commit hash.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.revision {
            Some(revision) => write!(f, "{}@{revision}", self.repository),
            None => f.write_str(&self.repository),
        }
    }
}

impl FromStr for ModelName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let wrong = |problem| NameError {
            text: text.to_owned(),
            problem,
        };
        let (repository, revision) = match text.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (text, None),
        };
        let parts: Vec<&str> = repository.split('/').collect();
        if parts.len() != 2 {
            return Err(wrong("it needs an owner and a name"));
        }
        if repository.len() > MAX_REPOSITORY {
            return Err(wrong("it is too long"));
        }
        for part in parts {
            check_part(part).map_err(wrong)?;
        }
        if let Some(revision) = revision {
            check_revision(revision).map_err(wrong)?;
        }
        Ok(Self {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
        })
    }
}

fn check_part(part: &str) -> Result<(), &'static str> {
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if part.is_empty() {
        Err("a part of it is empty")
    } else if !part.chars().all(known) {
        Err("only letters, digits and - _ . can be in it")
    } else if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
        Err("no part begins or ends with - or .")
    } else if part.contains("--") || part.contains("..") {
        Err("-- and .. cannot be in it")
    } else {
        Ok(())
    }
}

/// A revision becomes a path in the cache, so it has git's own limits.
fn check_revision(revision: &str) -> Result<(), &'static str> {
    let parts_fit = revision
        .split('/')
        .all(|part| !part.is_empty() && !part.starts_with('.'));
    let known = |c: char| c.is_ascii_graphic() && !"~^:?*[\\@\"'<>|".contains(c);
    if !parts_fit || revision.contains("..") || !revision.chars().all(known) {
        Err("its revision cannot be one of git's")
    } else if revision.len() > MAX_REVISION {
        Err("its revision is too long")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_an_owner_a_name_and_maybe_a_revision() {
        let plain: ModelName = "google/gemma-4-31B-it".parse().unwrap();
        assert_eq!(plain.repository(), "google/gemma-4-31B-it");
        assert_eq!(
            (plain.revision(), plain.commit(), plain.to_string()),
            ("main", None, "google/gemma-4-31B-it".to_owned())
        );
        let hash = "0123456789abcdef0123456789abcdef01234567";
        let pinned: ModelName = format!("a/b_c.d@{hash}").parse().unwrap();
        assert_eq!((pinned.revision(), pinned.commit()), (hash, Some(hash)));
        let branch: ModelName = "a/b@refs/pr/3".parse().unwrap();
        assert_eq!(branch.revision(), "refs/pr/3");
        assert_eq!(branch.to_string(), "a/b@refs/pr/3");
    }

    #[test]
    fn what_would_leave_the_cache_or_the_address_is_no_name() {
        for bad in [
            "gemma",
            "a/b/c",
            "/a",
            "a/",
            "a/..",
            "../b",
            "a/b--c",
            "a/-b",
            "a/b?x=1",
            "a/b c",
            "a/b@",
            "a/b@../x",
            "a/b@x/../y",
            "a/b@/x",
            "a/b@x y",
            "a/b@x\n",
            "a/b@.git",
        ] {
            let error = bad.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains("write OWNER/NAME"), "{error}");
        }
        assert!(
            format!("a/{}", "b".repeat(95))
                .parse::<ModelName>()
                .is_err()
        );
    }

    #[test]
    fn paths_do_not_look_like_names() {
        for (text, name) in [
            ("google/gemma-4-E4B-it", true),
            ("google/gemma-4-E4B-it@refs/pr/1", true),
            ("./models", false),
            ("/models/gemma", false),
            ("~/gemma", false),
            ("models/google/gemma", false),
            ("gemma", false),
        ] {
            assert_eq!(ModelName::looks_like(text), name, "{text}");
        }
    }
}
