//! The results: as a file, as tables, and compared with others.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Everything that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Results {
    /// Of brain.
    pub(super) version: String,
    pub(super) model: String,
    pub(super) fingerprint: String,
    pub(super) device: String,
    /// Empty when nothing drafts but look-ups.
    pub(super) drafter: String,
    pub(super) threads: usize,
    /// Tokens of an answer.
    pub(super) tokens: u32,
    /// Times that each was measured; rates are medians.
    pub(super) repeats: usize,
    /// Shares of rounds whose drafts were made to be right; empty when the drafter's own counted.
    #[serde(default)]
    pub(super) synthetic_acceptance: Vec<f64>,
    /// Positions that the model was let go to, beyond those that it was trained for.
    #[serde(default)]
    pub(super) stretched_to: Option<usize>,
    pub(super) contexts: Vec<ContextRow>,
    /// At fixed depths, where they were asked for.
    #[serde(default)]
    pub(super) depths: Vec<DepthRow>,
    pub(super) batches: Vec<BatchRow>,
    pub(super) reuse: Vec<ReuseRow>,
    #[serde(default)]
    pub(super) stall: Vec<StallRow>,
    /// The longest gaps meanwhile.
    #[serde(default)]
    pub(super) gaps: Vec<GapRow>,
    pub(super) restart: Vec<RestartRow>,
}

/// One sequence at one length of context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ContextRow {
    /// Tokens of the prompt.
    pub(super) context: usize,
    pub(super) prefill_per_second: f64,
    /// Without drafts.
    pub(super) decode_per_second: f64,
    /// With as many as brain chooses.
    pub(super) drafted_per_second: f64,
    /// The latter over the former, in pairs.
    pub(super) gain: f64,
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    pub(super) rounds: usize,
}

/// One sequence that drafts as many tokens in every round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct DepthRow {
    pub(super) context: usize,
    pub(super) depth: u32,
    pub(super) tokens_per_second: f64,
}

/// Several sequences at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct BatchRow {
    pub(super) sequences: usize,
    /// Of all together.
    pub(super) tokens_per_second: f64,
}

/// The second turn of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ReuseRow {
    pub(super) context: usize,
    /// Time to the first token of the first turn.
    pub(super) first_ms: f64,
    /// Of the second.
    pub(super) next_ms: f64,
    /// Of the tokens that were known, those taken from the cache.
    pub(super) cached_share: f64,
}

/// What somebody who is reading feels of a prompt that is computed meanwhile: milliseconds from one
/// token to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct StallRow {
    /// Tokens of that prompt.
    pub(super) context: usize,
    /// As the engine publishes them, before it came: the median and the longest.
    pub(super) usual_ms: f64,
    pub(super) usual_worst_ms: f64,
    /// While it was computed: the median, the longest but one in a hundred, and the longest.
    pub(super) median_ms: f64,
    pub(super) late_ms: f64,
    pub(super) worst_ms: f64,
    /// The longest of what is left when waits for a core are taken away, where the system counts them.
    pub(super) worst_own_ms: Option<f64>,
    /// As the reader gets them: the median before it came, and the longest while it was computed.
    pub(super) read_usual_ms: f64,
    pub(super) read_worst_ms: f64,
    /// Until the prompt's first token: with nobody else there, and beside the reader.
    #[serde(default)]
    pub(super) alone_ms: f64,
    #[serde(default)]
    pub(super) beside_ms: f64,
}

/// One of the longest gaps, and where its time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct GapRow {
    pub(super) gap_ms: f64,
    /// Tokens of the prompt computed in it.
    pub(super) prefill: usize,
    /// How long a thread that computes could have run and had no core, where the system counts it.
    pub(super) waited_ms: Option<f64>,
    /// From the last token's publishing until planning began: saving, commands, waiting for a core.
    pub(super) between_ms: f64,
    pub(super) planning_ms: f64,
    pub(super) device_ms: f64,
    pub(super) publishing_ms: f64,
}

impl GapRow {
    /// What is left without the wait for a core.
    pub(super) fn own_ms(&self) -> Option<f64> {
        Some(self.gap_ms - self.waited_ms?)
    }
}

/// The next turn in another brain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RestartRow {
    pub(super) context: usize,
    /// Time to the first token when the prompt is computed.
    pub(super) computed_ms: f64,
    /// When it comes from the snapshot.
    pub(super) restored_ms: f64,
    pub(super) cached_share: f64,
}

