//! Models by name: what is fetched, what survives cut connections, and every refusal, against a
//! stand-in of the hub on loopback.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "support/hub.rs"]
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

#[tokio::test]
async fn what_brain_needs_is_fetched_once() {
    let hub = StandIn::start(scene(&[(MODEL, target())])).await;
    let user = User::new(&hub.endpoint());
    let pulled = user.pull(MODEL).await.unwrap();
    assert_eq!(
        names(&pulled.folder),
        [
            "README.md",
            "chat_template.jinja",
            "config.json",
            "model-1.safetensors",
            "model-2.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json"
        ]
    );
    assert_eq!(
        std::fs::read(pulled.folder.join("model-2.safetensors")).unwrap(),
        weights(2)
    );
    assert_eq!(hub.store_requests(), [(None, false), (None, false)]);
    // The layout that Python's library reads.
    assert_eq!(
        std::fs::read_link(pulled.folder.join("model-1.safetensors")).unwrap(),
        Path::new("../../blobs").join(sha256(&weights(1)))
    );
    assert!(user.blobs().join(git_hash(b"{}")).is_file());
    let refs = user.blobs().with_file_name("refs");
    assert_eq!(std::fs::read_to_string(refs.join("main")).unwrap(), COMMIT);

    assert_eq!(user.pull(MODEL).await.unwrap(), pulled);
    assert_eq!(hub.store_requests(), []);
    // A whole commit in the cache needs no question.
    let pinned = user.pull(&format!("{MODEL}@{COMMIT}")).await.unwrap();
    assert_eq!(pinned, pulled);
    assert!(hub.scene().seen.is_empty());
}

#[tokio::test]
async fn a_cut_connection_goes_on_where_it_was_cut() {
    let mut repository = target();
    repository.files.remove("model.safetensors.index.json");
    repository
        .files
        .insert("model.safetensors".into(), weights(1));
    let hub = StandIn::start(Scene {
        // The second brings nothing; more cuts than attempts are fine while bytes come.
        cuts: vec![40_000, 0, 10_000, 10_000, 10_000, 10_000],
        ..scene(&[(MODEL, repository)])
    })
    .await;
    let user = User::new(&hub.endpoint());
    let pulled = user.pull(MODEL).await.unwrap();
    assert_eq!(
        std::fs::read(pulled.folder.join("model.safetensors")).unwrap(),
        weights(1)
    );
    let asked: Vec<_> = hub.store_requests().iter().map(|(from, _)| *from).collect();
    assert_eq!(asked[0], None);
    assert_eq!(asked.len(), 7, "{asked:?}");
    assert!(asked[1..].is_sorted(), "{asked:?}");
}

#[tokio::test]
async fn half_a_file_of_an_earlier_attempt_is_kept() {
    let hub = StandIn::start(scene(&[(MODEL, target())])).await;
    let user = User::new(&hub.endpoint());
    std::fs::create_dir_all(user.blobs()).unwrap();
    let put = |seed: u8, bytes: &[u8]| {
        let name = format!("{}.incomplete", sha256(&weights(seed)));
        std::fs::write(user.blobs().join(name), bytes).unwrap();
    };
    // The beginning of one, and something else in place of the other.
    put(1, &weights(1)[..60_000]);
    put(2, &weights(9)[..70_000]);
    let pulled = user.pull(MODEL).await.unwrap();
    for seed in [1, 2] {
        let file = pulled.folder.join(format!("model-{seed}.safetensors"));
        assert_eq!(std::fs::read(file).unwrap(), weights(seed));
    }
    let mut asked = hub.store_requests();
    asked.sort();
    assert_eq!(
        asked,
        [(None, false), (Some(60_000), false), (Some(70_000), false)]
    );
    assert!(
        !names(&user.blobs())
            .iter()
            .any(|name| name.ends_with("incomplete"))
    );
}

#[tokio::test]
async fn a_hub_without_ranges_sends_the_whole_again() {
    let hub = StandIn::start(Scene {
        cuts: vec![50_000, 50_000],
        no_ranges: true,
        busy: 2,
        ..scene(&[(MODEL, target())])
    })
    .await;
    let user = User::new(&hub.endpoint());
    let pulled = user.pull(MODEL).await.unwrap();
    assert_eq!(
        std::fs::read(pulled.folder.join("model-1.safetensors")).unwrap(),
        weights(1)
    );
}

