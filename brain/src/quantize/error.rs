//! How far encoded weights are from what they were.

use serde::{Deserialize, Serialize};

/// Sums over a tensor, from which its error follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ErrorSum {
    /// Weights.
    pub elements: u64,
    /// Sum of their squares.
    pub signal: f64,
    /// Sum of the squares of what encoding changed.
    pub error: f64,
    /// The same if every scale were the one that just holds its largest weight.
    pub plain: f64,
    /// The largest change of a weight.
    pub worst: f32,
    /// The largest weight.
    pub largest: f32,
}

impl ErrorSum {
    /// Adds the sums of other weights.
    pub fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.signal += other.signal;
        self.error += other.error;
        self.plain += other.plain;
        self.worst = self.worst.max(other.worst);
        self.largest = self.largest.max(other.largest);
    }

    /// Root mean square of the change over that of the weights; 0 where all are 0.
    pub fn relative_rms(&self) -> f64 {
        ratio(self.error, self.signal).sqrt()
    }

    /// The same if every scale were the one that just holds its largest weight.
    pub fn plain_relative_rms(&self) -> f64 {
        ratio(self.plain, self.signal).sqrt()
    }

    /// Signal to noise in dB; `None` where nothing was changed.
    pub fn snr(&self) -> Option<f64> {
        (self.error > 0.0).then(|| 10.0 * (self.signal / self.error).log10())
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
