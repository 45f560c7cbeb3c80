//! A reader beside the holder of a store sees what the holder has acknowledged.

use super::*;
use crate::{
    journal::{Durability, Journal},
    run::entry::Entry,
};

fn run(name: &str) -> RunId {
    RunId::new(name).unwrap()
}

fn append(journal: &SledJournal, run: &RunId, head: Head, bytes: u32) -> Head {
    let entry = Entry::TokensReceived {
        index: 0,
        ids: vec![7; bytes as usize],
    };
    journal
        .append(run, head, &[entry], Durability::Lazy)
        .unwrap()
}

/// A store in a folder whose path is too long for a socket's address.
fn store() -> (tempfile::TempDir, Arc<SledJournal>) {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("a-long-name".repeat(15)).join("store");
    let journal = Arc::new(SledJournal::open_or_create(&store).unwrap());
    (folder, journal)
}

#[test]
fn a_reader_sees_every_run_and_its_records_while_the_holder_writes_on() {
    let (_folder, journal) = store();
    let _share = Share::start(&journal).unwrap();
    let view = View::of(journal.path()).unwrap();
    assert!(view.runs().unwrap().is_empty());
    let mut head = Head::EMPTY;
    for bytes in [1, 10_000, 300_000] {
        head = append(&journal, &run("a"), head, bytes);
        assert_eq!(
            view.load(&run("a")).unwrap(),
            journal.load(&run("a")).unwrap()
        );
    }
    append(&journal, &run("b"), Head::EMPTY, 3);
    let heads: Vec<_> = view
        .runs()
        .unwrap()
        .into_iter()
        .map(|listing| (listing.run.to_string(), listing.head.unwrap().next))
        .collect();
    assert_eq!(heads, [("a".to_owned(), 3), ("b".to_owned(), 1)]);
    let unknown = view.load(&run("c")).unwrap_err();
    assert!(matches!(unknown, JournalError::UnknownRun(_)), "{unknown}");
}

#[test]
fn nonsense_is_the_loss_of_who_sent_it() {
    let (_folder, journal) = store();
    let _share = Share::start(&journal).unwrap();
    for bytes in [&b""[..], &[0xff; 64], &[3, 0, 0, 0, 9, 9, 9]] {
        let mut stream = connect(journal.path()).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        // The holder may already have hung up.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
    assert!(View::of(journal.path()).unwrap().runs().unwrap().is_empty());
}

#[test]
fn nobody_answers_once_the_holder_is_gone_and_the_next_one_takes_over() {
    let (_folder, journal) = store();
    let path = journal.path().to_owned();
    let share = Share::start(&journal).unwrap();
    drop(share);
    assert!(View::of(&path).is_none());
    // As after a kill: the socket's file is there, and nobody behind it.
    let (folder, address) = address(&path).unwrap();
    drop(UnixListener::bind(address).unwrap());
    drop(folder);
    assert!(path.join(SOCKET).exists());
    assert!(View::of(&path).is_none());
    let _share = Share::start(&journal).unwrap();
    assert!(View::of(&path).is_some());
}
