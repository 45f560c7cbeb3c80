//! Runs as they stand in a store: a table of them, and one of them in full.

use std::{fmt::Write as _, time::Duration};

use serde_json::{Value, json};

use super::words;
use crate::{
    journal::Record,
    run::{
        entry::{AnswerEnd, Entry},
        log::{self, AnswerLog},
        state::{State, Status},
    },
};

/// A run in one line of a table.
#[derive(Debug, Clone)]
pub struct Row {
    /// Its id.
    pub run: String,
    /// `running`, `paused`, `finished` or `damaged`.
    pub status: &'static str,
    /// Why it stands still, or what is wrong with its journal.
    pub reason: String,
    /// First entry's wall time, milliseconds since 1970.
    pub created_ms: u64,
    /// Latest entry's.
    pub changed_ms: u64,
    /// What was done.
    pub calls: u64,
    /// Tokens generated.
    pub generated: u64,
    /// What to do.
    pub goal: String,
}

impl Row {
    /// The row of a run with this journal.
    pub fn new(state: &State, records: &[Record]) -> Self {
        let (status, reason) = standing(state);
        Self {
            run: state.created.run.to_string(),
            status,
            reason,
            created_ms: records.first().map_or(0, |r| r.wall_ms),
            changed_ms: records.last().map_or(0, |r| r.wall_ms),
            calls: state.totals.calls,
            generated: state.totals.generated,
            goal: state.created.goal.clone(),
        }
    }

    /// The row of a run whose journal cannot be read.
    pub fn damaged(run: String, reason: String) -> Self {
        Self {
            run,
            status: "damaged",
            reason,
            created_ms: 0,
            changed_ms: 0,
            calls: 0,
            generated: 0,
            goal: String::new(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "run": self.run, "status": self.status, "reason": self.reason,
            "created_ms": self.created_ms, "changed_ms": self.changed_ms,
            "calls": self.calls, "generated": self.generated, "goal": self.goal,
        })
    }
}

/// How a run stands, and why.
pub fn standing(state: &State) -> (&'static str, String) {
    match &state.status {
        Status::Running => ("running", String::new()),
        Status::Paused(reason) => ("paused", reason.to_string()),
        Status::Finished(summary) => ("finished", summary.clone()),
    }
}

/// The table; `now_ms` is the wall clock.
pub fn table(rows: &[Row], now_ms: u64) -> String {
    if rows.is_empty() {
        return "no runs in this store; start one with `pilot run`\n".to_owned();
    }
    let width = rows.iter().map(|r| r.run.len()).max().unwrap_or(0).max(3);
    let mut out = format!(
        "{:<width$}  status    changed    calls     tokens  goal\n",
        "run"
    );
    for row in rows {
        let age = now_ms.saturating_sub(row.changed_ms);
        let age = if row.changed_ms == 0 {
            "-".to_owned()
        } else {
            ago(age)
        };
        let about = if row.status == "damaged" {
            &row.reason
        } else {
            &row.goal
        };
        let _ = writeln!(
            out,
            "{:<width$}  {:<8}  {age:<9} {:>6} {:>10}  {}",
            row.run,
            row.status,
            words::number(row.calls),
            words::number(row.generated),
            words::shorten(about, 60),
        );
    }
    out
}

/// The table for scripts: one object a line.
pub fn table_json(rows: &[Row]) -> String {
    rows.iter().map(|row| format!("{}\n", row.json())).collect()
}

fn ago(ms: u64) -> String {
    match ms / 1000 {
        0..60 => "now".to_owned(),
        s @ 60..3600 => format!("{} min ago", s / 60),
        s @ 3600..172_800 => format!("{} h ago", s / 3600),
        s => format!("{} d ago", s / 86_400),
    }
}

/// What `show` prints by default.
pub fn summary(state: &State, records: &[Record]) -> String {
    let (status, reason) = standing(state);
    let created = &state.created;
    let mut out = String::new();
    let mut put = |name: &str, value: &str| {
        if !value.is_empty() {
            let _ = writeln!(out, "{name:<12} {value}");
        }
    };
    put("run", created.run.as_str());
    put("status", status);
    put(
        if status == "finished" {
            "summary"
        } else {
            "reason"
        },
        &reason,
    );
    put("goal", &created.goal);
    put("workspace", &created.workspace);
    put(
        "model",
        &format!("{} ({})", created.model.name, created.model.fingerprint),
    );
    put("seed", &created.seed.to_string());
    put(
        "context",
        &format!(
            "{} tokens at most, {} prompts",
            state.context_limit(),
            state.totals.prompts
        ),
    );
    put(
        "calls",
        match state.calls_constrained {
            true => "kept to what the tools take",
            false => "as the model makes them",
        },
    );
    put("done", &words::totals(&state.totals));
    put("journal", &format!("{} records", records.len()));
    out
}

/// The same for scripts: one JSON object.
pub fn summary_json(state: &State, records: &[Record]) -> String {
    let (status, reason) = standing(state);
    let value = json!({
        "created": state.created, "calls_constrained": state.calls_constrained, "status": status, "reason": reason,
        "totals": state.totals, "records": records.len(),
    });
    format!("{value}\n")
}

/// Every answer's tokens, a line each: step, attempt, seed, ids.
pub fn tokens(entries: &[Entry]) -> String {
    let line = |answer: &AnswerLog| {
        let ids: Vec<String> = answer.ids.iter().map(u32::to_string).collect();
        format!(
            "{} {} {:016x} {}\n",
            answer.step,
            answer.attempt,
            answer.seed,
            ids.join(" ")
        )
    };
    log::answers(entries).iter().map(line).collect()
}

/// What was said and done, for people.
pub fn transcript(state: &State, entries: &[Entry]) -> String {
    let mut out = format!("GOAL\n{}\n", state.created.goal);
    for entry in entries {
        match entry {
            Entry::AnswerEnded(ended) if ended.end == AnswerEnd::Stop => {
                let turn = &ended.turn;
                for (title, text) in [("THOUGHT", &turn.reasoning), ("MODEL", &turn.content)] {
                    if !text.trim().is_empty() {
                        let _ = write!(out, "\n{title}\n{}\n", text.trim_end());
                    }
                }
                for call in &turn.calls {
                    let _ = write!(out, "\nCALL {} {}\n", call.name, call.arguments);
                }
            }
            Entry::AnswerEnded(ended) => {
                let why = match ended.end {
                    AnswerEnd::Malformed => "that was no proper turn",
                    AnswerEnd::Length | AnswerEnd::Stop => "that was too long",
                };
                let _ = write!(out, "\n(an answer {why} was dropped)\n");
            }
            Entry::ToolEnded(ended) => {
                let settled = words::settled(ended.origin);
                let note = if settled.is_empty() {
                    String::new()
                } else {
                    format!(" [{settled}]")
                };
                let took = Duration::from_millis(ended.elapsed_ms).as_secs_f64();
                let _ = write!(out, "RESULT ({took:.2} s){note}\n{}\n", ended.output.text);
            }
            Entry::PromptStarted { first_exchange, .. } if *first_exchange > 0 => {
                let _ = write!(
                    out,
                    "\n(new prompt; exchanges before {first_exchange} left out)\n"
                );
            }
            Entry::Resumed { .. } => out.push_str("\n(a pilot took the run up again)\n"),
            Entry::Paused(reason) => {
                let _ = write!(out, "\n(paused: {reason})\n");
            }
            Entry::Finished { summary } => {
                let _ = write!(out, "\nFINISHED\n{summary}\n");
            }
            _ => {}
        }
    }
    out
}
