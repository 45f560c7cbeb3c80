//! `brain bench`: what this model does on this machine, in figures, tables and a plot.
//!
//! The engine is the one that serves, without a front end. Everything is measured after a warm-up,
//! several times, and what is compared is measured in turns: a machine that is busy for a while is
//! busy for both.

mod measure;
mod plot;
mod report;
mod stall;

use std::{fs, io::Write as _, path::Path};

use crate::{
    bringup::{self, Trial},
    cli::BenchArgs,
    config::Config,
    error::Error,
};
use measure::Bench;
use report::Results;

/// Measures, prints tables and a plot, and writes `bench.json`, `bench.md` and `bench.svg`.
pub fn bench(args: &BenchArgs, config: &Config) -> Result<(), Error> {
    bringup::check(config)?;
    let trial = trial(args)?;
    fs::create_dir_all(&args.out).map_err(|error| unwritten(&args.out, &error))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|error| Error::Serving(format!("no runtime: {error}")))?;
    let snapshots = args.out.join("bench-snapshots");
    let config = config.apart();
    let bench = Bench {
        args,
        config: &config,
        trial,
        snapshots: &snapshots,
        progress: &|line| {
            // A closed standard error is no reason not to measure.
            let _ = writeln!(std::io::stderr(), "{line}");
        },
    };
    let measured = runtime.block_on(bench.run());
    // Left over when something failed, or not there at all.
    let _ = fs::remove_dir_all(&snapshots);
    let results = measured?;
    let json = serde_json::to_string_pretty(&results)
        .map_err(|error| Error::Serving(format!("the results cannot be written: {error}")))?;
    let markdown = report::markdown(&results);
    for (name, text) in [
        ("bench.json", &json),
        ("bench.md", &markdown),
        ("bench.svg", &plot::svg(&results)),
    ] {
        let path = args.out.join(name);
        fs::write(&path, text).map_err(|error| unwritten(&path, &error))?;
    }
    print(&format!("{markdown}\n{}", plot::terminal(&results)))
}

/// What the model is made to do, from the flags.
fn trial(args: &BenchArgs) -> Result<Trial, Error> {
    let acceptance = args.synthetic_acceptance.clone();
    let shares = acceptance.iter().all(|share| (0.0..=1.0).contains(share));
    if !shares || !acceptance.is_sorted_by(|before, after| before >= after) {
        return Err(Error::Usage(format!(
            "--synthetic-acceptance: give shares from 1 to 0, none larger than the one before it; \
             these are {acceptance:?}"
        )));
    }
    Ok(Trial {
        stretch: args.stretch_context.map(|tokens| tokens as usize),
        acceptance,
    })
}

/// Prints how the second of two result files compares with the first.
pub fn compare(before: &Path, after: &Path) -> Result<(), Error> {
    print(&report::comparison(&load(before)?, &load(after)?))
}

fn load(path: &Path) -> Result<Results, Error> {
    let unread = |error: &dyn std::fmt::Display| {
        Error::Usage(format!(
            "{} cannot be compared: {error}; give two bench.json files",
            path.display()
        ))
    };
    let text = fs::read_to_string(path).map_err(|error| unread(&error))?;
    serde_json::from_str(&text).map_err(|error| unread(&error))
}

fn print(text: &str) -> Result<(), Error> {
    let written = std::io::stdout().write_all(text.as_bytes());
    written.map_err(|error| Error::Serving(format!("cannot print: {error}")))
}

