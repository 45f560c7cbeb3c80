//! From a signal to a clean end: what stops when, and what is waited for.
//!
//! The first SIGTERM or SIGINT asks for a graceful end, the second for an immediate one. Every
//! task of a program has a [`Kind`] that says what an end means to it, so that "what happens to
//! this on shutdown" is answered where the task is started.

use std::{
    future::Future,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The two stages of an end.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    graceful: CancellationToken,
    forced: CancellationToken,
}

impl Shutdown {
    /// Listens for SIGTERM and SIGINT. Call it first in `main`, before anything slow: a daemon
    /// that is still loading must already be stoppable.
    ///
    /// # Errors
    /// When the process cannot install signal handlers.
    pub fn on_signals() -> io::Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let shutdown = Self::default();
        let stages = shutdown.clone();
        tokio::spawn(async move {
            for stage in [&stages.graceful, &stages.forced] {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                stage.cancel();
            }
        });
        Ok(shutdown)
    }

    /// Begins a graceful end without a signal.
    pub fn begin(&self) {
        self.graceful.cancel();
    }

    /// Cancelled when work should be finished and nothing new begun.
    pub fn graceful(&self) -> &CancellationToken {
        &self.graceful
    }

    /// Cancelled when the process should end at once.
    pub fn forced(&self) -> &CancellationToken {
        &self.forced
    }
}

/// What the end of the program means to a task, and the end of the task to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The program is pointless without it: when it ends or panics, a graceful end begins.
    Essential,
    /// It finishes by itself soon after the graceful end begins, and is waited for.
    Drained,
    /// It may be cut off at any await point.
    Background,
}

/// How a task ended that nobody asked to end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("task `{task}` {how}")]
pub struct TaskFailure {
    /// The name it was started under.
    pub task: &'static str,
    /// "panicked: …" or "ended".
    pub how: String,
}

/// The tasks of a program. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tasks {
    shutdown: Shutdown,
    waited_for: TaskTracker,
    background: CancellationToken,
    failure: Arc<Mutex<Option<TaskFailure>>>,
}

impl Tasks {
    /// No tasks yet, under this shutdown.
    pub fn new(shutdown: Shutdown) -> Self {
        Self {
            shutdown,
            waited_for: TaskTracker::new(),
            background: CancellationToken::new(),
            failure: Arc::default(),
        }
    }

    /// Starts a task. A panic in it is reported and, in an essential task, ends the program
    /// gracefully; it never takes another task with it.
    pub fn spawn<F>(&self, name: &'static str, kind: Kind, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let supervisor = self.clone();
        let supervised = async move {
            let ended = if kind == Kind::Background {
                supervisor
                    .background
                    .run_until_cancelled(spawn_caught(task))
                    .await
            } else {
                Some(spawn_caught(task).await)
            };
            match ended {
                Some(Err(panic)) => supervisor.failed(name, kind, format!("panicked: {panic}")),
                Some(Ok(()))
                    if kind == Kind::Essential && !supervisor.shutdown.graceful.is_cancelled() =>
                {
                    supervisor.failed(name, kind, "ended".to_owned());
                }
                _ => {}
            }
        };
        if kind == Kind::Background {
            tokio::spawn(supervised);
        } else {
            self.waited_for.spawn(supervised);
        }
    }

    fn failed(&self, task: &'static str, kind: Kind, how: String) {
        tracing::error!(task, how, "a task failed");
        if kind == Kind::Essential {
            // A poisoned lock still holds a failure worth keeping.
            let mut first = self
                .failure
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            first.get_or_insert(TaskFailure { task, how });
            self.shutdown.begin();
        }
    }

    /// Waits for the essential and drained tasks: at most `deadline`, and no longer than until
    /// the forced stage. Background tasks are cut off at the end.
    ///
    /// # Errors
    /// The first failure of an essential task. Running out of time is `Ok(false)`.
    pub async fn finish(&self, deadline: Duration) -> Result<bool, TaskFailure> {
        self.waited_for.close();
        let finished = tokio::select! {
            waited = timeout(deadline, self.waited_for.wait()) => waited.is_ok(),
            () = self.shutdown.forced.cancelled() => false,
        };
        self.background.cancel();
        let failure = self
            .failure
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone();
        failure.map_or(Ok(finished), Err)
    }
}

