use super::*;
use crate::model::plan::KvSource;

fn base() -> Map<String, Value> {
    let json = serde_json::json!({
        "model_type": "gemma4_text", "vocab_size": 1000, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    });
    match json {
        Value::Object(map) => map,
        _ => unreachable!("written as an object"),
    }
}

fn with(changes: Value) -> Vec<u8> {
    let mut map = base();
    for (k, v) in changes.as_object().unwrap() {
        map.insert(k.clone(), v.clone());
    }
    serde_json::to_vec(&map).unwrap()
}

fn target(changes: Value) -> Plan {
    parse_target(&with(changes)).unwrap()
}

fn refused(changes: Value) -> String {
    parse_target(&with(changes)).unwrap_err().to_string()
}

#[test]
fn full_layers_have_their_own_geometry() {
    let plan = target(serde_json::json!({"num_global_key_value_heads": 2}));
    let kinds: Vec<Kind> = plan.layers.iter().map(|l| l.kind).collect();
    assert_eq!(kinds[..5], [Kind::Sliding; 5]);
    assert_eq!(kinds[5], Kind::Full, "every sixth layer by default");
    assert_eq!((plan.layers[0].head_dim, plan.layers[0].kv_heads), (256, 4));
    // Global heads count only where keys are values.
    assert_eq!((plan.layers[5].head_dim, plan.layers[5].kv_heads), (512, 4));
    let plan = target(serde_json::json!({
        "num_global_key_value_heads": 2, "attention_k_eq_v": true, "global_head_dim": 128,
    }));
    assert_eq!((plan.layers[5].head_dim, plan.layers[5].kv_heads), (128, 2));
    assert_eq!(plan.layers[5].kv, KvSource::Own { values_only: true });
    assert_eq!(plan.layers[0].kv, KvSource::Own { values_only: false });
}

#[test]
fn both_forms_of_the_geometry_mean_the_same() {
    let types = serde_json::json!(["sliding_attention", "full_attention", "full_attention"]);
    let old = target(serde_json::json!({
        "num_hidden_layers": 3, "layer_types": types, "global_head_dim": 512,
        "num_global_key_value_heads": 2, "attention_k_eq_v": true,
    }));
    let new = target(serde_json::json!({
        "num_hidden_layers": 3, "layer_types": types, "attention_k_eq_v": true,
        "per_layer_config": {
            "01": {"head_dim": 512, "num_key_value_heads": 2},
            "02": {"head_dim": 512, "num_key_value_heads": 2},
        },
    }));
    assert_eq!(old, new);
}

#[test]
fn nested_and_null_fields_are_read() {
    let text = base();
    let nested = serde_json::json!({
        "model_type": "gemma4", "text_config": text, "vision_config": {"hidden_size": 5},
    });
    let plan = parse_target(nested.to_string().as_bytes()).unwrap();
    assert_eq!(
        plan,
        target(serde_json::json!({"final_logit_softcapping": null}))
    );
    assert_eq!(
        (plan.softcap, plan.per_layer_input, plan.moe),
        (None, None, None)
    );
    assert_eq!(
        target(serde_json::json!({"final_logit_softcapping": 30.0})).softcap,
        Some(30.0)
    );
}

#[test]
fn a_value_of_the_wrong_kind_is_named_with_its_place() {
    let mut text = base();
    assert!(refused(serde_json::json!({"hidden_size": "wide"})).starts_with("hidden_size: "));
    let rope = serde_json::json!({"rope_parameters": {"full_attention": {"rope_theta": []}}});
    assert!(refused(rope).starts_with("rope_parameters.full_attention.rope_theta: "));
    text.insert(
        "layer_types".into(),
        serde_json::json!(["sliding_attention", 5]),
    );
    let nested = serde_json::json!({"model_type": "gemma4", "text_config": text});
    let error = parse_target(nested.to_string().as_bytes())
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("text_config.layer_types[1]: "), "{error}");
}

