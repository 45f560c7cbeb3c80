//! The header of a safetensors file: what it says and what is wrong with it. No weight is read.

use std::{collections::BTreeSet, fmt, fs::File, io::Read as _, path::Path};

use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::Value;

use super::problem::{FETCH_AGAIN, Problem};

/// Larger than any header of a real model (0.2 MB for 1,200 tensors).
const MAX_HEADER: u64 = 100 << 20;

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
    /// The tensors that are described soundly.
    pub entries: Vec<Entry>,
}

/// Reads a file's header. Whatever is wrong becomes a problem; what is sound is kept all the same.
pub fn read(path: &Path, problems: &mut Vec<Problem>) -> Header {
    let file = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned();
    let mut header = Header {
        file,
        ..Header::default()
    };
    match load(path) {
        Err(error) => {
            let (problem, remedy) = match error.kind() {
                std::io::ErrorKind::NotFound => ("is not there".to_owned(), FETCH_AGAIN),
                _ => (
                    format!("cannot be read: {error}"),
                    "look at its permissions",
                ),
            };
            problems.push(Problem::of_file(&header.file, problem, remedy));
        }
        Ok((length, Err(problem))) => {
            header.bytes = length;
            problems.push(Problem::of_file(&header.file, problem, FETCH_AGAIN));
        }
        Ok((length, Ok(text))) => {
            header.bytes = length;
            header.entries = entries(&header.file, &text, length, problems);
        }
    }
    header
}

/// The file's length, and its header's text or what is wrong with it.
fn load(path: &Path) -> std::io::Result<(u64, Result<Vec<u8>, String>)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    if length < 8 {
        return Ok((
            length,
            Err(format!("ends within its header ({length} bytes in all)")),
        ));
    }
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix)?;
    let size = u64::from_le_bytes(prefix);
    if size > MAX_HEADER {
        let problem = format!("says that its header has {size} bytes: it is no safetensors file");
        return Ok((length, Err(problem)));
    }
    if size + 8 > length {
        return Ok((
            length,
            Err(format!("ends within its header ({length} bytes in all)")),
        ));
    }
    let mut text = vec![0; size as usize];
    file.read_exact(&mut text)?;
    Ok((length, Ok(text)))
}

