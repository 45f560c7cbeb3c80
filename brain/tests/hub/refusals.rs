//! Every refusal, and what it says to do.

use super::*;

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
            "\"../../x\", which is not a plain file name".into(),
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
    assert!(matches!(error, HubError::Full { .. }), "{error}");
    let said = error.to_string();
    assert!(
        said.contains(" is full with ") && said.contains(" still to come: make room"),
        "{said}"
    );
}
