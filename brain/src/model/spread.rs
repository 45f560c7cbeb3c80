//! Work over a list, shared among threads.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread::{ScopedJoinHandle, available_parallelism, scope},
};

/// Most threads; more wait for memory alone.
const MAX_THREADS: usize = 16;

/// `f` of every item, in the items' order, on one thread per core.
pub(crate) fn spread<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS);
    if threads == 1 || items.len() < 2 {
        return items.iter().map(f).collect();
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(i) else {
                return done;
            };
            done.push((i, f(item)));
        }
    };
    let finish = |worker: ScopedJoinHandle<'_, Vec<(usize, R)>>| match worker.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    let mut all: Vec<(usize, R)> = scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(finish).collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_items_order() {
        let items: Vec<usize> = (0..1000).collect();
        let doubled: Vec<usize> = items.iter().map(|n| 2 * n).collect();
        assert_eq!(spread(&items, |n| 2 * n), doubled);
        assert_eq!(spread(&items[..1], |n| n + 1), [1]);
        assert!(spread(&items[..0], |n| n + 1).is_empty());
    }
}
