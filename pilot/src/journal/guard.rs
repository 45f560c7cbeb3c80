//! Runs sled where its panics and hangs cannot take pilot along.
//!
//! sled 0.34 panics on most kinds of damage, sometimes on a thread of its own, after which the
//! caller waits for ever. So opening and reading happen on a thread that is given up on after a
//! while; a panic there becomes the text of an error. A disk that is only slow is told from damage
//! by whether a thread of sled's panicked meanwhile.

use std::{
    any::Any,
    io,
    panic::{self, AssertUnwindSafe},
    path::Path,
    sync::{
        Mutex, Once, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use super::JournalError;

/// Name of the threads that work here.
const WORKER: &str = "store";

/// What names of sled's own threads begin with.
const SLED: &str = "sled-";

/// Why guarded work gave no outcome.
#[derive(Debug)]
pub(super) enum Failure {
    /// It, or sled beneath it, panicked with these words.
    Panicked(String),
    /// It was not done after this long.
    Silent(Duration),
    /// There was no thread for it.
    NotStarted(io::Error),
}

impl Failure {
    /// The failure of `doing` something with the store at `path`.
    pub(super) fn of_store(self, path: &Path, doing: &str) -> JournalError {
        match self {
            Self::Panicked(what) => JournalError::Damaged {
                path: path.to_owned(),
                what: format!("{doing}: sled gave up ({what})"),
            },
            Self::Silent(patience) => JournalError::io(
                doing,
                format!(
                    "no answer in {} s; the disk is very slow, or does not answer",
                    patience.as_secs()
                ),
            ),
            Self::NotStarted(error) => JournalError::io(doing, error),
        }
    }
}

/// Runs `work` on a thread of its own and waits for at most `patience`.
pub(super) fn run<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    quiet();
    let (send, receive) = mpsc::channel();
    thread::Builder::new()
        .name(WORKER.into())
        .spawn(move || {
            let outcome = panic::catch_unwind(AssertUnwindSafe(work));
            // The receiver may have given up; then nobody wants the outcome.
            let _ = send.send(outcome.map_err(|payload| panic_text(payload.as_ref())));
        })
        .map_err(Failure::NotStarted)?;
    match receive.recv_timeout(patience) {
        Ok(outcome) => outcome.map_err(Failure::Panicked),
        Err(RecvTimeoutError::Disconnected) => Err(Failure::Panicked("its thread ended".into())),
        Err(RecvTimeoutError::Timeout) => Err(match sled_panicked().take() {
            Some(what) => Failure::Panicked(what),
            None => Failure::Silent(patience),
        }),
    }
}

/// Runs `work` here, turning a panic into the text of an error.
pub(super) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| panic_text(payload.as_ref()))
}

/// The first panic on a thread of sled's that nobody was told of yet.
fn sled_panicked() -> std::sync::MutexGuard<'static, Option<String>> {
    static FIRST: Mutex<Option<String>> = Mutex::new(None);
    FIRST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on panics of workers are not printed, since an error carries their words, and those of
/// sled's threads are kept.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let printing = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let thread = thread::current();
            match thread.name() {
                Some(WORKER) => {}
                Some(name) if name.starts_with(SLED) => {
                    sled_panicked().get_or_insert_with(|| panic_text(info.payload()));
                }
                _ => printing(info),
            }
        }));
    });
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    let first = text.lines().next().unwrap_or_default();
    first.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work that is never done, until the sender goes.
    fn hang() -> (mpsc::Sender<()>, impl FnOnce() -> bool + Send) {
        let (keep, never) = mpsc::channel::<()>();
        (keep, move || never.recv().is_ok())
    }

    #[test]
    fn panics_and_hangs_come_back_as_errors_of_their_own() {
        let patient = Duration::from_secs(60);
        let brief = Duration::from_millis(50);
        let of_store = |failure: Failure| failure.of_store(Path::new("s"), "opening");
        assert_eq!(run(patient, || 7).unwrap(), 7);
        let panicked = run(patient, || -> u8 { panic!("odd page\nmore") }).unwrap_err();
        let error = of_store(panicked);
        assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("odd page"), "{error}");

        let (keep, work) = hang();
        let error = of_store(run(brief, work).unwrap_err());
        assert!(matches!(error, JournalError::Io { .. }), "{error}");
        drop(keep);

        let (keep, work) = hang();
        let sled = thread::Builder::new().name(format!("{SLED}io-1"));
        let sled = sled.spawn(|| panic!("a bad page")).unwrap();
        assert!(sled.join().is_err());
        let error = of_store(run(brief, work).unwrap_err());
        assert!(error.to_string().contains("a bad page"), "{error}");
        drop(keep);
    }
}
