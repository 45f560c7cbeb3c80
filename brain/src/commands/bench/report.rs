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
    pub(super) batches: Vec<BatchRow>,
    pub(super) reuse: Vec<ReuseRow>,
    #[serde(default)]
    pub(super) stall: Vec<StallRow>,
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

/// What somebody who is reading feels of a prompt that is computed meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct StallRow {
    /// Tokens of that prompt.
    pub(super) context: usize,
    /// Between two tokens, before it came: the median.
    pub(super) usual_ms: f64,
    /// While it was computed: the median, the longest but one in a hundred, and the longest.
    pub(super) median_ms: f64,
    pub(super) late_ms: f64,
    pub(super) worst_ms: f64,
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
    let rows = results.stall.iter().map(|row| {
        format!(
            "| {} | {:.2} | {:.2} | {:.2} | {:.2} ({:.1} times the usual) |",
            row.context,
            row.usual_ms,
            row.median_ms,
            row.late_ms,
            row.worst_ms,
            row.worst_ms / row.usual_ms.max(f64::MIN_POSITIVE),
        )
    });
    let heads = "prompt beside it | usual ms between tokens | median | 99 % below | longest";
    table(
        &mut text,
        "Decoding while a prompt is computed",
        heads,
        rows,
    );
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
        batches: vec![BatchRow {
            sequences: 4,
            tokens_per_second: 300.0,
        }],
        stall: vec![StallRow {
            context: 4096,
            usual_ms: 2.0,
            median_ms: 3.0,
            late_ms: 4.5,
            worst_ms: 5.0,
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
            "| 4 | 300.0 |",
            "| 4096 | 4000.0 | 40.0 | 99.95 % |",
            "| 4096 | 2.00 | 3.00 | 4.50 | 5.00 (2.5 times the usual) |",
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
