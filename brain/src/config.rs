//! Settings: flags over environment (`BRAIN_…`) over a TOML file over defaults.

mod cpus;
mod layers;

use std::{
    path::{Path, PathBuf},
    str::FromStr,
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
    cli::Settings,
    error::Error,
    http::{HttpAddr, HttpOptions},
    hub::ModelName,
    model::kv_dtype::KvChoice,
    size,
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

/// The most drafts that a round may be asked to make.
const MAX_DRAFTS: u32 = 16;
/// The shortest lease.
const SECOND: Duration = Duration::from_secs(1);
/// The shortest time between two passes of saving.
const LEAST_INTERVAL: Duration = Duration::from_millis(10);

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

    /// Checks every setting.
    pub fn check(&self) -> Result<Config, Error> {
        let written = self.written.clone();
        let model = match written.model.as_str() {
            "demo" => Model::Demo,
            "" => {
                return Err(self.bad(
                    "model",
                    "is empty: give a checkpoint folder, OWNER/NAME, or demo",
                ));
            }
            path => match self.hub_name("model", path)? {
                Some(name) => Model::Hub(name),
                None => Model::Dir(path.into()),
            },
        };
        let name = match (written.served_model_name.as_str(), &model) {
            ("", Model::Demo) => "demo".to_owned(),
            ("", Model::Dir(path)) => folder_name(path),
            ("", Model::Hub(name)) => name.repository().to_owned(),
            (name, _) => name.to_owned(),
        };
        if name.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(self.bad("served_model_name", format!("{name:?} holds white space")));
        }
        let device = match written.device.as_str() {
            "auto" => Device::Auto,
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda(0),
            "fake" => Device::Fake,
            other => match other.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Device::Cuda(ordinal),
                _ => {
                    let problem = format!("{other:?} is not one of auto, cpu, cuda, cuda:N, fake");
                    return Err(self.bad("device", problem));
                }
            },
        };
        let drafter = match written.drafter.as_str() {
            "auto" => Drafter::Auto,
            "none" => Drafter::None,
            "" => {
                return Err(self.bad(
                    "drafter",
                    "is empty: give auto, none, a folder or OWNER/NAME",
                ));
            }
            path => match self.hub_name("drafter", path)? {
                Some(name) => Drafter::Hub(name),
                None => Drafter::Dir(path.into()),
            },
        };
        // Memory for so many is taken at once, on every device.
        for (field, value, most) in [
            ("max_num_seqs", written.max_num_seqs, 4096),
            (
                "max_num_batched_tokens",
                written.max_num_batched_tokens,
                1 << 16,
            ),
        ] {
            if !(1..=most).contains(&value) {
                return Err(self.bad(field, format!("must be from 1 to {most}, it is {value}")));
            }
        }
        let share = written.gpu_memory_utilization;
        if !(share > 0.0 && share <= 1.0) {
            let problem = format!("must be above 0 and at most 1, it is {share}");
            return Err(self.bad("gpu_memory_utilization", problem));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cpus = cpus::parse(&written.cpus).map_err(|problem| self.bad("cpus", problem))?;
        if !cpus.is_empty() && written.threads > cpus.len() {
            let problem = format!("names {} cores for {} threads", cpus.len(), written.threads);
            return Err(self.bad("cpus", problem));
        }
        Ok(Config {
            model,
            name,
            device,
            grpc_addr: ListenAddr::from_str(&written.grpc_addr)
                .map_err(|error| self.bad("grpc_addr", error.to_string()))?,
            http: HttpOptions {
                addr: self.http_addr(&written.http_addr)?,
                response_dir: set(written.response_dir),
                response_lease: self.time_from(
                    "response_lease",
                    &written.response_lease,
                    SECOND,
                )?,
                cors_origins: self.origins(&written.cors_origins)?,
            },
            drafter,
            draft_tokens: self.draft_tokens(&written.draft_tokens.text())?,
            max_model_len: (written.max_model_len > 0).then_some(written.max_model_len),
            max_num_seqs: written.max_num_seqs,
            max_num_batched_tokens: written.max_num_batched_tokens,
            kv_cache_bytes: self.size("kv_cache_memory", &written.kv_cache_memory.text())?,
            kv_cache_dtype: KvChoice::from_str(&written.kv_cache_dtype)
                .map_err(|problem| self.bad("kv_cache_dtype", problem))?,
            host_cache_bytes: match &*written.host_cache_memory.text() {
                "none" => Some(0),
                size => self.size("host_cache_memory", size)?,
            },
            gpu_memory_thousandths: (share * 1000.0).round().max(1.0) as u32,
            threads: match written.threads {
                0 if cpus.is_empty() => cores,
                0 => cpus.len(),
                threads => threads,
            },
            cpus,
            lease: self.time_from("lease", &written.lease, SECOND)?,
            drain: self.time("drain", &written.drain)?,
            snapshot_dir: set(written.snapshot_dir),
            snapshot_quota: self.given_size("snapshot_quota", &written.snapshot_quota.text())?,
            snapshot_interval: self.time_from(
                "snapshot_interval",
                &written.snapshot_interval,
                LEAST_INTERVAL,
            )?,
            token_file: set(written.token_file),
            api_key_file: set(written.api_key_file),
            identity: IdentityFiles::from_options(set(written.tls_cert), set(written.tls_key))
                .map_err(|error| Error::Usage(error.to_string()))?,
            client_ca: set(written.tls_client_ca),
            log: written.log,
            log_format: LogFormat::from_str(&written.log_format)
                .map_err(|error| self.bad("log_format", error.to_string()))?,
            otlp_endpoint: Some(written.otlp_endpoint).filter(|url| !url.is_empty()),
            trust_special_tokens: written.trust_special_tokens,
            fake_step_time: self.time("fake_step_time", &written.fake_step_time)?,
            device_fault_after: Some(written.device_fault_after).filter(|steps| *steps > 0),
        })
    }

    /// The repository that a setting names, if it names none of this machine's folders.
    fn hub_name(&self, field: &str, text: &str) -> Result<Option<ModelName>, Error> {
        if Path::new(text).exists() || !ModelName::looks_like(text) {
            return Ok(None);
        }
        let name = text.parse().map_err(|error: crate::hub::name::NameError| {
            self.bad(field, format!("{text:?} is no folder here, and {error}"))
        })?;
        Ok(Some(name))
    }

    fn http_addr(&self, text: &str) -> Result<HttpAddr, Error> {
        match text {
            "auto" => Ok(HttpAddr::Auto),
            "none" => Ok(HttpAddr::None),
            addr => ListenAddr::from_str(addr)
                .map(HttpAddr::At)
                .map_err(|error| self.bad("http_addr", error.to_string())),
        }
    }

    /// Origins as browsers send them: a scheme, a host and perhaps a port.
    fn origins(&self, text: &str) -> Result<Vec<String>, Error> {
        let origins = text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty());
        origins
            .map(|origin| {
                let host = origin
                    .strip_prefix("http://")
                    .or_else(|| origin.strip_prefix("https://"));
                let plain = host.is_some_and(|host| {
                    !host.is_empty()
                        && !host.contains('/')
                        && host.bytes().all(|b| b.is_ascii_graphic())
                });
                if origin == "*" || plain {
                    return Ok(origin.to_owned());
                }
                let what = format!("{origin:?} is no origin: write https://HOST or *");
                Err(self.bad("cors_origins", what))
            })
            .collect()
    }

    fn draft_tokens(&self, text: &str) -> Result<DraftTokens, Error> {
        match (text, text.parse::<u32>()) {
            ("auto", _) => Ok(DraftTokens::Auto),
            ("off", _) | (_, Ok(0)) => Ok(DraftTokens::Off),
            (_, Ok(drafts)) if drafts <= MAX_DRAFTS => Ok(DraftTokens::Fixed(drafts)),
            _ => Err(self.bad(
                "draft_tokens",
                format!("{text:?} is neither auto nor off nor a number up to {MAX_DRAFTS}"),
            )),
        }
    }

    fn time(&self, field: &str, text: &str) -> Result<Duration, Error> {
        humantime::parse_duration(text)
            .map_err(|_| self.bad(field, format!("{text:?} is no time: write 90s, 15m or 2h")))
    }

    /// A time after which something is done again and again.
    fn time_from(&self, field: &str, text: &str, least: Duration) -> Result<Duration, Error> {
        let time = self.time(field, text)?;
        if time < least {
            let least = humantime::format_duration(least);
            return Err(self.bad(
                field,
                format!("{text:?} is too short: give {least} or more"),
            ));
        }
        Ok(time)
    }

    /// `None` for `auto`.
    fn size(&self, field: &str, text: &str) -> Result<Option<u64>, Error> {
        match text {
            "auto" => Ok(None),
            _ => size::parse(text).map(Some).ok_or_else(|| {
                let what = "is no size: write auto, 512MiB or 8GiB";
                self.bad(field, format!("{text:?} {what}"))
            }),
        }
    }

    /// The same where nothing is chosen.
    fn given_size(&self, field: &str, text: &str) -> Result<u64, Error> {
        size::parse(text).ok_or_else(|| {
            let what = "is no size: write 512MiB or 8GiB";
            self.bad(field, format!("{text:?} {what}"))
        })
    }

    fn bad(&self, field: &str, what: impl AsRef<str>) -> Error {
        let origin = self
            .figment
            .find_metadata(field)
            .filter(|found| !found.name.contains("::"))
            .map(|found| format!(" ({})", origin(found, field)))
            .unwrap_or_default();
        Error::Usage(format!("setting {field}{origin}: {}", what.as_ref()))
    }
}

fn set(path: PathBuf) -> Option<PathBuf> {
    (!path.as_os_str().is_empty()).then_some(path)
}

fn folder_name(path: &Path) -> String {
    let name = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = name.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().replace(char::is_whitespace, "-")
}

#[cfg(test)]
mod tests;
