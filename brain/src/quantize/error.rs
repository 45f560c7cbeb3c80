//! How far encoded weights are from what they were.

use serde::{Deserialize, Serialize};

/// Sums over a tensor, from which its error follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ErrorSum {
    /// Weights.
    pub elements: u64,
    /// Sum of their squares.
    #[serde(with = "exact")]
    pub signal: f64,
    /// Sum of the squares of what encoding changed.
    #[serde(with = "exact")]
    pub error: f64,
    /// The same if every scale were the one that just holds its largest weight.
    #[serde(with = "exact")]
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

/// A number by its bits: one in decimals may come back as its neighbour, and a run that goes on would
/// report another error than one that was never interrupted.
pub(super) mod exact {
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(n: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(n.to_bits())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(bits: D) -> Result<f64, D::Error> {
        u64::deserialize(bits).map(f64::from_bits)
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_survive_the_journal_to_the_last_bit() {
        let mut n = 1.0 / 3.0;
        for _ in 0..200 {
            n = n * 1.1 + 1e-7;
            let sum = ErrorSum {
                elements: 7,
                signal: n,
                error: 1.0 / n,
                plain: n.sqrt(),
                worst: (0.1 / n) as f32,
                largest: n as f32,
            };
            let text = serde_json::to_string(&sum).unwrap();
            assert_eq!(serde_json::from_str::<ErrorSum>(&text).unwrap(), sum);
        }
    }
}
