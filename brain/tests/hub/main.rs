//! Models by name: what is fetched, what survives cut connections, and every refusal, against a
//! stand-in of the hub on loopback.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod fetching;
mod program;
mod refusals;
#[path = "../support/hub.rs"]
mod stand_in;

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use brain::hub::{
    HubError, HubSettings, ModelName,
    client::Patience,
    files::Part,
    progress::Progress,
    pull::{Hub, Pulled},
};
use stand_in::{Repository, Scene, StandIn, git_hash, sha256};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const MODEL: &str = "google/gemma-test-it";
const DRAFTER: &str = "google/gemma-test-it-assistant";

fn weights(seed: u8) -> Vec<u8> {
    (0..100_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed)
        .collect()
}

fn repository(files: &[(&str, &[u8])]) -> Repository {
    Repository {
        commit: COMMIT.into(),
        files: files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()))
            .collect(),
        gated: false,
    }
}

const INDEX: &[u8] = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;

fn target() -> Repository {
    repository(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{\"t\": 1}"),
        ("chat_template.jinja", b"{{ messages }}"),
        ("README.md", b"---\nlicense: x\n---\n"),
        ("model.safetensors.index.json", INDEX),
        ("model-1.safetensors", &weights(1)),
        ("model-2.safetensors", &weights(2)),
        ("consolidated.pth", b"not wanted"),
        ("images/a.png", b"not wanted"),
    ])
}

fn drafter() -> Repository {
    repository(&[
        ("config.json", b"{\"d\": 1}"),
        ("tokenizer.json", b"never used"),
        ("model.safetensors", &weights(3)),
    ])
}

fn scene(repositories: &[(&str, Repository)]) -> Scene {
    Scene {
        repositories: repositories
            .iter()
            .map(|(name, repository)| ((*name).to_owned(), repository.clone()))
            .collect(),
        ..Scene::default()
    }
}

/// One user of a hub.
struct User {
    home: tempfile::TempDir,
    said: Arc<Mutex<Vec<String>>>,
    variables: Vec<(&'static str, String)>,
}

impl User {
    fn new(endpoint: &str) -> Self {
        Self {
            home: tempfile::tempdir().unwrap(),
            said: Arc::default(),
            variables: vec![("HF_ENDPOINT", endpoint.to_owned())],
        }
    }

    fn with(mut self, variable: &'static str, value: &str) -> Self {
        self.set(variable, value);
        self
    }

    fn set(&mut self, variable: &'static str, value: &str) {
        self.variables.push((variable, value.to_owned()));
    }

    fn hub(&self) -> Hub {
        let settings = HubSettings::read(|name| match name {
            "HF_HOME" => Some(self.home.path().into()),
            name => {
                let set = self.variables.iter().find(|(set, _)| *set == name);
                set.map(|(_, value)| OsString::from(value))
            }
        });
        let patience = Patience {
            attempts: 3,
            first_wait: Duration::ZERO,
            ..Patience::default()
        };
        Hub::new(settings.unwrap(), patience).unwrap()
    }

    fn progress(&self) -> Progress {
        let said = self.said.clone();
        Progress::new(Box::new(move |text| {
            said.lock().unwrap().push(text.to_owned());
        }))
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().join("\n")
    }

    async fn pull(&self, name: &str) -> Result<Pulled, HubError> {
        let name: ModelName = name.parse().unwrap();
        self.hub().pull(&name, Part::Target, &self.progress()).await
    }

    async fn refused(&self, name: &str) -> String {
        self.pull(name).await.unwrap_err().to_string()
    }

    async fn drafter(&self, name: &str) -> Result<Option<PathBuf>, HubError> {
        let target = self.pull(name).await?;
        let name: ModelName = name.parse().unwrap();
        self.hub()
            .drafter_of(&name, &target, &self.progress())
            .await
    }

    fn blobs(&self) -> PathBuf {
        self.home
            .path()
            .join("hub/models--google--gemma-test-it/blobs")
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
