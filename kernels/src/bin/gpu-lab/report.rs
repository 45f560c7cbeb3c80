//! What was found: printed as it comes, written as JSON at the end.

use std::{path::Path, time::Duration};

use marathon_kernels::device::Device;
use serde_json::{Value, json};

/// Checks and timings of one run.
pub(crate) struct Report {
    card: String,
    checks: Vec<Value>,
    timings: Vec<Value>,
    failed: usize,
    only: Vec<String>,
}

impl Report {
    /// Timings are limited to those whose names contain one of `only`, if there are any.
    pub(crate) fn new(device: &Device, only: Vec<String>) -> Self {
        Self {
            card: device.name.clone(),
            checks: Vec::new(),
            timings: Vec::new(),
            failed: 0,
            only,
        }
    }

    /// A check: `bad` of `count` things were wrong, the worst by `worst` of what is allowed.
    pub(crate) fn check(&mut self, name: &str, count: usize, bad: usize, worst: f64) {
        let verdict = if bad == 0 && count > 0 {
            "ok    "
        } else {
            "FAILED"
        };
        println!("{verdict} {name}: {bad} of {count} wrong, worst {worst:.3} of the tolerance");
        self.failed += usize::from(bad > 0 || count == 0);
        self.checks
            .push(json!({ "name": name, "count": count, "bad": bad, "worst": worst }));
    }

    /// Whether a timing of this name is asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part))
    }

    /// A timing, and the time no version can beat.
    pub(crate) fn timing(&mut self, name: &str, micros: f64, floor: f64, note: &str) {
        let share = 100.0 * floor / micros;
        println!("{name:<44} {micros:>9.2} us  floor {floor:>9.2} us  {share:>5.1} %  {note}");
        self.timings
            .push(json!({ "name": name, "us": micros, "floor_us": floor, "note": note }));
    }

    pub(crate) fn good(&self) -> bool {
        self.failed == 0
    }

    pub(crate) fn finish(&self, out: &Path, took: Duration) {
        let all = json!({
            "card": self.card,
            "checks": self.checks,
            "timings": self.timings,
            "failed": self.failed,
            "seconds": took.as_secs_f64(),
        });
        if let Err(error) = std::fs::write(out, format!("{all:#}\n")) {
            println!("cannot write {}: {error}", out.display());
        }
        println!(
            "{} checks, {} failed, {} timings, {:.1} s",
            self.checks.len(),
            self.failed,
            self.timings.len(),
            took.as_secs_f64()
        );
    }
}
