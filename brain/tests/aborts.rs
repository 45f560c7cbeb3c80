//! Ten thousand requests, most of them given up at a random moment: pages, generations and memory
//! return to where they were.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    unsafe_code,
    reason = "a failure is a failed test; an allocator is not safe by its nature"
)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use brain::{
    backend::{
        Limits,
        fake::{FakeExecutor, FakeOptions},
    },
    engine::{Engine, EngineConfig, LogEvent, clock::ManualClock},
    sched::{
        request::Request,
        types::{DraftDepth, SamplingParams, TokenId},
    },
};

/// Counts the bytes that are allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's own; counting touches nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const REQUESTS: u64 = 10_000;
/// Open at a time.
const OPEN: usize = 12;
const LEASE: Duration = Duration::from_secs(60);

/// Random numbers (splitmix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// What is held when nobody asks for anything: pages, generations, bytes.
#[derive(Debug)]
struct Level {
    pages: (usize, usize),
    known: usize,
    bytes: usize,
}

/// Waits until everything has ended and every lease is over.
async fn level(engine: &Engine, clock: &ManualClock) -> Level {
    let settled = async {
        loop {
            clock.advance(LEASE);
            engine.tick();
            let stats = engine.stats();
            if stats.generations + stats.sched.running + stats.sched.waiting == 0 {
                return stats;
            }
            tokio::task::yield_now().await;
        }
    };
    let settled = tokio::time::timeout(Duration::from_secs(120), settled).await;
    let stats = settled.expect("something never ended");
    let sched = stats.sched;
    Level {
        pages: (sched.full_blocks_used, sched.sliding_blocks_used),
        known: stats.generations,
        bytes: ALLOCATED.load(Relaxed),
    }
}

/// Sends requests and gives most of them up; returns how many were aborted.
async fn storm(engine: &Engine, chance: &mut Chance, from: u64, count: u64) -> u64 {
    let mut open = Vec::new();
    let mut aborted = 0;
    for number in from..from + count {
        // Seven runs, whose prompts begin alike and go on differently.
        let run = number % 7;
        let common = chance.below(110) as u32;
        let mut prompt: Vec<TokenId> = (0..common).map(|at| run as u32 * 100 + at).collect();
        prompt.extend((0..1 + chance.below(9)).map(|_| chance.below(1000) as TokenId));
        let params = SamplingParams::greedy(1 + chance.below(60) as u32);
        let request = Request {
            run_id: format!("run {run}"),
            draft: DraftDepth::Fixed(chance.below(5) as u32),
            ..Request::new(prompt, params)
        };
        let id = format!("g{number}");
        let cursor = engine.generate(&id, Some(request), 0).unwrap().cursor;
        open.push((id, cursor, chance.below(20)));
        while open.len() >= OPEN {
            let which = chance.below(open.len() as u64) as usize;
            let (id, mut cursor, patience) = open.swap_remove(which);
            let mut seen = 0;
            loop {
                if seen >= patience && chance.below(4) > 0 {
                    // Some say so, some just go away.
                    if chance.below(2) == 0 {
                        engine.cancel(&id);
                    }
                    aborted += 1;
                    break;
                }
                match cursor.next().await.unwrap() {
                    LogEvent::Tokens { tokens, .. } => seen += tokens.len() as u64,
                    LogEvent::Finished(_) => break,
                }
            }
        }
    }
    aborted
}

#[tokio::test]
async fn ten_thousand_requests_with_random_aborts_leave_nothing_behind() {
    let limits = FakeOptions::default().limits;
    let options = FakeOptions {
        limits: Limits {
            // About two requests' worth: they take blocks from each other.
            full_blocks: 24,
            sliding_blocks: 48,
            ..limits
        },
        ..FakeOptions::default()
    };
    let mut config = EngineConfig {
        lease: LEASE,
        orphans: 4,
        host_cache: 64 << 10,
        ..EngineConfig::default()
    };
    config.sched.cache.anchors = 16;
    let clock = Arc::new(ManualClock::default());
    let executor = Box::new(FakeExecutor::new(options));
    let engine = Engine::start(executor, config, clock.clone()).unwrap();
    let mut chance = Chance(1);

    // What fills up once and then stands: caches, queues, tables.
    storm(&engine, &mut chance, 0, REQUESTS / 5).await;
    let before = level(&engine, &clock).await;
    let aborted = storm(&engine, &mut chance, REQUESTS / 5, REQUESTS).await;
    let after = level(&engine, &clock).await;

    assert!(aborted > REQUESTS / 2, "{aborted} aborted");
    let stats = engine.stats();
    println!("{aborted} of {REQUESTS} aborted; {before:?}, then {after:?}; {stats:?}");
    let sched = &stats.sched;
    assert!(sched.preemptions > 0, "{stats:?}");
    assert!(sched.lifted > 0 && sched.prefix_hits > 1000, "{stats:?}");
    assert_eq!((before.pages, before.known), ((0, 0), 0));
    assert_eq!((after.pages, after.known), ((0, 0), 0));
    let grown = after.bytes.saturating_sub(before.bytes);
    assert!(grown < 256 << 10, "{grown} bytes more than before");
}
