//! Runs sled where its panics and hangs cannot take pilot along.
//!
//! sled 0.34 panics on most kinds of damage, sometimes on a thread of its own, after which the
//! caller waits for ever. So opening and verifying happen on a thread that is given up on after a
//! while; a panic there becomes the text of an error.

use std::{
    any::Any,
    panic::{self, AssertUnwindSafe},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

/// Runs `work` on a thread of its own. `Err` says how it failed: panicked, or still not done after
/// `patience`. Panic messages of this process are not printed meanwhile: the error carries them.
pub(super) fn run<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let (send, receive) = mpsc::channel();
    let printing = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let spawned = thread::Builder::new().name("store".into()).spawn(move || {
        let outcome = panic::catch_unwind(AssertUnwindSafe(work));
        // The receiver may have given up; then nobody wants the outcome.
        let _ = send.send(outcome.map_err(|payload| panic_text(payload.as_ref())));
    });
    let outcome = match spawned {
        Err(error) => Err(format!("no thread for it: {error}")),
        Ok(_) => match receive.recv_timeout(patience) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => Err(format!("no answer in {} s", patience.as_secs())),
            Err(RecvTimeoutError::Disconnected) => Err("its thread ended early".into()),
        },
    };
    panic::set_hook(printing);
    outcome
}

/// Runs `work` here, turning a panic into the text of an error.
pub(super) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| panic_text(payload.as_ref()))
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

    #[test]
    fn panics_and_hangs_come_back_as_text() {
        let patient = Duration::from_secs(60);
        assert_eq!(run(patient, || 7), Ok(7));
        assert_eq!(
            run(patient, || -> u8 { panic!("odd page\nmore") }),
            Err("odd page".into())
        );
        let (keep, never) = mpsc::channel::<()>();
        let hung = run(Duration::from_millis(50), move || never.recv().is_ok());
        assert!(hung.unwrap_err().contains("no answer"));
        drop(keep);
    }
}
