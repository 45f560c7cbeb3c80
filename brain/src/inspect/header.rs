//! The files of a checkpoint by their headers: what they hold and what is wrong with them. No weight
//! is read.

use std::{io::Read as _, path::Path};

use safetensors::Dtype;

use super::problem::{FETCH_AGAIN, Problem};
use crate::model::{
    file,
    header::{Fault, PREFIX, Scan, scan, text_length},
    shown::shown,
};

/// A tensor as a header describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its full name.
    pub name: String,
    /// The file's name.
    pub file: String,
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Bytes of its elements.
    pub bytes: u64,
}

/// A file of weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Header {
    /// Its name.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// The tensors that are described soundly, in the order of their bytes.
    pub entries: Vec<Entry>,
}

/// Reads a file's header. Whatever is wrong becomes a problem; what is sound is kept all the same.
pub fn read(path: &Path, problems: &mut Vec<Problem>) -> Header {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let mut header = Header {
        file: name.to_string_lossy().into_owned(),
        ..Header::default()
    };
    match load(path, &mut header.bytes) {
        Err(error) => {
            let absent = error.kind() == std::io::ErrorKind::NotFound;
            problems.push(match absent {
                true => Problem::of_file(&header.file, absence(path), FETCH_AGAIN),
                false => Problem::of_reading(&header.file, &error),
            });
        }
        Ok(Scan { entries, faults }) => {
            let described = entries.into_iter().map(|e| Entry {
                file: header.file.clone(),
                bytes: e.range.end - e.range.start,
                name: e.name,
                dtype: e.dtype,
                shape: e.shape,
            });
            header.entries = described.collect();
            problems.extend(faults.into_iter().map(|fault| problem(&header.file, fault)));
        }
    }
    header
}

/// What is wrong where no file is.
fn absence(path: &Path) -> String {
    match path.read_link() {
        Ok(target) => {
            let target = shown(&target.to_string_lossy());
            format!("is a link to {target}, which is not there")
        }
        Err(_) => "is not there".to_owned(),
    }
}

/// Scans the header of a file, and finds out how long the file is.
fn load(path: &Path, length: &mut u64) -> std::io::Result<Scan> {
    let mut file = file::open(path)?;
    *length = file.metadata()?.len();
    let mut first = Vec::new();
    file.by_ref().take(PREFIX as u64).read_to_end(&mut first)?;
    match text_length(&first, *length) {
        Err(fault) => Ok(Scan {
            faults: vec![fault],
            ..Scan::default()
        }),
        Ok(size) => {
            let mut text = vec![0; size];
            file.read_exact(&mut text)?;
            Ok(scan(&text, *length - (PREFIX + size) as u64))
        }
    }
}

fn problem(file: &str, fault: Fault) -> Problem {
    match fault.tensor {
        Some(tensor) => Problem::of_tensor(file, &tensor, fault.problem, FETCH_AGAIN),
        None => Problem::of_file(file, fault.problem, FETCH_AGAIN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked_at(bytes: &[u8]) -> (Header, Vec<Problem>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let mut problems = Vec::new();
        (read(&path, &mut problems), problems)
    }

    #[test]
    fn problems_name_file_and_tensor_and_the_rest_is_kept() {
        let text = r#"{"good":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
            "type":{"dtype":"Q9","shape":[1],"data_offsets":[12,13]}}"#;
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend([0; 13]);
        let (header, problems) = looked_at(&bytes);
        assert_eq!(header.bytes, bytes.len() as u64);
        assert_eq!(header.entries.len(), 1);
        let good = &header.entries[0];
        assert_eq!((good.name.as_str(), good.bytes), ("good", 12));
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].file, "x.safetensors");
        assert_eq!(problems[0].tensor.as_deref(), Some("type"));
    }

    #[test]
    fn a_file_that_is_none_is_said_to_be_none() {
        let said = |bytes: &[u8]| {
            let (_, mut problems) = looked_at(bytes);
            assert_eq!(problems.len(), 1, "{problems:?}");
            problems.remove(0).problem
        };
        assert!(said(b"").contains("ends within its header"));
        assert!(said(&100u64.to_le_bytes()).contains("ends within its header"));
        assert!(said(&[255; 64]).contains("no safetensors file"));
        assert!(said(&[&2u64.to_le_bytes()[..], b"[]"].concat()).contains("not valid"));
        assert!(said(b"version https://git-lfs.github.com/spec/v1\n").contains("Git LFS"));
        let mut problems = Vec::new();
        let dir = tempfile::tempdir().unwrap();
        read(&dir.path().join("none"), &mut problems);
        assert_eq!(problems[0].problem, "is not there");
        #[cfg(unix)]
        {
            let link = dir.path().join("link");
            std::os::unix::fs::symlink("/nowhere/at/all", &link).unwrap();
            read(&link, &mut problems);
            let expected = "is a link to /nowhere/at/all, which is not there";
            assert_eq!(problems[1].problem, expected);
        }
        let pipe = dir.path().join("pipe");
        file::make_pipe(&pipe);
        read(&pipe, &mut problems);
        assert_eq!(problems[2].file, "pipe");
        assert_eq!(problems[2].problem, "is a named pipe, not a file");
        assert!(problems[2].remedy.contains("in its place"), "{problems:?}");
    }
}
