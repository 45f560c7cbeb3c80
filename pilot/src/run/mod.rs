//! What a run is, without any I/O: entries, the state they fold into, and what to do next.
//!
//! Nothing here knows a clock, a socket, a thread or a file (a test looks). The driver asks
//! [`decide::decide`] what comes next, performs it, journals the outcome as an [`entry::Entry`] and
//! folds it into the [`state::State`]. Recovery is the same fold over what the journal holds.

pub mod budget;
pub mod decide;
pub mod entry;
pub mod event;
pub mod log;
pub mod prompt;
pub mod repetition;
pub mod retry;
pub mod seed;
pub mod state;

#[cfg(test)]
mod purity {
    use std::{fs, path::Path};

    #[test]
    fn the_core_knows_no_clock_socket_thread_or_file() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/run");
        let banned = [
            concat!("std::", "fs"),
            concat!("std::", "net"),
            concat!("std::", "time"),
            concat!("std::", "thread"),
            concat!("std::", "env"),
            concat!("std::", "process"),
            concat!("tok", "io"),
            concat!("ton", "ic::"),
            concat!("Instant::", "now"),
            concat!("SystemTime::", "now"),
            concat!("ra", "nd::"),
        ];
        let mut files = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            // Test code at the end of a file may do as it likes.
            let core = text.split("#[cfg(test)]").next().unwrap();
            for word in banned {
                assert!(!core.contains(word), "{} uses {word}", path.display());
            }
            files += 1;
        }
        assert!(files >= 9, "only {files} files seen");
    }
}
