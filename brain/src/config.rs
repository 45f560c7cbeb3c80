//! Settings: flags over environment (`BRAIN_…`) over a TOML file over defaults.

mod check;
mod cpus;
mod layers;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use figment::{
    Figment,
    providers::{Env, Format as _, Serialized, Toml},
    value::Dict,
};
use layers::{Given, describe, environment, origin};
use marathon_proto::{net::ListenAddr, telemetry::LogFormat, tls::IdentityFiles};
use serde::{Deserialize, Serialize};

use crate::{
    cli::Settings, error::Error, http::HttpOptions, hub::ModelName, model::kv_dtype::KvChoice,
};

/// Every setting as it is written. An empty text is "not set".
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Written {
    /// Checkpoint folder, name on the hub, or `demo`.
    pub model: String,
    /// Name that clients see.
    pub served_model_name: String,
    /// Where to compute.
    pub device: String,
    /// Address of the gRPC server.
    pub grpc_addr: String,
    /// Address of the HTTP server.
    pub http_addr: String,
    /// File with API keys.
    pub api_key_file: PathBuf,
    /// Folder of stored responses.
    pub response_dir: PathBuf,
    /// How long a response stays stored.
    pub response_lease: String,
    /// Origins that may call over HTTP.
    pub cors_origins: String,
    /// Which drafter.
    pub drafter: String,
    /// Drafts per round.
    pub draft_tokens: Text,
    /// Prompt and answer together; 0: the model's.
    pub max_model_len: usize,
    /// Generations at a time.
    pub max_num_seqs: usize,
    /// Tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Memory for keys and values.
    pub kv_cache_memory: Text,
    /// How they are stored.
    pub kv_cache_dtype: String,
    /// Memory for cached prompts that the device has no room for.
    pub host_cache_memory: Text,
    /// Share of a card's memory that may be used.
    pub gpu_memory_utilization: f64,
    /// Compute threads; 0: one per core.
    pub threads: usize,
    /// Cores that they are bound to.
    pub cpus: String,
    /// How long an unread generation lives.
    pub lease: String,
    /// How long generations may take to end.
    pub drain: String,
    /// Folder for snapshots.
    pub snapshot_dir: PathBuf,
    /// Disk space for cached prompts.
    pub snapshot_quota: Text,
    /// How often they are saved.
    pub snapshot_interval: String,
    /// File with the bearer token.
    pub token_file: PathBuf,
    /// TLS certificate.
    pub tls_cert: PathBuf,
    /// TLS private key.
    pub tls_key: PathBuf,
    /// Authority of clients' certificates.
    pub tls_client_ca: PathBuf,
    /// Log filter.
    pub log: String,
    /// Form of log lines.
    pub log_format: String,
    /// OTLP collector.
    pub otlp_endpoint: String,
    /// Special tokens spelled in messages are meant.
    pub trust_special_tokens: bool,
    /// Least time of a step of the fake device.
    pub fake_step_time: String,
    /// Steps after which the device breaks; 0: never.
    pub device_fault_after: u64,
}

/// A setting that is a word or a number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Text {
    /// A number.
    Number(u64),
    /// A word.
    Word(String),
}

impl Text {
    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Word(word) => word.clone(),
        }
    }
}

impl Default for Written {
    fn default() -> Self {
        Self {
            model: "demo".into(),
            served_model_name: String::new(),
            device: "auto".into(),
            grpc_addr: "127.0.0.1:7411".into(),
            http_addr: "auto".into(),
            api_key_file: PathBuf::new(),
            response_dir: PathBuf::new(),
            response_lease: "24h".into(),
            cors_origins: String::new(),
            drafter: "auto".into(),
            draft_tokens: Text::Word("auto".into()),
            max_model_len: 0,
            max_num_seqs: 16,
            max_num_batched_tokens: 256,
            kv_cache_memory: Text::Word("auto".into()),
            kv_cache_dtype: "auto".into(),
            host_cache_memory: Text::Word("auto".into()),
            gpu_memory_utilization: 0.9,
            threads: 0,
            cpus: String::new(),
            lease: "15m".into(),
            drain: "20s".into(),
            snapshot_dir: PathBuf::new(),
            snapshot_quota: Text::Word("16GiB".into()),
            snapshot_interval: "10s".into(),
            token_file: PathBuf::new(),
            tls_cert: PathBuf::new(),
            tls_key: PathBuf::new(),
            tls_client_ca: PathBuf::new(),
            log: "info".into(),
            log_format: "text".into(),
            otlp_endpoint: String::new(),
            trust_special_tokens: false,
            fake_step_time: "0s".into(),
            device_fault_after: 0,
        }
    }
}

/// Where the weights are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Model {
    /// Built into the program.
    Demo,
    /// A checkpoint folder.
    Dir(PathBuf),
    /// A repository on the model hub, or in its cache.
    Hub(ModelName),
}

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A card, if there is one that can hold the model; else the processor.
    Auto,
    /// The processor.
    Cpu,
    /// The card of this number.
    Cuda(usize),
    /// No model: tokens from a hash.
    Fake,
}

