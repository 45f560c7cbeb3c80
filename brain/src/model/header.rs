//! The header of a safetensors file, believed only after every range in it was checked.

use std::{collections::BTreeSet, fmt, ops::Range};

use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

/// What a tensor is and where its bytes lie in the file.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
}

/// Far above any real header: the largest model of the family has some 100 KB.
const MAX_HEADER: u64 = 100 << 20;

/// Reads and checks it; an error is what is wrong with the file.
///
/// Tensors must cover all bytes behind the header, each once.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<Entry>, String> {
    if bytes.starts_with(b"version https://git-lfs") {
        return Err("it is a pointer of Git LFS, not the weights (git lfs pull)".to_owned());
    }
    let short = || format!("it ends within its header ({} bytes in all)", bytes.len());
    let length = bytes.first_chunk::<8>().ok_or_else(short)?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(format!(
            "its header would be {length} bytes long: it is no safetensors file"
        ));
    }
    let start = 8 + length as usize;
    let text = bytes.get(8..start).ok_or_else(short)?;
    let listed: Listed =
        serde_json::from_slice(text).map_err(|e| format!("its header is not valid: {e}"))?;
    let data = bytes.len() - start;
    let mut names = BTreeSet::new();
    for (name, _) in &listed.0 {
        if !names.insert(name) {
            return Err(format!("tensor {name} is listed twice"));
        }
    }
    let mut entries = listed
        .0
        .into_iter()
        .map(|(name, raw)| entry(name, raw, start, data))
        .collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|e| (e.range.start, e.range.end));
    covered(&entries, start, bytes.len())?;
    Ok(entries)
}

fn entry(name: String, raw: Raw, start: usize, data: usize) -> Result<Entry, String> {
    let Raw {
        dtype,
        shape,
        data_offsets: (from, to),
    } = raw;
    let dtype = Dtype::deserialize(serde_json::Value::String(dtype.clone()))
        .map_err(|_| format!("tensor {name} has the unknown element type {dtype:?}"))?;
    let length = byte_length(dtype, &shape)
        .ok_or_else(|| format!("tensor {name} has the impossible shape {shape:?}"))?;
    if from > to || to - from != length {
        return Err(format!(
            "tensor {name} should take {length} bytes and lies at {from}..{to}"
        ));
    }
    if to > data {
        return Err(format!(
            "tensor {name} lies at {from}..{to} of {data} bytes: at least {} are missing",
            to - data
        ));
    }
    Ok(Entry {
        name,
        dtype,
        shape,
        range: start + from..start + to,
    })
}

/// Checks that sorted tensors lie side by side from `start` to `end`.
fn covered(entries: &[Entry], start: usize, end: usize) -> Result<(), String> {
    let mut at = start;
    let mut before = "";
    for entry in entries {
        let Entry { name, range, .. } = entry;
        if range.start < at {
            return Err(format!("tensors {before} and {name} overlap"));
        }
        if range.start > at {
            let (from, to) = (at - start, range.start - start);
            return Err(format!(
                "bytes {from}..{to} before tensor {name} belong to none"
            ));
        }
        (at, before) = (range.end, name);
    }
    match end - at {
        0 => Ok(()),
        more => Err(format!("{more} bytes follow its last tensor")),
    }
}

fn byte_length(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// Everything in the order of the file; a map would swallow what is there twice.
struct Listed(Vec<(String, Raw)>);

impl<'de> Deserialize<'de> for Listed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Listed;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Listed, A::Error> {
                let mut all = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let raw = map
                        .next_value()
                        .map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                    all.push((name, raw));
                }
                Ok(Listed(all))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    }

    fn failure(header: &str, data: usize) -> String {
        read(&file(header, data)).map(|_| ()).unwrap_err()
    }

    fn tensor(name: &str, shape: &str, from: usize, to: usize) -> String {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    }

    #[test]
    fn what_is_right_is_read() {
        let header = format!(
            r#"{{"__metadata__":{{"format":"pt"}},{},{}}}"#,
            tensor("b", "[2,3]", 8, 32),
            tensor("a", "[2]", 0, 8)
        );
        let entries = read(&file(&header, 32)).unwrap();
        let names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(entries[1].shape, [2, 3]);
        assert_eq!(entries[1].range.end, 8 + header.len() + 32);
        assert!(read(&file("{}", 0)).unwrap().is_empty());
    }

    #[test]
    fn every_lie_is_named() {
        let one = |shape: &str, from, to| format!("{{{}}}", tensor("w", shape, from, to));
        let two = |first: &str, second: &str| format!("{{{first},{second}}}");
        let a = tensor("a", "[2]", 0, 8);
        for (header, data, expected) in [
            (one("[4]", 0, 8), 8, "tensor w should take 16 bytes"),
            (one("[2]", 8, 0), 8, "tensor w should take 8 bytes"),
            (
                one("[200]", 0, 800),
                8,
                "tensor w lies at 0..800 of 8 bytes: at least 792 are missing",
            ),
            (
                one("[4611686018427387904,4]", 0, 0),
                0,
                "tensor w has the impossible shape",
            ),
            (
                one("[18446744073709551615]", 0, 8),
                8,
                "tensor w has the impossible shape",
            ),
            (one("[-2]", 0, 8), 8, "tensor w: invalid value"),
            (one("[2]", 0, 8), 12, "4 bytes follow its last tensor"),
            (
                two(&a, &tensor("b", "[2]", 4, 12)),
                12,
                "tensors a and b overlap",
            ),
            (
                two(&a, &tensor("b", "[2]", 0, 8)),
                8,
                "tensors a and b overlap",
            ),
            (
                two(&a, &tensor("b", "[2]", 12, 20)),
                20,
                "bytes 8..12 before tensor b",
            ),
            (two(&a, &a), 8, "tensor a is listed twice"),
            (
                two(&a, &tensor("a", "[2]", 8, 16)),
                16,
                "tensor a is listed twice",
            ),
            (
                one("[2]", 0, 8).replace("F32", "Q9"),
                8,
                "unknown element type \"Q9\"",
            ),
            ("[]".into(), 0, "its header is not valid"),
            ("not json".into(), 0, "its header is not valid"),
        ] {
            let message = failure(&header, data);
            assert!(message.contains(expected), "{header}: {message}");
        }
        let huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
        assert!(
            read(&huge)
                .map(|_| ())
                .unwrap_err()
                .contains("no safetensors file")
        );
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
        assert!(read(pointer).map(|_| ()).unwrap_err().contains("Git LFS"));
        for length in 0..8 {
            let message = read(&vec![0; length]).map(|_| ()).unwrap_err();
            assert!(message.contains("ends within its header"), "{message}");
        }
    }
}
