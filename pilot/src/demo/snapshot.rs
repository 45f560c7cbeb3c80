//! Every byte of a folder, to compare two folders or one folder with what it should be.

use std::{collections::BTreeMap, fs, io, path::Path};

/// What stands under a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A file's bytes.
    File(Vec<u8>),
    /// A link's target.
    Link(String),
    /// A folder.
    Folder,
}

/// Everything in a folder by its path from there, `/` between the parts.
pub type Snapshot = BTreeMap<String, Node>;

/// Reads a folder whole. A pipe or device in it is an error.
pub fn take(root: &Path) -> io::Result<Snapshot> {
    let mut all = Snapshot::new();
    read_into(&mut all, root, "")?;
    Ok(all)
}

fn read_into(all: &mut Snapshot, folder: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type()?;
        let node = if kind.is_symlink() {
            Node::Link(fs::read_link(entry.path())?.to_string_lossy().into_owned())
        } else if kind.is_dir() {
            read_into(all, &entry.path(), &format!("{name}/"))?;
            Node::Folder
        } else if kind.is_file() {
            Node::File(fs::read(entry.path())?)
        } else {
            return Err(io::Error::other(format!(
                "{name} is neither file, link nor folder"
            )));
        };
        all.insert(name, node);
    }
    Ok(())
}

/// One line for each path at which they differ.
pub fn differences(found: &Snapshot, wanted: &Snapshot) -> Vec<String> {
    let mut lines = Vec::new();
    for (path, want) in wanted {
        match (found.get(path), want) {
            (None, _) => lines.push(format!("{path}: missing")),
            (Some(have), want) if have == want => {}
            (Some(Node::File(have)), Node::File(want)) => {
                let at = have.iter().zip(want).take_while(|(a, b)| a == b).count();
                let line = want[..at].iter().filter(|b| **b == b'\n').count() + 1;
                lines.push(format!("{path}: differs in line {line} (byte {at})"));
            }
            (Some(_), _) => lines.push(format!("{path}: of another kind")),
        }
    }
    let extra = found.keys().filter(|path| !wanted.contains_key(*path));
    lines.extend(extra.map(|path| format!("{path}: should not be there")));
    lines
}

/// Bytes in all files.
pub fn bytes(snapshot: &Snapshot) -> usize {
    let len = |node: &Node| {
        if let Node::File(bytes) = node {
            bytes.len()
        } else {
            0
        }
    };
    snapshot.values().map(len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_one_name_and_one_kind_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        fs::write(folder.path().join("a/b/c"), "one\ntwo\n").unwrap();
        std::os::unix::fs::symlink("gone", folder.path().join("link")).unwrap();
        let before = take(folder.path()).unwrap();
        assert_eq!(before.len(), 4);
        assert_eq!(bytes(&before), 8);
        assert!(differences(&before, &before).is_empty());
        fs::write(folder.path().join("a/b/c"), "one\ntwp\n").unwrap();
        fs::write(folder.path().join("new"), "").unwrap();
        fs::remove_file(folder.path().join("link")).unwrap();
        let after = take(folder.path()).unwrap();
        let found = differences(&after, &before);
        let wanted = [
            "a/b/c: differs in line 2 (byte 6)",
            "link: missing",
            "new: should not be there",
        ];
        assert_eq!(found, wanted);
        let longer = Snapshot::from([("f".to_owned(), Node::File(b"ab".to_vec()))]);
        let shorter = Snapshot::from([("f".to_owned(), Node::File(b"a".to_vec()))]);
        assert_eq!(
            differences(&shorter, &longer),
            ["f: differs in line 1 (byte 1)"]
        );
        let other = Snapshot::from([("f".to_owned(), Node::Folder)]);
        assert_eq!(differences(&other, &longer), ["f: of another kind"]);
    }
}
