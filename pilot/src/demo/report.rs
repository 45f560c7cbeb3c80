//! The end of the demo in a short table, or as one JSON object.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    record::Record,
    snapshot, timeline,
    verdict::{Outcome, Verdict},
};
use crate::ui::words;

/// Differences that are named.
const SHOWN: usize = 8;

/// Everything the report tells.
pub struct Report<'a> {
    /// The seed.
    pub seed: u64,
    /// Kills that were asked for.
    pub asked: u32,
    /// The marathon with kills.
    pub killed: (&'a Record, &'a Outcome),
    /// The one without.
    pub calm: (&'a Record, &'a Outcome),
    /// The comparison.
    pub verdict: &'a Verdict,
}

impl Report<'_> {
    /// For people.
    pub fn text(&self) -> String {
        let (killed, calm) = (self.killed.0, self.calm.0);
        let mut out = format!("\nThe marathon with kills (seed {}):\n\n", self.seed);
        out.push_str(&timeline::draw(killed));
        self.table(&mut out);
        out.push('\n');
        if let Some(faster) = killed.faster_than(calm) {
            let _ = writeln!(
                out,
                "  drafting is {faster:.2}x as fast, answer by answer (median)"
            );
        }
        self.kills(&mut out);
        out.push('\n');
        self.differences(&mut out);
        out
    }

    fn table(&self, out: &mut String) {
        let ((killed, with), (calm, without)) = (self.killed, self.calm);
        let mut row = |name: &str, a: String, b: String| {
            let _ = writeln!(out, "  {name:<24} {a:>14} {b:>14}");
        };
        row("", "with kills".into(), "undisturbed".into());
        row("drafter", "on".into(), "off".into());
        let number = |n: u64| words::number(n);
        row(
            "tool calls",
            number(with.totals.calls),
            number(without.totals.calls),
        );
        row(
            "  that failed",
            number(killed.errors.into()),
            number(calm.errors.into()),
        );
        row(
            "answers",
            number(with.totals.answers),
            number(without.totals.answers),
        );
        row(
            "tokens",
            number(with.tokens() as u64),
            number(without.tokens() as u64),
        );
        row(
            "new prompts (compacted)",
            number(killed.compactions.into()),
            number(calm.compactions.into()),
        );
        row(
            "tokens a round",
            decimals(killed.per_round(), 2),
            decimals(calm.per_round(), 2),
        );
        row(
            "tokens a second",
            decimals(killed.speed(), 0),
            decimals(calm.speed(), 0),
        );
        row(
            "seconds",
            format!("{:.1}", killed.elapsed.as_secs_f64()),
            format!("{:.1}", calm.elapsed.as_secs_f64()),
        );
        row("memory of brain, MiB", mebibytes(killed), mebibytes(calm));
    }

    fn differences(&self, out: &mut String) {
        let (_, with) = self.killed;
        let files = with.after.len();
        let bytes = words::number(snapshot::bytes(&with.after) as u64);
        let tokens = words::number(with.tokens() as u64);
        for (what, wrong, good) in [
            (
                "tokens",
                &self.verdict.tokens,
                format!("the same, {tokens} of {tokens}"),
            ),
            (
                "workspace",
                &self.verdict.bytes,
                format!("the same, {files} entries, {bytes} bytes"),
            ),
            (
                "oracle",
                &self.verdict.oracle,
                "every file of both is what the task asks for".to_owned(),
            ),
        ] {
            let (sign, said) = match wrong.is_empty() {
                true => ("ok ", good),
                false => ("BAD", words::count(wrong.len() as u64, "difference")),
            };
            let _ = writeln!(out, "  {sign} {what:<10} {said}");
            for line in wrong.iter().take(SHOWN) {
                let _ = writeln!(out, "                 {line}");
            }
        }
    }

    fn kills(&self, out: &mut String) {
        let (killed, _) = self.killed;
        if self.asked == 0 {
            return;
        }
        let done = killed.kills();
        let _ = writeln!(out, "  {} of {} kills, all SIGKILL:", done, self.asked);
        let _ = writeln!(
            out,
            "    brain {:>2}: {} in the middle of an answer, {} as one ended",
            killed.brain_kills(),
            killed.brain_in_answer,
            killed.brain_between
        );
        let places: Vec<String> = killed
            .pilot_at
            .iter()
            .map(|(place, n)| format!("{n} {place}"))
            .collect();
        let _ = writeln!(
            out,
            "    pilot {:>2}: {} at random, {} with the brain, at named places: {}",
            killed.pilot_kills(),
            killed.pilot_at_random,
            killed.both_at_once,
            if places.is_empty() {
                "none".to_owned()
            } else {
                places.join(", ")
            }
        );
        let settled: Vec<String> = killed
            .settled
            .iter()
            .map(|(how, n)| format!("{n} {how}"))
            .collect();
        let _ = writeln!(
            out,
            "    {} fell between a tool's intent and its result; settled: {}",
            killed.between_intent_and_result,
            if settled.is_empty() {
                "none".to_owned()
            } else {
                settled.join(", ")
            }
        );
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        let side = |record: &Record, outcome: &Outcome| {
            json!({
                "tool_calls": outcome.totals.calls, "errors": record.errors,
                "answers": outcome.totals.answers, "tokens": outcome.tokens(),
                "compactions": record.compactions, "tokens_per_round": record.per_round(),
                "tokens_per_second": record.speed(), "seconds": record.elapsed.as_secs_f64(),
                "brain_memory_bytes": record.brain_memory,
            })
        };
        let killed = self.killed.0;
        json!({
            "event": "summary", "seed": self.seed, "holds": self.verdict.holds(),
            "with_kills": side(killed, self.killed.1), "undisturbed": side(self.calm.0, self.calm.1),
            "drafting_speedup": killed.faster_than(self.calm.0),
            "kills": {
                "asked": self.asked, "done": killed.kills(),
                "brain_in_answer": killed.brain_in_answer, "brain_between": killed.brain_between,
                "pilot_at_random": killed.pilot_at_random, "both_at_once": killed.both_at_once,
                "pilot_at": killed.pilot_at,
                "between_intent_and_result": killed.between_intent_and_result,
                "settled": killed.settled,
            },
            "differences": {
                "tokens": self.verdict.tokens, "bytes": self.verdict.bytes,
                "oracle": self.verdict.oracle,
            },
        })
    }
}

fn decimals(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn mebibytes(record: &Record) -> String {
    record
        .brain_memory
        .map_or_else(|| "-".to_owned(), |bytes| (bytes >> 20).to_string())
}
