//! Decoding against context, as a picture and in a terminal.

use std::fmt::Write as _;

use super::report::{ContextRow, Results};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const MARGIN: f64 = 40.0;
/// Columns of the longest bar.
const BAR: f64 = 48.0;

type Series = (&'static str, &'static str, fn(&ContextRow) -> f64);

const SERIES: [Series; 2] = [
    ("without drafts", "#5b6b7f", |row| row.decode_per_second),
    ("with drafts", "#0a7f5a", |row| row.drafted_per_second),
];

/// Tokens a second over the length of the context.
pub(super) fn svg(results: &Results) -> String {
    let rows = &results.contexts;
    let most = highest(rows);
    let longest = rows.iter().map(|row| row.context).max().unwrap_or(1).max(1) as f64;
    let x = |context: f64| LEFT + context / longest * (WIDTH - LEFT - MARGIN);
    let y = |rate: f64| HEIGHT - MARGIN - rate / most * (HEIGHT - 2.0 * MARGIN);
    let mut body = String::new();
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let (rate, context) = (most * share, longest * share);
        // Writing to a string does not fail.
        let _ = writeln!(
            body,
            "<path d='M{LEFT} {0:.1}H{1:.1}' stroke='#ddd'/>\
             <text x='{2:.1}' y='{3:.1}' text-anchor='end'>{rate:.0}</text>\
             <text x='{4:.1}' y='{5:.1}' text-anchor='middle'>{context:.0}</text>",
            y(rate),
            WIDTH - MARGIN,
            LEFT - 6.0,
            y(rate) + 4.0,
            x(context),
            HEIGHT - MARGIN + 18.0,
        );
    }
    for (number, (name, colour, rate)) in SERIES.iter().enumerate() {
        let points = rows.iter().map(|row| (x(row.context as f64), y(rate(row))));
        let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            body,
            "<polyline fill='none' stroke='{colour}' stroke-width='2' points='{}'/>\
             <text x='{:.1}' y='{:.1}' fill='{colour}'>{name}</text>",
            points.join(" "),
            LEFT + 12.0 + 140.0 * number as f64,
            MARGIN - 16.0,
        );
    }
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' \
         font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='#fff'/>\n\
         {body}<text x='{:.1}' y='{:.1}' text-anchor='middle'>tokens of context; decode tokens a \
         second{}</text>\n</svg>\n",
        WIDTH / 2.0,
        HEIGHT - 6.0,
        synthetic(results),
    )
}

/// Said on every plot whose drafts were made to be right.
fn synthetic(results: &Results) -> &'static str {
    match results.synthetic_acceptance.is_empty() {
        true => "",
        false => "; synthetic acceptance",
    }
}

/// The same as bars.
pub(super) fn terminal(results: &Results) -> String {
    let most = highest(&results.contexts);
    let mut text = format!(
        "decode tokens a second, by tokens of context{}\n",
        synthetic(results)
    );
    for row in &results.contexts {
        for (name, _, rate) in SERIES {
            let bar = "█".repeat((rate(row) / most * BAR).round() as usize);
            let _ = writeln!(
                text,
                "{:>8}  {name:<14}  {bar} {:.1}",
                row.context,
                rate(row)
            );
        }
    }
    text
}

fn highest(rows: &[ContextRow]) -> f64 {
    let rates = rows
        .iter()
        .flat_map(|row| SERIES.map(|(_, _, rate)| rate(row)));
    rates.fold(f64::MIN_POSITIVE, f64::max)
}

#[cfg(test)]
mod tests {
    use super::{super::report::sample, *};

    #[test]
    fn both_plots_show_every_point() {
        let results = sample();
        let picture = svg(&results);
        assert_eq!(picture.matches("<polyline").count(), 2);
        // The highest point is at the top, the longest context at the right.
        assert!(
            picture.contains("points='64.0,40.0 680.0,180.0'"),
            "{picture}"
        );
        let bars = terminal(&results);
        assert_eq!(bars.lines().count(), 5);
        assert!(
            bars.contains(&format!("{} 180.0", "█".repeat(48))),
            "{bars}"
        );
    }

    #[test]
    fn nothing_measured_is_an_empty_plot() {
        assert!(svg(&Results::default()).ends_with("</svg>\n"));
        assert_eq!(terminal(&Results::default()).lines().count(), 1);
    }
}
