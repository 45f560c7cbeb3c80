//! The soak as a picture: resident memory, tokens a second, and when brain was killed.

use std::fmt::Write as _;

use crate::life::{Kill, Sample};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
/// Height of a band, and what lies above it.
const BAND: f64 = 150.0;
const ABOVE: f64 = 36.0;

/// The picture.
pub(crate) fn svg(samples: &[Sample], kills: &[Kill]) -> String {
    let longest = samples
        .last()
        .map_or(1.0, |last| last.at.as_secs_f64())
        .max(1.0);
    let x = |seconds: f64| LEFT + seconds / longest * (WIDTH - LEFT - RIGHT);
    let memory = samples.iter().map(|one| {
        let mib = one.resident.map(|bytes| bytes as f64 / (1 << 20) as f64);
        (one.at.as_secs_f64(), mib)
    });
    // Ten seconds together: a second's tokens jump about.
    let speed = samples.chunks(10).map(|ten| {
        let tokens: u64 = ten.iter().map(|one| one.tokens).sum();
        let at = ten[ten.len() / 2].at.as_secs_f64();
        (at, Some(tokens as f64 / ten.len() as f64))
    });
    let mut body = String::new();
    for kill in kills {
        let colour = if kill.hard { "#e4a39c" } else { "#c9cfd8" };
        // Writing to a string does not fail.
        let _ = writeln!(
            body,
            "<path d='M{:.1} {ABOVE}V{:.1}' stroke='{colour}'/>",
            x(kill.at.as_secs_f64()),
            2.0 * (ABOVE + BAND),
        );
    }
    band(
        &mut body,
        0,
        ("resident memory, MiB", "#35618f"),
        &memory.collect::<Vec<_>>(),
        x,
    );
    band(
        &mut body,
        1,
        ("tokens a second", "#0a7f5a"),
        &speed.collect::<Vec<_>>(),
        x,
    );
    let height = 2.0 * (ABOVE + BAND) + 40.0;
    for quarter in 0..=4 {
        let seconds = longest * f64::from(quarter) / 4.0;
        let _ = writeln!(
            body,
            "<text x='{:.1}' y='{:.1}' text-anchor='middle'>{:.1} min</text>",
            x(seconds),
            height - 22.0,
            seconds / 60.0
        );
    }
    let hard = kills.iter().filter(|kill| kill.hard).count();
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' \
         font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='#fff'/>\n\
         {body}<text x='{LEFT}' y='{:.1}'>red: SIGKILL ({hard}); grey: SIGTERM ({})</text>\n</svg>\n",
        height - 6.0,
        kills.len() - hard,
    )
}

fn band(
    body: &mut String,
    number: u32,
    (name, colour): (&str, &str),
    points: &[(f64, Option<f64>)],
    x: impl Fn(f64) -> f64,
) {
    let top = ABOVE + f64::from(number) * (ABOVE + BAND);
    let values = points.iter().filter_map(|(_, value)| *value);
    let most = values.fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    let y = |value: f64| top + BAND - value / most * BAND;
    for step in 0..=2 {
        let value = most * f64::from(step) / 2.0;
        let _ = writeln!(
            body,
            "<path d='M{LEFT} {0:.1}H{1:.1}' stroke='#ddd'/>\
             <text x='{2:.1}' y='{3:.1}' text-anchor='end'>{value:.0}</text>",
            y(value),
            WIDTH - RIGHT,
            LEFT - 6.0,
            y(value) + 4.0,
        );
    }
    let mut path = String::new();
    let mut down = false;
    for (at, value) in points {
        if let Some(value) = value {
            let _ = write!(
                path,
                "{}{:.1} {:.1}",
                if down { 'L' } else { 'M' },
                x(*at),
                y(*value)
            );
        }
        down = value.is_some();
    }
    let _ = writeln!(
        body,
        "<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>\
         <text x='{LEFT}' y='{:.1}' fill='{colour}'>{name}</text>",
        top - 8.0
    );
}
