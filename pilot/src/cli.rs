//! The command line.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use figment::value::{Dict, Value};

use crate::{driver::failpoint::FailAt, ui::Mode};

const EXAMPLES: &str = r#"Examples:
  pilot demo                          a marathon that is killed again and again
  pilot run "GOAL" --workspace DIR    begin a run
  pilot resume                        go on with the latest unfinished run
  pilot list                          what there is
  pilot show RUN --transcript         what was said and done

A run can be stopped at any time and in any way: Ctrl-C, kill -9, a power cut.
`pilot resume` goes on from the last thing that happened.

Exit status:
  0   finished          5   store damaged, or of a newer pilot
  1   other error       6   no such run or store
  2   wrong usage       7   workspace missing
  3   brain away        8   store cannot be read or written
  4   store in use      10  paused; `pilot resume` goes on
  130 stopped at once by a second signal"#;

const RUN_EXAMPLES: &str = r#"Examples:
  pilot run "Fix the typos in every .md file" --workspace docs
  pilot run --workspace . --allow-bash < goal.txt
  pilot run "Sort the inbox" --workspace mail \
            --brain https://gpu-host:7411 --token-file token --ca-file ca.pem
  pilot run --run nightly --or-resume "Check the logs" --workspace logs --json"#;

/// Runs AI agents that survive anything: every step is on the disk before the next.
#[derive(Debug, Parser)]
#[command(name = "pilot", version, after_help = EXAMPLES, propagate_version = true)]
#[command(disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Settings for every command.
    #[command(flatten)]
    pub shared: Shared,
}

/// What pilot can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Begin a run
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<RunArgs>),
    /// Go on with a run: with RUN, or with the latest one that is not finished
    Resume(Box<ResumeArgs>),
    /// List the runs in the store
    List(ListArgs),
    /// Show a run
    Show(ShowArgs),
    /// Remove a finished run and its journal, for good
    Remove(RemoveArgs),
    /// Watch a marathon survive being killed (no GPU, no download, no configuration)
    Demo(DemoArgs),
    /// Run one shell command; started by pilot itself
    #[command(hide = true)]
    Supervise {
        /// The command's folder.
        folder: PathBuf,
    },
    /// Become another program, one that dies with its parent; started by the demo
    #[command(hide = true)]
    Bound {
        /// Process number of the parent.
        parent: i32,
        /// The program and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        line: Vec<OsString>,
    },
}

/// Settings for every command.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Settings")]
pub struct Shared {
    /// TOML file with settings
    #[arg(long, global = true, value_name = "FILE", env = "PILOT_CONFIG")]
    pub config: Option<PathBuf>,
    /// Print the settings, and where each comes from, and end
    #[arg(long, global = true)]
    pub print_config: bool,
    /// Folder with the journals [default: ~/.local/state/marathon/pilot]
    #[arg(long, global = true, value_name = "DIR")]
    pub store: Option<PathBuf>,
    /// Log level on standard error: error, warn, info, debug, trace [default: warn]
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log: Option<String>,
    /// text or json [default: text]
    #[arg(long, global = true, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// How to reach the brain.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Brain")]
pub struct BrainArgs {
    /// Its address: HOST:PORT, http://, https:// or unix:PATH [default: http://127.0.0.1:7411]
    #[arg(long, value_name = "ADDR")]
    pub brain: Option<String>,
    /// File with the bearer token
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// PEM file with the certificate authority of an https brain
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Seconds without a sign of life from the link after which it is made anew [default: 20]
    #[arg(long, value_name = "S")]
    pub link_timeout: Option<u64>,
}

/// Where a run stops and asks for more.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Budgets (a run that meets one pauses)")]
pub struct Budgets {
    /// Answers and tool calls
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u64>,
    /// Generated tokens
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u64>,
    /// Seconds at work
    #[arg(long, value_name = "S")]
    pub max_time: Option<u64>,
}

/// What is shown.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct ViewArgs {
    /// How progress is shown
    #[arg(long, value_enum, default_value = "auto", value_name = "VIEW")]
    pub view: Mode,
    /// One JSON object a line; the same as --view json
    #[arg(long, conflicts_with = "view")]
    pub json: bool,
}

