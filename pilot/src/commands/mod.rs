//! What each subcommand does.

mod history;
mod outside;
mod remove;
mod run;
mod store;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;
use marathon_proto::{
    shutdown::Shutdown,
    telemetry::{Guard, Telemetry},
};

use crate::{
    cli::{Cli, Command},
    config::Config,
    error::{Error, exit},
    tools::supervisor,
};

/// Exit status of a process that a second signal ended.
const INTERRUPTED: u8 = 130;

/// Reads the command line, does what it says, and tells the exit status.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => {
            // Nobody reads what cannot be written.
            let _ = told.print();
            let status = if told.use_stderr() { exit::USAGE } else { 0 };
            return ExitCode::from(status);
        }
    };
    match dispatch(cli) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            let _ = writeln!(io::stderr(), "pilot: {}", one_line(&error.to_string()));
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(cli: Cli) -> Result<u8, Error> {
    if let Command::Supervise { folder } = &cli.command {
        // Before anything else is set up: a supervisor is small and needs nothing.
        let what = "supervising a command".to_owned();
        supervisor::supervise(folder).map_err(|source| Error::Io { what, source })?;
        return Ok(0);
    }
    if let Command::Bound { parent, line } = &cli.command {
        return Err(crate::demo::bound::become_program(*parent, line));
    }
    let loaded = Config::load(cli.shared.config.as_deref(), cli.settings())?;
    if cli.shared.print_config {
        print(&loaded.describe()?)?;
        return Ok(0);
    }
    let config = loaded.config;
    match cli.command {
        Command::List(args) => history::list(&config, &args),
        Command::Show(args) => history::show(&config, &args),
        Command::Remove(args) => remove::remove(&config, &args),
        Command::Run(args) => on_runtime(&config, |shutdown| run::run(&config, *args, shutdown)),
        Command::Resume(args) => {
            on_runtime(&config, |shutdown| run::resume(&config, *args, shutdown))
        }
        Command::Demo(args) => crate::demo::run(&args),
        Command::Supervise { .. } | Command::Bound { .. } => Ok(0),
    }
}

/// Runs `work` with signals, logs and an async runtime. A second signal ends it at once.
fn on_runtime<F>(config: &Config, work: impl FnOnce(Shutdown) -> F) -> Result<u8, Error>
where
    F: Future<Output = Result<u8, Error>>,
{
    let starting = |source| Error::Io {
        what: "starting".to_owned(),
        source,
    };
    let runtime = tokio::runtime::Runtime::new().map_err(starting)?;
    let ended = runtime.block_on(async {
        let shutdown = Shutdown::on_signals().map_err(starting)?;
        let _logs = logs(config)?;
        let forced = shutdown.forced().clone();
        tokio::select! {
            ended = work(shutdown) => ended,
            () = forced.cancelled() => Ok(INTERRUPTED),
        }
    });
    // A tool that is still at work must not hold up the end; its outcome is settled on resuming.
    runtime.shutdown_background();
    ended
}

/// Runs blocking `work` beside the async threads, so that a second signal ends the program even while
/// a disk or a terminal does not answer.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let stopped = |source: tokio::task::JoinError| Error::Io {
        what: "internal error".to_owned(),
        source: source.into(),
    };
    tokio::task::spawn_blocking(work).await.map_err(stopped)?
}

fn logs(config: &Config) -> Result<Guard, Error> {
    let usage = |error: &dyn std::fmt::Display| Error::Usage(error.to_string());
    let telemetry = Telemetry {
        service: "pilot",
        version: env!("CARGO_PKG_VERSION"),
        format: config.log_format.parse().map_err(|error| usage(&error))?,
        filter: config.log.clone(),
        otlp_endpoint: None,
    };
    telemetry.start().map_err(|error| usage(&error))
}

/// Writes to standard output. A reader that went away is no error.
fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => Err(Error::Io {
            what: "writing to standard output".to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
