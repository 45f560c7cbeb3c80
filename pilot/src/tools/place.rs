//! Where the workspace lies is not for the model: its prompt must not depend on it.

/// `text` with `.` for the path `place` and for the beginning of every path below it. Other paths
/// with the same letters in them stay as they are.
pub fn hide(text: &str, place: &str) -> String {
    // The root is part of every path.
    if place.len() < 2 {
        return text.to_owned();
    }
    let mut hidden = String::with_capacity(text.len());
    let mut done = 0;
    for (at, _) in text.match_indices(place) {
        let (before, after) = (&text[done..at], &text[at + place.len()..]);
        hidden.push_str(before);
        let is_it = begins_after(&text[..at]) && ends_before(after);
        hidden.push_str(if is_it { "." } else { place });
        done = at + place.len();
    }
    hidden.push_str(&text[done..]);
    hidden
}

/// Whether a path can begin after `before`: not in the middle of a longer one, but after the name of
/// an option (`-I/srv/notes`) or the scheme of an address.
fn begins_after(before: &str) -> bool {
    if before.ends_with("://") {
        return true;
    }
    let mut first = None;
    for c in before.chars().rev() {
        match c {
            '/' => return false,
            '.' | '_' | '-' => first = Some(c),
            c if c.is_alphanumeric() => first = Some(c),
            _ => break,
        }
    }
    matches!(first, None | Some('-'))
}

/// Whether the last name of a path can end before `after`.
fn ends_before(after: &str) -> bool {
    let mut rest = after.chars();
    match rest.next() {
        // The end of a sentence, or of a name that goes on.
        Some('.') => !rest.next().is_some_and(is_name),
        Some(next) => !is_name(next),
        None => true,
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || "._-+~@%#".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_is_hidden_and_its_neighbours_are_not() {
        for (text, shown) in [
            ("/srv/notes", "."),
            ("/srv/notes/a.txt", "./a.txt"),
            ("in /srv/notes: 3", "in .: 3"),
            ("It is /srv/notes.", "It is .."),
            ("It is /srv/notes.\n", "It is ..\n"),
            ("'/srv/notes'/a (/srv/notes)", "'.'/a (.)"),
            ("PATH=/srv/notes/bin:/srv/notes", "PATH=./bin:."),
            ("-I/srv/notes/include", "-I./include"),
            ("file:///srv/notes/a", "file://./a"),
            ("/srv/notes-old/a", "/srv/notes-old/a"),
            ("/srv/notes.bak", "/srv/notes.bak"),
            ("/srv/notes2 /srv/notes_", "/srv/notes2 /srv/notes_"),
            ("/srv/notes\u{e9}", "/srv/notes\u{e9}"),
            ("/mnt/srv/notes/a", "/mnt/srv/notes/a"),
            ("backup/srv/notes", "backup/srv/notes"),
            ("@/srv/notes/list", "@./list"),
            ("/srv/notes/srv/notes", "./srv/notes"),
        ] {
            assert_eq!(hide(text, "/srv/notes"), shown, "{text}");
        }
        assert_eq!(hide("/a /", "/"), "/a /");
    }
}
