//! A side file that remembers how far each run's journal had come.
//!
//! A store that lost its tail (a truncated file, a restored old copy) looks whole: its records still
//! chain. This file says that there was more. It holds fixed-size lines, appended and synced *after*
//! the commit they speak of, so it never runs ahead of the store; it is rewritten when it grows long.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use super::{
    Head, JournalError,
    disk::{self, Barrier},
};
use crate::run::entry::RunId;

const LINE: usize = 64;
const MAGIC: [u8; 4] = *b"MHwm";

/// Lines after which the file is rewritten at the next opening.
const LONG: usize = 4096;

/// Short name of a run in the file.
type Tag = [u8; 16];

/// The file, open for appending.
#[derive(Debug)]
pub(super) struct HighWater {
    file: File,
    marks: BTreeMap<Tag, Head>,
}

impl HighWater {
    /// Path of the file in a store.
    pub(super) fn path(store: &Path) -> PathBuf {
        store.join("high-water")
    }

    /// Makes an empty one.
    pub(super) fn create(store: &Path) -> io::Result<()> {
        disk::replace_file(&Self::path(store), &[])
    }

    /// Reads the file. A last line that is torn, or of full length and not what was written, is what
    /// a crash leaves: it was not acknowledged and is dropped, so that the next one does not follow
    /// it. Damage elsewhere is an error.
    pub(super) fn open(store: &Path) -> Result<Self, JournalError> {
        let path = Self::path(store);
        let damaged = |what: String| JournalError::Damaged {
            path: store.to_owned(),
            what,
        };
        let fail = |error| JournalError::io(format!("reading {}", path.display()), error);
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(mut file) => file.read_to_end(&mut bytes).map_err(fail)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged("its high-water file is gone".into()));
            }
            Err(error) => return Err(fail(error)),
        };
        let mut marks = BTreeMap::new();
        let lines = bytes.len().div_ceil(LINE);
        let mut torn = false;
        for (at, line) in bytes.chunks(LINE).enumerate() {
            match decode(line) {
                Some((tag, Head::EMPTY)) => {
                    marks.remove(&tag);
                }
                Some((tag, head)) => {
                    marks.insert(tag, head);
                }
                None if at + 1 == lines => torn = true,
                None => return Err(damaged(format!("line {at} of its high-water file"))),
            }
        }
        if lines > LONG || torn {
            let mut whole = Vec::new();
            marks
                .iter()
                .for_each(|(tag, head)| whole.extend_from_slice(&encode(*tag, *head)));
            disk::replace_file(&path, &whole).map_err(fail)?;
        }
        let file = OpenOptions::new().append(true).open(&path).map_err(fail)?;
        Ok(Self { file, marks })
    }

    /// Whether nothing was ever acknowledged.
    pub(super) fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }

    /// Runs with a mark.
    pub(super) fn len(&self) -> usize {
        self.marks.len()
    }

    /// How far the run had come; [`Head::EMPTY`] when nothing is known.
    pub(super) fn mark(&self, run: &RunId) -> Head {
        self.marks.get(&tag(run)).copied().unwrap_or(Head::EMPTY)
    }

    /// Notes that the run's journal has come to `head`.
    pub(super) fn raise(
        &mut self,
        run: &RunId,
        head: Head,
        barrier: &dyn Barrier,
    ) -> io::Result<()> {
        self.note(tag(run), head, barrier)?;
        self.marks.insert(tag(run), head);
        Ok(())
    }

    /// Notes that nothing more is expected of the run.
    pub(super) fn forget(&mut self, run: &RunId, barrier: &dyn Barrier) -> io::Result<()> {
        self.note(tag(run), Head::EMPTY, barrier)?;
        self.marks.remove(&tag(run));
        Ok(())
    }

    fn note(&mut self, tag: Tag, head: Head, barrier: &dyn Barrier) -> io::Result<()> {
        self.file.write_all(&encode(tag, head))?;
        barrier.sync_data(&self.file)
    }
}

fn tag(run: &RunId) -> Tag {
    let mut tag = [0; 16];
    tag.copy_from_slice(&blake3::hash(run.as_str().as_bytes()).as_bytes()[..16]);
    tag
}

fn encode(tag: Tag, head: Head) -> [u8; LINE] {
    let mut line = [0; LINE];
    line[..4].copy_from_slice(&MAGIC);
    line[4..20].copy_from_slice(&tag);
    line[20..28].copy_from_slice(&head.next.to_le_bytes());
    line[28..60].copy_from_slice(&head.hash);
    let crc = crc32c::crc32c(&line[..60]);
    line[60..].copy_from_slice(&crc.to_le_bytes());
    line
}