/// The results as tables.
pub(super) fn markdown(results: &Results) -> String {
    let drafter = match results.drafter.as_str() {
        "" => "no drafter",
        drafter => drafter,
    };
    let mut text = format!(
        "# brain bench\n\n{} on {}, {} threads, {drafter}; brain {}, fingerprint {:.16}…; answers of \
         {} tokens, medians of {}.\n",
        results.model,
        results.device,
        results.threads,
        results.version,
        results.fingerprint,
        results.tokens,
        results.repeats,
    );
    for note in notes(results) {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{note}\n");
    }
    let rows = results.contexts.iter().map(|row| {
        let share = 100.0 * row.accepted as f64 / row.drafted.max(1) as f64;
        let per_round = row.drafted as f64 / row.rounds.max(1) as f64;
        format!(
            "| {} | {:.0} | {:.1} | {:.1} | {:.2} | {per_round:.1} | {share:.0} % |",
            row.context,
            row.prefill_per_second,
            row.decode_per_second,
            row.drafted_per_second,
            row.gain,
        )
    });
    let heads = "context | prefill tokens/s | decode tokens/s | with drafts | gain | drafts a round | accepted";
    table(&mut text, "One sequence", heads, rows);
    let rows = results.depths.iter().filter_map(|row| {
        let chosen = results
            .contexts
            .iter()
            .find(|at| at.context == row.context)?;
        Some(format!(
            "| {} | {} | {:.1} | {:.2} |",
            row.context,
            row.depth,
            row.tokens_per_second,
            chosen.drafted_per_second / row.tokens_per_second.max(f64::MIN_POSITIVE),
        ))
    });
    let heads = "context | drafts in every round | tokens/s | as many as brain chooses, over that";
    table(&mut text, "Fixed depths", heads, rows);
    let rows = results.batches.iter();
    let rows = rows.map(|row| format!("| {} | {:.1} |", row.sequences, row.tokens_per_second));
    table(&mut text, "Batches", "sequences | tokens/s of all", rows);
    let rows = results.reuse.iter().map(|row| {
        format!(
            "| {} | {:.1} | {:.1} | {:.2} % |",
            row.context,
            row.first_ms,
            row.next_ms,
            100.0 * row.cached_share,
        )
    });
    let heads = "context | first turn, ms to the first token | next turn | from the cache";
    table(&mut text, "Prefix reuse", heads, rows);
    stall_tables(&mut text, results);
    let rows = results.restart.iter().map(|row| {
        format!(
            "| {} | {:.1} | {:.1} | {:.2} % |",
            row.context,
            row.computed_ms,
            row.restored_ms,
            100.0 * row.cached_share,
        )
    });
    let heads = "context | computed, ms to the first token | from the snapshot | of the tokens";
    table(&mut text, "Restart", heads, rows);
    text
}

/// What a prompt beside them does to tokens.
fn stall_tables(text: &mut String, results: &Results) {
    let times = |worst: f64, usual: f64| worst / usual.max(f64::MIN_POSITIVE);
    let rows = results.stall.iter().map(|row| {
        format!(
            "| {} | {:.2}, {:.2} | {:.2} | {:.2} | {:.2} ({:.1} times the usual) | {} | {:.2} ({:.1} times) | {:.0}, {:.0} |",
            row.context,
            row.usual_ms,
            row.usual_worst_ms,
            row.median_ms,
            row.late_ms,
            row.worst_ms,
            times(row.worst_ms, row.usual_ms),
            row.worst_own_ms.map_or("not counted".into(), |own| format!(
                "{own:.2} ({:.1} times)",
                times(own, row.usual_ms)
            )),
            row.read_worst_ms,
            times(row.read_worst_ms, row.read_usual_ms),
            row.alone_ms,
            row.beside_ms,
        )
    });
    let heads = "prompt beside it | usual ms between tokens, longest | median | 99 % below | longest | without waits for a core | longest as read | ms to the prompt's first token alone, beside";
    table(text, "Decoding while a prompt is computed", heads, rows);
    let rows = results.gaps.iter().map(|gap| {
        format!(
            "| {:.2} | {} | {} | {:.2} | {:.2} | {:.2} | {:.2} |",
            gap.gap_ms,
            gap.prefill,
            gap.waited_ms
                .map_or("?".into(), |waited| format!("{waited:.2}")),
            gap.device_ms,
            gap.planning_ms,
            gap.publishing_ms,
            gap.between_ms,
        )
    });
    let heads = "ms | tokens of the prompt in it | of it waiting for a core | device | planning | publishing | between turns";
    table(text, "The longest gaps meanwhile", heads, rows);
}

/// What a reader must know before believing a figure.
pub(super) fn notes(results: &Results) -> Vec<String> {
    let mut notes = Vec::new();
    if !results.synthetic_acceptance.is_empty() {
        let shares: Vec<String> = results
            .synthetic_acceptance
            .iter()
            .map(|share| format!("{share}"))
            .collect();
        notes.push(format!(
            "Synthetic acceptance: drafts were made to be right in {} of the rounds.",
            shares.join(", ")
        ));
    }
    if let Some(positions) = results.stretched_to {
        notes.push(format!(
            "The model was let go to {positions} positions: costs are real, its text is not."
        ));
    }
    notes
}