#[tokio::test]
async fn a_damaged_file_is_never_kept() {
    let hub = StandIn::start(Scene {
        corrupt: true,
        ..scene(&[(MODEL, target())])
    })
    .await;
    let user = User::new(&hub.endpoint());
    let error = user.pull(MODEL).await.unwrap_err();
    assert!(matches!(error, HubError::Damaged { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("safetensors of google/gemma-test-it came damaged (its hash is"),
        "{text}"
    );
    for seed in [1, 2] {
        assert!(!user.blobs().join(sha256(&weights(seed))).exists());
    }
    hub.scene().corrupt = false;
    user.pull(MODEL).await.unwrap();

    // Longer than announced.
    let user = User::new(&hub.endpoint());
    hub.scene().announced_size = Some(99_000);
    let error = user.refused(MODEL).await;
    assert!(error.contains("longer than 99000 bytes"), "{error}");
    // Shorter than announced: cut, whatever the hash.
    hub.scene().announced_size = Some(100_001);
    let error = user.refused(MODEL).await;
    assert!(error.contains("cannot fetch"), "{error}");
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let mut gated = target();
    gated.gated = true;
    let mut headless = target();
    headless.files.remove("tokenizer.json");
    let mut half = target();
    half.files.remove("model-2.safetensors");
    let mut broken = target();
    broken
        .files
        .insert("assistant/config.json".into(), b"{}".to_vec());
    let mut escaping = target();
    escaping.files.insert(
        "model.safetensors.index.json".into(),
        br#"{"weight_map": {"a": "../../x"}}"#.to_vec(),
    );
    let hub = StandIn::start(Scene {
        token: Some("good".into()),
        ..scene(&[
            (MODEL, target()),
            ("o/gated", gated),
            ("o/headless", headless),
            ("o/half", half),
            ("o/broken", broken),
            ("o/escaping", escaping),
        ])
    })
    .await;
    let open = User::new(&hub.endpoint());
    let known = User::new(&hub.endpoint()).with("HF_TOKEN", "good");
    let wrong = User::new(&hub.endpoint()).with("HF_TOKEN", "bad");
    let endpoint = hub.endpoint();
    for (user, name, expected) in [
        (
            &open,
            "o/nothing",
            format!(
                "{endpoint} has no model o/nothing, or it is private and needs an access token in HF_TOKEN: check the name"
            ),
        ),
        (
            &known,
            "o/nothing",
            format!("{endpoint} has no model o/nothing, or the access token may not see it"),
        ),
        (
            &open,
            "google/gemma-test-it@v9",
            "has no revision \"v9\"".into(),
        ),
        (
            &open,
            "o/gated",
            format!(
                "o/gated is gated: accept its licence at {endpoint}/o/gated, make an access token, and set HF_TOKEN"
            ),
        ),
        (
            &wrong,
            MODEL,
            format!("{endpoint} refuses the access token for {MODEL}: Invalid credentials"),
        ),
        (
            &open,
            "o/headless",
            "o/headless holds no tokenizer.json".into(),
        ),
        (
            &open,
            "o/half",
            "o/half holds no model-2.safetensors".into(),
        ),
        (
            &open,
            "o/broken",
            "o/broken holds no assistant/model.safetensors".into(),
        ),
        (
            &open,
            "o/escaping",
            "\"../../x\" is not a plain file name".into(),
        ),
    ] {
        let error = user.refused(name).await;
        assert!(error.contains(&expected), "{name}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(
            !error.contains("good") && !error.contains("bad "),
            "{error}"
        );
    }
    // With the right token the gated one comes, and the token goes to the hub alone.
    hub.scene().seen.clear();
    known.pull("o/gated").await.unwrap();
    assert!(
        hub.store_requests()
            .iter()
            .all(|(_, authorised)| !authorised)
    );
}

#[tokio::test]
async fn what_is_no_hub_is_said_so() {
    let hub = StandIn::start(Scene {
        page: Some("<html>Log in to the hotel's network</html>"),
        ..Scene::default()
    })
    .await;
    let error = User::new(&hub.endpoint()).refused(MODEL).await;
    assert!(
        error.contains("does not answer as a model hub does"),
        "{error}"
    );
    assert!(error.ends_with("check HF_ENDPOINT"), "{error}");
}

#[tokio::test]
async fn without_a_network_the_cache_is_enough() {
    let hub = StandIn::start(scene(&[(MODEL, target())])).await;
    let mut user = User::new(&hub.endpoint());
    let pulled = user.pull(MODEL).await.unwrap();
    hub.stop().await;
    let again = user.pull(MODEL).await.unwrap();
    assert_eq!(
        (again.folder, again.from_cache),
        (pulled.folder.clone(), true)
    );
    assert!(
        user.said().contains("as it is in the cache"),
        "{}",
        user.said()
    );
    let error = user.refused("google/another").await;
    assert!(
        error.starts_with("cannot fetch http://127.0.0.1:"),
        "{error}"
    );
    assert!(error.contains("give a folder"), "{error}");

    user.set("HF_HUB_OFFLINE", "1");
    assert_eq!(user.pull(MODEL).await.unwrap().folder, pulled.folder);
    std::fs::remove_file(user.blobs().join(sha256(&weights(2)))).unwrap();
    let error = user.refused(MODEL).await;
    assert!(
        error.contains("(model-2.safetensors is not there)"),
        "{error}"
    );
    assert!(
        error.contains("run `brain pull google/gemma-test-it`"),
        "{error}"
    );
    let error = user.refused("google/another").await;
    assert!(error.contains("(revision main is not there)"), "{error}");
}

#[tokio::test]
async fn a_full_disk_is_noticed_before_and_while() {
    let hub = StandIn::start(Scene {
        announced_size: Some(1 << 60),
        ..scene(&[(MODEL, target())])
    })
    .await;
    let user = User::new(&hub.endpoint());
    let error = user.refused(MODEL).await;
    assert!(
        error.contains("2048.0 PiB are needed: make room, or set HF_HOME"),
        "{error}"
    );
    assert_eq!(hub.store_requests(), []);

    hub.scene().announced_size = None;
    let full = user
        .blobs()
        .join(format!("{}.incomplete", sha256(&weights(1))));
    std::os::unix::fs::symlink("/dev/full", full).unwrap();
    let error = user.pull(MODEL).await.unwrap_err();
    assert!(matches!(error, HubError::DiskFull { .. }), "{error}");
}

#[tokio::test]
async fn a_drafter_is_found_by_name_by_card_or_not_at_all() {
    let mut quantised = target();
    quantised.files.insert(
        "README.md".into(),
        format!("---\nbase_model:\n- {MODEL}\n---\n").into_bytes(),
    );
    let mut complete = target();
    for (name, bytes) in drafter().files {
        complete.files.insert(format!("assistant/{name}"), bytes);
    }
    let hub = StandIn::start(scene(&[
        (MODEL, target()),
        (DRAFTER, drafter()),
        ("o/quantised", quantised),
        ("o/complete", complete),
        ("o/alone", target()),
    ]))
    .await;
    let mut user = User::new(&hub.endpoint());
    let named = user.drafter(MODEL).await.unwrap().unwrap();
    assert_eq!(names(&named), ["config.json", "model.safetensors"]);
    assert_eq!(
        user.drafter("o/quantised").await.unwrap(),
        Some(named.clone())
    );
    let inside = user.drafter("o/complete").await.unwrap().unwrap();
    assert_eq!(names(&inside), ["config.json", "model.safetensors"]);
    assert_eq!(user.drafter("o/alone").await.unwrap(), None);
    assert!(
        user.said()
            .contains("no drafter for o/alone: o/alone-assistant is not on the hub"),
        "{}",
        user.said()
    );

    // One that is there and cannot be had is no reason to do without.
    hub.scene().repositories.get_mut(DRAFTER).unwrap().gated = true;
    let other = User::new(&hub.endpoint());
    let error = other.drafter(MODEL).await.unwrap_err();
    assert!(matches!(error, HubError::Gated { .. }), "{error}");

    user.set("HF_HUB_OFFLINE", "1");
    assert_eq!(user.drafter(MODEL).await.unwrap(), Some(named));
    assert_eq!(user.drafter("o/alone").await.unwrap(), None);
}

#[tokio::test]
async fn two_programs_fetch_a_file_once() {
    let hub = StandIn::start(scene(&[(MODEL, target())])).await;
    let user = User::new(&hub.endpoint());
    let (one, two) = tokio::join!(user.pull(MODEL), user.pull(MODEL));
    assert_eq!(one.unwrap(), two.unwrap());
    assert_eq!(hub.store_requests().len(), 2);
}

/// The demonstration model as the hub would hold it.
fn demo() -> Scene {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let read = |folder: &str| {
        let names = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model.safetensors",
        ];
        let files = names.into_iter().filter_map(|name| {
            let bytes = std::fs::read(assets.join(folder).join(name)).ok()?;
            Some((name.to_owned(), bytes))
        });
        Repository {
            commit: COMMIT.into(),
            files: files.collect(),
            gated: false,
        }
    };
    scene(&[(MODEL, read(".")), (DRAFTER, read("assistant"))])
}

/// Runs brain with nothing in its environment but these.
async fn brain(arguments: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_brain"));
    command.args(arguments).env_clear();
    for (name, value) in variables {
        command.env(name, value);
    }
    command.kill_on_drop(true).output().await.unwrap()
}

#[tokio::test]
async fn the_program_fetches_a_model_and_serves_it_offline() {
    let hub = StandIn::start(demo()).await;
    let home = tempfile::tempdir().unwrap();
    let home = home.path().to_str().unwrap();
    let endpoint = hub.endpoint();
    let variables = [("HF_HOME", home), ("HF_ENDPOINT", &endpoint)];
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();

    let pulled = brain(&["pull", MODEL], &variables).await;
    let said = text(&pulled.stderr);
    assert_eq!(pulled.status.code(), Some(0), "{said}");
    let folder = PathBuf::from(text(&pulled.stdout).trim_end());
    assert!(folder.join("model.safetensors").is_file(), "{folder:?}");
    assert!(said.contains("its drafter is in "), "{said}");

    hub.stop().await;
    let offline = [("HF_HOME", home), ("HF_HUB_OFFLINE", "1")];
    let ask = [
        "--prompt",
        "List the files.",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
    ];
    let by_name = brain(
        &[&["generate", "--model", MODEL], &ask[..]].concat(),
        &offline,
    )
    .await;
    let built_in = brain(&[&["generate"], &ask[..]].concat(), &[]).await;
    assert_eq!(by_name.status.code(), Some(0), "{}", text(&by_name.stderr));
    assert_eq!(text(&by_name.stdout), text(&built_in.stdout));

    let missing = brain(
        &["generate", "--model", "google/none", "--prompt", "x"],
        &offline,
    )
    .await;
    assert_eq!(missing.status.code(), Some(3));
    let error = text(&missing.stderr);
    assert!(error.contains("run `brain pull google/none`"), "{error}");
    let wrong = brain(&["pull", "gemma"], &[]).await;
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("write OWNER/NAME"));
}

#[tokio::test]
async fn a_broken_drafter_is_never_done_without_silently() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir_all(model.join("assistant")).unwrap();
    for (name, bytes) in &demo().repositories[MODEL].files {
        std::fs::write(model.join(name), bytes).unwrap();
    }
    let model = model.to_str().unwrap();
    let ask = ["--prompt", "x", "--max-tokens", "1"];
    let broken = brain(&[&["generate", "--model", model], &ask[..]].concat(), &[]).await;
    assert_eq!(broken.status.code(), Some(3));
    let error = String::from_utf8(broken.stderr).unwrap();
    assert!(error.contains("assistant"), "{error}");
    let without = [
        &["generate", "--model", model, "--drafter", "none"],
        &ask[..],
    ]
    .concat();
    assert_eq!(brain(&without, &[]).await.status.code(), Some(0));
}
