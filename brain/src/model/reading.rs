//! Reads every byte of a model's weights, on threads of its own, while everything else comes up.
//!
//! A fingerprint needs all bytes, and so does the search for weights that are no finite numbers. Some
//! threads do nothing but wait for the disk, so that it always has something to do; others look at
//! what has come.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use super::{
    checkpoint::Tensor,
    fingerprint::{BytesHash, Digest, digest},
    names::NameError,
    spread::spread,
    weight::{Weight, codes::first_not_finite, not_finite},
};

/// Bytes that are hashed at a time: few enough to stay in a cache for the search, and a multiple of
/// any element's size.
const PIECE: usize = 1 << 20;
/// Bytes that are fetched at a time: large pages.
const FETCH: usize = 4 << 20;
/// Threads that wait for the disk.
const FETCHERS: usize = 2;
/// Bytes after which what was read is given back.
const BEHIND: usize = 16 << 20;

/// The reading of a target's weights, from [`Reading::start`] on. Dropping it ends it.
#[derive(Debug)]
pub struct Reading {
    work: Arc<Work>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Work {
    tensors: Vec<Tensor>,
    /// Names of those whose every element has to be a finite number.
    finite: HashSet<String>,
    numbers: String,
    /// Nobody wants the result any more.
    stop: AtomicBool,
    /// What was looked at is given back.
    copied: AtomicBool,
    result: OnceLock<Result<Digest, NameError>>,
}

impl Reading {
    /// Begins to read `tensors`, those of `weights` first and in their order, which is the one
    /// that a back end that copies takes them in. `numbers`: see [`super::fingerprint::numbers`].
    pub fn start(mut tensors: Vec<Tensor>, weights: &[&Weight], numbers: String) -> Self {
        let used: Vec<&Tensor> = weights.iter().flat_map(|w| w.tensors()).collect();
        let mut order = HashMap::new();
        for (i, tensor) in used.iter().enumerate() {
            order.entry(tensor.name()).or_insert(i);
        }
        tensors.sort_by_key(|t| order.get(t.name()).copied().unwrap_or(usize::MAX));
        let finite = weights.iter().filter_map(|w| w.fallible());
        let work = Arc::new(Work {
            tensors,
            finite: finite.map(|t| t.name().to_owned()).collect(),
            numbers,
            stop: AtomicBool::new(false),
            copied: AtomicBool::new(false),
            result: OnceLock::new(),
        });
        let theirs = work.clone();
        let thread = std::thread::Builder::new()
            .name("weights".to_owned())
            .spawn(move || {
                theirs.result.get_or_init(|| theirs.read());
            });
        Self {
            work,
            // Without a thread, whoever asks for the digest reads.
            thread: Mutex::new(thread.ok()),
        }
    }

    /// The back end copies the weights: memory of the files that was looked at is given back, and not
    /// held beside the copy.
    pub fn copied(&self) {
        self.work.copied.store(true, Ordering::Relaxed);
    }

    /// Waits until every byte was read.
    ///
    /// # Errors
    /// A weight that is no finite number, with its tensor and file.
    pub fn digest(&self) -> Result<Digest, NameError> {
        self.work.result.get_or_init(|| self.work.read()).clone()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.work.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.get_mut();
        // Files may be replaced once the model is gone, which nobody may be reading then.
        if let Some(thread) = thread.unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl Work {
    fn read(&self) -> Result<Digest, NameError> {
        let next = AtomicUsize::new(0);
        let pieces: Vec<(&Tensor, Range<usize>)> = self.tensors.iter().flat_map(parts).collect();
        let hashes = std::thread::scope(|scope| {
            for _ in 0..FETCHERS {
                scope.spawn(|| self.fetch(&pieces, &next));
            }
            let hashes = spread(&self.tensors, |t| self.hash(t));
            next.store(pieces.len(), Ordering::Relaxed);
            hashes
        });
        let mut hashed = Vec::with_capacity(hashes.len());
        for (tensor, hash) in self.tensors.iter().zip(hashes) {
            hashed.push((tensor, hash?));
        }
        Ok(digest(hashed, &self.numbers))
    }

    /// Fetches one piece after the other.
    fn fetch(&self, pieces: &[(&Tensor, Range<usize>)], next: &AtomicUsize) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some((tensor, range)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            tensor.fetch(range.clone());
        }
    }

    /// Once it should stop, the hash is of no use, and goes to nobody.
    fn hash(&self, tensor: &Tensor) -> Result<u128, NameError> {
        let (bytes, search) = (tensor.bytes(), self.finite.contains(tensor.name()));
        let mut hash = BytesHash::default();
        let mut kept = 0;
        for start in (0..bytes.len()).step_by(PIECE) {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let range = piece(start, bytes.len());
            let piece = &bytes[range.clone()];
            hash.update(piece);
            let dtype = tensor.dtype();
            if let Some(i) = search.then(|| first_not_finite(dtype, piece)).flatten() {
                return Err(not_finite(tensor, start * 8 / dtype.bitsize() + i));
            }
            let enough = range.end - kept >= BEHIND || range.end == bytes.len();
            if enough && self.copied.load(Ordering::Relaxed) {
                tensor.release_bytes(kept..range.end);
                kept = range.end;
            }
        }
        Ok(hash.finish())
    }
}

/// A tensor in pieces to fetch.
fn parts(tensor: &Tensor) -> impl Iterator<Item = (&Tensor, Range<usize>)> {
    let length = tensor.bytes().len();
    let range = move |start: usize| start..length.min(start + FETCH);
    (0..length)
        .step_by(FETCH)
        .map(move |start| (tensor, range(start)))
}

fn piece(start: usize, end: usize) -> Range<usize> {
    start..end.min(start + PIECE)
}

#[cfg(test)]
mod tests {
    use twox_hash::XxHash3_128;

