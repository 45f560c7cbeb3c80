//! What the sled journal promises, and what it says about damage.

use std::{
    fs::{self, OpenOptions},
    io::{self, Seek, SeekFrom, Write},
    os::unix::fs::PermissionsExt,
    sync::atomic::{AtomicU64, Ordering},
};

use super::*;
use crate::{
    journal::tree::{CHUNK, record_key},
    run::entry::Limits,
};

fn run(name: &str) -> RunId {
    RunId::new(name).unwrap()
}

fn note(number: u32) -> Entry {
    Entry::TokensReceived {
        index: number,
        ids: vec![number; 20],
    }
}

/// Appends `count` synced notes.
fn fill(journal: &SledJournal, run: &RunId, count: u32) -> Head {
    let mut head = journal.head(run).unwrap();
    for number in 0..count {
        head = journal
            .append(run, head, &[note(number)], Durability::Synced)
            .unwrap();
    }
    head
}

#[derive(Default)]
struct Counting {
    calls: AtomicU64,
    fail_from: AtomicU64,
}

impl Barrier for Counting {
    fn sync_data(&self, file: &File) -> io::Result<()> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let fail_from = self.fail_from.load(Ordering::SeqCst);
        if fail_from > 0 && call >= fail_from {
            return Err(io::Error::other("injected EIO"));
        }
        file.sync_data()
    }
}

#[test]
fn entries_come_back_after_reopening_and_epochs_grow() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let journal = SledJournal::open_or_create(&store).unwrap();
    let head = fill(&journal, &run("a"), 50);
    fill(&journal, &run("b"), 3);
    assert_eq!(head.next, 50);
    drop(journal);
    let journal = SledJournal::open(&store).unwrap();
    assert_eq!(journal.head(&run("a")).unwrap(), head);
    fill(&journal, &run("a"), 1);
    let records = journal.load(&run("a")).unwrap();
    assert_eq!(records.len(), 51);
    assert_eq!(records[49].entry, note(49));
    assert_eq!((records[49].epoch, records[50].epoch), (1, 2));
    let names: Vec<String> = journal
        .runs()
        .unwrap()
        .iter()
        .map(|listing| listing.run.to_string())
        .collect();
    assert_eq!(names, ["a", "b"]);
    assert!(matches!(
        journal.load(&run("c")),
        Err(JournalError::UnknownRun(_))
    ));
}

#[test]
fn records_larger_than_a_chunk_come_back_and_sled_makes_no_files_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    let mut head = Head::EMPTY;
    let mut all = Vec::new();
    for size in [
        CHUNK - 100,
        CHUNK,
        CHUNK + 1,
        10 * CHUNK,
        300_000,
        1 << 20,
        7,
    ] {
        let entry = Entry::Finished {
            summary: "s".repeat(size),
        };
        head = journal
            .append(
                &run("big"),
                head,
                std::slice::from_ref(&entry),
                Durability::Synced,
            )
            .unwrap();
        all.push(entry);
    }
    drop(journal);
    assert_eq!(
        fs::read_dir(folder.path().join("sled/blobs"))
            .unwrap()
            .count(),
        0
    );
    let journal = SledJournal::open(folder.path()).unwrap();
    let read: Vec<Entry> = journal
        .load(&run("big"))
        .unwrap()
        .into_iter()
        .map(|record| record.entry)
        .collect();
    assert!(read == all);
}

#[test]
fn a_batch_is_whole_and_a_stale_writer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    let head = journal
        .append(
            &run("a"),
            Head::EMPTY,
            &[note(0), note(1), note(2)],
            Durability::Lazy,
        )
        .unwrap();
    assert_eq!(head.next, 3);
    let stale = journal.append(&run("a"), Head::EMPTY, &[note(9)], Durability::Synced);
    assert!(matches!(
        stale,
        Err(JournalError::Conflict {
            expected: 0,
            found: 3,
            ..
        })
    ));
    journal
        .append(&run("a"), head, &[note(3)], Durability::Synced)
        .unwrap();
    assert_eq!(journal.load(&run("a")).unwrap().len(), 4);
}

#[test]
fn a_synced_append_reaches_the_disk_twice_and_a_lazy_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let barrier = Arc::new(Counting::default());
    let journal = SledJournal::open_with(folder.path(), barrier.clone()).unwrap();
    let mut head = Head::EMPTY;
    let count = || barrier.calls.load(Ordering::SeqCst);
    for number in 0..10 {
        let before = count();
        head = journal
            .append(&run("a"), head, &[note(number)], Durability::Lazy)
            .unwrap();
        assert_eq!(count(), before);
        head = journal
            .append(&run("a"), head, &[note(number)], Durability::Synced)
            .unwrap();
        // Once for the store, once for the high-water line.
        assert_eq!(count(), before + 2);
    }
}

