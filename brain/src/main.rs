//! The `brain` program.

use std::{io::Write as _, process::ExitCode};

use brain::{
    cli::{Cli, Command, ServeArgs},
    config::Loaded,
    error::Error,
    server,
};
use clap::Parser as _;

fn main() -> ExitCode {
    let Command::Serve(args) = Cli::parse().command;
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // proof: nothing is left to do when standard error is closed too.
            let _ = writeln!(std::io::stderr(), "brain: {error}");
            error.exit_code()
        }
    }
}

fn serve(args: &ServeArgs) -> Result<(), Error> {
    let loaded = Loaded::from_args(args)?;
    let config = loaded.check()?;
    if args.print_config {
        let written = std::io::stdout().write_all(loaded.describe()?.as_bytes());
        return written.map_err(|error| Error::Serving(format!("cannot print: {error}")));
    }
    server::serve(config)
}
