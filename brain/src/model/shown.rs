//! Names and texts that come out of files, as they may be shown: on one line, without anything
//! that a terminal obeys, and no longer than a reader bears.

use std::path::{Path, PathBuf};

/// Characters of a name that are shown.
const NAME: usize = 80;
/// Characters of a text that quotes a file: what another library said of it, or a value.
const TEXT: usize = 240;

/// A name out of a file. Characters that cannot be seen are escaped; of a long name the middle is
/// left out.
pub(crate) fn shown(name: &str) -> String {
    cut(name, NAME)
}

/// The same for a text that may quote what a file holds.
pub(crate) fn shown_text(text: &str) -> String {
    cut(text, TEXT)
}

/// The same for the last part of a path: the folders before it are the user's own words.
pub(crate) fn shown_path(path: &Path) -> String {
    let Some(name) = path.file_name() else {
        return path.display().to_string();
    };
    let name = shown(&name.to_string_lossy());
    let parent = path.parent().map_or(PathBuf::new(), Path::to_owned);
    parent.join(name).display().to_string()
}

fn cut(text: &str, most: usize) -> String {
    let (whole, rest) = head(text.chars(), most);
    if !rest {
        return whole.concat();
    }
    let half = most / 2;
    let (begin, _) = head(text.chars(), half - 1);
    let (mut end, _) = head(text.chars().rev(), half);
    end.reverse();
    format!("{}…{}", begin.concat(), end.concat())
}

/// The first characters, each as it is shown, that take no more than `most` together; and whether
/// any are left.
fn head(chars: impl Iterator<Item = char>, most: usize) -> (Vec<String>, bool) {
    let (mut pieces, mut width) = (Vec::new(), 0);
    for c in chars {
        let piece = escape(c);
        width += piece.chars().count();
        if width > most {
            return (pieces, true);
        }
        pieces.push(piece);
    }
    (pieces, false)
}

fn escape(c: char) -> String {
    match c {
        '\'' | '"' | '\\' => c.to_string(),
        c => c.escape_debug().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_plain_stays_as_it_is() {
        for name in ["", "model.layers.0.q_proj.weight", "größe", "a \"b\" \\ c"] {
            assert_eq!(shown(name), name);
        }
        let most = "x".repeat(NAME);
        assert_eq!(shown(&most), most);
    }

    #[test]
    fn nothing_reaches_a_terminal_and_nothing_is_endless() {
        let hostile = "a\n\r\t\0\x1b[31m\u{7f}\u{9b}2J\u{202e}\u{2028}\u{200b}b";
        let safe = shown(hostile);
        assert!(safe.chars().all(|c| c.is_ascii_graphic()), "{safe}");
        assert!(safe.starts_with("a\\n\\r\\t"), "{safe}");
        for long in [
            "y".repeat(1 << 20),
            "\n".repeat(1 << 20),
            "\u{202e}".repeat(99),
        ] {
            let name = format!("begin{long}end");
            let safe = shown(&name);
            assert!(safe.starts_with("begin") && safe.ends_with("end"), "{safe}");
            assert!(safe.contains('…'), "{safe}");
            assert!(safe.chars().count() <= NAME, "{safe}");
        }
        assert!(shown_text(&"z".repeat(TEXT + 1)).chars().count() <= TEXT);
    }

    #[test]
    fn of_a_path_only_the_name_is_cut() {
        let folder = "/".to_owned() + &"f".repeat(200);
        let path = Path::new(&folder).join("a\nb");
        assert_eq!(shown_path(&path), folder.clone() + "/a\\nb");
        assert_eq!(shown_path(Path::new("a\nb")), "a\\nb");
        assert_eq!(shown_path(Path::new("/")), "/");
    }
}