#[test]
fn after_a_failed_sync_nothing_is_written_until_the_store_is_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let barrier = Arc::new(Counting::default());
    let journal = SledJournal::open_with(folder.path(), barrier.clone()).unwrap();
    let head = fill(&journal, &run("a"), 5);
    barrier
        .fail_from
        .store(barrier.calls.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
    let failed = journal
        .append(&run("a"), head, &[note(5)], Durability::Synced)
        .unwrap_err();
    assert!(failed.to_string().contains("injected EIO"), "{failed}");
    barrier.fail_from.store(0, Ordering::SeqCst);
    let refused = journal
        .append(&run("a"), head, &[note(5)], Durability::Synced)
        .unwrap_err();
    assert!(
        refused.to_string().contains("open the store again"),
        "{refused}"
    );
    // It was stored, but not acknowledged: who looks sees what was, and no damage.
    assert_eq!(journal.load(&run("a")).unwrap().len(), 5);
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    // The record was stored though it was not acknowledged; what was acknowledged is all there.
    assert!(journal.load(&run("a")).unwrap().len() >= 5);
    fill(&journal, &run("a"), 1);
}

#[test]
fn two_pilots_cannot_have_one_store() {
    let folder = tempfile::tempdir().unwrap();
    let first = SledJournal::open_or_create(folder.path()).unwrap();
    let error = SledJournal::open(folder.path()).err().unwrap();
    assert!(matches!(error, JournalError::Locked { .. }), "{error}");
    drop(first);
    SledJournal::open(folder.path()).unwrap();
}

#[test]
fn a_missing_store_is_not_made_by_looking() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("none");
    assert!(matches!(
        SledJournal::open(&store),
        Err(JournalError::NoStore(_))
    ));
    assert!(!store.exists());
}

#[test]
fn a_creation_cut_short_at_any_file_is_finished_later() {
    for keep_sled in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        drop(SledJournal::open_or_create(folder.path()).unwrap());
        fs::remove_file(folder.path().join(MARKER)).unwrap();
        if !keep_sled {
            fs::remove_file(HighWater::path(folder.path())).unwrap();
            fs::remove_dir_all(folder.path().join("sled")).unwrap();
        }
        let journal = SledJournal::open_or_create(folder.path()).unwrap();
        fill(&journal, &run("a"), 2);
    }
}

/// A store with a run of 400 records, closed.
fn filled_store() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    fill(&journal, &run("a"), 400);
    drop(journal);
    folder
}

/// Opens and reads; `Ok` only if every record is as it was written.
fn read_all(store: &Path) -> Result<(), JournalError> {
    let journal = SledJournal::open(store)?;
    let records = journal.load(&run("a"))?;
    assert_eq!(
        records.len(),
        400,
        "acknowledged records vanished without an error"
    );
    for (at, record) in records.iter().enumerate() {
        assert_eq!(record.entry, note(at as u32));
    }
    Ok(())
}

fn is_damage(outcome: &Result<(), JournalError>) -> bool {
    matches!(outcome, Err(JournalError::Damaged { .. }))
}

#[test]
fn files_that_vanish_or_are_emptied_are_damage_or_harmless_never_loss() {
    type Harm = fn(&Path);
    let cases: [(&str, Harm, bool); 8] = [
        (
            "db gone",
            |s| fs::remove_file(s.join("sled/db")).unwrap(),
            true,
        ),
        (
            "db emptied",
            |s| fs::write(s.join("sled/db"), b"").unwrap(),
            true,
        ),
        (
            "sled gone",
            |s| fs::remove_dir_all(s.join("sled")).unwrap(),
            true,
        ),
        (
            "marker gone",
            |s| fs::remove_file(s.join(MARKER)).unwrap(),
            true,
        ),
        (
            "marker odd",
            |s| fs::write(s.join(MARKER), b"x").unwrap(),
            true,
        ),
        (
            "high-water gone",
            |s| fs::remove_file(HighWater::path(s)).unwrap(),
            true,
        ),
        (
            "conf emptied",
            |s| fs::write(s.join("sled/conf"), b"").unwrap(),
            false,
        ),
        (
            "conf gone",
            |s| fs::remove_file(s.join("sled/conf")).unwrap(),
            false,
        ),
    ];
    for (name, harm, must_fail) in cases {
        let store = filled_store();
        harm(store.path());
        let outcome = read_all(store.path());
        assert!(
            is_damage(&outcome) || (outcome.is_ok() && !must_fail),
            "{name}: {outcome:?}"
        );
    }
}

