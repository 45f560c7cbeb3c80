//! The header of a safetensors file, believed only after every range in it was checked.
//!
//! [`scan`] finds everything that is wrong, for whoever wants to tell it; [`read`] takes a file
//! only if that is nothing.

use std::{collections::BTreeSet, fmt, marker::PhantomData, ops::Range};

use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::Value;

use super::shown::{shown, shown_text};

/// What a tensor is and where its bytes lie behind the header.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<u64>,
}

/// Something that is wrong: with a tensor, or with the file as a whole.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) tensor: Option<String>,
    /// Said of the tensor or of the file: "is listed twice".
    pub(crate) problem: String,
}

impl Fault {
    fn of_file(problem: impl Into<String>) -> Self {
        Self {
            tensor: None,
            problem: problem.into(),
        }
    }

    fn of_tensor(name: &str, problem: impl Into<String>) -> Self {
        Self {
            tensor: Some(name.to_owned()),
            problem: problem.into(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tensor {
            Some(name) => write!(f, "tensor {} {}", shown(name), self.problem),
            None => write!(f, "it {}", self.problem),
        }
    }
}

/// The tensors that a header describes soundly, in the order of their bytes, and what is wrong.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) entries: Vec<Entry>,
    pub(crate) faults: Vec<Fault>,
}

/// Bytes in front of a header: its length.
pub(crate) const PREFIX: usize = 8;
/// Far above any real header: the largest model of the family has some 200 KB, and one of 30,000
/// quantised experts in a single file 6 MB.
const MAX_HEADER: u64 = 16 << 20;
/// Values of a header, of which each takes many times its text in memory; a tensor has some six.
const MAX_VALUES: usize = 1 << 20;
/// More sizes than any tensor has.
const MAX_SIZES: usize = 8;
/// Faults after which there is nothing to be gained by telling more.
const MAX_FAULTS: usize = 100;

/// The length of a header's text, read off the first bytes of a file of `length` bytes.
pub(crate) fn text_length(first: &[u8], length: u64) -> Result<usize, Fault> {
    if first.starts_with(b"version") {
        let problem = "is a pointer of Git LFS, not the weights (git lfs pull)";
        return Err(Fault::of_file(problem));
    }
    let short = || Fault::of_file(format!("ends within its header ({length} bytes in all)"));
    let prefix = first.first_chunk::<PREFIX>().ok_or_else(short)?;
    let text = u64::from_le_bytes(*prefix);
    if text > MAX_HEADER {
        let problem = format!("would have a header of {text} bytes: it is no safetensors file");
        return Err(Fault::of_file(problem));
    }
    if text + PREFIX as u64 > length {
        return Err(short());
    }
    Ok(text as usize)
}

/// Takes a file whose header is sound and whose tensors cover all bytes behind it, each once;
/// ranges are those in the file.
///
/// # Errors
/// The first fault.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<(Entry, Range<usize>)>, Fault> {
    let start = PREFIX + text_length(bytes, bytes.len() as u64)?;
    let (text, data) = bytes[PREFIX..].split_at(start - PREFIX);
    let Scan { entries, faults } = scan(text, data.len() as u64);
    if let Some(first) = faults.into_iter().next() {
        return Err(first);
    }
    let placed = entries.into_iter().map(|entry| {
        // A scan without faults has no tensor beyond the data.
        let (from, to) = (entry.range.start as usize, entry.range.end as usize);
        (entry, start + from..start + to)
    });
    Ok(placed.collect())
}