impl ViewArgs {
    /// The view asked for.
    pub fn mode(&self) -> Mode {
        if self.json { Mode::Json } else { self.view }
    }
}

/// Places to die at, for tests and the demo.
#[derive(Debug, Default, Args)]
pub struct FailArgs {
    /// Kill this process with SIGKILL at the N-th time it comes to a named place
    #[arg(long, value_name = "NAME:N", hide = true)]
    pub fail_at: Vec<FailAt>,
}

/// `pilot run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// What to do; without it, standard input is read
    pub goal: Option<String>,
    /// The folder to work in; the file tools reach nothing outside of it
    #[arg(long, short, value_name = "DIR", default_value = ".")]
    pub workspace: PathBuf,
    /// Name of the run [default: made from date and chance]
    #[arg(long, value_name = "RUN")]
    pub run: Option<String>,
    /// If the run --run exists, go on with it
    #[arg(long, requires = "run")]
    pub or_resume: bool,
    /// Let the model run shell commands, with your rights
    #[arg(long)]
    pub allow_bash: bool,
    /// How to reach the brain.
    #[command(flatten)]
    pub brain: BrainArgs,
    /// How answers are made.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Where it stops.
    #[command(flatten)]
    pub budgets: Budgets,
    /// What is shown.
    #[command(flatten)]
    pub view: ViewArgs,
    /// Where it dies.
    #[command(flatten)]
    pub fail: FailArgs,
}

/// How answers are made.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct SamplingArgs {
    /// Same seed, goal, workspace and model: same run, token by token [default: by chance]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Context in tokens; an older part of the run is left out beyond it [default: the model's]
    #[arg(long, value_name = "N")]
    pub max_context: Option<u32>,
    /// Room for an answer in it [default: a sixteenth, from 256 to 8192]
    #[arg(long, value_name = "N")]
    pub answer_reserve: Option<u32>,
    /// 0 = always the likeliest token [default: the model's]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens up to this share [default: the model's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Take tool calls as the model makes them; else they are kept to tools that exist and arguments
    /// that these take
    #[arg(long)]
    pub free_calls: bool,
}

/// `pilot resume`
#[derive(Debug, Args)]
pub struct ResumeArgs {
    /// Which run
    pub run: Option<String>,
    /// Go on although the brain serves another model; its tokens will differ
    #[arg(long)]
    pub accept_new_fingerprint: bool,
    /// Context in tokens from now on [default: as before]
    #[arg(long, value_name = "N")]
    pub max_context: Option<u32>,
    /// How to reach the brain.
    #[command(flatten)]
    pub brain: BrainArgs,
    /// Where it stops.
    #[command(flatten)]
    pub budgets: Budgets,
    /// What is shown.
    #[command(flatten)]
    pub view: ViewArgs,
    /// Where it dies.
    #[command(flatten)]
    pub fail: FailArgs,
}

/// `pilot list`
#[derive(Debug, Args)]
pub struct ListArgs {
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// `pilot show`
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Which run
    pub run: String,
    /// One JSON object
    #[arg(long, group = "form")]
    pub json: bool,
    /// Every answer's tokens: step, attempt, seed, ids
    #[arg(long, group = "form")]
    pub tokens: bool,
    /// Everything that was said and done
    #[arg(long, group = "form")]
    pub transcript: bool,
}

/// `pilot remove`
#[derive(Debug, Args)]
pub struct RemoveArgs {
    /// Which run
    pub run: String,
    /// Remove it although it is not finished, or damaged
    #[arg(long)]
    pub unfinished: bool,
}

