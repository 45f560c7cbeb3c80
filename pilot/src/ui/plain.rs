//! One line for each thing that happened; for logs, pipes and simple terminals.

use std::io::{self, Write};

use super::{Happening, Stage, View, words};
use crate::run::event::RunEvent;

const WIDTH: usize = 60;

/// Writes lines.
pub struct Plain<W> {
    out: W,
}

impl<W: Write> Plain<W> {
    /// Into `out`.
    pub fn new(out: W) -> Self {
        Self { out }
    }
}

impl<W: Write + Send> View for Plain<W> {
    fn show(&mut self, happening: &Happening) -> io::Result<()> {
        if let Some(text) = line(happening) {
            self.out.write_all(format!("{text}\n").as_bytes())?;
            self.out.flush()?;
        }
        Ok(())
    }
}

/// The line for a happening, if it is worth one.
pub fn line(happening: &Happening) -> Option<String> {
    match happening {
        Happening::Run(event) => run_line(event),
        Happening::Stage(stage) => stage_line(stage),
    }
}

fn run_line(event: &RunEvent) -> Option<String> {
    match event {
        RunEvent::Opened { .. } | RunEvent::Paused { .. } | RunEvent::Finished { .. } => {
            life_line(event)
        }
        RunEvent::BrainReached { .. } | RunEvent::BrainAway { .. } => brain_line(event),
        RunEvent::Compacted { .. }
        | RunEvent::AnswerStarted { .. }
        | RunEvent::AnswerEnded { .. }
        | RunEvent::Nudged { .. } => answer_line(event),
        RunEvent::ToolStarted { .. } | RunEvent::ToolEnded { .. } => tool_line(event),
        RunEvent::Tokens { .. } => None,
    }
}

/// How a run begins and ends.
fn life_line(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::Opened {
            run,
            goal,
            resumed,
            totals,
            ..
        } => match resumed {
            false => format!("run {run}: {}", words::shorten(goal, 2 * WIDTH)),
            true => format!("run {run} taken up again: {}", words::totals(totals)),
        },
        RunEvent::Paused { reason, totals } => {
            format!("paused: {reason}\n        {}", words::totals(totals))
        }
        RunEvent::Finished { summary, totals } => {
            let summary = words::shorten(summary, 4 * WIDTH);
            format!("finished: {summary}\n          {}", words::totals(totals))
        }
        _ => return None,
    })
}

fn brain_line(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::BrainReached {
            model,
            fingerprint,
            device,
            drafter,
        } => {
            let drafts = if drafter.is_empty() {
                "no drafter"
            } else {
                drafter.as_str()
            };
            let print = words::shorten(fingerprint, 12);
            format!("brain: {model} on {device}, {drafts}, fingerprint {print}")
        }
        RunEvent::BrainAway {
            attempt,
            wait_ms,
            reason,
        } => {
            let wait = *wait_ms as f64 / 1000.0;
            let why = words::shorten(reason, 2 * WIDTH);
            format!("brain away (attempt {attempt}, again in {wait:.1} s): {why}")
        }
        _ => return None,
    })
}

/// Prompts and answers; nothing for what only went as it should.
fn answer_line(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::Compacted {
            from_tokens,
            to_tokens,
            kept,
        } => {
            let kept = words::count(*kept, "exchange");
            format!("context: new prompt, {from_tokens} -> {to_tokens} tokens, {kept} kept")
        }
        RunEvent::AnswerStarted {
            step,
            continued_from,
            ..
        } if *continued_from > 0 => {
            format!("answer {step} goes on after {continued_from} tokens")
        }
        RunEvent::AnswerEnded { content, .. } if !content.trim().is_empty() => {
            format!("      \"{}\"", words::shorten(content.trim(), 2 * WIDTH))
        }
        RunEvent::Nudged { count } => format!("      no tool call; asked for one ({count})"),
        _ => return None,
    })
}

fn tool_line(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::ToolStarted {
            call,
            name,
            arguments,
            in_doubt,
            ..
        } => {
            let doubt = if *in_doubt {
                "  (in doubt since the restart)"
            } else {
                ""
            };
            format!("{call:>5} {}{doubt}", words::call(name, arguments, WIDTH))
        }
        RunEvent::ToolEnded {
            text,
            origin,
            elapsed_ms,
            ..
        } => {
            let settled = words::settled(*origin);
            let note = if settled.is_empty() {
                String::new()
            } else {
                format!("  [{settled}]")
            };
            let said = words::result(text, WIDTH);
            format!("      -> {said} ({elapsed_ms} ms){note}")
        }
        _ => return None,
    })
}

fn stage_line(stage: &Stage) -> Option<String> {
    Some(match stage {
        Stage::Chapter { title, .. } => format!("== {title}"),
        Stage::Killed { side, moment } => format!("** {} killed {moment}", side.name()),
        Stage::Restarted { side } => format!("** {} started again", side.name()),
        Stage::Dropped { count } => {
            format!(
                "({} not shown: the reader was too slow)",
                words::count(*count, "event")
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        run::{
            entry::{ResultOrigin, RunId},
            event::Totals,
        },
        tools::Class,
        ui::Side,
    };

    fn lines(happenings: &[Happening]) -> String {
        let mut out = Vec::new();
        let mut view = Plain::new(&mut out);
        for happening in happenings {
            view.show(happening).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_short_run_reads_like_a_log() {
        let totals = Totals {
            answers: 1,
            calls: 1,
            generated: 1200,
            rounds: 400,
            ..Totals::default()
        };
        let shown = lines(&[
            Happening::Run(RunEvent::Opened {
                run: RunId::new("r-1").unwrap(),
                goal: "Sort the\nfiles.".into(),
                resumed: false,
                totals: Totals::default(),
                context_limit: 4096,
            }),
            Happening::Run(RunEvent::ToolStarted {
                call: 0,
                name: "append".into(),
                arguments: r#"{"path":"a.txt","content":"x"}"#.into(),
                class: Class::Verifiable,
                in_doubt: true,
            }),
            Happening::Run(RunEvent::ToolEnded {
                call: 0,
                name: "append".into(),
                text: "appended to a.txt".into(),
                error: false,
                origin: ResultOrigin::Repaired,
                elapsed_ms: 2,
            }),
            Happening::Stage(Stage::Killed {
                side: Side::Brain,
                moment: "in an answer".into(),
            }),
            Happening::Run(RunEvent::Finished {
                summary: "Sorted.".into(),
                totals,
            }),
        ]);
        assert_eq!(
            shown,
            "run r-1: Sort the files.\n\
             \x20   0 append a.txt  (in doubt since the restart)\n\
             \x20     -> appended to a.txt (2 ms)  [half done, put right]\n\
             ** brain killed in an answer\n\
             finished: Sorted.\n\
             \x20         1 answer, 1 tool call, 1,200 tokens, 3.00 tokens a round\n"
        );
    }
}