/// Which assistant drafts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drafter {
    /// The one beside the checkpoint, if there is one.
    Auto,
    /// None.
    None,
    /// The one in this folder.
    Dir(PathBuf),
    /// The one in this repository.
    Hub(ModelName),
}

/// Drafts per round of requests that do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftTokens {
    /// Chosen from cost and acceptance.
    Auto,
    /// Nothing drafts, whatever a request says.
    Off,
    /// This many.
    Fixed(u32),
}

/// Every setting, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the weights are.
    pub model: Model,
    /// Name that clients see.
    pub name: String,
    /// Where to compute.
    pub device: Device,
    /// Address of the gRPC server.
    pub grpc_addr: ListenAddr,
    /// The HTTP server.
    pub http: HttpOptions,
    /// Which assistant drafts.
    pub drafter: Drafter,
    /// Drafts per round.
    pub draft_tokens: DraftTokens,
    /// Prompt and answer together; `None`: the model's.
    pub max_model_len: Option<usize>,
    /// Generations at a time.
    pub max_num_seqs: usize,
    /// Tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Bytes for keys and values; `None`: chosen.
    pub kv_cache_bytes: Option<u64>,
    /// How they are stored.
    pub kv_cache_dtype: KvChoice,
    /// Bytes for cached prompts that the device has no room for; `None`: chosen.
    pub host_cache_bytes: Option<u64>,
    /// Share of a card's memory that may be used, in thousandths.
    pub gpu_memory_thousandths: u32,
    /// Compute threads.
    pub threads: usize,
    /// Cores that they are bound to, as many as threads; empty: the system moves them.
    pub cpus: Vec<usize>,
    /// How long an unread generation lives.
    pub lease: Duration,
    /// How long generations may take to end.
    pub drain: Duration,
    /// Folder for snapshots; `None`: none are kept.
    pub snapshot_dir: Option<PathBuf>,
    /// Bytes of cached prompts in it, at most.
    pub snapshot_quota: u64,
    /// How often they are saved.
    pub snapshot_interval: Duration,
    /// File with the bearer token.
    pub token_file: Option<PathBuf>,
    /// File with further keys.
    pub api_key_file: Option<PathBuf>,
    /// TLS certificate and key.
    pub identity: Option<IdentityFiles>,
    /// Authority of clients' certificates.
    pub client_ca: Option<PathBuf>,
    /// Log filter.
    pub log: String,
    /// Form of log lines.
    pub log_format: LogFormat,
    /// OTLP collector.
    pub otlp_endpoint: Option<String>,
    /// Special tokens spelled in messages are meant.
    pub trust_special_tokens: bool,
    /// Least time of a step of the fake device.
    pub fake_step_time: Duration,
    /// Steps after which the device breaks, for tests of what follows.
    pub device_fault_after: Option<u64>,
}

impl Config {
    /// The same without the folders that a service has for itself: what is asked here is no part of
    /// what it goes on with.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self {
            snapshot_dir: None,
            ..self.clone()
        }
    }
}

/// Settings and where each came from.
#[derive(Debug)]
pub struct Loaded {
    /// As written.
    pub written: Written,
    figment: Figment,
}

impl Loaded {
    /// Layers the flags over the environment over the file over the defaults.
    pub fn new(file: Option<&Path>, flags: &Settings) -> Result<Self, Error> {
        let mut figment = Figment::from(Serialized::defaults(Written::default()));
        if let Some(path) = file {
            if !path.is_file() {
                return Err(Error::Usage(format!(
                    "the configuration file {} is not there",
                    path.display()
                )));
            }
            figment = figment.merge(Toml::file_exact(path));
        }
        let figment = figment
            // The keys are secrets: they are never printed and are read where they are used.
            .merge(environment(
                Env::prefixed("BRAIN_")
                    .ignore(&["config", "api_keys"])
                    .iter()
                    .map(|(name, text)| (name.into_string(), text)),
            ))
            .merge(Given("command line", flags.given()));
        let written = figment
            .extract()
            .map_err(|error| Error::Usage(describe(&error)))?;
        Ok(Self { written, figment })
    }

    /// One line a setting: `name = value  # origin`.
    pub fn describe(&self) -> Result<String, Error> {
        let all: Dict = self
            .figment
            .extract()
            .map_err(|error| Error::Usage(describe(&error)))?;
        let mut lines = String::new();
        for (name, value) in all {
            let shown = serde_json::to_string(&value).unwrap_or_default();
            let origin = self
                .figment
                .find_metadata(&name)
                .filter(|found| !found.name.contains("::"))
                .map_or_else(|| "default".to_owned(), |found| origin(found, &name));
            lines.push_str(&format!("{name} = {shown}  # {origin}\n"));
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests;
