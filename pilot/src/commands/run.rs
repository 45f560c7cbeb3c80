//! `pilot run` and `pilot resume`.

use std::{
    hash::{BuildHasher, RandomState},
    io::{self, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use marathon_proto::shutdown::Shutdown;

use super::{
    blocking, outside,
    store::{self, Stored},
};
use crate::{
    brain::client::{BrainClient, BrainOptions},
    cli::{Budgets, FailArgs, ResumeArgs, RunArgs},
    config::Config,
    driver::{self, Driver, Ending, NewRun, Parts, Resume, failpoint::FailPoints},
    error::{Error, exit},
    journal::{Journal, JournalError, share::Share, sled::SledJournal},
    run::{
        entry::{Limits, RunId, SamplingChoice},
        state::Status,
    },
    tools,
    ui::{Mode, Screen},
};

/// Bytes of a goal that are taken from standard input.
const LONGEST_GOAL: u64 = 1 << 20;

pub(super) async fn run(config: &Config, args: RunArgs, shutdown: Shutdown) -> Result<u8, Error> {
    let workspace = workspace(&args.workspace)?;
    outside::check(&config.store, &workspace)?;
    let wanted = args
        .run
        .as_deref()
        .map(RunId::new)
        .transpose()
        .map_err(Error::Usage)?;
    let known = match &wanted {
        Some(run) => {
            let (config, run) = (config.clone(), run.clone());
            blocking(move || existing(&config, &run)).await?
        }
        None => None,
    };
    if let Some((journal, run)) = known {
        if !args.or_resume {
            return Err(Error::Usage(format!(
                "run {run} exists; `pilot resume {run}` goes on with it, --or-resume does so by itself"
            )));
        }
        let how = Going {
            budgets: &args.budgets,
            accept_new_fingerprint: false,
            max_context: args.sampling.max_context,
            mode: args.view.mode(),
            fail: args.fail,
        };
        return go_on(config, journal, run, how, shutdown).await;
    }
    let goal = blocking(move || goal(args.goal)).await?;
    let run = wanted.map_or_else(new_name, Ok)?;
    let new = asked_for(config, run.clone(), goal, workspace)?;
    let brain = brain(config)?;
    let tools = tools::toolbox(config.allow_bash);
    // Before the store is made: a brain that is away, or a run that cannot be, leaves nothing behind.
    driver::plan(&brain, &tools, new.clone()).await?;
    let store = config.store.clone();
    let journal = blocking(move || Ok(SledJournal::open_or_create(&store)?)).await?;
    let journal = Arc::new(journal);
    let _share = share(&journal);
    let screen = Arc::new(Screen::new(args.view.mode().view()));
    let parts = Parts {
        spool: journal.spool(&run),
        journal,
        brain,
        tools,
        observer: screen.clone(),
        fail: Arc::new(FailPoints::new(args.fail.fail_at)),
        cancel: shutdown.graceful().clone(),
    };
    let ended = match Driver::create(parts, new).await {
        Ok(driver) => driver.run().await,
        Err(error) => Err(error),
    };
    close(screen).await?;
    Ok(say_end(&run, ended?))
}

/// A run as the settings have it.
fn asked_for(
    config: &Config,
    run: RunId,
    goal: String,
    workspace: PathBuf,
) -> Result<NewRun, Error> {
    Ok(NewRun {
        run,
        goal,
        system: config.system.clone(),
        workspace,
        seed: if config.seed == 0 {
            chance()
        } else {
            config.seed
        },
        max_context: config.max_context,
        answer_reserve: config.answer_reserve,
        limits: limits(config),
        sampling: sampling(config)?,
        allow_bash: config.allow_bash,
        constrain_calls: config.constrain_calls,
    })
}

pub(super) async fn resume(
    config: &Config,
    args: ResumeArgs,
    shutdown: Shutdown,
) -> Result<u8, Error> {
    let (settings, named) = (config.clone(), args.run.clone());
    let (journal, run) = blocking(move || {
        let journal = store::open(&settings)?;
        let run = match named {
            Some(text) => store::named(&text)?,
            None => latest(&settings, &journal)?,
        };
        Ok((journal, run))
    })
    .await?;
    let how = Going {
        budgets: &args.budgets,
        accept_new_fingerprint: args.accept_new_fingerprint,
        max_context: args.max_context,
        mode: args.view.mode(),
        fail: args.fail,
    };
    go_on(config, journal, run, how, shutdown).await
}

struct Going<'a> {
    budgets: &'a Budgets,
    accept_new_fingerprint: bool,
    max_context: Option<u32>,
    mode: Mode,
    fail: FailArgs,
}

async fn go_on(
    config: &Config,
    journal: SledJournal,
    run: RunId,
    how: Going<'_>,
    shutdown: Shutdown,
) -> Result<u8, Error> {
    let (settings, name) = (config.clone(), run.clone());
    let (journal, stored) = blocking(move || {
        let stored = Stored::load(&settings, &journal, &name)?;
        Ok((journal, stored))
    })
    .await?;
    let created = &stored.state.created;
    if !matches!(stored.state.status, Status::Finished(_)) {
        let workspace = workspace(Path::new(&created.workspace))?;
        outside::check(&config.store, &workspace)?;
    }
    let limits = how.budgets.any().then(|| Limits {
        steps: how.budgets.max_steps.unwrap_or(created.limits.steps),
        tokens: how.budgets.max_tokens.unwrap_or(created.limits.tokens),
        active_ms: how
            .budgets
            .max_time
            .map_or(created.limits.active_ms, milliseconds),
    });
    let brain = brain(config)?;
    let journal = Arc::new(journal);
    let _share = share(&journal);
    let screen = Arc::new(Screen::new(how.mode.view()));
    let parts = Parts {
        spool: journal.spool(&run),
        journal,
        brain,
        tools: tools::toolbox(created.allow_bash),
        observer: screen.clone(),
        fail: Arc::new(FailPoints::new(how.fail.fail_at)),
        cancel: shutdown.graceful().clone(),
    };
    let resume = Resume {
        limits,
        max_context: how.max_context,
        accept_new_fingerprint: how.accept_new_fingerprint,
    };
    let ended = match Driver::open(parts, run.clone(), resume).await {
        Ok(driver) => driver.run().await,
        Err(error) => Err(error),
    };
    close(screen).await?;
    Ok(say_end(&run, ended?))
}

/// Lets `pilot list` and `pilot show` look in while this process holds the store. A run needs no
/// onlookers, so one that cannot have them goes on.
fn share(journal: &Arc<SledJournal>) -> Option<Share> {
    Share::start(journal)
        .inspect_err(|error| tracing::warn!(%error, "list and show cannot look in"))
        .ok()
}

/// Shows what is left to show. A reader that does not read holds this up, and nothing else.
async fn close(screen: Arc<Screen>) -> Result<(), Error> {
    blocking(move || {
        screen.close();
        Ok(())
    })
    .await
}

fn say_end(run: &RunId, ending: Ending) -> u8 {
    match ending {
        Ending::Finished(_) => 0,
        Ending::Paused(_) => {
            // A hint for people, beside the view; losing it loses nothing.
            let _ = writeln!(
                io::stderr(),
                "pilot: run {run} is paused; `pilot resume {run}` goes on"
            );
            exit::PAUSED
        }
    }
}

/// The run of this name and its store, if there is one.
fn existing(config: &Config, run: &RunId) -> Result<Option<(SledJournal, RunId)>, Error> {
    let journal = match store::open(config) {
        Ok(journal) => journal,
        Err(Error::Journal(JournalError::NoStore(_))) => return Ok(None),
        Err(error) => return Err(error),
    };
    let known = journal.head(run)?.next > 0;
    Ok(known.then(|| (journal, run.clone())))
}

/// The run written to last among those that are not finished.
fn latest(config: &Config, journal: &SledJournal) -> Result<RunId, Error> {
    let unfinished = store::all(config, journal)?
        .into_iter()
        .filter_map(|found| {
            let stored = found.stored.ok()?;
            let open = !matches!(stored.state.status, Status::Finished(_));
            open.then(|| (stored.changed_ms(), found.run))
        });
    match unfinished.max() {
        Some((_, run)) => Ok(run),
        None => Err(JournalError::UnknownRun("to go on with".to_owned()).into()),
    }
}

fn workspace(path: &Path) -> Result<PathBuf, Error> {
    let wrong = |reason: &str| Error::Workspace {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    match path.canonicalize() {
        Ok(place) if place.is_dir() => Ok(place),
        Ok(_) => Err(wrong("is no folder; name one with --workspace")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(wrong(
            "is not there; make it, or name another with --workspace",
        )),
        Err(e) => Err(wrong(&e.to_string())),
    }
}

fn goal(given: Option<String>) -> Result<String, Error> {
    let missing =
        || Error::Usage("no goal; write `pilot run \"GOAL\"`, or give it on standard input".into());
    let text = match given {
        Some(text) => text,
        None if io::stdin().is_terminal() => return Err(missing()),
        None => {
            let mut text = String::new();
            let read = io::stdin().take(LONGEST_GOAL).read_to_string(&mut text);
            read.map_err(|e| Error::Usage(format!("the goal on standard input: {e}")))?;
            text
        }
    };
    let text = text.trim();
    if text.is_empty() {
        Err(missing())
    } else {
        Ok(text.to_owned())
    }
}

fn brain(config: &Config) -> Result<BrainClient, Error> {
    let given = |path: &Path| (!path.as_os_str().is_empty()).then(|| path.to_owned());
    let options = BrainOptions {
        address: config.brain.clone(),
        token_file: given(&config.token_file),
        ca_file: given(&config.ca_file),
        silence: std::time::Duration::from_secs(config.link_timeout.max(1)),
    };
    Ok(BrainClient::new(&options)?)
}

/// The sampling asked for. The brain would refuse values out of range too, but only once the run
/// exists, which could then never go on.
fn sampling(config: &Config) -> Result<SamplingChoice, Error> {
    let wrong = |what: &str, range: &str, value: f32| {
        Err(Error::Usage(format!(
            "{what} must be {range}, it is {value}"
        )))
    };
    match (config.temperature, config.top_p) {
        (Some(value), _) if !(0.0..=2.0).contains(&value) => {
            wrong("--temperature", "from 0 to 2", value)
        }
        (_, Some(value)) if !(value > 0.0 && value <= 1.0) => {
            wrong("--top-p", "above 0 and at most 1", value)
        }
        (temperature, top_p) => Ok(SamplingChoice {
            temperature,
            top_k: config.top_k,
            top_p,
        }),
    }
}

fn limits(config: &Config) -> Limits {
    Limits {
        steps: config.max_steps,
        tokens: config.max_tokens,
        active_ms: milliseconds(config.max_time),
    }
}

fn milliseconds(seconds: u64) -> u64 {
    seconds.saturating_mul(1000)
}

/// `20260131-4k2m9x`: sorts by day, can be said aloud, and is one of 887,503,681 names of that day.
fn new_name() -> Result<RunId, Error> {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let day: String = now.chars().filter(char::is_ascii_digit).take(8).collect();
    let letters = b"abcdefghjkmnpqrstuvwxyz23456789";
    let mut bits = chance();
    let mut tail = String::new();
    for _ in 0..6 {
        tail.push(char::from(letters[(bits % letters.len() as u64) as usize]));
        bits /= letters.len() as u64;
    }
    RunId::new(format!("{day}-{tail}")).map_err(Error::Usage)
}

/// 64 bits that nobody chose; the standard library seeds its hash maps from the system's chance.
/// Not 0, which means "not chosen" in the settings.
fn chance() -> u64 {
    RandomState::new().hash_one(std::process::id()).max(1)
}
