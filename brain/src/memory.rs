//! How much memory this process may still take.

use std::path::Path;

/// Where control groups are.
const GROUPS: &str = "/sys/fs/cgroup";

/// Bytes that could be allocated now without swapping: what the system has available, or what is
/// left of the limits of this process's control groups if that is less. `None` where the system does
/// not say.
pub(crate) fn available() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| field(&text, "MemAvailable:"));
    let own = read("/proc/self/cgroup").unwrap_or_default();
    let groups = groups_left(Path::new(GROUPS), own_group(&own));
    match (machine, groups) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The path of a process's group in the unified hierarchy, from the lines of its `cgroup` file.
fn own_group(lines: &str) -> &str {
    let own = lines.lines().find_map(|line| line.strip_prefix("0::/"));
    own.unwrap_or("")
}

/// What is left of the limit of a group and of those that it is in, whichever is least. In a
/// container the groups begin at its own, and a path from outside leads nowhere.
fn groups_left(root: &Path, own: &str) -> Option<u64> {
    let own = root.join(own);
    let groups = own.ancestors().take_while(|group| group.starts_with(root));
    groups.filter_map(group_left).min()
}

/// A line `Name:  123 kB`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// What is left of a limit, file pages that the system can drop not counted as used.
fn group_left(group: &Path) -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(group.join(file)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let cached = read("memory.stat").and_then(|stat| {
        let line = stat
            .lines()
            .find_map(|l| l.strip_prefix("inactive_file "))?;
        line.trim().parse::<u64>().ok()
    });
    Some(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_and_limits_are_read() {
        let text = "MemTotal:       24 kB\nMemAvailable:   16 kB\n";
        assert_eq!(field(text, "MemAvailable:"), Some(16 << 10));
        assert_eq!(field("MemAvailable: many\n", "MemAvailable:"), None);
        let group = tempfile::tempdir().unwrap();
        assert_eq!(group_left(group.path()), None);
        let write = |file: &str, text: &str| std::fs::write(group.path().join(file), text).unwrap();
        write("memory.current", "700\n");
        write("memory.max", "max\n");
        assert_eq!(group_left(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(group_left(group.path()), Some(300));
        write("memory.stat", "anon 500\ninactive_file 200\n");
        assert_eq!(group_left(group.path()), Some(500));
    }
    #[test]
    fn the_tightest_limit_above_a_group_counts() {
        assert_eq!(own_group("0::/a/b.service\n"), "a/b.service");
        assert_eq!(own_group("5:memory:/x\n0::/\n"), "");
        assert_eq!(own_group("5:memory:/x\n"), "");
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("a/b");
        std::fs::create_dir_all(&deep).unwrap();
        let limit = |group: &Path, limit: &str| {
            std::fs::write(group.join("memory.current"), "100\n").unwrap();
            std::fs::write(group.join("memory.max"), limit).unwrap();
        };
        assert_eq!(groups_left(root.path(), "a/b"), None);
        limit(&deep, "max\n");
        limit(&root.path().join("a"), "500\n");
        assert_eq!(groups_left(root.path(), "a/b"), Some(400));
        limit(&deep, "300\n");
        assert_eq!(groups_left(root.path(), "a/b"), Some(200));
        // What a container cannot see is no limit to it; its own group's is.
        limit(root.path(), "900\n");
        assert_eq!(groups_left(root.path(), "not/here"), Some(800));
    }
}
