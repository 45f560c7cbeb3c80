//! What is told while a model comes: a bar on a terminal, else a line now and then.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// How long nothing is said where there is no bar.
const PAUSE: Duration = Duration::from_secs(10);

/// Where lines go that are not part of a bar.
pub type Say = Box<dyn Fn(&str) + Send + Sync>;

/// Counts the bytes that came.
pub struct Progress {
    bar: Option<ProgressBar>,
    say: Say,
    total: AtomicU64,
    /// Bytes that are on the disk, the ones of earlier attempts included.
    have: AtomicU64,
    /// Bytes that came in this attempt.
    came: AtomicU64,
    started: Instant,
    said: Mutex<Instant>,
}

impl Progress {
    /// A bar on standard error if that is a terminal, else lines through `say`.
    pub fn new(say: Say) -> Self {
        let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
        let bar = terminal.then(|| {
            let bar = ProgressBar::no_length();
            // A template that does not parse falls back to indicatif's own.
            if let Ok(style) = ProgressStyle::with_template(
                "{wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} left",
            ) {
                bar.set_style(style);
            }
            bar
        });
        let now = Instant::now();
        Self {
            bar,
            say,
            total: AtomicU64::new(0),
            have: AtomicU64::new(0),
            came: AtomicU64::new(0),
            started: now,
            said: Mutex::new(now),
        }
    }

    /// Something that is not a count.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| (self.say)(text)),
            None => (self.say)(text),
        }
    }

    /// So many bytes are to come.
    pub(super) fn expect(&self, bytes: u64) {
        let total = self.total.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
    }

    /// An earlier attempt left these.
    pub(super) fn kept(&self, bytes: u64) {
        self.have.fetch_add(bytes, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
            bar.reset_eta();
        }
    }

    /// These have come.
    pub(super) fn came(&self, bytes: u64) {
        self.have.fetch_add(bytes, Ordering::Relaxed);
        self.came.fetch_add(bytes, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => bar.inc(bytes),
            None => self.say_now_and_then(),
        }
    }

    /// These are thrown away and come again.
    pub(super) fn lost(&self, bytes: u64) {
        self.have.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.dec(bytes);
        }
    }

    /// All has come.
    pub(super) fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn say_now_and_then(&self) {
        let now = Instant::now();
        let Ok(mut said) = self.said.try_lock() else {
            return;
        };
        if now.duration_since(*said) < PAUSE {
            return;
        }
        *said = now;
        let seconds = now.duration_since(self.started).as_secs_f64();
        (self.say)(&line(
            self.have.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
            self.came.load(Ordering::Relaxed) as f64 / seconds.max(1e-3),
        ));
    }
}

/// `12.3 GiB of 58.4 GiB, 210.0 MiB/s, 3m 46s left`.
fn line(have: u64, total: u64, rate: f64) -> String {
    let left = (total.saturating_sub(have)) as f64 / rate.max(1.0);
    let left = Duration::from_secs(left.min(1e9) as u64);
    format!(
        "{} of {}, {}/s, {} left",
        size(have),
        size(total),
        size(rate as u64),
        humantime::format_duration(left)
    )
}

/// Bytes as people read them.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64;
    let mut unit = "";
    for name in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = name;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_read_them() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (62_706_000_000, "58.4 GiB"),
            (u64::MAX, "16384.0 PiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn a_line_has_rate_and_time_left() {
        assert_eq!(
            line(1 << 30, 3 << 30, (64 << 20) as f64),
            "1.0 GiB of 3.0 GiB, 64.0 MiB/s, 32s left"
        );
        // A transfer that stands still gives no infinite time.
        assert!(line(0, u64::MAX, 0.0).ends_with(" left"));
    }
}
