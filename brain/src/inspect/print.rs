//! A report as people read it.

use std::fmt::Write as _;

use super::{
    memory::{Kv, MemoryPlan},
    problem::Problem,
    report::{Architecture, Parameters, Report, Stored, TextFacts},
};
use crate::{
    model::shown::{shown, shown_text},
    size::show,
};

/// Problems that are written out; the JSON form has all of them.
const PROBLEMS: usize = 40;

/// The whole report as text.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    heading(&mut out, report);
    if let Some(architecture) = &report.architecture {
        layers(&mut out, architecture);
    }
    if let Some(parameters) = &report.parameters {
        numbers(&mut out, parameters);
    }
    storage(&mut out, &report.storage);
    files(&mut out, report);
    if let Some(kv) = &report.kv {
        cache(&mut out, kv, report);
    }
    if let Some(plan) = &report.memory {
        memory(&mut out, plan);
    }
    if let Some(drafter) = &report.drafter {
        let verdict = if drafter.fits { "fits" } else { "does not fit" };
        let layer = |l: Option<usize>| l.map_or("none".to_owned(), |l| l.to_string());
        line(&mut out, "");
        line(
            &mut out,
            &format!(
                "drafter  {} {verdict}; {}, {}; reads the cache of layers {} and {}",
                drafter.path,
                count(drafter.parameters),
                show(drafter.bytes),
                layer(drafter.reads[0]),
                layer(drafter.reads[1]),
            ),
        );
    }
    if let Some(facts) = &report.text {
        words(&mut out, facts);
    }
    if let Some(tensors) = &report.tensors {
        line(&mut out, "");
        let rows = tensors.iter().map(|t| {
            [
                shown(&t.name),
                t.dtype.clone(),
                format!("{:?}", t.shape),
                t.used.to_owned(),
                shown(&t.file),
            ]
        });
        table(
            &mut out,
            ["tensor", "type", "shape", "used for", "file"],
            rows,
            5,
        );
    }
    if !report.notes.is_empty() {
        line(&mut out, "");
    }
    for note in &report.notes {
        line(&mut out, &format!("note  {note}"));
    }
    problems(&mut out, &report.problems);
    out
}

fn line(out: &mut String, text: &str) {
    out.push_str(text.trim_end());
    out.push('\n');
}

/// Rows under a heading. The first `left` columns are words, the others numbers.
fn table<const N: usize>(
    out: &mut String,
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    left: usize,
) {
    let mut all = vec![heading.map(str::to_owned)];
    all.extend(rows);
    let width = |column: usize| {
        let widths = all.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in &all {
        let mut text = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = match column < left {
                true => write!(text, "{gap}{cell:<width$}"),
                false => write!(text, "{gap}{cell:>width$}"),
            };
        }
        line(out, &text);
    }
}

/// A number of parameters.
pub fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

fn heading(out: &mut String, report: &Report) {
    let what = match report.kind {
        "target" => "a model",
        "assistant" => "an MTP assistant",
        "file" => "a file of weights",
        _ => "not a checkpoint that can be served",
    };
    line(out, &format!("{}: {what}", report.path));
    if let Some(recipe) = &report.quantization {
        line(out, &format!("quantised: {}", shown_text(recipe)));
    }
    let Some(a) = &report.architecture else {
        return;
    };
    line(
        out,
        &format!(
            "{}: width {}, {} query heads, {} tokens, window {}, up to {} positions",
            shown(&a.model_type),
            a.hidden,
            a.heads,
            a.vocab,
            a.window,
            a.max_positions
        ),
    );
    let mut more = Vec::new();
    more.extend(
        a.backbone
            .map(|b| format!("drafts for a model of width {b}")),
    );
    more.extend(a.softcap.map(|c| format!("logits bounded by {c}")));
    more.extend(
        a.per_layer_input
            .map(|p| format!("per-layer input of width {p}")),
    );
    more.extend(a.experts.map(|[all, chosen]| {
        let width = a.expert_intermediate.unwrap_or(0);
        format!("{chosen} of {all} experts of width {width} beside the dense block")
    }));
    more.extend(
        a.clusters
            .map(|[all, chosen]| format!("a head that looks at {chosen} of {all} clusters")),
    );
    if !more.is_empty() {
        line(out, &more.join("; "));
    }
}

fn layers(out: &mut String, architecture: &Architecture) {
    line(out, "");
    let rows = architecture.layers.iter().map(|row| {
        [
            row.kind.replace("_attention", ""),
            row.cache.clone(),
            row.count.to_string(),
            row.kv_heads.to_string(),
            row.head_dim.to_string(),
            row.intermediate.to_string(),
            row.layers.clone(),
        ]
    });
    let heading = [
        "attention",
        "cache",
        "layers",
        "kv heads",
        "head",
        "ffn",
        "which",
    ];
    table(out, heading, rows, 2);
}

fn numbers(out: &mut String, p: &Parameters) {
    line(out, "");
    let mut parts = vec![
        format!("{} ({}) parameters", count(p.total), p.total),
        format!("{} active", count(p.active)),
        format!("{} embedding", count(p.embedding)),
    ];
    if p.per_layer_table > 0 {
        parts.push(format!("{} per-layer table", count(p.per_layer_table)));
    }
    if p.experts > 0 {
        parts.push(format!("{} experts", count(p.experts)));
    }
    if p.towers > 0 {
        parts.push(format!("{} in towers that are not read", count(p.towers)));
    }
    line(out, &parts.join("; "));
}

