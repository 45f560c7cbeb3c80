//! How much memory this process may still take.

use std::path::Path;

/// Bytes that could be allocated now without swapping: what the system has available, or what is
/// left of the control group's limit if that is less. `None` where the system does not say.
pub(crate) fn available() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| field(&text, "MemAvailable:"));
    let group = group_left(Path::new("/sys/fs/cgroup"));
    match (machine, group) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
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
}
