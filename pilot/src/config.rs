//! pilot's settings: flags over environment (`PILOT_…`) over a TOML file over defaults.

use std::path::{Path, PathBuf};

use figment::{
    Figment, Source,
    providers::{Env, Format, Serialized, Toml},
    value::{Dict, Map, Value},
};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Address of the brain: `http://host:port`, or `host:port`.
    pub brain: String,
    /// File with the bearer token for the brain; empty: none.
    pub token_file: PathBuf,
    /// PEM file with the certificate authority of a brain behind `https://`; empty: none.
    pub ca_file: PathBuf,
    /// Folder with the journals.
    pub store: PathBuf,
    /// Seed of a new run; 0: chosen at random.
    pub seed: u64,
    /// Allow the `bash` tool.
    pub allow_bash: bool,
    /// Keep the calls in answers to tools that exist and arguments that they take.
    pub constrain_calls: bool,
    /// Answers and tool calls at most; 0: no limit.
    pub max_steps: u64,
    /// Generated tokens at most; 0: no limit.
    pub max_tokens: u64,
    /// Seconds at work at most; 0: no limit.
    pub max_time: u64,
    /// Context limit in tokens; 0: what the model can do, but 65536 at most.
    pub max_context: u32,
    /// Room for an answer, in tokens; 0: a sixteenth of the context, from 256 to 8192.
    pub answer_reserve: u32,
    /// Sampling temperature; unset: the model's.
    pub temperature: Option<f32>,
    /// Keep the k likeliest tokens; unset: the model's.
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens that reaches this share; unset: the model's.
    pub top_p: Option<f32>,
    /// System prompt.
    pub system: String,
    /// Seconds without a sign of life after which a link to the brain is taken for dead.
    pub link_timeout: u64,
    /// Log level on standard error: error, warn, info, debug, trace.
    pub log: String,
    /// `text` or `json`.
    pub log_format: String,
}

/// What pilot tells the model unless told otherwise.
pub const DEFAULT_SYSTEM: &str = "You are a careful agent. Do the task with the tools, one call at a time. When everything is done, call finish.";

impl Default for Config {
    fn default() -> Self {
        Self {
            brain: "http://127.0.0.1:7411".into(),
            token_file: PathBuf::new(),
            ca_file: PathBuf::new(),
            store: default_store(),
            seed: 0,
            allow_bash: false,
            constrain_calls: true,
            max_steps: 0,
            max_tokens: 0,
            max_time: 0,
            max_context: 0,
            answer_reserve: 0,
            temperature: None,
            top_k: None,
            top_p: None,
            system: DEFAULT_SYSTEM.into(),
            link_timeout: 20,
            log: "warn".into(),
            log_format: "text".into(),
        }
    }
}

/// `$XDG_STATE_HOME/marathon/pilot`, or `~/.local/state/marathon/pilot`.
fn default_store() -> PathBuf {
    let state = std::env::var_os("XDG_STATE_HOME")
        .map(PathBuf::from)
        .filter(|p| p.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    state
        .or_else(home)
        .unwrap_or_else(|| PathBuf::from("."))
        .join("marathon/pilot")
}

/// A config and where each value came from.
#[derive(Debug)]
pub struct Loaded {
    /// The result.
    pub config: Config,
    figment: Figment,
}

impl Config {
    /// Layers `flags` (only those given) over the environment over `file` over the defaults.
    /// A `file` that was named must exist.
    pub fn load(file: Option<&Path>, flags: Dict) -> Result<Loaded, Error> {
        let mut figment = Figment::from(Serialized::defaults(Self::default()));
        if let Some(path) = file {
            if !path.is_file() {
                return Err(Error::Usage(format!(
                    "config file {}: not there",
                    path.display()
                )));
            }
            figment = figment.merge(Toml::file_exact(path));
        }
        let figment = figment
            .merge(Env::prefixed("PILOT_").ignore(&["config"]))
            .merge(Flags(flags));
        let config: Self = figment
            .extract()
            .map_err(|error| Error::Usage(describe(&error)))?;
        Ok(Loaded { config, figment })
    }
}

impl Loaded {
    /// One line a setting: `name = value  # origin`.
    pub fn describe(&self) -> Result<String, Error> {
        let text = |value: &Value| match value.as_str() {
            Some(text) => format!("{text:?}"),
            None => serde_json::to_string(value).unwrap_or_default(),
        };
        let mut lines = String::new();
        let all: Dict = self
            .figment
            .extract()
            .map_err(|error| Error::Usage(describe(&error)))?;
        for (name, _) in all {
            let Ok(value) = self.figment.find_value(&name) else {
                continue;
            };
            let origin = match self.figment.get_metadata(value.tag()) {
                Some(found) => match &found.source {
                    // Defaults are known by the line of code that sets them.
                    Some(Source::Code(_)) => "default".to_owned(),
                    Some(source) => source.to_string(),
                    None => found.name.to_string(),
                },
                None => "default".to_owned(),
            };
            let shown = if matches!(value, Value::Empty(..)) {
                "(model's)".into()
            } else {
                text(&value)
            };
            lines.push_str(&format!("{name} = {shown}  # {origin}\n"));
        }
        Ok(lines)
    }
}

fn describe(error: &figment::Error) -> String {
    let origin = error.metadata.as_ref().map(|found| {
        found
            .source
            .as_ref()
            .map_or_else(|| found.name.to_string(), ToString::to_string)
    });
    let name = error.path.join(".");
    let place = origin
        .map(|origin| format!(" ({origin})"))
        .unwrap_or_default();
    if name.is_empty() {
        format!("configuration{place}: {}", error.kind)
    } else {
        format!("setting `{name}`{place}: {}", error.kind)
    }
}

struct Flags(Dict);

impl figment::Provider for Flags {
    fn metadata(&self) -> figment::Metadata {
        figment::Metadata::named("command line")
    }

    fn data(&self) -> Result<Map<figment::Profile, Dict>, figment::Error> {
        Ok(Map::from([(figment::Profile::Default, self.0.clone())]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pilot.toml");
        std::fs::write(&file, "max_steps = 7\nmax_tokens = 8\n").unwrap();
        let flags = Dict::from([("max_steps".to_owned(), Value::from(9_u64))]);
        let loaded = Config::load(Some(&file), flags).unwrap();
        assert_eq!((loaded.config.max_steps, loaded.config.max_tokens), (9, 8));
        assert_eq!(loaded.config.max_time, 0);
        let text = loaded.describe().unwrap();
        assert!(text.contains("max_steps = 9  # command line"), "{text}");
        let from_file = text
            .lines()
            .find(|line| line.starts_with("max_tokens = 8"))
            .unwrap();
        assert!(from_file.contains("pilot.toml"), "{from_file}");
        assert!(
            text.contains("temperature = (model's)  # default"),
            "{text}"
        );
    }

    #[test]
    fn wrong_settings_are_named_with_their_origin() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pilot.toml");
        std::fs::write(&file, "max_step = 7\n").unwrap();
        let unknown = Config::load(Some(&file), Dict::new())
            .unwrap_err()
            .to_string();
        assert!(unknown.contains("max_step"), "{unknown}");
        std::fs::write(&file, "max_steps = \"many\"\n").unwrap();
        let wrong = Config::load(Some(&file), Dict::new())
            .unwrap_err()
            .to_string();
        assert!(
            wrong.contains("max_steps") && wrong.contains("pilot.toml"),
            "{wrong}"
        );
        let missing = Config::load(Some(Path::new("/nowhere.toml")), Dict::new()).unwrap_err();
        assert_eq!(missing.exit_code(), crate::error::exit::USAGE);
    }
}