fn storage(out: &mut String, rows: &[Stored]) {
    if rows.is_empty() {
        return;
    }
    line(out, "");
    let bits = |s: &Stored| match s.parameters {
        0 => String::new(),
        n => format!("{:.2}", s.bytes as f64 * 8.0 / n as f64),
    };
    let row = |s: &Stored| {
        [
            s.part.to_owned(),
            s.form.clone(),
            s.tensors.to_string(),
            count(s.parameters),
            show(s.bytes),
            bits(s),
        ]
    };
    let read: Vec<&Stored> = rows.iter().filter(|s| s.part != "towers").collect();
    let mut all: Vec<_> = rows.iter().map(row).collect();
    all.push(row(&Stored {
        part: "all that is read",
        form: String::new(),
        tensors: read.iter().map(|s| s.tensors).sum(),
        parameters: read.iter().map(|s| s.parameters).sum(),
        bytes: read.iter().map(|s| s.bytes).sum(),
    }));
    let heading = ["part", "form", "tensors", "parameters", "size", "bits each"];
    table(out, heading, all, 2);
}

fn files(out: &mut String, report: &Report) {
    line(out, "");
    let rows = report
        .files
        .iter()
        .map(|f| [shown(&f.file), f.tensors.to_string(), show(f.bytes)]);
    table(out, ["file", "tensors", "size"], rows, 1);
}

fn cache(out: &mut String, kv: &Kv, report: &Report) {
    line(out, "");
    let rows = [&kv.full, &kv.sliding].map(|group| {
        let kept = match group.slots {
            None => "every token".to_owned(),
            Some(slots) => format!("{slots} tokens"),
        };
        let fixed = |bytes: u64| match group.slots {
            None => String::new(),
            Some(slots) => show(slots * bytes),
        };
        [
            group.kind.replace("_attention", ""),
            kept,
            group.layers.to_string(),
            group.stored_elements.to_string(),
            show(group.bytes_bf16),
            show(group.bytes_fp8),
            fixed(group.bytes_bf16),
            fixed(group.bytes_fp8),
        ]
    });
    let heading = [
        "keys and values",
        "keeps",
        "layers",
        "elements a token",
        "bf16",
        "fp8",
        "a window, bf16",
        "fp8",
    ];
    table(out, heading, rows, 2);
    if kv.full.values_only > 0 {
        let note = "full layers store values only: keys are formed from them";
        line(out, note);
    }
    if report.asks_for_fp8_cache {
        let note = "the configuration asks for an FP8 cache: --kv-cache-dtype auto is fp8";
        line(out, note);
    }
    if report.kv_scales > 0 {
        let scales = report.kv_scales;
        line(out, &format!("{scales} calibrated scales for an FP8 cache"));
    }
}

fn memory(out: &mut String, plan: &MemoryPlan) {
    line(out, "");
    let left = match plan.left {
        left if left < 0 => format!("{} too little", show(left.unsigned_abs())),
        left => format!("{} for keys and values", show(left as u64)),
    };
    line(
        out,
        &format!(
            "of {} a share of {} is {}; weights {}, drafter {}: {left}",
            show(plan.memory),
            plan.utilization,
            show(plan.usable),
            show(plan.weights),
            show(plan.drafter),
        ),
    );
    let rows = plan.fits.iter().map(|fit| {
        [
            fit.kv.name().to_owned(),
            show(fit.sequence),
            fit.sequences.to_string(),
            fit.longest.to_string(),
        ]
    });
    let each = format!("{} tokens take", plan.tokens);
    let heading = ["cache in", &each, "such sequences", "longest alone"];
    table(out, heading, rows, 1);
}

fn words(out: &mut String, facts: &TextFacts) {
    line(out, "");
    let mut parts = Vec::new();
    parts.extend(facts.tokens.map(|n| format!("tokenizer of {n} tokens")));
    parts.extend(
        facts
            .template
            .as_deref()
            .map(|hash| format!("chat template {}", &hash[..16.min(hash.len())])),
    );
    if let (Some(t), Some(k), Some(p)) = (facts.temperature, facts.top_k, facts.top_p) {
        parts.push(match t {
            0.0 => "samples greedily".to_owned(),
            _ => format!("samples at temperature {t}, top_k {k}, top_p {p}"),
        });
    }
    parts.push(format!("ends with {:?}", facts.eos));
    if !facts.suppressed.is_empty() {
        parts.push(format!("never emits {:?}", facts.suppressed));
    }
    line(out, &parts.join("; "));
}

fn problems(out: &mut String, problems: &[Problem]) {
    line(out, "");
    if problems.is_empty() {
        line(out, "no problem found");
        return;
    }
    let one = problems.len() == 1;
    let noun = if one { "problem" } else { "problems" };
    line(out, &format!("{} {noun}:", problems.len()));
    for p in problems.iter().take(PROBLEMS) {
        let tensor = p.tensor.as_deref().map(|t| format!("{t} "));
        line(
            out,
            &format!(
                "  {}: {}{}: {}",
                p.file,
                tensor.unwrap_or_default(),
                p.problem,
                p.remedy
            ),
        );
    }
    if let Some(more) = problems.len().checked_sub(PROBLEMS).filter(|n| *n > 0) {
        line(out, &format!("  and {more} more: --json lists all"));
    }
}
