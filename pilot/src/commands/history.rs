//! `pilot list` and `pilot show`: what stands in the store.

use std::{
    io::{self, Write},
    time::{SystemTime, UNIX_EPOCH},
};

use super::{print, store};
use crate::{
    cli::{ListArgs, ShowArgs},
    config::Config,
    error::Error,
    journal::JournalError,
    ui::history::{self, Row},
};

pub(super) fn list(config: &Config, args: &ListArgs) -> Result<u8, Error> {
    let mut rows = Vec::new();
    match store::view(config) {
        // Before the first run there is no store, and that is an empty list; or a name is mistyped.
        Err(Error::Journal(error @ JournalError::NoStore(_))) => {
            let _ = writeln!(io::stderr(), "pilot: {error}");
        }
        Err(error) => return Err(error),
        Ok(journal) => {
            for found in store::all(config, &*journal)? {
                rows.push(match found.stored {
                    Ok(stored) => Row::new(&stored.state, &stored.records),
                    Err(reason) => Row::damaged(found.run.to_string(), reason),
                });
            }
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.changed_ms));
    let text = if args.json {
        history::table_json(&rows)
    } else {
        history::table(&rows, now_ms())
    };
    print(&text)?;
    Ok(0)
}

pub(super) fn show(config: &Config, args: &ShowArgs) -> Result<u8, Error> {
    let journal = store::view(config)?;
    let stored = store::Stored::load(config, &*journal, &store::named(&args.run)?)?;
    let text = if args.tokens {
        history::tokens(&stored.entries())
    } else if args.transcript {
        history::transcript(&stored.state, &stored.entries())
    } else if args.json {
        history::summary_json(&stored.state, &stored.records)
    } else {
        history::summary(&stored.state, &stored.records)
    };
    print(&text)?;
    Ok(0)
}

fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
