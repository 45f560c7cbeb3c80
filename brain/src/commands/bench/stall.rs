//! What somebody who is reading feels of a long prompt that is computed meanwhile.
//!
//! Gaps between tokens are measured twice: where the engine publishes them and where a reader gets
//! them. The reader is a thread of its own, and where there are no more cores than compute threads
//! one of them waits for a core now and then, as they do for everything else that the machine runs.
//! How long the threads that compute waited is asked of the system (Linux) and told apart.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use super::{
    measure::{Device, median, millis},
    report::{GapRow, StallRow},
};
use crate::{
    engine::{Cursor, LogEvent, Observer, Turn},
    error::Error,
    sched::{sequence::Outcome, types::DraftDepth},
};

/// Tokens of the reader's own prompt.
const QUESTION: usize = 16;
/// Gaps that make the usual one.
const USUAL_GAPS: usize = 500;
/// Longest gaps that are looked into.
const LOOKED_INTO: usize = 10;

/// Every turn of the engine since they were last taken.
#[derive(Debug, Default)]
struct Turns(Mutex<Heard>);

#[derive(Debug, Default)]
struct Heard {
    turns: Vec<(Turn, Option<Waits>)>,
    threads: Vec<File>,
}

/// Milliseconds that each thread which computes has waited for a core since it began.
type Waits = Vec<f64>;

impl Observer for Turns {
    fn round(&self, _: usize, _: usize, _: usize) {}

    fn finished(&self, _: &Outcome) {}

    fn turn(&self, turn: &Turn) {
        let mut heard = self.lock();
        let waits: Option<Waits> = heard.threads.iter().map(waited).collect();
        heard
            .turns
            .push((*turn, waits.filter(|waits| !waits.is_empty())));
    }
}

impl Turns {
    fn new() -> Self {
        Self(Mutex::new(Heard {
            turns: Vec::new(),
            threads: threads_that_compute(),
        }))
    }

    fn take(&self) -> Vec<(Turn, Option<Waits>)> {
        std::mem::take(&mut self.lock().turns)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the system counts the waits of the engine's thread and of the processor's pool; nothing
/// where it does not.
fn threads_that_compute() -> Vec<File> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let open = |folder: std::path::PathBuf| {
        let name = fs::read_to_string(folder.join("comm")).ok()?;
        let computes = name.starts_with("engine") || name.starts_with("cpu-");
        computes.then(|| File::open(folder.join("schedstat")).ok())?
    };
    tasks
        .flatten()
        .filter_map(|task| open(task.path()))
        .collect()
}

/// The second number: nanoseconds that the thread could run and did not.
fn waited(schedstat: &File) -> Option<f64> {
    let mut text = [0; 64];
    let len = schedstat.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(text.get(..len)?).ok()?;
    let nanos: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(nanos as f64 / 1e6)
}

/// Somebody reads token after token; then a prompt of so many tokens comes; then one of as many with
/// nobody beside it. Also the longest gaps meanwhile, the longest first.
pub(super) async fn stall(
    device: &mut Device,
    context: usize,
) -> Result<(StallRow, Vec<GapRow>), Error> {
    let turns = Arc::new(Turns::new());
    device.engine.observe(turns.clone());
    let room = device.engine.max_len().saturating_sub(QUESTION);
    let prompt = device.prompt(QUESTION);
    let mut reading = device.open(prompt, room as u32, DraftDepth::Fixed(0))?;
    let never = std::future::pending::<Result<(), Error>>();
    let usual_read = gaps(&mut reading, USUAL_GAPS, never).await?;
    let usual = gap_rows(&turns.take());
    let prompt = device.prompt(context);
    let mut beside = None;
    let computed = async {
        let done = device.ask(prompt, 1, DraftDepth::Fixed(0)).await?;
        beside = Some(done.outcome.timings.ttft);
        Ok(())
    };
    let read = gaps(&mut reading, usize::MAX, computed).await?;
    let during = gap_rows(&turns.take());
    let id = reading.generation_id().to_owned();
    device.engine.cancel(&id);
    drop(reading);
    let prompt = device.prompt(context);
    let alone = device.ask(prompt, 1, DraftDepth::Fixed(0)).await?;
    let own = during.iter().map(GapRow::own_ms);
    let worst_own_ms = own.reduce(|a, b| Some(a?.max(b?))).flatten();
    let (usual, emitted) = (Spread::of(&usual), Spread::of(&during));
    let (usual_read, read) = (Spread::new(usual_read), Spread::new(read));
    let row = StallRow {
        context,
        usual_ms: usual.median,
        usual_worst_ms: usual.worst,
        median_ms: emitted.median,
        late_ms: emitted.late,
        worst_ms: emitted.worst,
        worst_own_ms,
        read_usual_ms: usual_read.median,
        read_worst_ms: read.worst,
        alone_ms: millis(alone.outcome.timings.ttft),
        beside_ms: beside.map_or(0.0, millis),
    };
    let mut longest = during;
    longest.sort_unstable_by(|a, b| b.gap_ms.total_cmp(&a.gap_ms));
    longest.truncate(LOOKED_INTO);
    Ok((row, longest))
}

/// The gap before each turn that emitted, and what it was made of.
fn gap_rows(turns: &[(Turn, Option<Waits>)]) -> Vec<GapRow> {
    let emitting = turns.iter().filter(|(turn, _)| turn.emitting > 0);
    let emitting: Vec<_> = emitting.collect();
    let pairs = emitting.windows(2).map(|pair| {
        let [(before, waits_before), (turn, waits)] = pair else {
            return GapRow::default();
        };
        // Threads wait at the same time: the one that waited longest is what it costs at least.
        let longest = |before: &Waits, now: &Waits| {
            let each = before.iter().zip(now).map(|(before, now)| now - before);
            each.fold(0.0, f64::max)
        };
        let gap_ms = millis(turn.published - before.published);
        GapRow {
            gap_ms,
            prefill: turn.prefill,
            waited_ms: waits_before
                .as_ref()
                .zip(waits.as_ref())
                .map(|(before, now)| longest(before, now).min(gap_ms)),
            between_ms: millis(turn.begun.saturating_sub(before.published)),
            planning_ms: millis(turn.planned - turn.begun),
            device_ms: millis(turn.computed - turn.planned),
            publishing_ms: millis(turn.published - turn.computed),
        }
    });
    pairs.collect()
}

/// What is told of many gaps.
#[derive(Debug, Default, PartialEq)]
struct Spread {
    median: f64,
    /// All but one in a hundred are shorter.
    late: f64,
    worst: f64,
}

impl Spread {
    fn of(rows: &[GapRow]) -> Self {
        Self::new(rows.iter().map(|row| row.gap_ms).collect())
    }

