//! What the workspace must hold after a right run, worked out from what it held before and from
//! the words of the task alone. It knows neither the model, nor its answers, nor how the workspace
//! was made.

use super::snapshot::{Node, Snapshot};

/// The folder after the run, given the folder before it.
///
/// The report begins with `heading` and has a line for each entry of `folder`, in the order in
/// which a listing shows them: `NAME | OWNER | CODE`, or `NAME | unreadable` for what is no text
/// file. In each text file the line `state: open` has become `state: done`. Nothing else changed.
pub fn expected(before: &Snapshot, folder: &str, report: &str, heading: &str) -> Snapshot {
    let mut after = before.clone();
    let mut rows = Vec::new();
    for (path, node) in before {
        let Some(file) = path
            .strip_prefix(folder)
            .and_then(|rest| rest.strip_prefix('/'))
        else {
            continue;
        };
        if file.contains('/') {
            continue;
        }
        let name = file.strip_suffix(".txt").unwrap_or(file);
        let listed = if *node == Node::Folder {
            format!("{file}/")
        } else {
            file.to_owned()
        };
        let row = match readable(node) {
            Some(text) => {
                after.insert(path.clone(), Node::File(done(text).into_bytes()));
                format!(
                    "{name} | {} | {}",
                    field(text, "owner"),
                    field(text, "code")
                )
            }
            None => format!("{name} | unreadable"),
        };
        rows.push((listed, row));
    }
    rows.sort_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()));
    let mut text = format!("{heading}\n");
    for (_, row) in rows {
        text.push_str(&row);
        text.push('\n');
    }
    after.insert(report.to_owned(), Node::File(text.into_bytes()));
    after
}

fn readable(node: &Node) -> Option<&str> {
    match node {
        Node::File(bytes) => std::str::from_utf8(bytes)
            .ok()
            .filter(|text| !text.contains('\0')),
        Node::Link(_) | Node::Folder => None,
    }
}

fn field<'a>(text: &'a str, key: &str) -> &'a str {
    let value = |line: &'a str| {
        line.split_once(": ")
            .filter(|(k, _)| *k == key)
            .map(|(_, v)| v)
    };
    text.lines().find_map(value).unwrap_or_default()
}

fn done(text: &str) -> String {
    let turned = |line: &str| {
        let (body, end) = line
            .strip_suffix('\n')
            .map_or((line, ""), |body| (body, "\n"));
        let body = if body == "state: open" {
            "state: done"
        } else {
            body
        };
        format!("{body}{end}")
    };
    text.split_inclusive('\n').map(turned).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{snapshot, workspace},
        *,
    };

    fn file(text: &str) -> Node {
        Node::File(text.as_bytes().to_vec())
    }

    #[test]
    fn a_small_case_worked_out_by_hand() {
        let before = Snapshot::from([
            ("inbox".to_owned(), Node::Folder),
            ("inbox/ab.txt".to_owned(), Node::Folder),
            (
                "inbox/aba.txt".to_owned(),
                file("code: 1234\nstate: open\nowner: Lomi\n"),
            ),
            ("inbox/bin.txt".to_owned(), Node::File(vec![0xff])),
            ("inbox/gone.txt".to_owned(), Node::Link("nowhere".into())),
            (
                "inbox/two.txt".to_owned(),
                file("owner: Ka\nnote: was state: open too\nstate: open\ncode: 98765\n"),
            ),
            ("other.txt".to_owned(), file("state: open\n")),
        ]);
        let after = expected(&before, "inbox", "report.txt", "Cards for Zu");
        let report = "Cards for Zu\nab | unreadable\naba | Lomi | 1234\nbin | unreadable\n\
                      gone | unreadable\ntwo | Ka | 98765\n";
        assert_eq!(after["report.txt"], file(report));
        assert_eq!(
            after["inbox/aba.txt"],
            file("code: 1234\nstate: done\nowner: Lomi\n")
        );
        let two = "owner: Ka\nnote: was state: open too\nstate: done\ncode: 98765\n";
        assert_eq!(after["inbox/two.txt"], file(two));
        assert_eq!(after["other.txt"], before["other.txt"]);
        assert_eq!(after.len(), before.len() + 1);
    }

    #[test]
    fn one_wrong_byte_anywhere_is_found() {
        let plan = workspace::Plan::new(11, 12);
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("w");
        plan.build(&root).unwrap();
        let before = snapshot::take(&root).unwrap();
        let right = expected(&before, workspace::FOLDER, workspace::REPORT, &plan.heading);
        assert!(snapshot::differences(&right, &right).is_empty());
        // The folder as it was is not right, in every record and for want of the report.
        let texts = before.values().filter(|n| readable(n).is_some()).count();
        assert_eq!(snapshot::differences(&before, &right).len(), texts + 1);
        let mut tried = 0;
        for (path, node) in &right {
            let Node::File(bytes) = node else { continue };
            for at in 0..bytes.len() {
                let mut wrong = right.clone();
                let mut changed = bytes.clone();
                changed[at] ^= 1;
                wrong.insert(path.clone(), Node::File(changed));
                assert_eq!(
                    snapshot::differences(&wrong, &right).len(),
                    1,
                    "{path} {at}"
                );
                tried += 1;
            }
        }
        assert!(tried > 500);
    }
}
