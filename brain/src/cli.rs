//! The command line: flags as typed. What they mean is in [`crate::config`].

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use figment::value::{Dict, Value};
use serde::Serialize;

use crate::{error::EXIT_CODES, quantize::layout::Format, vllm::VllmFlags};

/// Serves Gemma 4 with multi-token prediction over gRPC and HTTP.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a checkpoint until a signal ends it.
    ///
    /// When it serves, one line goes to standard output:
    /// `ready addr=ADDRESS model=NAME fingerprint=HASH http=ADDRESS`. Logs go to standard error. The first
    /// SIGTERM or SIGINT lets running generations end, the second ends everything at once.
    #[command(after_help = serve_help())]
    Serve(ServeArgs),
    /// Print one answer of the model, without a server.
    Generate(GenerateArgs),
    /// Measure prefill, decoding with and without drafts, batches, prefix reuse and a restart.
    ///
    /// Prints tables and a plot; writes bench.json, bench.md and bench.svg.
    Bench(BenchArgs),
    /// Fetch a model and its drafter from the hub; print the folder they are in.
    #[command(after_help = PULL_HELP)]
    Pull(PullArgs),
    /// Say what a checkpoint is: sizes, forms, memory, drafter, and every problem.
    ///
    /// Only headers and small files are read. The exit code is 3 when a problem was found.
    Inspect(InspectArgs),
    /// Write a checkpoint again in four or eight bits.
    ///
    /// Weights of the feed-forward blocks and the experts are encoded, those of attention if asked
    /// for; everything else is copied. The result has the layout of NVIDIA's ModelOpt. A run that
    /// was interrupted goes on when the same command is given again.
    Quantize(QuantizeArgs),
}

const SERVE_HELP: &str = "\
Every flag is also a setting of the configuration file (grpc_addr = \"…\") and a variable
(BRAIN_GRPC_ADDR). A flag wins over a variable, a variable over the file, the file over the
default.

Examples:
  brain serve                                    the built-in demonstration model
  brain serve --model /models/gemma-4-E4B-it     a checkpoint folder
  brain serve --model google/gemma-4-E4B-it      a model on the hub, fetched once
  brain serve --grpc-addr unix:/run/brain.sock   a socket instead of a port
  brain serve --print-config                     every setting and where it comes from";

fn serve_help() -> String {
    format!("{SERVE_HELP}\n\n{EXIT_CODES}")
}

const PULL_HELP: &str = "\
The files go to the cache that huggingface_hub uses, and what is there is not fetched again. A fetch
that was cut short goes on where it ended. These variables mean here what they mean there:

  HF_HOME, HF_HUB_CACHE   where the cache is
  HF_TOKEN                the access token (else the one that `hf auth login` stored)
  HF_ENDPOINT             another hub
  HF_HUB_OFFLINE=1        take everything from the cache

Examples:
  brain pull google/gemma-4-31B-it
  brain serve --model google/gemma-4-31B-it      fetches what is missing, too";

/// Flags of `brain pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// OWNER/NAME, or OWNER/NAME@REVISION for a branch, a tag or a commit.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The drafter to fetch with it: auto (the one that belongs to it), none, or OWNER/NAME.
    #[arg(long, value_name = "auto|none|NAME", default_value = "auto")]
    pub drafter: String,
}

/// Flags of `brain serve`.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// Configuration file (TOML); also BRAIN_CONFIG.
    #[arg(long, env = "BRAIN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print every setting with its origin, and end.
    #[arg(long)]
    pub print_config: bool,
    /// The settings.
    #[command(flatten)]
    pub settings: Settings,
    /// vLLM's flags.
    #[command(flatten)]
    pub vllm: VllmFlags,
}

/// Flags of `brain generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// What to ask.
    #[arg(long, short, value_name = "TEXT")]
    pub prompt: String,
    /// Instructions before it.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Take the prompt as it stands: no chat template, spelled special tokens count.
    #[arg(long)]
    pub raw: bool,
    /// Let the model think first.
    #[arg(long)]
    pub thinking: bool,
    /// Tokens of the answer, at most.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// 0 takes the likeliest token each time [default: the model's].
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// The same seed gives the same answer.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Configuration file (TOML); also BRAIN_CONFIG.
    #[arg(long, env = "BRAIN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The settings of `brain serve`; those of its server and its snapshot folder do nothing here.
    #[command(flatten)]
    pub settings: Settings,
}

/// Flags of `brain inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Checkpoint folder, or one safetensors file.
    #[arg(value_name = "DIR|FILE")]
    pub path: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// List every tensor and what it is used for.
    #[arg(long)]
    pub tensors: bool,
    /// The drafter's folder [default: the folder `assistant` of the checkpoint, if it is there].
    #[arg(long, value_name = "DIR")]
    pub drafter: Option<PathBuf>,
    /// Plan for a device with this memory, such as 96GiB.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse_flag)]
    pub gpu_memory: Option<u64>,
    /// The share of it that weights and cache may take.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    pub gpu_memory_utilization: f64,
    /// Tokens of a sequence in that plan [default: what the model was made for].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub max_model_len: Option<u64>,
}