/// A JSON object in the order of the file, repeated keys included.
struct Pairs(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Pairs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

#[derive(Deserialize)]
struct Described {
    dtype: Value,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

fn entries(file: &str, text: &[u8], length: u64, problems: &mut Vec<Problem>) -> Vec<Entry> {
    let Pairs(pairs) = match serde_json::from_slice(text) {
        Ok(pairs) => pairs,
        Err(error) => {
            let problem = format!("has a header that is not JSON: {error}");
            problems.push(Problem::of_file(file, problem, FETCH_AGAIN));
            return Vec::new();
        }
    };
    let data = length - 8 - text.len() as u64;
    let (mut entries, mut ranges, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut end_of_all = 0;
    for (name, value) in pairs {
        if name == "__metadata__" {
            continue;
        }
        match describe(&value) {
            Err(problem) => {
                problems.push(Problem::of_tensor(file, &name, problem, FETCH_AGAIN));
            }
            Ok((dtype, shape, (start, end))) => {
                end_of_all = end.max(end_of_all);
                ranges.push((start, end, name.clone()));
                if !seen.insert(name.clone()) {
                    problems.push(Problem::of_tensor(
                        file,
                        &name,
                        "is described twice",
                        FETCH_AGAIN,
                    ));
                    continue;
                }
                entries.push(Entry {
                    name,
                    file: file.to_owned(),
                    dtype,
                    shape,
                    bytes: end - start,
                });
            }
        }
    }
    if end_of_all > data {
        let whole = end_of_all + length - data;
        let problem = format!("has {length} of {whole} bytes: the download is not complete");
        problems.push(Problem::of_file(file, problem, FETCH_AGAIN));
    }
    ranges.sort();
    for pair in ranges.windows(2) {
        let ((_, end, first), (start, last, second)) = (&pair[0], &pair[1]);
        if start < end && start < last {
            let problem = format!("shares bytes with {first}");
            problems.push(Problem::of_tensor(file, second, problem, FETCH_AGAIN));
        }
    }
    entries
}

type Place = (Dtype, Vec<usize>, (u64, u64));

/// Type, shape and place of a tensor, in agreement with each other.
fn describe(value: &Value) -> Result<Place, String> {
    let described = Described::deserialize(value)
        .map_err(|error| format!("is not described as safetensors does: {error}"))?;
    let dtype = Dtype::deserialize(&described.dtype)
        .map_err(|_| format!("holds numbers of an unknown type, {}", described.dtype))?;
    let impossible = || format!("has an impossible shape, {:?}", described.shape);
    let elements = described
        .shape
        .iter()
        .try_fold(1u64, |n, d| n.checked_mul(*d))
        .ok_or_else(impossible)?;
    let bits = elements
        .checked_mul(dtype.bitsize() as u64)
        .ok_or_else(impossible)?;
    let (start, end) = described.data_offsets;
    if start > end || (end - start).checked_mul(8) != Some(bits) {
        return Err(format!(
            "should take {} bytes and takes {start}..{end}",
            bits.div_ceil(8)
        ));
    }
    let shape = described
        .shape
        .iter()
        .map(|n| usize::try_from(*n).map_err(|_| impossible()))
        .collect::<Result<_, _>>()?;
    Ok((dtype, shape, (start, end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(header: &str, data: usize) -> (Vec<String>, usize) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        std::fs::write(&path, bytes).unwrap();
        let mut problems = Vec::new();
        let header = read(&path, &mut problems);
        let texts = problems
            .iter()
            .map(|p| format!("{} {}", p.tensor.as_deref().unwrap_or("-"), p.problem));
        (texts.collect(), header.entries.len())
    }

    #[test]
    fn every_problem_of_a_header_is_found_and_the_sound_tensors_are_kept() {
        let (problems, sound) = problems_of(
            r#"{"__metadata__":{"format":"pt"},
               "good":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
               "over":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},
               "good":{"dtype":"BF16","shape":[1],"data_offsets":[12,14]},
               "type":{"dtype":"Q9","shape":[1],"data_offsets":[14,15]},
               "size":{"dtype":"F32","shape":[4],"data_offsets":[15,16]},
               "huge":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]},
               "back":{"dtype":"F32","shape":[0],"data_offsets":[8,4]},
               "odd":{"shape":[1]},
               "far":{"dtype":"U8","shape":[4],"data_offsets":[16,20]}}"#,
            16,
        );
        assert_eq!(sound, 3, "{problems:?}");
        for expected in [
            "good is described twice",
            "over shares bytes with good",
            "type holds numbers of an unknown type",
            "size should take 16 bytes and takes 15..16",
            "huge has an impossible shape",
            "back should take 0 bytes",
            "odd is not described",
            "the download is not complete",
        ] {
            assert_eq!(
                problems.iter().filter(|p| p.contains(expected)).count(),
                1,
                "{expected}: {problems:?}"
            );
        }
        assert_eq!(problems.len(), 8, "{problems:?}");
    }

    #[test]
    fn a_file_that_is_none_is_said_to_be_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let said = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let mut problems = Vec::new();
            read(&path, &mut problems);
            assert_eq!(problems.len(), 1, "{problems:?}");
            problems.remove(0).problem
        };
        assert!(said(b"").contains("ends within its header"));
        assert!(said(&100u64.to_le_bytes()).contains("ends within its header"));
        assert!(said(&[255; 64]).contains("no safetensors file"));
        assert!(said(&[&2u64.to_le_bytes()[..], b"[]"].concat()).contains("not JSON"));
        let mut problems = Vec::new();
        read(&dir.path().join("none"), &mut problems);
        assert_eq!(problems[0].problem, "is not there");
    }
}
