//! The `pilot` program.

use std::{env, ffi::OsString, path::PathBuf, process::ExitCode};

use pilot::{error::exit, tools::supervisor};

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    if let [verb, folder] = arguments.as_slice()
        && verb == "supervise"
    {
        // Before anything else is set up: a supervisor is small and needs nothing.
        let ended = supervisor::supervise(PathBuf::from(folder));
        return if ended.is_ok() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(exit::OTHER)
        };
    }
    ExitCode::from(exit::USAGE)
}