/// Flags of `brain quantize`.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Checkpoint folder in bf16, fp16 or fp32.
    #[arg(value_name = "SOURCE")]
    pub source: PathBuf,
    /// New folder for the result.
    #[arg(value_name = "RESULT")]
    pub target: PathBuf,
    /// nvfp4 (4.5 bits a weight) or fp8 (8 bits and a scale per row).
    #[arg(long, value_name = "nvfp4|fp8", value_enum)]
    pub format: Format,
    /// What to do with the weights of attention [default: keep in nvfp4, quantize in fp8].
    #[arg(long, value_name = "keep|quantize", value_enum)]
    pub attention: Option<AttentionWeights>,
    /// Size of a file of the result.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = crate::size::parse_flag)]
    pub shard_size: u64,
    /// Threads; 0: one per core.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// Print the report as JSON; it is in the result as quantize_report.json as well.
    #[arg(long)]
    pub json: bool,
}

/// What to do with the weights of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AttentionWeights {
    /// Copy them.
    Keep,
    /// Encode them like the others.
    Quantize,
}

/// A part of `brain bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchPart {
    /// Prefill, and decoding with and without drafts, by length of context.
    Contexts,
    /// Several generations at a time.
    Batches,
    /// The next turn of a run.
    Reuse,
    /// Decoding while a prompt is computed.
    Stall,
    /// The next turn after a restart.
    Restart,
}

impl BenchPart {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Contexts,
        Self::Batches,
        Self::Reuse,
        Self::Stall,
        Self::Restart,
    ];
}

impl std::fmt::Display for BenchPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Contexts => "contexts",
            Self::Batches => "batches",
            Self::Reuse => "reuse",
            Self::Stall => "stall",
            Self::Restart => "restart",
        };
        f.write_str(name)
    }
}

/// Flags of `brain bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Tokens of context to measure at; those that the model cannot hold are left out.
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', default_values_t = [0, 1024, 4096, 16384, 50000])]
    pub contexts: Vec<usize>,
    /// Generations at a time to measure.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    pub batches: Vec<usize>,
    /// What is measured.
    #[arg(long, value_name = "PART,…", value_delimiter = ',', default_values_t = BenchPart::ALL)]
    pub parts: Vec<BenchPart>,
    /// Measure fixed depths too: so many drafts in every round.
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=8))]
    pub depths: Vec<u32>,
    /// Tokens of an answer.
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    pub tokens: u32,
    /// How often each is measured; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeats: usize,
    /// Measure as if the drafter were right this often: shares of rounds whose first, second, …
    /// draft is accepted, from 1 to 0 and never rising. Drafting and verifying cost what they cost.
    #[arg(long, value_name = "P1,P2,…", value_delimiter = ',')]
    pub synthetic_acceptance: Vec<f64>,
    /// Let the model go this far, beyond the context that it was trained for. What it says there
    /// means nothing; what it costs does.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub stretch_context: Option<u32>,
    /// Folder for the results.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Measure nothing: print how the second result file compares with the first.
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"])]
    pub compare: Vec<PathBuf>,
    /// Configuration file (TOML); also BRAIN_CONFIG.
    #[arg(long, env = "BRAIN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The settings of `brain serve`; those of its server and its snapshot folder do nothing here.
    #[command(flatten)]
    pub settings: Settings,
}

