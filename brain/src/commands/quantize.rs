//! `brain quantize`: a checkpoint in four or eight bits.

use std::{
    io::{IsTerminal as _, Write as _},
    path::Path,
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    cli::{AttentionWeights, QuantizeArgs},
    error::Error,
    quantize::{
        journal::JournalError,
        layout::{Format, Recipe},
        run::{QuantizeError, Task, Watch, run},
    },
    size::show,
};

/// Quantises and prints the report.
pub fn quantize(args: &QuantizeArgs) -> Result<(), Error> {
    let attention = match args.attention {
        Some(AttentionWeights::Quantize) => true,
        Some(AttentionWeights::Keep) => false,
        None => args.format == Format::Fp8,
    };
    let task = Task {
        source: args.source.clone(),
        target: args.target.clone(),
        recipe: Recipe {
            format: args.format,
            attention,
            shard_size: args.shard_size,
        },
        threads: match args.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        },
    };
    let bar = Bar::new();
    let report = run(&task, &bar).map_err(|error| to_error(&error))?;
    bar.0.finish_and_clear();
    let text = match args.json {
        true => serde_json::to_string_pretty(&report)
            .map_err(|error| Error::Serving(format!("cannot write the report: {error}")))?,
        false => report.text(),
    };
    writeln!(std::io::stdout(), "{}", text.trim_end())
        .map_err(|error| Error::Serving(format!("cannot print: {error}")))
}

fn to_error(error: &QuantizeError) -> Error {
    let text = error.to_string();
    match error {
        QuantizeError::Config { .. }
        | QuantizeError::Checkpoint(_)
        | QuantizeError::Names { .. }
        | QuantizeError::Quantised { .. }
        | QuantizeError::NotFinite(_)
        | QuantizeError::NoFolder(_)
        | QuantizeError::Drafter(_)
        | QuantizeError::Changed { .. }
        | QuantizeError::NoObject(_)
        | QuantizeError::Io { doing: "read", .. } => Error::Checkpoint(text),
        QuantizeError::Exists(_)
        | QuantizeError::Foreign { .. }
        | QuantizeError::DeadLink(_)
        | QuantizeError::Inside(_)
        | QuantizeError::Journal(JournalError::Other { .. } | JournalError::Busy(_)) => {
            Error::Usage(text)
        }
        QuantizeError::NoRoom { .. } | QuantizeError::Io { .. } | QuantizeError::Journal(_) => {
            Error::Serving(text)
        }
    }
}

/// A progress bar where there is a terminal; a line for every finished file everywhere.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = match std::io::stderr().is_terminal() {
            true => ProgressBar::no_length(),
            false => ProgressBar::hidden(),
        };
        let style = "{wide_bar} {binary_bytes} of {binary_total_bytes}, \
                     {binary_bytes_per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn say(&self, text: &str) {
        self.0.suspend(|| {
            // proof: a closed standard error takes only the progress.
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }
}

impl Watch for Bar {
    fn made(&self, folder: &Path) {
        self.say(&format!("made {}, which was not there", folder.display()));
    }

    fn look(&self, total: u64) {
        if total > 0 {
            self.0.set_length(total);
            self.say(&format!(
                "looking again at {} that an earlier run finished",
                show(total)
            ));
        }
    }

    fn begin(&self, total: u64, done: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
        // The rate is that of this run.
        self.0.reset_eta();
        if done > 0 {
            let share = 100.0 * done as f64 / total.max(1) as f64;
            self.say(&format!(
                "going on where an earlier run ended, at {share:.0} %"
            ));
        }
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    fn again(&self, file: &str) {
        self.say(&format!(
            "{file} is not what an earlier run wrote: it is made again"
        ));
    }

    fn shard(&self, file: &str, number: usize, count: usize) {
        self.say(&format!("{file} is done, {number} of {count}"));
    }
}
