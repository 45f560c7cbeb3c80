//! One cap for what any tool tells the model: the beginning and the end, with a note between.

/// Bytes of a result that reach the model.
pub const MAX_RESULT: usize = 16 << 10;

/// `text` if it is short, else its head and tail (whole lines where it has lines) around a note
/// that says how much is missing and what to do.
pub fn cap(text: &str, advice: &str) -> String {
    if text.len() <= MAX_RESULT {
        return text.to_owned();
    }
    let mut head = boundary(text, MAX_RESULT * 3 / 4);
    let mut tail = boundary(text, text.len() - MAX_RESULT / 4);
    if let Some(line) = text[..head].rfind('\n').filter(|at| *at > head / 2) {
        head = line + 1;
    }
    if let Some(line) = text[tail..]
        .find('\n')
        .filter(|at| *at < (text.len() - tail) / 2)
    {
        tail += line + 1;
    }
    let gap = if text[..head].ends_with('\n') {
        ""
    } else {
        "\n"
    };
    format!(
        "{}{gap}[{} bytes left out; {advice}]\n{}",
        &text[..head],
        tail - head,
        &text[tail..]
    )
}

/// The last place at or before `at` where a character begins.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at)
        .rev()
        .find(|place| text.is_char_boundary(*place))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_text_is_left_alone() {
        assert_eq!(cap("a\nb", "x"), "a\nb");
        let full = "y".repeat(MAX_RESULT);
        assert_eq!(cap(&full, "x"), full);
    }

    #[test]
    fn long_text_keeps_both_ends_and_counts_the_rest() {
        let text: String = (0..9000).map(|n| format!("line {n}\n")).collect();
        let shown = cap(&text, "read less");
        assert!(shown.len() <= MAX_RESULT + 60);
        assert!(shown.starts_with("line 0\n") && shown.ends_with("line 8999\n"));
        let note = shown.lines().find(|l| l.starts_with('[')).unwrap();
        let missing: usize = note[1..].split(' ').next().unwrap().parse().unwrap();
        assert_eq!(shown.len() - note.len() - 1 + missing, text.len());
    }

    #[test]
    fn characters_are_never_cut() {
        for lead in 0..4 {
            let text = format!("{}{}", "a".repeat(lead), "ä€😀".repeat(9000));
            assert!(cap(&text, "x").contains("bytes left out"));
        }
    }
}
