//! A few threads that share the chunks of one operation.
//!
//! Chunks are parts of the *output*, and a chunk's arithmetic does not depend on who takes it, so
//! chunks are simply claimed: a core that is busy with something else delays nobody. Threads spin
//! briefly for the next operation, then sleep.

#![allow(
    unsafe_code,
    reason = "lends a closure to other threads for the length of a call"
)]

use std::{
    cell::{Cell, UnsafeCell},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Set in `state` while a job may be joined; the other bits count the threads inside it.
const OPEN: u32 = 1 << 31;
/// Rounds of waiting before a thread sleeps: some tens of microseconds.
const SPINS: u32 = 3_000;

type Job = *const (dyn Fn(usize, usize) + Sync);

struct Shared {
    state: AtomicU32,
    next: AtomicUsize,
    chunks: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    asleep: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
}

// SAFETY: `job` is written only while the state is closed and nobody is inside, and read only
// inside; the state's acquire and release order the two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is used only between publishing and closing a job, while the closure lives.
unsafe impl Send for Shared {}

/// The threads. Dropping it ends them.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// The core of the thread that calls.
    own: Option<usize>,
}

impl Pool {
    /// A pool of `threads`, the caller's own included.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        Self::bound(threads, &[])
    }

    /// The same with each thread on a core of its own, as far as there are cores in the list. The
    /// first is that of whoever calls [`Self::bind_caller`].
    pub(super) fn bound(threads: usize, cores: &[usize]) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU32::new(0),
            next: AtomicUsize::new(0),
            chunks: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            own: cores.first().copied(),
        };
        for worker in 1..threads.max(1) {
            let shared = pool.shared.clone();
            let core = cores.get(worker).copied();
            let thread = std::thread::Builder::new()
                .name(format!("cpu-{worker}"))
                .spawn(move || {
                    core.into_iter().for_each(bind);
                    work(&shared, worker);
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Binds the calling thread to the first core of the list, unless it is bound to it already.
    pub(super) fn bind_caller(&self) {
        thread_local!(static BOUND: Cell<Option<usize>> = const { Cell::new(None) });
        if self.own.is_some() && BOUND.replace(self.own) != self.own {
            self.own.into_iter().for_each(bind);
        }
    }

    /// Threads, the caller's own included.
    pub(super) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `f(chunk, thread)` for every chunk, and returns when all calls have.
    pub(super) fn run(&self, chunks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if chunks <= 1 || self.threads.is_empty() {
            (0..chunks).for_each(|i| f(i, 0));
            return;
        }
        let s = &*self.shared;
        // SAFETY: erases the lifetime; `Closing` below waits until no thread can use it, on
        // every way out of this function.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), Job>(f) };
        // SAFETY: the state is closed and empty here, so that nobody reads it.
        unsafe { *s.job.get() = Some(job) };
        s.panicked.store(false, Ordering::Relaxed);
        s.next.store(0, Ordering::Relaxed);
        s.chunks.store(chunks, Ordering::Relaxed);
        s.state.store(OPEN, Ordering::SeqCst);
        let closing = Closing(s);
        if s.asleep.load(Ordering::SeqCst) > 0 {
            drop(s.bed.lock().unwrap_or_else(PoisonError::into_inner));
            s.bell.notify_all();
        }
        claim(s, f, 0);
        drop(closing);
        if s.panicked.swap(false, Ordering::Relaxed) {
            #[allow(clippy::panic, reason = "carries a worker's panic to the caller")]
            {
                panic!("a compute thread panicked; its message is above");
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(
            self.shared
                .bed
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        self.shared.bell.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Closes the job and waits for those inside.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut waited = 0u32;
        while self.0.state.load(Ordering::Acquire) != 0 {
            waited += 1;
            if waited > 10_000 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// Binds the calling thread to a core. Where the system refuses, because the core has gone, the
/// thread computes all the same.
fn bind(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    let _ = sched_setaffinity(None, &cores);
}

fn claim(s: &Shared, f: &(dyn Fn(usize, usize) + Sync), thread: usize) {
    let chunks = s.chunks.load(Ordering::Relaxed);
    loop {
        let i = s.next.fetch_add(1, Ordering::Relaxed);
        if i >= chunks {
            return;
        }
        f(i, thread);
    }
}

fn work(s: &Shared, thread: usize) {
    let mut idle = 0;
    while !s.stop.load(Ordering::Relaxed) {
        let state = s.state.load(Ordering::Acquire);
        let worth = s.next.load(Ordering::Relaxed) < s.chunks.load(Ordering::Relaxed);
        if state & OPEN != 0
            && worth
            && s.state
                .compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        {
            // SAFETY: inside an open job, the closure lives and nobody writes the cell.
            let job = unsafe { (*s.job.get()).map(|job| &*job) };
            let result = catch_unwind(AssertUnwindSafe(|| {
                if let Some(job) = job {
                    claim(s, job, thread);
                }
            }));
            if result.is_err() {
                s.panicked.store(true, Ordering::Relaxed);
            }
            s.state.fetch_sub(1, Ordering::Release);
            idle = 0;
            continue;
        }
        std::hint::spin_loop();
        idle += 1;
        if idle > SPINS {
            sleep(s);
            idle = 0;
        }
    }
}

fn sleep(s: &Shared) {
    let mut bed = s.bed.lock().unwrap_or_else(PoisonError::into_inner);
    s.asleep.fetch_add(1, Ordering::SeqCst);
    while s.state.load(Ordering::SeqCst) & OPEN == 0 && !s.stop.load(Ordering::SeqCst) {
        bed = s.bell.wait(bed).unwrap_or_else(PoisonError::into_inner);
    }
    s.asleep.fetch_sub(1, Ordering::SeqCst);
}

/// A pointer that chunks may share because they write disjoint parts behind it.
#[derive(Clone, Copy)]
pub(super) struct Shards<T>(*mut T);

// SAFETY: whoever writes through it vouches that parts do not overlap.
unsafe impl<T> Sync for Shards<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shards<T> {}

impl<T> Shards<T> {
    pub(super) fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// The pointer to element `i`, which must lie in the slice it was made from.
    pub(super) fn at(&self, i: usize) -> *mut T {
        self.0.wrapping_add(i)
    }

    /// Elements `start .. start + len`.
    ///
    /// # Safety
    /// They lie in the slice, and nobody else touches them while the result is used.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts")]
    pub(super) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::atomic::AtomicU64};

    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for chunks in [0, 1, 2, 7, 100, 1000] {
                let counts: Vec<AtomicU64> = (0..chunks).map(|_| AtomicU64::new(0)).collect();
                for _ in 0..50 {
                    pool.run(chunks, &|i, thread| {
                        assert!(thread < threads);
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn a_panic_in_a_thread_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..20 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, &|i, _| assert!(i != 17, "on purpose"));
            }));
            assert!(result.is_err());
            let sum = AtomicU64::new(0);
            pool.run(10, &|i, _| {
                sum.fetch_add(i as u64, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 45);
        }
    }

    #[test]
    fn threads_stay_on_their_cores() {
        let allowed = sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU)
            .find(|core| allowed.is_set(*core))
            .unwrap();
        // A thread of its own, so that the test's is left as it is.
        std::thread::spawn(move || {
            let pool = Pool::bound(3, &[core, core]).unwrap();
            pool.bind_caller();
            let seen = Mutex::new(BTreeSet::new());
            while seen.lock().unwrap().len() < 3 {
                pool.run(64, &|_, thread| {
                    let mine = sched_getaffinity(None).unwrap();
                    let bound = mine.count() == 1 && mine.is_set(core);
                    assert!(
                        bound || (thread == 2 && mine == allowed),
                        "{thread}: {mine:?}"
                    );
                    seen.lock().unwrap().insert(thread);
                    std::thread::yield_now();
                });
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn sleeping_threads_wake() {
        let pool = Pool::new(2).unwrap();
        let other = AtomicU64::new(0);
        // Let the thread fall asleep, seen by its own account.
        while pool.shared.asleep.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        // Chunk 0 waits for somebody else to take chunk 1: only a woken thread can.
        pool.run(2, &|_, thread| {
            if thread == 1 {
                other.store(1, Ordering::Release);
            } else {
                while other.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
            }
        });
        assert_eq!(other.load(Ordering::Acquire), 1);
    }
}