/// Settings given as flags; a flag that was not given is not there.
#[derive(Debug, Default, Args, Serialize)]
pub struct Settings {
    /// Checkpoint folder, OWNER/NAME[@REVISION] on the model hub (see `brain pull --help`), or
    /// `demo` for the built-in model [default: demo].
    #[arg(long, value_name = "DIR|NAME|demo")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Name that clients see [default: the folder's name, or OWNER/NAME].
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_model_name: Option<String>,
    /// Where to compute: auto (a card that can hold the model, else the processor), cpu, cuda, cuda:N,
    /// or fake (no model: tokens from a hash, for tests) [default: auto].
    #[arg(long, value_name = "auto|cpu|cuda[:N]|fake")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Address to serve gRPC on: IP:PORT, localhost:PORT or unix:PATH; port 0 takes a free one
    /// [default: 127.0.0.1:7411]. An address that other machines reach needs
    /// --token-file, --api-key-file or BRAIN_API_KEYS.
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc_addr: Option<String>,
    /// Address to serve HTTP on (OpenAI's and Anthropic's API): as --grpc-addr, or none, or auto
    /// (127.0.0.1:8000 if it is free) [default: auto]. An address that other machines reach needs
    /// --token-file, --api-key-file or BRAIN_API_KEYS.
    #[arg(long, value_name = "ADDR|auto|none")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_addr: Option<String>,
    /// File with the keys of callers, one a line, or `sha256:` and the hash of one; over gRPC and
    /// HTTP every call must carry one of these or the token. What a caller makes belongs to its key.
    /// BRAIN_API_KEYS holds further ones, separated by commas.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<String>,
    /// Folder that responses of /v1/responses are stored in; none are without it.
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_dir: Option<String>,
    /// How long a response stays stored [default: 24h].
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_lease: Option<String>,
    /// Origins of pages that may call over HTTP, separated by commas; * is all [default: none].
    #[arg(long, value_name = "ORIGINS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cors_origins: Option<String>,
    /// The MTP drafter: auto (the one that belongs to the model), none, or its folder or name
    /// [default: auto].
    #[arg(long, value_name = "auto|none|DIR|NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafter: Option<String>,
    /// Drafts per round unless a request says: auto, off, or a number [default: auto].
    #[arg(long, value_name = "N|auto|off")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_tokens: Option<String>,
    /// Prompt and answer together, in tokens, at most; 0: what the model was made for [default: 0].
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
    /// Generations computed at a time, at most [default: 16].
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_num_seqs: Option<usize>,
    /// Tokens computed in one step, at most [default: 256].
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_num_batched_tokens: Option<usize>,
    /// Memory for keys and values: a size such as 512MiB, or auto [default: auto]: enough for one
    /// sequence of full length beside all others at a moderate one, at most half of what is free.
    #[arg(long, value_name = "SIZE|auto")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_memory: Option<String>,
    /// How keys and values are stored: auto (fp8 where the checkpoint's configuration asks for it,
    /// else the numbers it is computed in), bf16, or fp8: E4M3 with the checkpoint's scales, or 1
    /// where it has none; half the memory [default: auto]. It changes the fingerprint.
    #[arg(long, value_name = "auto|bf16|fp8")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<String>,
    /// Memory of this machine for cached prompts that the device has no room for: a size, none, or
    /// auto: with a card a quarter of what is free, at most 16GiB, else none [default: auto].
    #[arg(long, value_name = "SIZE|auto|none")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_cache_memory: Option<String>,
    /// Share of a card's memory that weights, keys and values may take together [default: 0.9].
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_utilization: Option<f64>,
    /// Compute threads; 0: one per core [default: 0]. Cannot change a token.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Cores that compute threads are bound to, one each, as 0-3,8; with it `--threads 0` is one per
    /// core of the list [default: none is bound]. Of use where other programs compute on the machine.
    #[arg(long, value_name = "LIST")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// How long a generation that nobody reads is computed on and stays readable [default: 15m].
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// How long running generations may take to end after SIGTERM [default: 20s].
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<String>,
    /// Folder for snapshots: generations and cached prompts outlive this process, whatever ends it.
    /// Without one a restart computes prompts again.
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_dir: Option<String>,
    /// Disk space for cached prompts in it, at most, as 64GiB; the oldest go first [default: 16GiB].
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_quota: Option<String>,
    /// How often cached prompts are saved while brain works; at its end they always are
    /// [default: 10s].
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_interval: Option<String>,
    /// File with the bearer token that every call must carry; nobody else may read it.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<String>,
    /// TLS certificate (PEM); needs --tls-key.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<String>,
    /// TLS private key (PEM); needs --tls-cert.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<String>,
    /// Authority that clients' certificates must come from (PEM).
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_client_ca: Option<String>,
    /// Log level, or TARGET=LEVEL,… [default: info].
    #[arg(long, value_name = "LEVEL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// How log lines look: text or json [default: text].
    #[arg(long, value_name = "text|json")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_format: Option<String>,
    /// OTLP collector for traces and metrics, such as http://127.0.0.1:4317.
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub otlp_endpoint: Option<String>,
    /// Take special tokens that messages spell for what they spell, as transformers does: whoever
    /// writes the messages can then end turns and forge tool results [default: false].
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_special_tokens: Option<bool>,
    /// Least time of a step of the fake device, for tests that must catch it at work
    /// [default: 0s].
    #[arg(long, value_name = "TIME", hide = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fake_step_time: Option<String>,
    /// Steps after which the device breaks, a card or the fake one, for tests of what follows
    /// [default: 0, never].
    #[arg(long, value_name = "STEPS", hide = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_fault_after: Option<u64>,
}

impl Settings {
    /// The flags that were given.
    pub fn given(&self) -> Dict {
        match Value::serialize(self) {
            Ok(Value::Dict(_, dict)) => dict,
            _ => Dict::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_shows_the_exit_codes() {
        let mut command = Cli::command();
        command.clone().debug_assert();
        assert!(command.render_help().to_string().contains(EXIT_CODES));
        let serve = command.find_subcommand_mut("serve").unwrap();
        assert!(serve.render_help().to_string().contains(EXIT_CODES));
    }

    #[test]
    fn only_flags_that_were_given_are_settings() {
        let cli = Cli::parse_from(["brain", "serve", "--threads", "2", "--draft-tokens", "off"]);
        let Command::Serve(args) = cli.command else {
            panic!("not serve")
        };
        let given = args.settings.given();
        assert_eq!(
            given.keys().collect::<Vec<_>>(),
            ["draft_tokens", "threads"]
        );
    }
}