#[test]
fn a_cut_off_or_zeroed_tail_is_damage() {
    for cut in [1_u64, 100, 3_000, 30_000] {
        let store = filled_store();
        let db = store.path().join("sled/db");
        let len = fs::metadata(&db).unwrap().len();
        let file = OpenOptions::new().write(true).open(&db).unwrap();
        file.set_len(len.saturating_sub(cut)).unwrap();
        let outcome = read_all(store.path());
        // The file may end in unused bytes: then nothing was lost.
        assert!(
            is_damage(&outcome) || outcome.is_ok(),
            "cut {cut}: {outcome:?}"
        );
    }
    let store = filled_store();
    let db = store.path().join("sled/db");
    let used = last_used_byte(&db);
    let mut file = OpenOptions::new().write(true).open(&db).unwrap();
    file.seek(SeekFrom::Start(used - 2_000)).unwrap();
    file.write_all(&[0; 2_000]).unwrap();
    drop(file);
    assert!(is_damage(&read_all(store.path())));
}

fn last_used_byte(path: &Path) -> u64 {
    let bytes = fs::read(path).unwrap();
    bytes.iter().rposition(|byte| *byte != 0).unwrap() as u64
}

/// Each flip opens a store on threads that sled may leave hanging, so a dozen are tried;
/// more would only be slower.
#[test]
fn flipped_bits_are_damage_or_harmless_never_loss() {
    let original = filled_store();
    let db = original.path().join("sled/db");
    let used = last_used_byte(&db);
    let mut outcomes = (0, 0);
    for try_number in 0..12_u64 {
        let store = tempfile::tempdir().unwrap();
        copy_tree(original.path(), store.path());
        let mixed = *blake3::hash(&try_number.to_le_bytes()).as_bytes();
        let at = u64::from_le_bytes(mixed[..8].try_into().unwrap()) % used;
        flip(&store.path().join("sled/db"), at, 1 << (mixed[8] % 8));
        let outcome = read_all(store.path());
        assert!(
            is_damage(&outcome) || outcome.is_ok(),
            "byte {at}: {outcome:?}"
        );
        outcomes = (outcomes.0 + i32::from(outcome.is_ok()), outcomes.1 + 1);
    }
    assert!(outcomes.0 < outcomes.1, "no flip was noticed at all");
}

fn flip(path: &Path, at: u64, mask: u8) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= mask;
    fs::write(path, bytes).unwrap();
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn one_damaged_run_leaves_the_others_alone() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    fill(&journal, &run("good"), 20);
    let head = fill(&journal, &run("bad"), 20);
    let tree = journal.tree(&run("bad")).unwrap();
    tree.insert(record_key(7, 0), b"something else").unwrap();
    journal.db.flush().unwrap();
    drop(tree);
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    assert_eq!(journal.load(&run("good")).unwrap().len(), 20);
    assert!(matches!(
        journal.load(&run("bad")),
        Err(JournalError::Damaged { .. })
    ));
    assert!(matches!(
        journal.append(&run("bad"), head, &[note(0)], Durability::Synced),
        Err(JournalError::Damaged { .. })
    ));
    let listing = journal.runs().unwrap();
    assert!(listing[0].head.as_ref().unwrap_err().contains("record 7"));
    assert!(listing[1].head.is_ok());
}

#[test]
fn a_record_of_a_newer_pilot_refuses_its_own_run_alone() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    fill(&journal, &run("old"), 3);
    let stamp = Stamp {
        epoch: 1,
        wall_ms: 0,
    };
    let (mut bytes, _) = codec::encode(&run("new"), Head::EMPTY, stamp, &note(0)).unwrap();
    bytes[5] = u8::MAX;
    let end = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    let head = Head {
        next: 1,
        hash: *blake3::hash(&bytes).as_bytes(),
    };
    journal
        .commit(&run("new"), Head::EMPTY, &[(0, bytes)], head)
        .unwrap();
    journal.db.flush().unwrap();
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    let error = journal.load(&run("new")).unwrap_err();
    assert!(matches!(error, JournalError::Newer { .. }), "{error}");
    fill(&journal, &run("old"), 3);
    assert_eq!(journal.load(&run("old")).unwrap().len(), 6);
}

#[test]
fn records_past_the_end_are_damage() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    fill(&journal, &run("a"), 3);
    let tree = journal.tree(&run("a")).unwrap();
    tree.insert(record_key(3, 0), b"a leftover").unwrap();
    journal.db.flush().unwrap();
    drop((tree, journal));
    let journal = SledJournal::open(folder.path()).unwrap();
    let error = journal.load(&run("a")).unwrap_err().to_string();
    assert!(error.contains("4 records of 3"), "{error}");
}

#[test]
fn a_reader_sees_a_whole_run_while_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    let mut head = fill(&journal, &run("a"), 50);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while seen < 600 {
                let now = journal.load(&run("a")).unwrap().len();
                assert!(now >= seen, "{now} after {seen}");
                seen = now;
            }
        });
        for number in 50..600 {
            head = journal
                .append(&run("a"), head, &[note(number)], Durability::Lazy)
                .unwrap();
        }
        reader.join().unwrap();
    });
}

