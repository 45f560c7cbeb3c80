use clap::Parser as _;

use super::*;
use crate::cli::{Cli, Command};

fn load(flags: &[&str]) -> Result<Loaded, Error> {
    let cli = Cli::parse_from(["brain", "serve"].iter().chain(flags));
    let Command::Serve(args) = cli.command else {
        panic!("not serve")
    };
    Loaded::new(args.config.as_deref(), &args.settings)
}

fn check(flags: &[&str]) -> Result<Config, Error> {
    load(flags)?.check()
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("brain.toml");
    std::fs::write(&file, "threads = 3\nmax_num_seqs = 4\ndraft_tokens = 5\n").unwrap();
    let path = file.to_str().unwrap();
    let loaded = load(&["--config", path, "--threads", "7"]).unwrap();
    let config = loaded.check().unwrap();
    assert_eq!((config.threads, config.max_num_seqs), (7, 4));
    assert_eq!(config.draft_tokens, DraftTokens::Fixed(5));
    let text = loaded.describe().unwrap();
    assert!(text.contains("threads = 7  # command line\n"), "{text}");
    assert!(
        text.contains(&format!("max_num_seqs = 4  # {path}\n")),
        "{text}"
    );
    assert!(
        text.contains("grpc_addr = \"127.0.0.1:7411\"  # default\n"),
        "{text}"
    );
    let all = serde_json::to_value(Written::default()).unwrap();
    let count = all.as_object().unwrap().len();
    assert_eq!(text.lines().count(), count, "{text}");
}

#[test]
fn wrong_settings_are_named_with_their_origin() {
    for (flags, expected) in [
        (
            ["--device", "gpu"],
            "setting device (command line): \"gpu\" is not one of auto, cpu, cuda, cuda:N, fake",
        ),
        (
            ["--cpus", "0-"],
            "setting cpus (command line): \"0-\" is neither",
        ),
        (
            ["--grpc-addr", "nowhere"],
            "setting grpc_addr (command line): `nowhere` is no address",
        ),
        (
            ["--draft-tokens", "many"],
            "setting draft_tokens (command line): \"many\" is neither",
        ),
        (
            ["--lease", "soon"],
            "setting lease (command line): \"soon\" is no time",
        ),
        (
            ["--lease", "0s"],
            "setting lease (command line): \"0s\" is too short: give 1s or more",
        ),
        (
            ["--snapshot-interval", "9ms"],
            "setting snapshot_interval (command line): \"9ms\" is too short: give 10ms or more",
        ),
        (
            ["--response-lease", "999ms"],
            "setting response_lease (command line): \"999ms\" is too short",
        ),
        (
            ["--snapshot-quota", "auto"],
            "setting snapshot_quota (command line): \"auto\" is no size: write 512MiB",
        ),
        (
            ["--kv-cache-memory", "7 apples"],
            "setting kv_cache_memory (command line): \"7 apples\" is no size",
        ),
        (
            ["--kv-cache-dtype", "fp8_e5m2"],
            "setting kv_cache_dtype (command line): \"fp8_e5m2\" is not one of auto",
        ),
        (
            ["--max-num-seqs", "0"],
            "setting max_num_seqs (command line): must be from 1 to 4096, it is 0",
        ),
        (
            ["--max-num-seqs", "4000000000"],
            "setting max_num_seqs (command line): must be from 1 to 4096",
        ),
        (
            ["--max-num-batched-tokens", "70000"],
            "setting max_num_batched_tokens (command line): must be from 1 to 65536",
        ),
        (
            ["--log-format", "xml"],
            "setting log_format (command line): log format `xml`",
        ),
        (
            ["--tls-cert", "a.pem"],
            "TLS needs a certificate and its key",
        ),
        (
            ["--config", "/nowhere.toml"],
            "the configuration file /nowhere.toml is not there",
        ),
    ] {
        let error = check(&flags).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(error.code(), 2);
    }
}

#[test]
fn a_misspelled_setting_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("brain.toml");
    std::fs::write(&file, "thread = 3\n").unwrap();
    let error = load(&["--config", file.to_str().unwrap()])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("thread") && error.contains("brain.toml"),
        "{error}"
    );
}

#[test]
fn sizes_and_names() {
    assert_eq!(
        check(&["--kv-cache-memory", "512MiB"])
            .unwrap()
            .kv_cache_bytes,
        Some(512 << 20)
    );
    assert_eq!(
        check(&["--kv-cache-memory", "4096"])
            .unwrap()
            .kv_cache_bytes,
        Some(4096)
    );
    let kv = |size| check(&["--kv-cache-memory", size]).unwrap().kv_cache_bytes;
    assert_eq!((kv("24GB"), kv("auto")), (Some(24_000_000_000), None));
    let quota = |size| check(&["--snapshot-quota", size]).unwrap().snapshot_quota;
    assert_eq!((quota("1TiB"), quota("1.5G")), (1 << 40, 3 << 29));
    assert_eq!(
        check(&["--kv-cache-dtype", "fp8_e4m3"])
            .unwrap()
            .kv_cache_dtype,
        KvChoice::Fp8
    );
    assert_eq!(check(&[]).unwrap().kv_cache_dtype, KvChoice::Auto);
    assert_eq!(check(&[]).unwrap().name, "demo");
    let hub = check(&["--model", "google/gemma-4-E4B-it@main"]).unwrap();
    assert_eq!(hub.name, "google/gemma-4-E4B-it");
    assert!(matches!(hub.model, Model::Hub(_)));
    let here = check(&["--model", "src/text"]).unwrap();
    assert_eq!(
        (here.name.as_str(), here.model),
        ("text", Model::Dir("src/text".into()))
    );
    let neither = check(&["--model", "google/gemma 4"])
        .unwrap_err()
        .to_string();
    assert!(neither.contains("is no folder here, and"), "{neither}");
    assert_eq!(
        check(&["--model", "/models/gemma 4"]).unwrap().name,
        "gemma-4"
    );
    assert_eq!(
        check(&["--draft-tokens", "0"]).unwrap().draft_tokens,
        DraftTokens::Off
    );
}
