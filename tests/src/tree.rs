//! A folder as a value, to say that nothing in it changed or that two are the same.

use std::{collections::BTreeMap, fs, path::Path};

/// Every file below `root` by its relative path with its bytes; folders end in `/`. A folder that
/// is absent is an empty one.
pub fn snapshot(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    if root.exists() {
        walk(root, "", &mut found);
    }
    found
}

fn walk(folder: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().unwrap().is_dir() {
            let name = format!("{name}/");
            walk(&entry.path(), &name, found);
            found.insert(name, Vec::new());
        } else {
            found.insert(name, fs::read(entry.path()).unwrap());
        }
    }
}
