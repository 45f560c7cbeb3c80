//! What is written in settings, checked and understood.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use marathon_proto::{net::ListenAddr, telemetry::LogFormat, tls::IdentityFiles};

use super::{Config, Device, DraftTokens, Drafter, Loaded, Model, cpus, layers::origin};
use crate::{
    error::Error,
    http::{HttpAddr, HttpOptions},
    hub::ModelName,
    model::kv_dtype::KvChoice,
    size,
};

/// The most drafts that a round may be asked to make.
const MAX_DRAFTS: u32 = 16;
/// The shortest lease.
const SECOND: Duration = Duration::from_secs(1);
/// The shortest time between two passes of saving.
const LEAST_INTERVAL: Duration = Duration::from_millis(10);

impl Loaded {
    /// Checks every setting.
    pub fn check(&self) -> Result<Config, Error> {
        let written = self.written.clone();
        let model = self.model(&written.model)?;
        // Memory for so many is taken at once, on every device.
        self.check_count("max_num_seqs", written.max_num_seqs, 4096)?;
        let rows = written.max_num_batched_tokens;
        self.check_count("max_num_batched_tokens", rows, 1 << 16)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cpus = self.cpus()?;
        Ok(Config {
            name: self.name(&model)?,
            model,
            device: self.device(&written.device)?,
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
            drafter: self.drafter(&written.drafter)?,
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
            gpu_memory_thousandths: self.memory_share(written.gpu_memory_utilization)?,
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

    fn model(&self, text: &str) -> Result<Model, Error> {
        match text {
            "demo" => Ok(Model::Demo),
            "" => Err(self.bad(
                "model",
                "is empty: give a checkpoint folder, OWNER/NAME, or demo",
            )),
            path => match self.hub_name("model", path)? {
                Some(name) => Ok(Model::Hub(name)),
                None => Ok(Model::Dir(path.into())),
            },
        }
    }

    /// Under which clients see the model.
    fn name(&self, model: &Model) -> Result<String, Error> {
        let name = match (self.written.served_model_name.as_str(), model) {
            ("", Model::Demo) => "demo".to_owned(),
            ("", Model::Dir(path)) => folder_name(path),
            ("", Model::Hub(name)) => name.repository().to_owned(),
            (name, _) => name.to_owned(),
        };
        match name.chars().any(|c| c.is_whitespace() || c.is_control()) {
            false => Ok(name),
            true => Err(self.bad("served_model_name", format!("{name:?} holds white space"))),
        }
    }

    fn device(&self, text: &str) -> Result<Device, Error> {
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            "fake" => Ok(Device::Fake),
            other => match other.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Ok(Device::Cuda(ordinal)),
                _ => {
                    let problem = format!("{other:?} is not one of auto, cpu, cuda, cuda:N, fake");
                    Err(self.bad("device", problem))
                }
            },
        }
    }

    fn drafter(&self, text: &str) -> Result<Drafter, Error> {
        match text {
            "auto" => Ok(Drafter::Auto),
            "none" => Ok(Drafter::None),
            "" => Err(self.bad(
                "drafter",
                "is empty: give auto, none, a folder or OWNER/NAME",
            )),
            path => match self.hub_name("drafter", path)? {
                Some(name) => Ok(Drafter::Hub(name)),
                None => Ok(Drafter::Dir(path.into())),
            },
        }
    }

    fn check_count(&self, field: &str, count: usize, most: usize) -> Result<(), Error> {
        match (1..=most).contains(&count) {
            true => Ok(()),
            false => Err(self.bad(field, format!("must be from 1 to {most}, it is {count}"))),
        }
    }

    /// In thousandths.
    fn memory_share(&self, share: f64) -> Result<u32, Error> {
        if share > 0.0 && share <= 1.0 {
            return Ok((share * 1000.0).round().max(1.0) as u32);
        }
        let problem = format!("must be above 0 and at most 1, it is {share}");
        Err(self.bad("gpu_memory_utilization", problem))
    }

    fn cpus(&self) -> Result<Vec<usize>, Error> {
        let (cpus, threads) = (&self.written.cpus, self.written.threads);
        let cpus = cpus::parse(cpus).map_err(|problem| self.bad("cpus", problem))?;
        if !cpus.is_empty() && threads > cpus.len() {
            let problem = format!("names {} cores for {threads} threads", cpus.len());
            return Err(self.bad("cpus", problem));
        }
        Ok(cpus)
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
