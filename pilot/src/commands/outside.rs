//! The agent must not be able to write into its own journal.

use std::{
    io,
    path::{Component, Path, PathBuf},
};

use crate::error::Error;

/// Refuses a store that lies in the workspace or around it, by whatever name. `workspace` is canonical.
pub(super) fn check(store: &Path, workspace: &Path) -> Result<(), Error> {
    let place = real(store).map_err(|source| Error::Io {
        what: format!("looking for store {}", store.display()),
        source,
    })?;
    if place.starts_with(workspace) || workspace.starts_with(&place) {
        return Err(Error::Usage(format!(
            "store {} lies in the workspace or around it, where the tools reach it; use another \
             --store",
            store.display()
        )));
    }
    Ok(())
}

/// Where the folder is or would be made: links and `..` of what exists are followed, the rest is
/// taken as it is written.
fn real(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let mut missing = Vec::new();
    let mut known = path.as_path();
    let mut place = loop {
        match known.canonicalize() {
            Ok(place) => break place,
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Err(error) => {
                // A link to nothing is somewhere, and nobody knows where it will be.
                if known.is_symlink() {
                    return Err(error);
                }
                missing.extend(known.components().next_back());
                known = known.parent().ok_or(error)?;
            }
        }
    };
    for part in missing.into_iter().rev() {
        match part {
            Component::ParentDir => {
                place.pop();
            }
            part => place.push(part),
        }
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn no_name_of_a_folder_in_the_workspace_passes() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let workspace = root.join("workspace");
        fs::create_dir_all(workspace.join("there")).unwrap();
        fs::create_dir(root.join("beside")).unwrap();
        symlink(&workspace, root.join("link")).unwrap();
        symlink("nowhere", root.join("dangling")).unwrap();
        for inside in [
            "workspace",
            "workspace/store",
            "workspace/there/a/b",
            "",
            "link/..",
            "link/store",
            "link/there",
            "beside/../workspace/store",
            "beside/../link/new/../store",
            "none/../workspace/store",
            "dangling",
            "dangling/store",
        ] {
            let checked = check(&root.join(inside), &workspace);
            assert!(checked.is_err(), "{inside}");
        }
        for outside in [
            "store",
            "workspace-2/store",
            "beside/store",
            "link/../store",
            "workspace/../store",
        ] {
            check(&root.join(outside), &workspace).unwrap();
        }
    }
}
