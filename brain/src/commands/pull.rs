//! `brain pull`: a model and its drafter from the hub into the cache.

use std::io::Write as _;

use crate::{
    cli::PullArgs,
    error::Error,
    hub::locate::{Drafting, Place, locate},
};

/// Fetches what is missing and prints the model's folder.
pub fn pull(args: &PullArgs) -> Result<(), Error> {
    let name = |text: &str| {
        text.parse()
            .map_err(|error: crate::hub::name::NameError| Error::Usage(error.to_string()))
    };
    let drafting = match args.drafter.as_str() {
        "auto" => Drafting::Auto,
        "none" => Drafting::None,
        other => Drafting::At(Place::Hub(name(other)?)),
    };
    // proof: a closed standard error takes only what is told meanwhile.
    let say = |text: &str| drop(writeln!(std::io::stderr(), "brain: {text}"));
    let located = locate(&Place::Hub(name(&args.name)?), &drafting, Box::new(say))?;
    if let Some(drafter) = &located.drafter {
        say(&format!("its drafter is in {}", drafter.display()));
    }
    writeln!(std::io::stdout(), "{}", located.model.display())
        .map_err(|error| Error::Serving(format!("cannot print: {error}")))
}
