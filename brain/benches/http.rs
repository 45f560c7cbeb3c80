//! What HTTP adds to a streamed token: time from the engine to the client's socket, and processor time.
//!
//!     cargo bench -p brain --bench http [-- STREAMS…]
//!
//! The server is the one that `brain serve` runs, with the fake device, whose steps of 20 ms end in
//! one token for each stream at once: first with snapshots, then the most streams without. Server
//! and clients are one process, so that both read one clock. A token's time begins when the engine
//! begins to hand out the tokens of its step, so the wait for those handed out before it is in it;
//! it ends when its client has read it, so the wait for the clients read before it is in it too.
//! All clients share one thread. Measure on a machine that does nothing else.
//!
//! For comparison the same clients read from a thread that does nothing but send as many bytes to
//! each socket, one after the other: what is left when there is no brain.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a benchmark fails by panicking and prints its figures"
)]

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use brain::{
    bringup,
    callers::Keys,
    cli::{Cli, Command},
    config::Loaded,
    engine::Observer,
    http::{HttpServer, Setup},
    sched::sequence::Outcome,
};
use clap::Parser as _;
use marathon_proto::net::ListenAddr;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_util::sync::CancellationToken;

/// Of a stream; the steps before the last stream has begun are a small part of as many.
const TOKENS: usize = 400;
/// From the beginning of a step to the next one's.
const STEP: Duration = Duration::from_millis(20);
/// Bytes of an event with a token, in its HTTP chunk.
const PIECE: usize = 340;
/// Tokens of one step are handed out closer together than this.
const APART: Duration = Duration::from_millis(5);
/// Threads of the server and of the clients.
const SERVER: &str = "http";
const CLIENTS: &str = "clients";

/// Notes when the engine handed out tokens.
#[derive(Debug, Default)]
struct Marks(Mutex<Vec<Instant>>);

impl Observer for Marks {
    fn round(&self, _emitted: usize, _drafted: usize, _accepted: usize) {
        self.0.lock().unwrap().push(Instant::now());
    }

    fn finished(&self, _outcome: &Outcome) {}
}

impl Marks {
    /// The first and the last mark of each step.
    fn steps(&self) -> Vec<(Instant, Instant)> {
        let mut steps: Vec<(Instant, Instant)> = Vec::new();
        for &mark in self.0.lock().unwrap().iter() {
            match steps.last_mut() {
                Some((_, last)) if mark - *last < APART => *last = mark,
                _ => steps.push((mark, mark)),
            }
        }
        steps
    }
}

fn main() {
    let given: Vec<String> = std::env::args().skip(1).collect();
    // A test runner asks every program for its tests, and runs it to see whether it works.
    if given.iter().any(|arg| arg == "--list") {
        return;
    }
    if !given.iter().any(|arg| arg == "--bench") {
        measure(2, 5, true);
        measure_bare(2, 5);
        return;
    }
    let mut counts: Vec<usize> = given.iter().filter_map(|arg| arg.parse().ok()).collect();
    if counts.is_empty() {
        counts = vec![1, 16, 64];
    }
    for &streams in &counts {
        measure_bare(streams, TOKENS);
        measure(streams, TOKENS, true);
    }
    measure(counts.into_iter().max().unwrap(), TOKENS, false);
}

fn measure(streams: usize, tokens: usize, snapshots: bool) {
    let folder = tempfile::tempdir().unwrap();
    let mut flags = "brain serve --device fake --fake-step-time 20ms --draft-tokens off \
                     --http-addr 127.0.0.1:0 --max-num-seqs"
        .split_whitespace()
        .map(String::from)
        .collect::<Vec<_>>();
    flags.push(streams.to_string());
    if snapshots {
        flags.push(format!("--snapshot-dir={}", folder.path().display()));
    }
    let Command::Serve(args) = Cli::parse_from(flags).command else {
        unreachable!("that is the command")
    };
    let config = Loaded::new(None, &args.settings).unwrap().check().unwrap();
    let serving = bringup::bring_up(&config).unwrap();
    let marks = Arc::new(Marks::default());
    serving.engine.observe(marks.clone());

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name(SERVER)
        .enable_all()
        .build()
        .unwrap();
    let closing = CancellationToken::new();
    let setup = Setup {
        keys: Keys::gather(None, None, None).unwrap(),
        tls: None,
        model_name: config.name.clone(),
        ending: CancellationToken::new(),
    };
    let server = runtime
        .block_on(HttpServer::bind(&config.http, setup))
        .unwrap()
        .unwrap();
    let Some(ListenAddr::Tcp(addr)) = server.local_addr() else {
        unreachable!("it listens on TCP")
    };
    server.model().send_replace(Some(serving));
    let serving = runtime.spawn(server.serve(closing.clone()));

    let ask = |tokens| {
        let clients = thread::Builder::new().name(CLIENTS.into());
        let clients = clients.spawn(move || read_all(&addr.to_string(), streams, tokens));
        clients.unwrap().join().unwrap()
    };
    ask(tokens / 8 + 1);
    marks.0.lock().unwrap().clear();
    let before = processor_time();
    let arrivals = ask(tokens);
    println!("{streams} streams, snapshots: {snapshots}");
    report(&marks, &arrivals, &before);
    closing.cancel();
    runtime.block_on(serving).unwrap();
}