fn unwritten(path: &Path, error: &std::io::Error) -> Error {
    Error::Usage(format!(
        "--out: {} cannot be written: {error}",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{
        cli::{Cli, Command},
        config::Loaded,
    };

    /// Runs `brain bench` with a fake device.
    fn run(out: &Path, flags: &str) -> Result<(), Error> {
        run_with(out, "--device fake --fake-step-time 50us", flags)
    }

    fn run_with(out: &Path, device: &str, flags: &str) -> Result<(), Error> {
        let flags = ["brain", "bench", "--out", out.to_str().unwrap()]
            .into_iter()
            .chain(device.split_whitespace())
            .chain(flags.split_whitespace());
        let Command::Bench(args) = Cli::parse_from(flags).command else {
            panic!("not bench")
        };
        let config = Loaded::new(None, &args.settings).unwrap().check().unwrap();
        bench(&args, &config)
    }

    #[test]
    fn acceptance_is_made_as_asked_and_said_wherever_figures_stand() {
        let out = tempfile::tempdir().unwrap();
        // A depth of its own would depend on how busy this machine is.
        let flags = "--contexts 300 --batches 2 --tokens 60 --repeats 1 --draft-tokens 2 \
                     --synthetic-acceptance 1,1";
        run(out.path(), flags).unwrap();
        let results = load(&out.path().join("bench.json")).unwrap();
        assert_eq!(results.synthetic_acceptance, [1.0, 1.0]);
        let row = results.contexts[0];
        assert!(
            row.accepted > 0 && row.accepted <= 2 * row.rounds,
            "{row:?}"
        );
        for name in ["bench.md", "bench.svg"] {
            let text = fs::read_to_string(out.path().join(name)).unwrap();
            assert!(
                text.to_lowercase().contains("synthetic acceptance"),
                "{name}"
            );
        }
        for wrong in ["0.5,0.9", "1.1", "-0.5", "NaN"] {
            let flags = format!("--contexts 0 --synthetic-acceptance={wrong}");
            let error = run(out.path(), &flags).unwrap_err().to_string();
            assert!(error.contains("--synthetic-acceptance"), "{wrong}: {error}");
        }
        let flags = "--contexts 0 --drafter none --synthetic-acceptance 1";
        let error = run(out.path(), flags).unwrap_err().to_string();
        assert!(error.contains("drafter"), "{error}");
    }

    #[test]
    fn a_model_in_a_folder_is_measured() {
        let out = tempfile::tempdir().unwrap();
        let folder = concat!(
            "--device cpu --model ",
            env!("CARGO_MANIFEST_DIR"),
            "/assets/demo"
        );
        let flags = "--parts contexts --contexts 40 --tokens 4 --repeats 1";
        run_with(out.path(), folder, flags).unwrap();
        let results = load(&out.path().join("bench.json")).unwrap();
        let row = &results.contexts[0];
        assert_eq!(row.context, 40);
        assert!(row.decode_per_second > 0.0, "{row:?}");
    }

    #[test]
    fn a_bench_measures_everything_and_leaves_three_files() {
        let out = tempfile::tempdir().unwrap();
        let flags = "--contexts 0,300,900000 --batches 1,3 --tokens 20 --repeats 2";
        run(out.path(), flags).unwrap();
        let results = load(&out.path().join("bench.json")).unwrap();
        let contexts: Vec<_> = results.contexts.iter().map(|row| row.context).collect();
        assert_eq!(contexts, [0, 300], "what does not fit is left out");
        let rates = results.contexts.iter().flat_map(|row| {
            [
                row.prefill_per_second,
                row.decode_per_second,
                row.drafted_per_second,
                row.gain,
            ]
        });
        assert!(rates.into_iter().all(|rate| rate > 0.0 && rate.is_finite()));
        assert_eq!(results.batches.len(), 2);
        assert!(results.reuse[0].cached_share > 0.99);
        assert!(results.restart[0].cached_share > 0.99);
        assert!(out.path().join("bench.md").is_file() && out.path().join("bench.svg").is_file());
        assert!(!out.path().join("bench-snapshots").exists());
        run(out.path(), &format!("{flags} --parts reuse,stall")).unwrap();
        let part = load(&out.path().join("bench.json")).unwrap();
        assert!(part.contexts.is_empty() && part.batches.is_empty() && part.restart.is_empty());
        assert_eq!((part.reuse.len(), part.stall.len()), (1, 1));
        assert!(!part.gaps.is_empty());
        let json = out.path().join("bench.json");
        compare(&json, &json).unwrap();
        let error = compare(&json, &out.path().join("bench.md")).unwrap_err();
        assert!(error.to_string().contains("bench.md"), "{error}");
    }
}
