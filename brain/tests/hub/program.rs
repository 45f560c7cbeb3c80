//! The program itself: by name, offline, and with a broken drafter.

use super::*;

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
    // A service's folder is no business of one answer's.
    let snapshots = Path::new(home).join("snapshots");
    let with_folder = [("BRAIN_SNAPSHOT_DIR", snapshots.to_str().unwrap())];
    let built_in = brain(&[&["generate"], &ask[..]].concat(), &with_folder).await;
    assert!(!snapshots.exists());
    assert_eq!(by_name.status.code(), Some(0), "{}", text(&by_name.stderr));
    assert_eq!(text(&by_name.stdout), text(&built_in.stdout));

    let hot = ["generate", "--prompt", "x", "--temperature", "5"];
    let hot = brain(&hot, &[]).await;
    assert_eq!(hot.status.code(), Some(2), "as of every other request");
    assert!(
        text(&hot.stderr).contains("from 0 to 2"),
        "{}",
        text(&hot.stderr)
    );

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
