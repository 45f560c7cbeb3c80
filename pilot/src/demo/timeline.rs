//! A picture of a marathon in a few lines of text.

use std::time::Duration;

use super::record::{Mark, Record};
use crate::ui::words;

/// Columns of the picture.
const WIDTH: usize = 68;
const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// When each program lived, when it was killed, and how many tool calls were made.
pub fn draw(record: &Record) -> String {
    let brain = life(record, Mark::BrainKilled, Mark::BrainBack);
    let pilot = life(record, Mark::PilotKilled, Mark::PilotBack);
    let calls = calls(record);
    let end = words::duration(record.elapsed);
    let ruler = format!("0:00{:>width$}", end, width = WIDTH - 4);
    format!("  brain  {brain}\n  pilot  {pilot}\n  calls  {calls}\n         {ruler}\n")
}

fn column(at: Duration, all: Duration) -> usize {
    let share = at.as_secs_f64() / all.as_secs_f64().max(1e-9);
    ((share * WIDTH as f64) as usize).min(WIDTH - 1)
}

fn life(record: &Record, killed: Mark, back: Mark) -> String {
    let mut line = ['━'; WIDTH];
    let mut down: Option<usize> = None;
    for (at, mark) in &record.marks {
        let at = column(*at, record.elapsed);
        if *mark == killed {
            down = Some(at);
        } else if *mark == back
            && let Some(from) = down.take()
        {
            line[from..at].fill('╌');
        }
    }
    // Last, so that no gap hides a kill.
    for (at, _) in record.marks.iter().filter(|(_, mark)| *mark == killed) {
        line[column(*at, record.elapsed)] = '✗';
    }
    line.iter().collect()
}

fn calls(record: &Record) -> String {
    let mut counts = [0_usize; WIDTH];
    for (at, mark) in &record.marks {
        if *mark == Mark::Call {
            counts[column(*at, record.elapsed)] += 1;
        }
    }
    let most = counts.iter().copied().max().unwrap_or(0).max(1);
    counts
        .iter()
        .map(|n| LEVELS[(n * (LEVELS.len() - 1)).div_ceil(most)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_gaps_and_calls_stand_where_they_happened() {
        let at = |percent: u64| Duration::from_millis(percent * 100);
        let mut record = Record::default();
        record.elapsed = Duration::from_secs(10);
        record.marks = vec![
            (at(0), Mark::Call),
            (at(25), Mark::BrainKilled),
            (at(50), Mark::BrainBack),
            (at(75), Mark::PilotKilled),
            (at(100), Mark::Call),
        ];
        let picture = draw(&record);
        let rows: Vec<Vec<char>> = picture
            .lines()
            .map(|l| l.chars().skip(9).collect())
            .collect();
        assert!(rows.iter().all(|row| row.len() == WIDTH), "{picture}");
        assert_eq!(
            (rows[0][17], rows[0][18], rows[0][33], rows[0][34]),
            ('✗', '╌', '╌', '━')
        );
        assert_eq!(rows[1].iter().filter(|c| **c == '✗').count(), 1);
        assert_eq!(
            (rows[2][0], rows[2][1], rows[2][WIDTH - 1]),
            ('█', ' ', '█')
        );
        assert!(picture.ends_with("0:10\n"));
        // A marathon of no length draws something too.
        assert!(draw(&Record::default()).contains("brain"));
    }
}
