//! What quantising did: sizes, errors, and the matrices that suffered most.

use serde::{Deserialize, Serialize};

use super::{
    config::algorithm,
    error::ErrorSum,
    journal::Record,
    layout::{Layout, Recipe},
};
use crate::size::show;

/// The report's name in the folder of the result.
pub const FILE: &str = "quantize_report.json";
/// Matrices that are shown.
const WORST: usize = 10;
/// From this share of its blocks on, a matrix counts as one on the grid of Q4_0.
const GRID: f64 = 0.99;

/// What was done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// By what recipe.
    pub recipe: Recipe,
    /// Its name in the configuration.
    pub algorithm: String,
    /// Bytes of the source's weights.
    pub source_bytes: u64,
    /// Bytes of the result's files.
    pub bytes: u64,
    /// Matrices that could be encoded and were left as they are.
    pub kept: usize,
    /// All encoded matrices together.
    pub total: Figures,
    /// Matrices whose weights lie on the grid of Q4_0.
    pub on_q4_0_grid: usize,
    /// Every encoded matrix, the one with the largest relative error first.
    pub matrices: Vec<Figures>,
}

/// Errors of a matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Its name, without `.weight`.
    pub module: String,
    /// Weights.
    pub weights: u64,
    /// Root mean square of the change over that of the weights.
    pub relative_rms: f64,
    /// The same with scales that just hold the largest weight of their block.
    pub relative_rms_plain: f64,
    /// Sum of the squares of all changes.
    pub squared_error: f64,
    /// Signal to noise in dB, if there is any noise.
    pub snr_db: Option<f64>,
    /// The largest change of a weight.
    pub largest_error: f32,
    /// The largest weight.
    pub largest_weight: f32,
    /// Share of the looked-at blocks that lie on the grid of Q4_0.
    pub q4_0_grid: f64,
}

impl Figures {
    fn new(module: &str, sum: &ErrorSum, grid: f64) -> Self {
        Self {
            module: module.to_owned(),
            weights: sum.elements,
            relative_rms: sum.relative_rms(),
            relative_rms_plain: sum.plain_relative_rms(),
            squared_error: sum.error,
            snr_db: sum.snr(),
            largest_error: sum.worst,
            largest_weight: sum.largest,
            q4_0_grid: grid,
        }
    }
}

impl Report {
    /// Of all that was recorded.
    pub fn new(layout: &Layout, recipe: Recipe, source_bytes: u64, records: &[Record]) -> Self {
        let mut total = ErrorSum::default();
        records.iter().for_each(|r| total.add(&r.sum));
        let mut matrices: Vec<Figures> = records
            .iter()
            .map(|r| Figures::new(&r.module, &r.sum, r.grid))
            .collect();
        matrices.sort_by(|a, b| {
            let by_error = b.relative_rms.total_cmp(&a.relative_rms);
            by_error.then_with(|| a.module.cmp(&b.module))
        });
        let on_grid = matrices.iter().filter(|m| m.q4_0_grid >= GRID).count();
        let grid = on_grid as f64 / matrices.len().max(1) as f64;
        Self {
            recipe,
            algorithm: algorithm(recipe.format).to_owned(),
            source_bytes,
            bytes: layout.bytes(),
            kept: layout.kept.len(),
            total: Figures::new("all", &total, grid),
            on_q4_0_grid: on_grid,
            matrices,
        }
    }

    /// The report as people read it.
    pub fn text(&self) -> String {
        let total = &self.total;
        let mut out = format!(
            "{}: {} matrices encoded, {} kept; {} became {}\n",
            self.algorithm,
            self.matrices.len(),
            self.kept,
            show(self.source_bytes),
            show(self.bytes),
        );
        if total.weights > 0 {
            out += &format!(
                "relative error {:.3} % ({}) over {} weights",
                100.0 * total.relative_rms,
                snr(total),
                total.weights,
            );
            if total.relative_rms < total.relative_rms_plain {
                out += &format!(
                    "; with the plain choice of scales it were {:.3} %",
                    100.0 * total.relative_rms_plain
                );
            }
            out.push('\n');
        }
        if self.on_q4_0_grid > 0 {
            out += &format!(
                "{} of {} matrices lie on the grid of Q4_0, for which this checkpoint was trained: \
                 this format is not that grid and adds the error above\n",
                self.on_q4_0_grid,
                self.matrices.len()
            );
        }
        let shown = &self.matrices[..WORST.min(self.matrices.len())];
        let width = shown
            .iter()
            .map(|m| m.module.len())
            .max()
            .unwrap_or(0)
            .max(6);
        out += &format!(
            "\n{:width$}  {:>10}  {:>8}  {:>13}  {:>14}\n",
            "worst", "error", "dB", "largest error", "largest weight"
        );
        for m in shown {
            out += &format!(
                "{:width$}  {:>8.3} %  {:>8}  {:>13.3e}  {:>14.3e}\n",
                m.module,
                100.0 * m.relative_rms,
                snr(m).trim_end_matches(" dB"),
                m.largest_error,
                m.largest_weight,
            );
        }
        out
    }
}

fn snr(figures: &Figures) -> String {
    match figures.snr_db {
        Some(db) => format!("{db:.1} dB"),
        None => "exact".to_owned(),
    }
}