#[test]
fn a_removed_run_is_gone_with_its_spool_and_its_name_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    for name in ["gone", "kept", "bad"] {
        fill(&journal, &run(name), 20);
    }
    fs::create_dir_all(journal.spool(&run("gone")).join("call-1")).unwrap();
    let tree = journal.tree(&run("bad")).unwrap();
    tree.remove(record_key(19, 0)).unwrap();
    journal.db.flush().unwrap();
    drop((tree, journal));
    let journal = SledJournal::open(folder.path()).unwrap();
    journal.remove(&run("gone")).unwrap();
    journal.remove(&run("bad")).unwrap();
    assert!(!journal.spool(&run("gone")).exists());
    let unknown = journal.remove(&run("gone")).unwrap_err();
    assert!(matches!(unknown, JournalError::UnknownRun(_)), "{unknown}");
    let only = |journal: &SledJournal| {
        let runs = journal.runs().unwrap();
        assert_eq!(runs.len(), 1);
        assert_eq!(runs[0].run, run("kept"));
    };
    only(&journal);
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    only(&journal);
    assert_eq!(fill(&journal, &run("gone"), 2).next, 2);
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    assert_eq!(journal.load(&run("gone")).unwrap().len(), 2);
    assert_eq!(journal.load(&run("kept")).unwrap().len(), 20);
}

#[test]
fn a_removal_cut_short_can_be_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    fill(&journal, &run("a"), 20);
    fill(&journal, &run("b"), 20);
    // What a removal has done when it dies after its first step, and after its second.
    for (name, head_too) in [("a", false), ("b", true)] {
        let mut writer = journal.writer();
        writer
            .high_water
            .forget(&run(name), &*journal.barrier)
            .unwrap();
        if head_too {
            journal.heads.remove(name).unwrap();
        }
    }
    journal.db.flush().unwrap();
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    assert_eq!(journal.load(&run("a")).unwrap().len(), 20);
    assert!(journal.load(&run("b")).is_err());
    for name in ["a", "b"] {
        journal.remove(&run(name)).unwrap();
    }
    assert!(journal.runs().unwrap().is_empty());
}

#[test]
fn what_a_store_holds_is_its_owners_alone_whoever_made_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    drop(SledJournal::open_or_create(folder.path()).unwrap());
    let inner = ["sled", "spool"].map(|name| folder.path().join(name));
    for place in &inner {
        assert_eq!(mode(place), 0o700);
        // As an older pilot left it.
        fs::set_permissions(place, fs::Permissions::from_mode(0o755)).unwrap();
    }
    drop(SledJournal::open(folder.path()).unwrap());
    assert!(inner.iter().all(|place| mode(place) == 0o700));
    // The folder itself may be somebody's mount: it stays as it is.
    assert_eq!(mode(folder.path()), 0o755);
}

#[test]
fn records_removed_behind_our_back_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    fill(&journal, &run("a"), 20);
    // A consistent older state: two records fewer, and the head to match.
    let records = journal.load(&run("a")).unwrap();
    let mut head = Head::EMPTY;
    for record in &records[..18] {
        let stamp = Stamp {
            epoch: record.epoch,
            wall_ms: record.wall_ms,
        };
        head = codec::encode(&run("a"), head, stamp, &record.entry)
            .unwrap()
            .1;
    }
    let tree = journal.tree(&run("a")).unwrap();
    tree.remove(record_key(18, 0)).unwrap();
    tree.remove(record_key(19, 0)).unwrap();
    journal.heads.insert("a", encode_head(head)).unwrap();
    journal.db.flush().unwrap();
    drop(tree);
    drop(journal);
    let journal = SledJournal::open(folder.path()).unwrap();
    let error = journal.load(&run("a")).unwrap_err().to_string();
    assert!(error.contains("had 20 records, 18 are left"), "{error}");
}

#[test]
fn every_kind_of_entry_survives_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let journal = SledJournal::open_or_create(folder.path()).unwrap();
    let limits = Limits {
        steps: 1,
        tokens: 2,
        active_ms: 3,
    };
    let entries = [
        Entry::PromptStarted {
            head: vec![1, 2, 300_000],
            first_exchange: 4,
        },
        Entry::Resumed {
            limits,
            model: None,
        },
        Entry::MessagesAppended {
            ids: vec![],
            nudge: true,
        },
    ];
    journal
        .append(&run("a"), Head::EMPTY, &entries, Durability::Synced)
        .unwrap();
    let read: Vec<Entry> = journal
        .load(&run("a"))
        .unwrap()
        .into_iter()
        .map(|record| record.entry)
        .collect();
    assert_eq!(read, entries);
}
