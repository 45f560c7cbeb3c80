//! Named places at which a test makes pilot kill itself.
//!
//! Compiled in and harmless: without a `--fail-at` nothing is counted and nothing happens. The kill
//! is SIGKILL, so that no destructor, flush or handler softens it.

use std::{
    collections::BTreeMap,
    fmt,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
};

/// Every name, in the order a step meets them.
pub const NAMES: &[&str] = &[
    "before-ask",
    "mid-answer",
    "after-answer",
    "before-intent",
    "after-intent",
    "mid-tool",
    "after-tool",
    "after-result",
    "after-append",
    "after-compaction",
];

/// "The `count`-th time `name` is reached."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailAt {
    /// One of [`NAMES`].
    pub name: String,
    /// From 1.
    pub count: u64,
}

impl FromStr for FailAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, count) = text.split_once(':').unwrap_or((text, "1"));
        if !NAMES.contains(&name) {
            return Err(format!(
                "no fail point `{name}`; there are: {}",
                NAMES.join(", ")
            ));
        }
        let count = count
            .parse()
            .ok()
            .filter(|count| *count > 0)
            .ok_or_else(|| format!("`{count}` is no count; write {name}:N with N from 1"))?;
        Ok(Self {
            name: name.to_owned(),
            count,
        })
    }
}

impl fmt::Display for FailAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.count)
    }
}

/// Counts passes and kills at the one asked for.
#[derive(Debug, Default)]
pub struct FailPoints {
    armed: BTreeMap<String, (u64, AtomicU64)>,
}

impl FailPoints {
    /// Armed at these places; of two with the same name the later counts.
    pub fn new(points: impl IntoIterator<Item = FailAt>) -> Self {
        let armed = points
            .into_iter()
            .map(|point| (point.name, (point.count, AtomicU64::new(0))))
            .collect();
        Self { armed }
    }

    /// Says that execution is at `name`. Does not return the time it was armed for.
    pub fn hit(&self, name: &str) {
        if self.would_kill(name) {
            // Nothing useful can be done should the signal fail: then the test sees no kill.
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
        }
    }

    fn would_kill(&self, name: &str) -> bool {
        debug_assert!(NAMES.contains(&name), "unlisted fail point {name}");
        self.armed
            .get(name)
            .is_some_and(|(at, passed)| passed.fetch_add(1, Ordering::Relaxed) + 1 == *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fires_once_at_its_count() {
        let points = FailPoints::new(["after-intent:3".parse().unwrap()]);
        let fired: Vec<bool> = (0..5).map(|_| points.would_kill("after-intent")).collect();
        assert_eq!(fired, [false, false, true, false, false]);
        assert!(!points.would_kill("after-tool"));
    }

    #[test]
    fn bad_points_are_named() {
        assert!(
            "nowhere:1"
                .parse::<FailAt>()
                .unwrap_err()
                .contains("after-intent")
        );
        assert!(
            "after-tool:0"
                .parse::<FailAt>()
                .unwrap_err()
                .contains("N from 1")
        );
        assert_eq!("after-tool".parse::<FailAt>().unwrap().count, 1);
    }
}