    use super::*;
    use crate::model::{
        checkpoint::Checkpoint,
        weight::{Fp8, Fp8Scale},
    };

    /// Tensors `a`, `b`, … of E4M3 codes.
    fn tensors(contents: &[Vec<u8>]) -> Vec<Tensor> {
        typed("F8_E4M3", 1, contents)
    }

    /// Tensors `a`, `b`, … of elements of `size` bytes.
    fn typed(dtype: &str, size: usize, contents: &[Vec<u8>]) -> Vec<Tensor> {
        let mut at = 0;
        let listed: Vec<String> = contents
            .iter()
            .zip('a'..)
            .map(|(bytes, name)| {
                let (from, to) = (at, at + bytes.len());
                at = to;
                let length = bytes.len() / size;
                format!(
                    r#""{name}":{{"dtype":"{dtype}","shape":[1,{length}],"data_offsets":[{from},{to}]}}"#
                )
            })
            .collect();
        let header = format!("{{{}}}", listed.join(","));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(contents.concat());
        let checkpoint = Checkpoint::embedded("test", Vec::leak(file)).unwrap();
        checkpoint.tensors().cloned().collect()
    }

    fn noise(length: usize, step: usize) -> Vec<u8> {
        // Codes up to 0x7e.
        (0..length).map(|i| (i * step % 127) as u8).collect()
    }

    fn fp8(tensor: &Tensor, scale: &Tensor) -> Weight {
        Weight::Fp8(Fp8::new(tensor.clone(), Fp8Scale::Tensor(scale.clone())))
    }

    #[test]
    fn pieces_make_the_hash_of_the_whole_in_any_order() {
        let all = tensors(&[
            noise(3 * PIECE + 17, 7),
            Vec::new(),
            noise(PIECE, 11),
            noise(5, 3),
        ]);
        let whole = digest(
            all.iter()
                .map(|t| (t, XxHash3_128::oneshot(t.bytes())))
                .collect(),
            "numbers",
        );
        let read = |all: &[Tensor], weights: &[&Weight], numbers: &str| {
            let reading = Reading::start(all.to_vec(), weights, numbers.into());
            reading.digest().unwrap()
        };
        assert_eq!(read(&all, &[], "numbers"), whole);
        assert_ne!(read(&all, &[], "others"), whole);
        assert_ne!(read(&all[1..], &[], "numbers"), whole);
        let last = fp8(&all[2], &all[3]);
        assert_eq!(read(&all, &[&last], "numbers"), whole);
    }

    #[test]
    fn a_code_that_is_no_number_is_named() {
        let mut bad = noise(2 * PIECE, 7);
        bad[PIECE + 12] = 0xff;
        let all = tensors(&[noise(100, 3), bad, vec![0x7f]]);
        let weight = fp8(&all[1], &all[2]);
        let reading = Reading::start(all.clone(), &[&weight], String::new());
        let message = reading.digest().unwrap_err().to_string();
        let expected = format!("tensor b: element {} is NaN, not a finite", PIECE + 12);
        assert!(message.contains(&expected), "{message}");
        // Only codes of weights are looked at: the third is a scale.
        let reading = Reading::start(all[2..].to_vec(), &[&weight], String::new());
        reading.digest().unwrap();
    }

    #[test]
    fn a_plain_number_that_is_not_finite_is_named() {
        for (dtype, bad) in [
            ("BF16", &[0xc0, 0x7f][..]),
            ("F16", &[0x00, 0x7e]),
            ("F32", &[0x00, 0x00, 0xc0, 0x7f]),
        ] {
            let size = bad.len();
            let at = PIECE / size + 12;
            let mut bytes = vec![0; 2 * PIECE];
            bytes[at * size..][..size].copy_from_slice(bad);
            let all = typed(dtype, size, &[vec![0; 8], bytes]);
            let weights = [Weight::Float(all[0].clone()), Weight::Float(all[1].clone())];
            let read = |weights: &[&Weight]| {
                let reading = Reading::start(all.clone(), weights, String::new());
                reading.digest().map_err(|error| error.to_string())
            };
            let message = read(&[&weights[0], &weights[1]]).unwrap_err();
            let expected = format!("tensor b: element {at} is NaN, not a finite number; fetch");
            assert!(message.contains(&expected), "{dtype}: {message}");
            assert!(message.ends_with("(in test)"), "{dtype}: {message}");
            // What no weight is made of may hold anything.
            read(&[&weights[0]]).unwrap();
        }
    }

    #[test]
    fn nobody_has_to_wait_for_it() {
        let all = tensors(&[noise(8 * PIECE, 7)]);
        for _ in 0..20 {
            let reading = Reading::start(all.clone(), &[], String::new());
            let work = reading.work.clone();
            drop(reading);
            assert!(work.stop.load(Ordering::Relaxed));
            assert_eq!(Arc::strong_count(&work), 1, "its thread has ended");
        }
        // What was told to stop looks at no byte more.
        let reading = Reading::start(all.clone(), &[], String::new());
        let whole = reading.digest().unwrap();
        let stopped = Work {
            tensors: all,
            finite: HashSet::new(),
            numbers: String::new(),
            stop: AtomicBool::new(true),
            copied: AtomicBool::new(false),
            result: OnceLock::new(),
        };
        assert_ne!(stopped.read().unwrap(), whole);
    }
}