/// `pilot demo`
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Names the workspace, the answers and the kills
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Processes to kill, about half of them brains
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(0..=60))]
    pub kills: u32,
    /// Records in the workspace
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=48))]
    pub files: u32,
    /// Keep the workspaces, the journals and the logs
    #[arg(long)]
    pub keep: bool,
    /// The brain program [default: beside this one]
    #[arg(long, value_name = "FILE")]
    pub brain_program: Option<PathBuf>,
    /// What is shown.
    #[command(flatten)]
    pub view: ViewArgs,
}

impl Cli {
    /// The settings given on the command line, by their names in the configuration.
    pub fn settings(&self) -> Dict {
        let mut given = Given::default();
        given.path("store", &self.shared.store);
        given.put("log", &self.shared.log);
        given.put("log_format", &self.shared.log_format);
        match &self.command {
            Command::Run(run) => {
                given.brain(&run.brain);
                given.budgets(&run.budgets);
                let sampling = &run.sampling;
                given.put("seed", &sampling.seed);
                given.put("max_context", &sampling.max_context);
                given.put("answer_reserve", &sampling.answer_reserve);
                given.put("temperature", &sampling.temperature);
                given.put("top_k", &sampling.top_k);
                given.put("top_p", &sampling.top_p);
                given.put("system", &sampling.system);
                given.put("constrain_calls", &sampling.free_calls.then_some(false));
                given.put("allow_bash", &run.allow_bash.then_some(true));
            }
            Command::Resume(resume) => {
                given.brain(&resume.brain);
                given.budgets(&resume.budgets);
            }
            _ => {}
        }
        given.0
    }
}

impl Budgets {
    /// Any of them was given.
    pub fn any(&self) -> bool {
        self.max_steps.is_some() || self.max_tokens.is_some() || self.max_time.is_some()
    }
}

#[derive(Default)]
struct Given(Dict);

impl Given {
    fn put<T: Clone + Into<Value>>(&mut self, name: &str, value: &Option<T>) {
        if let Some(value) = value {
            self.0.insert(name.to_owned(), value.clone().into());
        }
    }

    fn path(&mut self, name: &str, value: &Option<PathBuf>) {
        self.put(
            name,
            &value
                .as_ref()
                .map(|path| path.to_string_lossy().into_owned()),
        );
    }

    fn brain(&mut self, brain: &BrainArgs) {
        self.put("brain", &brain.brain);
        self.path("token_file", &brain.token_file);
        self.path("ca_file", &brain.ca_file);
        self.put("link_timeout", &brain.link_timeout);
    }

    fn budgets(&mut self, budgets: &Budgets) {
        self.put("max_steps", &budgets.max_steps);
        self.put("max_tokens", &budgets.max_tokens);
        self.put("max_time", &budgets.max_time);
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::Config;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_that_sets_something_reaches_the_settings() {
        let line = "pilot run goal --brain h:1 --token-file t --ca-file c --link-timeout 5 --store s \
                    --log info --log-format json --seed 18446744073709551615 --max-context 9 \
                    --answer-reserve 8 --temperature 0.5 --top-k 7 --top-p 0.25 --system hello \
                    --allow-bash --free-calls --max-steps 1 --max-tokens 2 --max-time 3";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let config = Config::load(None, cli.settings()).unwrap().config;
        let wanted = Config {
            brain: "h:1".into(),
            token_file: "t".into(),
            ca_file: "c".into(),
            store: "s".into(),
            seed: u64::MAX,
            allow_bash: true,
            constrain_calls: false,
            max_steps: 1,
            max_tokens: 2,
            max_time: 3,
            max_context: 9,
            answer_reserve: 8,
            temperature: Some(0.5),
            top_k: Some(7),
            top_p: Some(0.25),
            system: "hello".into(),
            link_timeout: 5,
            log: "info".into(),
            log_format: "json".into(),
        };
        assert_eq!(config, wanted);
    }

    #[test]
    fn what_was_not_given_is_not_set() {
        let cli = Cli::try_parse_from(["pilot", "run", "goal"]).unwrap();
        assert!(cli.settings().is_empty());
    }
}