/// Runs `task` in its own tokio task, aborted with this future; a panic becomes its message.
async fn spawn_caught<F>(task: F) -> Result<(), String>
where
    F: Future<Output = ()> + Send + 'static,
{
    let handle = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(task));
    match handle.await {
        Ok(()) => Ok(()),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => Err(panic_message(panic.as_ref())),
            // Only the runtime's own end cancels it, and then nobody listens.
            Err(_) => Ok(()),
        },
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::sync::oneshot;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn drained_tasks_are_waited_for() {
        let shutdown = Shutdown::default();
        let tasks = Tasks::new(shutdown.clone());
        let (send, receive) = oneshot::channel();
        let graceful = shutdown.graceful().clone();
        tasks.spawn("writer", Kind::Drained, async move {
            graceful.cancelled().await;
            send.send("flushed").unwrap();
        });
        shutdown.begin();
        assert_eq!(tasks.finish(LONG).await, Ok(true));
        assert_eq!(receive.await, Ok("flushed"));
    }

    #[tokio::test]
    async fn a_panic_in_an_essential_task_begins_the_end_and_is_reported() {
        let shutdown = Shutdown::default();
        let tasks = Tasks::new(shutdown.clone());
        tasks.spawn("engine", Kind::Essential, async { panic!("index 7") });
        shutdown.graceful().cancelled().await;
        let failure = tasks.finish(LONG).await.unwrap_err();
        assert_eq!(failure.to_string(), "task `engine` panicked: index 7");
    }

    #[tokio::test]
    async fn an_essential_task_that_just_ends_is_a_failure_too() {
        let shutdown = Shutdown::default();
        let tasks = Tasks::new(shutdown.clone());
        tasks.spawn("server", Kind::Essential, async {});
        shutdown.graceful().cancelled().await;
        assert_eq!(tasks.finish(LONG).await.unwrap_err().task, "server");
    }

    #[tokio::test]
    async fn a_panic_elsewhere_leaves_the_program_running() {
        let shutdown = Shutdown::default();
        let tasks = Tasks::new(shutdown.clone());
        tasks.spawn("request", Kind::Drained, async { panic!("one request") });
        assert_eq!(tasks.finish(LONG).await, Ok(true));
        assert!(!shutdown.graceful().is_cancelled());
    }

    #[tokio::test]
    async fn background_tasks_are_cut_off() {
        struct Tell(Option<oneshot::Sender<()>>);
        impl Drop for Tell {
            fn drop(&mut self) {
                self.0.take().map(|send| send.send(()));
            }
        }
        let tasks = Tasks::new(Shutdown::default());
        let (send, dropped) = oneshot::channel();
        let tell = Tell(Some(send));
        tasks.spawn("stats", Kind::Background, async move {
            let _tell = tell;
            pending::<()>().await;
        });
        assert_eq!(tasks.finish(LONG).await, Ok(true));
        dropped.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_ends_the_wait() {
        let tasks = Tasks::new(Shutdown::default());
        tasks.spawn("stuck", Kind::Drained, pending());
        assert_eq!(tasks.finish(LONG).await, Ok(false));
    }

    #[tokio::test]
    async fn the_second_signal_ends_the_wait() {
        let shutdown = Shutdown::on_signals().unwrap();
        let tasks = Tasks::new(shutdown.clone());
        tasks.spawn("stuck", Kind::Drained, pending());
        raise_sigterm();
        shutdown.graceful().cancelled().await;
        assert!(!shutdown.forced().is_cancelled());
        raise_sigterm();
        assert_eq!(tasks.finish(LONG).await, Ok(false));
        assert!(shutdown.forced().is_cancelled());
    }

    fn raise_sigterm() {
        let me = std::process::id().to_string();
        let killed = std::process::Command::new("kill")
            .args(["-TERM", &me])
            .status()
            .unwrap();
        assert!(killed.success());
    }
}
