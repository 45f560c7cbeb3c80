//! `brain inspect`: what a checkpoint is.

use std::io::Write as _;

use crate::{
    cli::InspectArgs,
    error::Error,
    inspect::{self, Options, print},
    model::file,
};

/// Looks at a checkpoint and prints what was found. An error if there are problems.
pub fn inspect(args: &InspectArgs) -> Result<(), Error> {
    if let Err(error) = args.path.metadata() {
        return Err(Error::Checkpoint(format!(
            "cannot look at {}: {}; give a checkpoint folder or a safetensors file",
            args.path.display(),
            file::why(&error)
        )));
    }
    let utilization = args.gpu_memory_utilization;
    if !(utilization > 0.0 && utilization <= 1.0) {
        return Err(Error::Usage(format!(
            "--gpu-memory-utilization {utilization} is not in (0, 1]"
        )));
    }
    let options = Options {
        drafter: args.drafter.clone(),
        memory: args.gpu_memory.map(|bytes| (bytes, utilization)),
        tokens: args.max_model_len,
        tensors: args.tensors,
    };
    let report = inspect::inspect(&args.path, &options);
    let text = match args.json {
        true => serde_json::to_string_pretty(&report)
            .map_err(|error| Error::Serving(format!("cannot write the report: {error}")))?,
        false => print::text(&report),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", text.trim_end())
        .map_err(|error| Error::Serving(format!("cannot print: {error}")))?;
    match report.problems.len() {
        0 => Ok(()),
        1 => Err(Error::Checkpoint("one problem was found".into())),
        n => Err(Error::Checkpoint(format!("{n} problems were found"))),
    }
}
