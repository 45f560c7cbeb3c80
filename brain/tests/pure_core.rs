//! The scheduler is a pure core: its sources name no clock, thread, socket, file or device.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{fs, path::Path};

const FORBIDDEN: &[&str] = &[
    "Instant",
    "SystemTime",
    "std::thread",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::io",
    "std::sync::Mutex",
    "std::sync::mpsc",
    "tokio",
    "tracing",
    "cudarc",
    "rand::",
    "unsafe",
    "println!",
];

#[test]
fn the_scheduler_names_nothing_impure() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sched");
    let mut seen = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let source = fs::read_to_string(&path).unwrap();
        // Tests may do as they like; they stand at the end.
        let code = source.split("#[cfg(test)]").next().unwrap();
        for line in code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
        {
            for name in FORBIDDEN {
                assert!(
                    !line.contains(name),
                    "{}: {name} in {line:?}",
                    path.display()
                );
            }
        }
        seen += 1;
    }
    assert!(seen >= 10, "{seen} sources looked at");
}