#[test]
fn shared_layers_read_the_last_owner_of_their_kind() {
    let types = ["sliding_attention", "full_attention"].repeat(3);
    let plan = target(serde_json::json!({
        "layer_types": types, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
    }));
    assert_eq!(plan.layers[4].kv, KvSource::Shared { owner: 2 });
    assert_eq!(plan.layers[5].kv, KvSource::Shared { owner: 3 });
    assert_eq!(
        (plan.layers[3].intermediate, plan.layers[4].intermediate),
        (96, 192)
    );
    assert_eq!(
        (plan.last_owner(Kind::Sliding), plan.last_owner(Kind::Full)),
        (Some(2), Some(3))
    );
    assert_eq!(plan.last_storing(), Some(3));
}

#[test]
fn the_last_layer_is_full_whatever_the_file_says() {
    let plan = target(serde_json::json!({"layer_types": vec!["sliding_attention"; 6]}));
    assert_eq!(plan.layers[5].kind, Kind::Full);
}

#[test]
fn rope_parameters_are_read_by_kind() {
    let plan = target(serde_json::json!({"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5,
                           "rope_theta": 70000.0, "factor": 2.0},
    }}));
    assert_eq!(
        plan.rope_sliding,
        Rope {
            theta: 5000.0,
            partial: 1.0,
            factor: 1.0
        }
    );
    assert_eq!(
        plan.rope_full,
        Rope {
            theta: 70000.0,
            partial: 0.5,
            factor: 2.0
        }
    );
    let plain = target(serde_json::json!({}));
    assert_eq!(
        plain.rope_full,
        Rope {
            theta: 1e6,
            partial: 0.25,
            factor: 1.0
        }
    );
}

#[test]
fn experts_need_all_their_sizes() {
    let moe = serde_json::json!({
        "enable_moe_block": true, "num_experts": 8, "top_k_experts": 2,
        "expert_intermediate_size": 20,
    });
    assert_eq!(
        target(moe.clone()).moe,
        Some(Moe {
            experts: 8,
            top_k: 2,
            intermediate: 20
        })
    );
    let mut missing = moe;
    missing["num_experts"] = Value::Null;
    assert!(refused(missing).contains("num_experts"));
}