    fn new(mut gaps: Vec<f64>) -> Self {
        gaps.sort_unstable_by(f64::total_cmp);
        let late = gaps.get(gaps.len() * 99 / 100).copied().unwrap_or(0.0);
        let worst = gaps.last().copied().unwrap_or(0.0);
        Self {
            late,
            worst,
            median: median(gaps),
        }
    }
}

/// Milliseconds between the rounds of a stream, until there are `count` or `other` is done.
async fn gaps(
    stream: &mut Cursor,
    count: usize,
    other: impl Future<Output = Result<(), Error>>,
) -> Result<Vec<f64>, Error> {
    let mut other = std::pin::pin!(other);
    let mut gaps = Vec::new();
    let mut last: Option<Instant> = None;
    while gaps.len() < count {
        let event = tokio::select! {
            event = stream.next() => event,
            done = &mut other => {
                done?;
                break;
            }
        };
        if !matches!(event, Some(LogEvent::Tokens { .. })) {
            let reason = "the answer beside the prompt ended before it";
            return Err(Error::Serving(reason.into()));
        }
        let now = Instant::now();
        if let Some(last) = last.replace(now) {
            gaps.push(millis(now - last));
        }
    }
    Ok(gaps)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_gap_is_told_by_its_parts_and_turns_that_emit_nothing_belong_to_the_next_that_does() {
        let at = Duration::from_millis;
        let turn = |emitting, prefill, times: [u64; 4], waits: [f64; 2]| {
            let turn = Turn {
                emitting,
                drafts: 0,
                prefill,
                begun: at(times[0]),
                planned: at(times[1]),
                computed: at(times[2]),
                published: at(times[3]),
            };
            (turn, Some(waits.to_vec()))
        };
        let turns = [
            turn(1, 0, [0, 1, 2, 3], [1.0, 1.0]),
            turn(0, 9, [3, 4, 5, 6], [2.0, 2.0]),
            turn(1, 7, [8, 10, 14, 15], [4.0, 2.5]),
        ];
        let [gap] = gap_rows(&turns)[..] else {
            panic!("one gap")
        };
        assert_eq!((gap.gap_ms, gap.prefill), (12.0, 7));
        assert_eq!((gap.waited_ms, gap.own_ms()), (Some(3.0), Some(9.0)));
        assert_eq!((gap.between_ms, gap.planning_ms), (5.0, 2.0));
        assert_eq!((gap.device_ms, gap.publishing_ms), (4.0, 1.0));
        assert!(gap_rows(&turns[..1]).is_empty());
        let spread = Spread::new((1..=200).map(f64::from).collect());
        assert_eq!(
            (spread.median, spread.late, spread.worst),
            (101.0, 199.0, 200.0)
        );
        assert_eq!(Spread::new(Vec::new()), Spread::default());
    }
}
