//! `pilot remove`: a run that nobody wants to see again.

use super::{print, store};
use crate::{cli::RemoveArgs, config::Config, error::Error, run::state::Status};

pub(super) fn remove(config: &Config, args: &RemoveArgs) -> Result<u8, Error> {
    let run = store::named(&args.run)?;
    let journal = store::open(config)?;
    if !args.unfinished {
        let stored = store::Stored::load(config, &journal, &run)?;
        if !matches!(stored.state.status, Status::Finished(_)) {
            return Err(Error::Usage(format!(
                "run {run} is not finished; --unfinished removes it all the same"
            )));
        }
    }
    journal.remove(&run)?;
    print(&format!("removed run {run}\n"))?;
    Ok(0)
}
