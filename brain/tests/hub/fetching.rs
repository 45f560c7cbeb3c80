//! What is fetched, what survives a cut connection, and whose drafter is found.

use super::*;

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
async fn a_hub_that_never_comes_further_is_given_up() {
    let hub = StandIn::start(Scene {
        cuts: vec![50_000; 100],
        wrong_ranges: true,
        ..scene(&[(MODEL, target())])
    })
    .await;
    let user = User::new(&hub.endpoint());
    let error = user.pull(MODEL).await.unwrap_err();
    assert!(matches!(error, HubError::Network { .. }), "{error}");
    // Four files at a time, each asked for as often as patience says.
    let asked = hub.store_requests().len();
    assert!(asked <= 4 * 6, "{asked} requests");
}

#[tokio::test]
async fn what_is_no_file_in_the_cache_is_not_waited_for() {
    let hub = StandIn::start(scene(&[(MODEL, target())])).await;
    let user = User::new(&hub.endpoint());
    std::fs::create_dir_all(user.blobs()).unwrap();
    let pipe = user
        .blobs()
        .join(format!("{}.incomplete", sha256(&weights(1))));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let error = user.pull(MODEL).await.unwrap_err().to_string();
    assert!(error.contains("it is a named pipe, not a file"), "{error}");
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