/// The same clients, and a sender that has the pieces ready.
fn measure_bare(streams: usize, tokens: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let marks = Arc::new(Marks::default());
    let before = processor_time();
    let clients = thread::Builder::new().name(CLIENTS.into());
    let clients = clients.spawn(move || read_all(&addr, streams, tokens));
    let (sender, sent) = (thread::Builder::new().name(SERVER.into()), marks.clone());
    let sender = sender.spawn(move || {
        let mut sockets: Vec<_> = (0..streams).map(|_| listener.accept().unwrap().0).collect();
        for socket in &mut sockets {
            socket.set_nodelay(true).unwrap();
            assert_ne!(socket.read(&mut [0; 4096]).unwrap(), 0);
            socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        }
        let (piece, mut next) = ([b'x'; PIECE], Instant::now());
        for _ in 0..tokens {
            next += STEP;
            thread::sleep(next.saturating_duration_since(Instant::now()));
            sent.round(streams, 0, 0);
            for socket in &mut sockets {
                socket.write_all(&piece).unwrap();
            }
        }
        thread::sleep(STEP);
        for socket in &mut sockets {
            socket.write_all(b"0\r\n\r\n").unwrap();
        }
        spent_by_this_thread()
    });
    let arrivals = clients.unwrap().join().unwrap();
    let sender = sender.unwrap().join().unwrap();
    println!(
        "{streams} streams, no brain: {:.1} us of sending a token",
        micros(sender, streams * tokens)
    );
    report(&marks, &arrivals, &before);
}

fn micros(time: Duration, tokens: usize) -> f64 {
    time.as_secs_f64() * 1e6 / tokens as f64
}

/// When each stream's pieces came.
fn read_all(addr: &str, streams: usize, tokens: usize) -> (Vec<Instant>, Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let reading = runtime.block_on(async {
        let reading = (0..streams).map(|number| read(addr.to_owned(), number, tokens));
        futures::future::join_all(reading.map(tokio::spawn)).await
    });
    let arrivals = reading.into_iter().flat_map(Result::unwrap).collect();
    (arrivals, spent_by_this_thread())
}

async fn read(addr: String, number: usize, tokens: usize) -> Vec<Instant> {
    let body = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"Stream {number}\"}}],\"stream\":true,\
         \"max_tokens\":{tokens},\"ignore_eos\":true,\"seed\":{number}}}"
    );
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {addr}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut socket = TcpStream::connect(&addr).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let (mut buffer, mut arrivals) = (vec![0; 64 << 10], Vec::with_capacity(tokens));
    loop {
        let read = socket.read(&mut buffer).await.unwrap();
        let now = Instant::now();
        assert_ne!(read, 0, "the stream broke off");
        let bytes = &buffer[..read];
        if bytes.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n") || bytes.ends_with(b"0\r\n\r\n") {
            return arrivals;
        }
        if bytes.starts_with(b"HTTP/1.1 ") {
            assert!(
                bytes.starts_with(b"HTTP/1.1 200"),
                "{}",
                String::from_utf8_lossy(bytes)
            );
            continue;
        }
        arrivals.push(now);
    }
}

fn report(
    marks: &Marks,
    (arrivals, clients): &(Vec<Instant>, Duration),
    before: &BTreeMap<String, Duration>,
) {
    let steps = marks.steps();
    let mut late: Vec<f64> = arrivals
        .iter()
        .filter_map(|arrival| {
            let begun = steps.partition_point(|(first, _)| first <= arrival);
            let (first, _) = steps.get(begun.checked_sub(1)?)?;
            Some(arrival.duration_since(*first).as_secs_f64() * 1e3)
        })
        .collect();
    let mut handing: Vec<f64> = steps
        .iter()
        .map(|(first, last)| (*last - *first).as_secs_f64() * 1e3)
        .collect();
    late.sort_by(f64::total_cmp);
    handing.sort_by(f64::total_cmp);
    let share = |sorted: &[f64], part: f64| sorted[((sorted.len() - 1) as f64 * part) as usize];
    println!("  {} pieces in {} steps", late.len(), steps.len());
    print!("  from the engine to the client, ms:");
    for part in [0.5, 0.9, 0.99, 0.999, 1.0] {
        print!(" {:.3} ({} %)", share(&late, part), part * 100.0);
    }
    println!();
    println!(
        "  of that the engine's, to hand out a step's tokens, ms: {:.3} (50 %) {:.3} (99 %)",
        share(&handing, 0.5),
        share(&handing, 0.99)
    );
    let each = |time: Duration| micros(time, late.len());
    print!("  processor time a token, us:");
    for (name, after) in processor_time() {
        let spent = after.saturating_sub(before.get(&name).copied().unwrap_or_default());
        if each(spent) >= 0.1 {
            print!(" {name} {:.1}", each(spent));
        }
    }
    println!(" {CLIENTS} {:.1}", each(*clients));
}

/// Time that this process's threads have computed, by their names.
fn processor_time() -> BTreeMap<String, Duration> {
    let mut times = BTreeMap::<String, Duration>::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // A thread that ends meanwhile is gone.
        let (Ok(name), Ok(stat)) = (
            fs::read_to_string(task.join("comm")),
            fs::read_to_string(task.join("schedstat")),
        ) else {
            continue;
        };
        *times.entry(name.trim().to_owned()).or_default() += computed(&stat);
    }
    times
}

fn spent_by_this_thread() -> Duration {
    computed(&fs::read_to_string("/proc/thread-self/schedstat").unwrap())
}

/// The first number of a `schedstat`: nanoseconds.
fn computed(stat: &str) -> Duration {
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}