fn table(text: &mut String, title: &str, heads: &str, rows: impl Iterator<Item = String>) {
    let rows: Vec<String> = rows.collect();
    if rows.is_empty() {
        return;
    }
    let rule = "---|".repeat(heads.split(" | ").count());
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "\n## {title}\n\n| {heads} |\n|{rule}\n{}\n",
        rows.join("\n")
    );
}

/// How the second results compare with the first.
pub(super) fn comparison(before: &Results, after: &Results) -> String {
    let mut text = format!(
        "# {} on {} ({:.16}…) against {} on {} ({:.16}…)\n",
        after.model,
        after.device,
        after.fingerprint,
        before.model,
        before.device,
        before.fingerprint,
    );
    let (was, is) = (rates(before), rates(after));
    let rows = is.iter().filter_map(|(name, now)| {
        let (_, then) = was.iter().find(|(other, _)| other == name)?;
        Some(format!(
            "| {name} | {then:.1} | {now:.1} | {:.3} |",
            now / then
        ))
    });
    table(
        &mut text,
        "Tokens a second",
        "what | before | after | ratio",
        rows,
    );
    text
}

/// Every rate by its name.
fn rates(results: &Results) -> Vec<(String, f64)> {
    let contexts = results.contexts.iter().flat_map(|row| {
        let at = row.context;
        [
            (format!("prefill of {at}"), row.prefill_per_second),
            (format!("decode at {at}"), row.decode_per_second),
            (format!("with drafts at {at}"), row.drafted_per_second),
        ]
    });
    let batches = results.batches.iter();
    let batches = batches.map(|row| (format!("batch of {}", row.sequences), row.tokens_per_second));
    contexts.chain(batches).collect()
}

#[cfg(test)]
pub(super) fn sample() -> Results {
    let at = |context, plain, drafted| ContextRow {
        context,
        prefill_per_second: 1000.0,
        decode_per_second: plain,
        drafted_per_second: drafted,
        gain: drafted / plain,
        drafted: 40,
        accepted: 30,
        rounds: 10,
    };
    Results {
        model: "m".into(),
        device: "cpu".into(),
        fingerprint: "0123456789abcdef0123".into(),
        contexts: vec![at(0, 100.0, 180.0), at(4096, 80.0, 90.0)],
        depths: vec![DepthRow {
            context: 4096,
            depth: 2,
            tokens_per_second: 100.0,
        }],
        batches: vec![BatchRow {
            sequences: 4,
            tokens_per_second: 300.0,
        }],
        stall: vec![StallRow {
            context: 4096,
            usual_ms: 2.0,
            usual_worst_ms: 2.5,
            median_ms: 3.0,
            late_ms: 4.5,
            worst_ms: 5.0,
            worst_own_ms: Some(4.8),
            read_usual_ms: 2.0,
            read_worst_ms: 6.0,
            alone_ms: 900.0,
            beside_ms: 1800.0,
        }],
        gaps: vec![GapRow {
            gap_ms: 5.0,
            prefill: 12,
            waited_ms: Some(0.2),
            between_ms: 0.25,
            planning_ms: 0.5,
            device_ms: 4.0,
            publishing_ms: 0.25,
        }],
        restart: vec![RestartRow {
            context: 4096,
            computed_ms: 4000.0,
            restored_ms: 40.0,
            cached_share: 0.9995,
        }],
        ..Results::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_survive_their_file_and_show_every_figure() {
        let results = sample();
        let json = serde_json::to_string(&results).unwrap();
        assert_eq!(serde_json::from_str::<Results>(&json).unwrap(), results);
        let text = markdown(&results);
        for line in [
            "| 0 | 1000 | 100.0 | 180.0 | 1.80 | 4.0 | 75 % |",
            "| 4096 | 2 | 100.0 | 0.90 |",
            "| 4 | 300.0 |",
            "| 4096 | 4000.0 | 40.0 | 99.95 % |",
            "| 4096 | 2.00, 2.50 | 3.00 | 4.50 | 5.00 (2.5 times the usual) | 4.80 (2.4 times) | 6.00 (3.0 times) | 900, 1800 |",
            "| 5.00 | 12 | 0.20 | 4.00 | 0.50 | 0.25 | 0.25 |",
            "no drafter",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains("Prefix reuse"), "nothing was measured");
    }

    #[test]
    fn a_comparison_has_what_both_have() {
        let (before, mut after) = (sample(), sample());
        after.contexts.truncate(1);
        after.contexts[0].decode_per_second = 150.0;
        let text = comparison(&before, &after);
        assert!(
            text.contains("| decode at 0 | 100.0 | 150.0 | 1.500 |"),
            "{text}"
        );
        assert!(!text.contains("4096"), "{text}");
    }
}