/// Reads a header's text, which `data` bytes follow.
pub(crate) fn scan(text: &[u8], data: u64) -> Scan {
    let mut scan = Scan::default();
    if text.iter().filter(|byte| **byte == b',').count() > MAX_VALUES {
        let problem = format!("has a header of more than {MAX_VALUES} values: it is no model's");
        scan.faults.push(Fault::of_file(problem));
        return scan;
    }
    let Listed(listed): Listed<Said> = match serde_json::from_slice(text) {
        Ok(listed) => listed,
        Err(error) => {
            let problem = shown_text(&format!("has a header that is not valid: {error}"));
            scan.faults.push(Fault::of_file(problem));
            return scan;
        }
    };
    let mut names = BTreeSet::new();
    for (name, said) in listed {
        if scan.faults.len() == MAX_FAULTS {
            let problem =
                format!("has {MAX_FAULTS} faults in its header, which was read no further");
            scan.faults.push(Fault::of_file(problem));
            return scan;
        }
        let metadata = name == METADATA;
        if !names.insert(name.clone()) {
            scan.faults.push(match metadata {
                true => Fault::of_file(format!("lists {METADATA} twice")),
                false => Fault::of_tensor(&name, "is listed twice"),
            });
            continue;
        }
        if metadata {
            scan.faults.extend(check_metadata(&said).err());
            continue;
        }
        match described(said) {
            Ok((dtype, shape, range)) => scan.entries.push(Entry {
                name,
                dtype,
                shape,
                range,
            }),
            Err(problem) => scan.faults.push(Fault::of_tensor(&name, problem)),
        }
    }
    scan.entries.sort_by_key(|e| (e.range.start, e.range.end));
    let complete = scan.faults.is_empty();
    scan.check_places(data, complete);
    scan
}

impl Scan {
    /// Whether sorted tensors lie side by side in `data` bytes. `complete`: no tensor is left out,
    /// so that bytes of none are a fault.
    fn check_places(&mut self, data: u64, complete: bool) {
        let (mut at, mut before) = (0, "");
        for Entry { name, range, .. } in &self.entries {
            if self.faults.len() > MAX_FAULTS {
                return;
            }
            let Range { start, end } = *range;
            if start < at && start < end {
                let problem = format!("shares bytes with {}", shown(before));
                self.faults.push(Fault::of_tensor(name, problem));
            }
            if start > at && complete {
                let problem = format!("follows bytes {at}..{start}, which belong to none");
                self.faults.push(Fault::of_tensor(name, problem));
            }
            if end >= at {
                (at, before) = (end, name);
            }
        }
        if at > data {
            let problem = format!(
                "has {data} of {at} bytes of weights: {} are missing, the download is not complete",
                at - data
            );
            self.faults.push(Fault::of_file(problem));
        } else if at < data && complete {
            let problem = format!("has {} bytes behind its last tensor", data - at);
            self.faults.push(Fault::of_file(problem));
        }
    }
}

/// The one name that is not a tensor's.
const METADATA: &str = "__metadata__";

/// Nobody reads it here; a file in which it is something else was not written by what writes these.
fn check_metadata(said: &Said) -> Result<(), Fault> {
    let Said::Fields(fields) = said else {
        let problem = format!("has a {METADATA} that is not a map of strings");
        return Err(Fault::of_file(problem));
    };
    if let Some((key, _)) = fields.0.iter().find(|(_, value)| !value.is_string()) {
        let problem = format!("has a {METADATA} whose \"{}\" is not a string", shown(key));
        return Err(Fault::of_file(problem));
    }
    match fields.twice() {
        None => Ok(()),
        Some(key) => Err(Fault::of_file(format!(
            "has a {METADATA} with \"{}\" twice",
            shown(key)
        ))),
    }
}

/// What a header says of a name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Fields(Listed<Value>),
    Other(Value),
}