#[test]
fn what_is_not_served_is_named() {
    for (changes, words) in [
        (serde_json::json!({"model_type": "llama"}), "llama"),
        (
            serde_json::json!({"hidden_activation": "silu"}),
            "hidden_activation",
        ),
        (
            serde_json::json!({"attention_bias": true}),
            "attention_bias",
        ),
        (
            serde_json::json!({"num_key_value_heads": 3}),
            "num_key_value_heads",
        ),
        (serde_json::json!({"head_dim": 7}), "head_dim"),
        (serde_json::json!({"head_dim": 2048}), "head_dim"),
        (serde_json::json!({"hidden_size": 0}), "hidden_size"),
        (
            serde_json::json!({"hidden_size": -1}),
            "hidden_size: invalid value",
        ),
        (serde_json::json!({"vocab_size": 1u64 << 40}), "vocab_size"),
        (
            serde_json::json!({"num_hidden_layers": 0}),
            "num_hidden_layers",
        ),
        (
            serde_json::json!({"layer_types": ["full_attention"]}),
            "layer_types",
        ),
        (
            serde_json::json!({"layer_types": ["x", "x", "x", "x", "x", "x"]}),
            "layer_types",
        ),
        (
            serde_json::json!({"num_kv_shared_layers": 6}),
            "num_kv_shared_layers",
        ),
        (
            serde_json::json!({"num_kv_shared_layers": 1, "layer_types": [
            "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
            "sliding_attention", "full_attention"]}),
            "num_kv_shared_layers",
        ),
        (
            serde_json::json!({"final_logit_softcapping": -3.0}),
            "final_logit_softcapping",
        ),
        (
            serde_json::json!({"use_bidirectional_attention": "all"}),
            "use_bidirectional_attention",
        ),
        (
            serde_json::json!({"per_layer_config": {"9": {}}}),
            "per_layer_config",
        ),
        (
            // Layers of a kind have one rotary embedding between them.
            serde_json::json!({"per_layer_config": {"3": {"head_dim": 128}}}),
            "heads of layer 3 have a size of 128, those of an earlier sliding_attention layer \
             one of 256",
        ),
        (serde_json::json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        (
            serde_json::json!({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
            "yarn",
        ),
    ] {
        let message = refused(changes.clone());
        assert!(message.contains(words), "{changes}: {message}");
    }
    assert!(
        parse_target(b"[")
            .unwrap_err()
            .to_string()
            .contains("not a model configuration")
    );
    assert!(
        parse_target(b"{}")
            .unwrap_err()
            .to_string()
            .contains("not served")
    );
}

/// What is a number in fp64 and none in fp32, which is what is computed with.
#[test]
fn numbers_are_checked_as_they_are_used() {
    let rope = |name: &str, n: f64| serde_json::json!({"rope_parameters": {"sliding_attention": {(name): n}}});
    for (changes, words) in [
        (serde_json::json!({"rms_norm_eps": 1e-60}), "rms_norm_eps"),
        (serde_json::json!({"rms_norm_eps": 1e-40}), "rms_norm_eps"),
        (
            serde_json::json!({"rms_norm_eps": 0.999_999_999_999}),
            "rms_norm_eps",
        ),
        (
            serde_json::json!({"final_logit_softcapping": 1e-50}),
            "final_logit_softcapping",
        ),
        (
            serde_json::json!({"final_logit_softcapping": 1e300}),
            "final_logit_softcapping",
        ),
        (rope("rope_theta", 1e300), "rope_parameters"),
        (rope("factor", 1e300), "rope_parameters"),
        (rope("factor", 1e-300), "rope_parameters"),
    ] {
        let message = refused(changes.clone());
        assert!(message.contains(words), "{changes}: {message}");
    }
}

#[test]
fn what_a_file_says_is_shown_safely() {
    let long = format!("\u{1b}[2J\n{}", "x".repeat(1 << 16));
    for changes in [
        serde_json::json!({"model_type": long}),
        serde_json::json!({"layer_types": [long, "x", "x", "x", "x", "x"]}),
        serde_json::json!({"hidden_activation": long}),
        serde_json::json!({"per_layer_config": {(long.as_str()): {}}}),
        serde_json::json!({"rope_parameters": {"full_attention": {"rope_type": long}}}),
        serde_json::json!({"vocab_size": long}),
    ] {
        let message = refused(changes);
        assert!(message.len() < 1000, "{message}");
        assert!(!message.contains(char::is_control), "{message:?}");
    }
    let assistant = serde_json::json!({
        "model_type": "gemma4_assistant", "backbone_hidden_size": long, "text_config": base(),
    });
    let message = parse_assistant(assistant.to_string().as_bytes())
        .unwrap_err()
        .to_string();
    assert!(
        message.len() < 1000 && !message.contains(char::is_control),
        "{message:?}"
    );
}

#[test]
fn assistants_are_read() {
    let text = Value::Object(base());
    let config = |changes: Value| {
        let mut json = serde_json::json!({
            "model_type": "gemma4_assistant", "backbone_hidden_size": 128, "text_config": text,
        });
        for (k, v) in changes.as_object().unwrap() {
            json[k] = v.clone();
        }
        parse_assistant(json.to_string().as_bytes())
    };
    let plain = config(serde_json::json!({})).unwrap();
    assert_eq!((plain.backbone, plain.head), (128, DraftHead::Dense));
    assert!(plain.text.layers.iter().all(|l| l.kv == KvSource::Target));
    let ordered = serde_json::json!({
        "use_ordered_embeddings": true, "num_centroids": 10, "centroid_intermediate_top_k": 3,
    });
    assert_eq!(
        config(ordered).unwrap().head,
        DraftHead::Centroids {
            count: 10,
            top_k: 3
        }
    );
    for (changes, words) in [
        (
            serde_json::json!({"model_type": "gemma4"}),
            "is a whole model (gemma4), not an MTP assistant",
        ),
        (
            serde_json::json!({"model_type": "llama"}),
            "\"llama\", another family of models, which is not served; expected gemma4_assistant",
        ),
        (
            serde_json::json!({"backbone_hidden_size": null}),
            "backbone_hidden_size",
        ),
        (serde_json::json!({"text_config": 3}), "text_config"),
        (
            serde_json::json!({"use_ordered_embeddings": true, "num_centroids": 7}),
            "num_centroids",
        ),
        (
            serde_json::json!({"use_ordered_embeddings": true, "num_centroids": 10,
            "centroid_intermediate_top_k": 11}),
            "centroid_intermediate_top_k",
        ),
    ] {
        let message = config(changes.clone()).unwrap_err().to_string();
        assert!(message.contains(words), "{changes}: {message}");
    }
}
