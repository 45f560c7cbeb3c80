//! A few lines at the bottom of a terminal that are redrawn, and a log of what is remarkable above
//! them. Without a terminal it draws nothing.

use std::{
    io,
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{Happening, View, plain, tally::Tally, words};
use crate::run::event::RunEvent;

const REDRAW: Duration = Duration::from_millis(100);

/// The live view.
pub struct Live {
    began: Instant,
    tally: Tally,
    screen: MultiProgress,
    doing: ProgressBar,
    progress: ProgressBar,
    numbers: ProgressBar,
    survived: ProgressBar,
    /// The brain's line that was shown last.
    brain: String,
}

impl Live {
    /// On the terminal behind standard error.
    pub fn new() -> Self {
        Self::on(MultiProgress::new())
    }

    fn on(screen: MultiProgress) -> Self {
        let doing = screen.add(ProgressBar::no_length());
        doing.set_style(style("{spinner:.cyan} {msg}"));
        let progress = screen.add(ProgressBar::new(1));
        progress.set_style(style("  {bar:40.green/dim} {msg}").progress_chars("━╸─"));
        let numbers = screen.add(ProgressBar::no_length());
        numbers.set_style(style("  {msg:.dim}"));
        let survived = screen.add(ProgressBar::no_length());
        survived.set_style(style("  {msg:.dim}"));
        doing.enable_steady_tick(REDRAW);
        Self {
            began: Instant::now(),
            tally: Tally::default(),
            screen,
            doing,
            progress,
            numbers,
            survived,
            brain: String::new(),
        }
    }

    /// A brain that is back and the same is no news: that it was away is.
    fn is_news(&mut self, happening: &Happening, line: &str) -> bool {
        match happening {
            Happening::Run(RunEvent::BrainReached { .. }) => {
                std::mem::replace(&mut self.brain, line.to_owned()) != line
            }
            _ => true,
        }
    }

    fn redraw(&self, now: Duration) {
        let [doing, progress, numbers, survived] = status(&self.tally, now);
        self.doing.set_message(doing);
        self.progress.set_length(self.tally.expected_calls.max(1));
        self.progress
            .set_position(self.tally.totals.calls.min(self.tally.expected_calls));
        self.progress.set_message(progress);
        self.numbers.set_message(numbers);
        self.survived.set_message(survived);
    }
}

impl Default for Live {
    fn default() -> Self {
        Self::new()
    }
}

impl View for Live {
    fn show(&mut self, happening: &Happening) -> io::Result<()> {
        let now = self.began.elapsed();
        self.tally.take(now, happening);
        if is_remarkable(happening)
            && let Some(text) = plain::line(happening)
            && self.is_news(happening, &text)
        {
            for line in text.lines() {
                self.screen.println(words::shorten(line, width()))?;
            }
        }
        self.redraw(now);
        Ok(())
    }

    fn close(&mut self) {
        self.doing.finish_and_clear();
        self.progress.finish_and_clear();
        self.numbers.finish_and_clear();
        self.survived.finish_and_clear();
    }
}

/// Worth a line that stays.
fn is_remarkable(happening: &Happening) -> bool {
    match happening {
        Happening::Stage(_) => true,
        Happening::Run(event) => match event {
            RunEvent::Tokens { .. }
            | RunEvent::AnswerStarted { .. }
            | RunEvent::AnswerEnded { .. } => false,
            RunEvent::ToolStarted { in_doubt, .. } => *in_doubt,
            RunEvent::ToolEnded { error, origin, .. } => {
                *error || !words::settled(*origin).is_empty()
            }
            RunEvent::BrainAway { attempt, .. } => *attempt == 1,
            _ => true,
        },
    }
}

/// The four lines: what is done, how far it is, how fast it goes, and what it survived.
fn status(tally: &Tally, now: Duration) -> [String; 4] {
    let totals = &tally.totals;
    let doing = format!(
        "{:<48} {}",
        words::shorten(&tally.doing, 48),
        words::duration(tally.elapsed(now))
    );
    let mut progress = match tally.expected_calls {
        0 => words::count(totals.calls, "call"),
        all => format!("{}/{all} calls", totals.calls),
    };
    if totals.errors > 0 {
        progress.push_str(&format!(" · {}", words::count(totals.errors, "error")));
    }
    if let Some(left) = tally.left(now) {
        progress.push_str(&format!(" · {} left", words::duration(left)));
    }
    let mut numbers = vec![format!("{:.0} tok/s", tally.speed(now))];
    if let (Some(share), Some(per_round)) = (tally.acceptance(), tally.per_round()) {
        numbers.push(format!(
            "drafts {:.0} % right, {per_round:.1} a round",
            share * 100.0
        ));
    }
    if tally.context_limit > 0 {
        numbers.push(format!("context {}/{}", tally.context, tally.context_limit));
    }
    let (brain, pilot) = (
        tally.brain_restarts,
        tally.pilot_restarts.max(totals.resumes),
    );
    let mut survived = Vec::new();
    if brain + pilot > 0 {
        survived.push(format!("restarts: brain {brain}, pilot {pilot}"));
    }
    if totals.recovered > 0 {
        survived.push(format!(
            "{} in doubt, settled",
            words::count(totals.recovered, "call")
        ));
    }
    [doing, progress, numbers.join(" · "), survived.join(" · ")]
}

/// Columns of the terminal, less one that some terminals need.
fn width() -> usize {
    crossterm::terminal::size().map_or(79, |(columns, _)| usize::from(columns).saturating_sub(1))
}

fn style(template: &str) -> ProgressStyle {
    // A template that does not parse (a test draws each of them) falls back to indicatif's own.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use indicatif::{InMemoryTerm, ProgressDrawTarget};

    use super::*;
    use crate::ui::{Side, Stage};

    #[test]
    fn the_screen_shows_the_state_and_keeps_what_is_remarkable() {
        let terminal = InMemoryTerm::new(12, 100);
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let mut view = Live::on(MultiProgress::with_draw_target(target));
        let chapter = Stage::Chapter {
            title: "With kills".into(),
            expected_calls: 120,
        };
        view.show(&Happening::Stage(chapter)).unwrap();
        let killed = Stage::Killed {
            side: Side::Brain,
            moment: "in an answer".into(),
        };
        view.show(&Happening::Stage(killed)).unwrap();
        view.show(&Happening::Stage(Stage::Restarted { side: Side::Brain }))
            .unwrap();
        view.doing.disable_steady_tick();
        let shown = terminal.contents();
        for wanted in [
            "== With kills",
            "** brain killed in an answer",
            "0/120 calls",
            "restarts: brain 1, pilot 0",
        ] {
            assert!(shown.contains(wanted), "{wanted}\n{shown}");
        }
        view.close();
        assert!(!terminal.contents().contains("tok/s"));
    }
}
