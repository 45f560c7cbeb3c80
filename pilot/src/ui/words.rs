//! How calls, results, durations and counts are put into a line.

use std::time::Duration;

use serde_json::Value;

use crate::run::{entry::ResultOrigin, event::Totals};

/// The one argument of a call that tells it from others, in at most `width` characters.
pub fn call(name: &str, arguments: &str, width: usize) -> String {
    let value: Value = serde_json::from_str(arguments).unwrap_or_default();
    let text = |key: &str| value[key].as_str();
    let telling = match name {
        "bash" => text("command"),
        "finish" => text("summary"),
        _ => text("path"),
    };
    match telling {
        Some(telling) => shorten(&format!("{name} {telling}"), width),
        None => shorten(&format!("{name} {arguments}"), width),
    }
}

/// The first line of a result, and how many more there are.
pub fn result(text: &str, width: usize) -> String {
    let lines = text.lines().count();
    let first = shorten(text.lines().next().unwrap_or_default(), width);
    match lines {
        0 => "(nothing)".to_owned(),
        1 => first,
        _ => format!("{first} (+{} lines)", lines - 1),
    }
}

/// At most `width` characters on one line; control characters become spaces.
pub fn shorten(text: &str, width: usize) -> String {
    let mut shown: String = text
        .chars()
        .take(width + 1)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if shown.chars().count() > width {
        shown = shown.chars().take(width.saturating_sub(1)).collect();
        shown.push('…');
    }
    shown
}

/// `0:07`, `12:34` or `3:25:45`.
pub fn duration(time: Duration) -> String {
    let s = time.as_secs();
    if s < 3600 {
        format!("{}:{:02}", s / 60, s % 60)
    } else {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    }
}

/// `1 call`, `2 calls`.
pub fn count(n: u64, thing: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", number(n))
}

/// Digits in groups of three.
pub fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut shown = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

/// How a result in doubt was settled; empty for one that never was in doubt.
pub fn settled(origin: ResultOrigin) -> &'static str {
    match origin {
        ResultOrigin::Executed | ResultOrigin::Refused => "",
        ResultOrigin::Reran => "run again, which is harmless",
        ResultOrigin::VerifiedMissing => "had not happened, done now",
        ResultOrigin::VerifiedDone => "had happened, result recovered",
        ResultOrigin::Repaired => "half done, put right",
        ResultOrigin::Unknown => "outcome unknown, the model was told",
    }
}

/// A run's sums in a line.
pub fn totals(totals: &Totals) -> String {
    let mut parts = vec![
        count(totals.answers, "answer"),
        count(totals.calls, "tool call"),
        count(totals.generated, "token"),
    ];
    if totals.rounds > 0 {
        let share = totals.generated as f64 / totals.rounds as f64;
        parts.push(format!("{share:.2} tokens a round"));
    }
    if totals.active_ms > 0 {
        parts.push(format!(
            "{} at work",
            duration(Duration::from_millis(totals.active_ms))
        ));
    }
    if totals.resumes > 0 {
        parts.push(count(totals.resumes, "restart"));
    }
    if totals.recovered > 0 {
        parts.push(format!(
            "{} settled after a restart",
            count(totals.recovered, "call")
        ));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_a_line() {
        assert_eq!(shorten("abc", 3), "abc");
        assert_eq!(shorten("abcd", 3), "ab…");
        assert_eq!(shorten("a\nb\u{1b}[31m", 20), "a b [31m");
        assert_eq!(result("one\ntwo\nthree", 10), "one (+2 lines)");
        assert_eq!(result("", 10), "(nothing)");
        assert_eq!(
            call("read", r#"{"path":"inbox/a.txt"}"#, 40),
            "read inbox/a.txt"
        );
        assert_eq!(call("bash", r#"{"command":"wc -l x"}"#, 40), "bash wc -l x");
        assert_eq!(call("odd", "{broken", 40), "odd {broken");
    }

    #[test]
    fn numbers_and_times() {
        assert_eq!(number(0), "0");
        assert_eq!(number(999), "999");
        assert_eq!(number(1_234_567), "1,234,567");
        assert_eq!(duration(Duration::from_secs(7)), "0:07");
        assert_eq!(duration(Duration::from_secs(12_345)), "3:25:45");
        assert_eq!(count(1, "call"), "1 call");
        assert_eq!(count(2, "call"), "2 calls");
    }
}
