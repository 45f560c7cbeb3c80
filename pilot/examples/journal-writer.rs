//! Writes a journal until it is killed, or checks what is left of one. For power-cut tests.
//!
//! `journal-writer write STORE PAUSE_MS` appends synced records and prints each one's number after
//! it was acknowledged. `journal-writer check STORE ACKNOWLEDGED` opens the store, verifies every
//! record, prints how many there are, and fails if there are fewer than were acknowledged.

use std::{
    env,
    io::{self, Write},
    path::Path,
    process::ExitCode,
    thread,
    time::Duration,
};

use pilot::{
    journal::{Durability, History, Journal, JournalError, sled::SledJournal},
    run::entry::{Entry, RunId},
};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["write", store, pause] => match pause.parse() {
            Ok(pause) => write(Path::new(store), Duration::from_millis(pause)),
            Err(_) => Err(format!("{pause} is no number of milliseconds").into()),
        },
        ["check", store, acknowledged] => match acknowledged.parse() {
            Ok(acknowledged) => check(Path::new(store), acknowledged),
            Err(_) => Err(format!("{acknowledged} is no number of records").into()),
        },
        _ => Err("usage: journal-writer write STORE PAUSE_MS | check STORE ACKNOWLEDGED".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "journal-writer: {error}");
            ExitCode::FAILURE
        }
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn run() -> Result<RunId, String> {
    RunId::new("power-cut")
}

/// Record `number`, about a kilobyte that does not compress. Every fourth is lazy in a real run; here
/// a lazy one goes before each synced one.
fn entry(number: u64) -> Entry {
    let mut ids = Vec::new();
    for part in 0..32_u64 {
        let hash = blake3::hash(&[number.to_le_bytes(), part.to_le_bytes()].concat());
        ids.extend(hash.as_bytes().chunks(4).map(|word| {
            word.iter()
                .fold(0, |value: u32, byte| value << 8 | u32::from(*byte))
        }));
    }
    Entry::TokensReceived {
        index: number as u32,
        ids,
    }
}

fn write(store: &Path, pause: Duration) -> Outcome {
    let journal = SledJournal::open_or_create(store)?;
    let run = run()?;
    let mut head = journal.head(&run)?;
    let mut out = io::stdout();
    loop {
        head = journal.append(&run, head, &[entry(head.next)], Durability::Lazy)?;
        head = journal.append(&run, head, &[entry(head.next)], Durability::Synced)?;
        writeln!(out, "{}", head.next)?;
        out.flush()?;
        thread::sleep(pause);
    }
}

fn check(store: &Path, acknowledged: u64) -> Outcome {
    let found = match SledJournal::open(store) {
        Err(JournalError::NoStore(_)) if acknowledged == 0 => return Ok(()),
        other => verify(&other?)?,
    };
    writeln!(io::stdout(), "{found}")?;
    if found < acknowledged {
        return Err(format!("{acknowledged} records were acknowledged, {found} are left").into());
    }
    // What is left must be good to go on from, and what is put behind it must come back.
    let journal = SledJournal::open(store)?;
    let head = journal.head(&run()?)?;
    journal.append(&run()?, head, &[entry(head.next)], Durability::Synced)?;
    drop(journal);
    let after = verify(&SledJournal::open(store)?)?;
    if after != found + 1 {
        return Err(format!("{after} records after one was put behind {found}").into());
    }
    Ok(())
}

/// How many records there are, each as it was written.
fn verify(journal: &SledJournal) -> Result<u64, Box<dyn std::error::Error>> {
    let records = match journal.load(&run()?) {
        Err(JournalError::UnknownRun(_)) => Vec::new(),
        other => other?,
    };
    match records
        .iter()
        .find(|record| record.entry != entry(record.sequence))
    {
        Some(odd) => Err(format!("record {} is not what was written", odd.sequence).into()),
        None => Ok(records.len() as u64),
    }
}