fn decode(line: &[u8]) -> Option<(Tag, Head)> {
    let line: &[u8; LINE] = line.try_into().ok()?;
    if line[..4] != MAGIC || crc32c::crc32c(&line[..60]).to_le_bytes() != line[60..] {
        return None;
    }
    let (mut tag, mut next, mut hash) = ([0; 16], [0; 8], [0; 32]);
    tag.copy_from_slice(&line[4..20]);
    next.copy_from_slice(&line[20..28]);
    hash.copy_from_slice(&line[28..60]);
    Some((
        tag,
        Head {
            next: u64::from_le_bytes(next),
            hash,
        },
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::journal::disk::DiskBarrier;

    fn run(name: &str) -> RunId {
        RunId::new(name).unwrap()
    }

    #[test]
    fn marks_come_back_and_a_torn_tail_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        HighWater::create(folder.path()).unwrap();
        let mut marks = HighWater::open(folder.path()).unwrap();
        assert!(marks.is_empty());
        for next in 1..=5 {
            marks
                .raise(
                    &run("a"),
                    Head {
                        next,
                        hash: [next as u8; 32],
                    },
                    &DiskBarrier,
                )
                .unwrap();
        }
        marks
            .raise(
                &run("b"),
                Head {
                    next: 9,
                    hash: [1; 32],
                },
                &DiskBarrier,
            )
            .unwrap();
        drop(marks);
        let path = HighWater::path(folder.path());
        let whole = fs::read(&path).unwrap();
        for cut in 1..LINE {
            fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            let marks = HighWater::open(folder.path()).unwrap();
            assert_eq!(marks.mark(&run("a")).next, 5);
            assert_eq!(marks.mark(&run("b")), Head::EMPTY);
            assert_eq!(fs::metadata(&path).unwrap().len() % LINE as u64, 0);
        }
        fs::write(&path, &whole).unwrap();
        assert_eq!(
            HighWater::open(folder.path()).unwrap().mark(&run("b")).next,
            9
        );
    }

    #[test]
    fn a_last_line_that_never_reached_the_disk_is_gone_for_good() {
        let folder = tempfile::tempdir().unwrap();
        HighWater::create(folder.path()).unwrap();
        let path = HighWater::path(folder.path());
        let head = |next| Head {
            next,
            hash: [next as u8; 32],
        };
        let raise = |next| {
            let mut marks = HighWater::open(folder.path()).unwrap();
            marks.raise(&run("a"), head(next), &DiskBarrier).unwrap();
        };
        raise(1);
        raise(2);
        let whole = fs::read(&path).unwrap();
        // A power cut can leave the new length and none of the content, or half of it.
        for kept in [0, 30] {
            let mut cut = whole.clone();
            cut[LINE + kept..].fill(0);
            fs::write(&path, &cut).unwrap();
            raise(3);
            assert_eq!(
                HighWater::open(folder.path()).unwrap().mark(&run("a")),
                head(3)
            );
        }
    }

    #[test]
    fn a_forgotten_run_has_no_mark_until_it_is_raised_again() {
        let folder = tempfile::tempdir().unwrap();
        HighWater::create(folder.path()).unwrap();
        let head = |next| Head {
            next,
            hash: [1; 32],
        };
        let mut marks = HighWater::open(folder.path()).unwrap();
        marks.raise(&run("a"), head(5), &DiskBarrier).unwrap();
        marks.raise(&run("b"), head(6), &DiskBarrier).unwrap();
        marks.forget(&run("a"), &DiskBarrier).unwrap();
        assert_eq!((marks.len(), marks.mark(&run("a"))), (1, Head::EMPTY));
        let mut marks = HighWater::open(folder.path()).unwrap();
        assert_eq!((marks.len(), marks.mark(&run("a"))), (1, Head::EMPTY));
        marks.raise(&run("a"), head(1), &DiskBarrier).unwrap();
        assert_eq!(
            HighWater::open(folder.path()).unwrap().mark(&run("a")),
            head(1)
        );
    }

    #[test]
    fn damage_in_the_middle_and_a_missing_file_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        HighWater::create(folder.path()).unwrap();
        let mut marks = HighWater::open(folder.path()).unwrap();
        for next in 1..=3 {
            marks
                .raise(
                    &run("a"),
                    Head {
                        next,
                        hash: [0; 32],
                    },
                    &DiskBarrier,
                )
                .unwrap();
        }
        let path = HighWater::path(folder.path());
        let mut bytes = fs::read(&path).unwrap();
        bytes[LINE + 21] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = HighWater::open(folder.path()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
        fs::remove_file(&path).unwrap();
        let error = HighWater::open(folder.path()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
    }

    #[test]
    fn a_long_file_is_rewritten_short() {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = Vec::new();
        for next in 0..=LONG as u64 {
            bytes.extend_from_slice(&encode(
                tag(&run("a")),
                Head {
                    next,
                    hash: [0; 32],
                },
            ));
        }
        fs::write(HighWater::path(folder.path()), bytes).unwrap();
        let marks = HighWater::open(folder.path()).unwrap();
        assert_eq!(marks.mark(&run("a")).next, LONG as u64);
        assert_eq!(
            fs::metadata(HighWater::path(folder.path())).unwrap().len(),
            LINE as u64
        );
    }
}
