//! The `brain` program.

use std::{io::Write as _, process::ExitCode};

use brain::{
    cli::{BenchArgs, Cli, Command, GenerateArgs, ServeArgs},
    commands,
    config::Loaded,
    error::Error,
    server,
};
use clap::Parser as _;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(args) => serve(&args),
        Command::Generate(args) => generate(&args),
        Command::Bench(args) => bench(&args),
        Command::Pull(args) => commands::pull::pull(&args),
        Command::Inspect(args) => commands::inspect::inspect(&args),
        Command::Quantize(args) => commands::quantize::quantize(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // proof: nothing is left to do when standard error is closed too.
            let _ = writeln!(std::io::stderr(), "brain: {error}");
            error.exit_code()
        }
    }
}

fn serve(args: &ServeArgs) -> Result<(), Error> {
    args.vllm.check()?;
    for flag in args.vllm.always() {
        // proof: a note that nobody can read is no reason to stop.
        let _ = writeln!(std::io::stderr(), "brain: {flag}: always on, leave it out");
    }
    let loaded = Loaded::new(args.config.as_deref(), &args.settings)?;
    let config = loaded.check()?;
    if args.print_config {
        let written = std::io::stdout().write_all(loaded.describe()?.as_bytes());
        return written.map_err(|error| Error::Serving(format!("cannot print: {error}")));
    }
    server::serve(config)
}

fn generate(args: &GenerateArgs) -> Result<(), Error> {
    let config = Loaded::new(args.config.as_deref(), &args.settings)?.check()?;
    commands::generate::generate(args, &config)
}

fn bench(args: &BenchArgs) -> Result<(), Error> {
    if let [before, after] = &args.compare[..] {
        return commands::bench::compare(before, after);
    }
    let config = Loaded::new(args.config.as_deref(), &args.settings)?.check()?;
    commands::bench::bench(args, &config)
}