#[derive(Deserialize)]
struct Described {
    dtype: Value,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Type, shape and place of a tensor, in agreement with each other.
fn described(said: Said) -> Result<(Dtype, Vec<usize>, Range<u64>), String> {
    let otherwise =
        |why: String| shown_text(&format!("is not described as safetensors does: {why}"));
    let fields = match said {
        Said::Fields(fields) => fields,
        Said::Other(value) => return Err(otherwise(format!("{value} is no map"))),
    };
    if let Some(field) = fields.twice() {
        return Err(otherwise(format!("it has {field:?} twice")));
    }
    let Described {
        dtype,
        shape,
        data_offsets: (from, to),
    } = Described::deserialize(Value::Object(fields.0.into_iter().collect()))
        .map_err(|error| otherwise(error.to_string()))?;
    let dtype = Dtype::deserialize(&dtype).map_err(|_| {
        let dtype = shown(&dtype.to_string());
        format!("holds numbers of the unknown type {dtype}")
    })?;
    let impossible = || shown_text(&format!("has the impossible shape {shape:?}"));
    if shape.len() > MAX_SIZES {
        return Err(format!(
            "has {} sizes, and {MAX_SIZES} would be many",
            shape.len()
        ));
    }
    let length = byte_length(dtype, &shape).ok_or_else(impossible)?;
    if from > to || to - from != length {
        return Err(format!(
            "should take {length} bytes and lies at {from}..{to}"
        ));
    }
    let sizes = shape.iter().map(|n| usize::try_from(*n));
    let sizes = sizes.collect::<Result<_, _>>().map_err(|_| impossible())?;
    Ok((dtype, sizes, from..to))
}

fn byte_length(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// Everything in the order of the file; a map would swallow what is there twice.
struct Listed<T>(Vec<(String, T)>);

impl<T> Listed<T> {
    /// A name that is there again.
    fn twice(&self) -> Option<&str> {
        let mut names = BTreeSet::new();
        let mut all = self.0.iter().map(|(name, _)| name.as_str());
        all.find(|name| !names.insert(*name))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Listed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Listed<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Listed<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    all.push(entry);
                }
                Ok(Listed(all))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
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

    fn failure(bytes: &[u8]) -> String {
        read(bytes).map(|_| ()).unwrap_err().to_string()
    }

    fn tensor(name: &str, shape: &str, from: usize, to: usize) -> String {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    }

    #[test]
    fn what_is_right_is_read() {
        let header = format!(
            r#"{{"__metadata__":{{"format":"pt"}},{},{},{}}}"#,
            tensor("b", "[2,3]", 8, 32),
            tensor("a", "[2]", 0, 8),
            tensor("none", "[0]", 8, 8),
        );
        let entries = read(&file(&header, 32)).unwrap();
        let names: Vec<&str> = entries.iter().map(|(e, _)| e.name.as_str()).collect();
        assert_eq!(names, ["a", "none", "b"]);
        assert_eq!(entries[2].0.shape, [2, 3]);
        assert_eq!(entries[2].1.end, 8 + header.len() + 32);
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
                "it has 8 of 800 bytes of weights: 792 are missing",
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
            (
                one("[-2]", 0, 8),
                8,
                "tensor w is not described as safetensors does",
            ),
            (
                one("[2]", 0, 8),
                12,
                "it has 4 bytes behind its last tensor",
            ),
            (
                two(&a, &tensor("b", "[2]", 4, 12)),
                12,
                "tensor b shares bytes with a",
            ),
            (
                two(&a, &tensor("b", "[2]", 0, 8)),
                8,
                "tensor b shares bytes with a",
            ),
            (
                two(&a, &tensor("b", "[2]", 12, 20)),
                20,
                "tensor b follows bytes 8..12, which belong to none",
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
                "tensor w holds numbers of the unknown type \"Q9\"",
            ),
            ("[]".into(), 0, "it has a header that is not valid"),
            ("not json".into(), 0, "it has a header that is not valid"),
        ] {
            let message = failure(&file(&header, data));
            assert!(message.contains(expected), "{header}: {message}");
        }
        let huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
        assert!(failure(&huge).contains("no safetensors file"));
        assert!(failure(&100u64.to_le_bytes()).contains("ends within its header"));
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
        assert!(failure(pointer).contains("Git LFS"));
        for length in 0..8 {
            let message = failure(&vec![0; length]);
            assert!(message.contains("ends within its header"), "{message}");
        }
    }

    #[test]
    fn what_would_take_memory_or_time_without_end_is_refused() {
        let zeros = vec!["0"; MAX_VALUES + 2].join(",");
        for header in [format!(r#"{{"a":[{zeros}]}}"#), format!("[{zeros}]")] {
            let message = failure(&file(&header, 0));
            assert!(message.contains("of more than 1048576 values"), "{message}");
        }
        let ones = ["1"; MAX_SIZES + 1].join(",");
        let header = format!("{{{}}}", tensor("w", &format!("[{ones}]"), 0, 4));
        assert_eq!(
            failure(&file(&header, 4)),
            "tensor w has 9 sizes, and 8 would be many"
        );
        let long = [&(MAX_HEADER + 1).to_le_bytes()[..], b"{}"].concat();
        assert!(failure(&long).contains("no safetensors file"));
        // Each of these is a fault, and so is that they share their bytes.
        let lies: Vec<String> = (0..10_000).map(|i| format!(r#""{i}":0"#)).collect();
        let found = scan(format!("{{{}}}", lies.join(",")).as_bytes(), 0).faults;
        assert_eq!(found.len(), MAX_FAULTS + 1);
        let last = found.last().map(Fault::to_string).unwrap_or_default();
        assert!(last.contains("was read no further"), "{last}");
        let same: Vec<String> = (0..10_000)
            .map(|i| tensor(&i.to_string(), "[1]", 0, 4))
            .collect();
        let found = scan(format!("{{{}}}", same.join(",")).as_bytes(), 4).faults;
        assert_eq!(found.len(), MAX_FAULTS + 1);
    }

    #[test]
    fn a_field_that_is_there_twice_is_a_lie() {
        let whole = tensor("w", "[2]", 0, 8);
        for field in [
            r#""dtype":"BF16""#,
            r#""dtype":"F32""#,
            r#""shape":[2]"#,
            r#""data_offsets":[0,8]"#,
            r#""more":1,"more":1"#,
        ] {
            let name = field.split('"').nth(1).unwrap_or_default();
            let header = format!("{{{}}}", whole.replace("}", &format!(",{field}}}")));
            let message = failure(&file(&header, 8));
            let expected =
                format!("tensor w is not described as safetensors does: it has {name:?} twice");
            assert!(message.contains(&expected), "{header}: {message}");
        }
        for other in ["7", "null", "\"F32\"", r#"["F32",[2],[0,8]]"#] {
            let message = failure(&file(&format!(r#"{{"w":{other}}}"#), 8));
            let expected = "tensor w is not described as safetensors does";
            assert!(message.contains(expected), "{other}: {message}");
            assert!(message.ends_with("is no map"), "{other}: {message}");
        }
    }

    #[test]
    fn metadata_is_a_map_of_strings() {
        let with = |metadata: &str| {
            let header = format!(r#"{{{metadata},{}}}"#, tensor("w", "[2]", 0, 8));
            file(&header, 8)
        };
        for sound in [r#"{}"#, r#"{"format":"pt","more":""}"#] {
            let bytes = with(&format!(r#""__metadata__":{sound}"#));
            assert_eq!(read(&bytes).unwrap().len(), 1, "{sound}");
        }
        for (metadata, expected) in [
            ("7", "it has a __metadata__ that is not a map of strings"),
            ("null", "it has a __metadata__ that is not a map of strings"),
            (
                r#"["pt"]"#,
                "it has a __metadata__ that is not a map of strings",
            ),
            (
                r#"{"format":"pt","step":7}"#,
                r#"it has a __metadata__ whose "step" is not a string"#,
            ),
            (
                r#"{"format":{"a":"b"}}"#,
                r#"it has a __metadata__ whose "format" is not a string"#,
            ),
            (
                r#"{"format":"pt","format":"pt"}"#,
                r#"it has a __metadata__ with "format" twice"#,
            ),
            (r#"{},"__metadata__":{}"#, "it lists __metadata__ twice"),
        ] {
            let message = failure(&with(&format!(r#""__metadata__":{metadata}"#)));
            assert_eq!(message, expected, "{metadata}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_found_and_the_sound_tensors_are_kept() {
        let text = r#"{"__metadata__":{"format":"pt"},
           "good":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
           "over":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},
           "good":{"dtype":"BF16","shape":[1],"data_offsets":[12,14]},
           "type":{"dtype":"Q9","shape":[1],"data_offsets":[14,15]},
           "size":{"dtype":"F32","shape":[4],"data_offsets":[15,16]},
           "huge":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]},
           "back":{"dtype":"F32","shape":[0],"data_offsets":[8,4]},
           "odd":{"shape":[1]},
           "far":{"dtype":"U8","shape":[4],"data_offsets":[16,20]}}"#;
        let Scan { entries, faults } = scan(text.as_bytes(), 16);
        let names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["good", "over", "far"]);
        let faults: Vec<String> = faults.iter().map(Fault::to_string).collect();
        for expected in [
            "tensor good is listed twice",
            "tensor over shares bytes with good",
            "tensor type holds numbers of the unknown type",
            "tensor size should take 16 bytes and lies at 15..16",
            "tensor huge has the impossible shape",
            "tensor back should take 0 bytes",
            "tensor odd is not described",
            "the download is not complete",
        ] {
            let count = faults.iter().filter(|f| f.contains(expected)).count();
            assert_eq!(count, 1, "{expected}: {faults:?}");
        }
        assert_eq!(faults.len(), 8, "{faults:?}");
    }
}
