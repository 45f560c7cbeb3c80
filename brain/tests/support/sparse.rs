//! Models of the released sizes without their weights: memory that is mapped and never read holds
//! every matrix, ones every vector. For measuring; a card fills the matrices with random numbers.

use brain::model::{
    LoadedDrafter, LoadedModel,
    checkpoint::Checkpoint,
    config,
    fingerprint::numbers,
    plan::{DraftPlan, KvSource, Plan},
    reading::Reading,
    weights,
};
use serde_json::{Value, json};

type Tensors = Vec<(String, Vec<usize>)>;

/// The configuration of a released model and of its assistant.
pub fn released(name: &str) -> (Value, Value) {
    let e4b = name == "e4b";
    let (hidden, layers, heads, kv, global, wide) = match name {
        "31b" => (5376, 60, 32, 16, Some(4), 21504),
        "26b" => (2816, 30, 16, 8, Some(2), 2112),
        _ => (2560, 42, 8, 2, None, 10240),
    };
    let kinds = |count: usize, every: usize| -> Vec<&str> {
        (1..=count)
            .map(|i| match i % every {
                0 => "full_attention",
                _ => "sliding_attention",
            })
            .collect()
    };
    let (window, positions) = if e4b { (512, 131_072) } else { (1024, 262_144) };
    let ropes = json!({
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25
        }
    });
    let text = |hidden: usize, wide: usize, heads: usize, kinds: Vec<&str>| {
        json!({
            "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": hidden,
            "intermediate_size": wide, "num_hidden_layers": kinds.len(),
            "num_attention_heads": heads, "num_key_value_heads": kv,
            "num_global_key_value_heads": global, "head_dim": 256, "global_head_dim": 512,
            "sliding_window": window, "max_position_embeddings": positions,
            "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 0, "tie_word_embeddings": true,
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
            "attention_k_eq_v": !e4b, "layer_types": kinds, "rope_parameters": ropes
        })
    };
    let mut target = text(hidden, wide, heads, kinds(layers, 6));
    if e4b {
        target["hidden_size_per_layer_input"] = 256.into();
        target["vocab_size_per_layer_input"] = 262_144.into();
        target["num_kv_shared_layers"] = 18.into();
    }
    if name == "26b" {
        target["enable_moe_block"] = true.into();
        target["num_experts"] = 128.into();
        target["top_k_experts"] = 8.into();
        target["moe_intermediate_size"] = 704.into();
    }
    let (small, small_wide) = if e4b { (256, 2048) } else { (1024, 8192) };
    let small_heads = if e4b { 4 } else { heads };
    let mut inner = text(small, small_wide, small_heads, kinds(4, 4));
    inner["final_logit_softcapping"] = Value::Null;
    inner["num_kv_shared_layers"] = 4.into();
    let assistant = json!({
        "model_type": "gemma4_assistant", "backbone_hidden_size": hidden,
        "use_ordered_embeddings": e4b, "num_centroids": 2048, "centroid_intermediate_top_k": 32,
        "text_config": inner
    });
    (target, assistant)
}

fn layers(plan: &Plan) -> Tensors {
    let mut all = Tensors::new();
    for (i, l) in plan.layers.iter().enumerate() {
        let mut add = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{i}.{name}"), shape.to_vec()));
        };
        let (h, q, kv) = (
            plan.hidden,
            plan.heads * l.head_dim,
            l.kv_heads * l.head_dim,
        );
        add("self_attn.q_proj.weight", &[q, h]);
        add("self_attn.o_proj.weight", &[h, q]);
        add("self_attn.q_norm.weight", &[l.head_dim]);
        if let KvSource::Own { values_only } = l.kv {
            add("self_attn.k_proj.weight", &[kv, h]);
            add("self_attn.k_norm.weight", &[l.head_dim]);
            if !values_only {
                add("self_attn.v_proj.weight", &[kv, h]);
            }
        }
        for norm in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ] {
            add(&format!("{norm}.weight"), &[h]);
        }
        add("mlp.gate_proj.weight", &[l.intermediate, h]);
        add("mlp.up_proj.weight", &[l.intermediate, h]);
        add("mlp.down_proj.weight", &[h, l.intermediate]);
        add("layer_scalar", &[1]);
        if let Some(p) = plan.per_layer_input {
            add("per_layer_input_gate.weight", &[p.dim, h]);
            add("per_layer_projection.weight", &[h, p.dim]);
            add("post_per_layer_input_norm.weight", &[h]);
        }
        if let Some(m) = plan.moe {
            add("router.proj.weight", &[m.experts, h]);
            add("router.scale", &[h]);
            add("router.per_expert_scale", &[m.experts]);
            add("experts.gate_up_proj", &[m.experts, 2 * m.intermediate, h]);
            add("experts.down_proj", &[m.experts, h, m.intermediate]);
            add("pre_feedforward_layernorm_2.weight", &[h]);
            add("post_feedforward_layernorm_1.weight", &[h]);
            add("post_feedforward_layernorm_2.weight", &[h]);
        }
    }
    all.push(("model.norm.weight".into(), vec![plan.hidden]));
    all.push((
        "model.embed_tokens.weight".into(),
        vec![plan.vocab, plan.hidden],
    ));
    all
}

fn target_tensors(plan: &Plan) -> Tensors {
    let mut all = layers(plan);
    if let Some(p) = plan.per_layer_input {
        let width = plan.layers.len() * p.dim;
        let mut add = |name: &str, shape: Vec<usize>| all.push((format!("model.{name}"), shape));
        add("embed_tokens_per_layer.weight", vec![p.vocab, width]);
        add(
            "per_layer_model_projection.weight",
            vec![width, plan.hidden],
        );
        add("per_layer_projection_norm.weight", vec![p.dim]);
    }
    all
}

fn assistant_tensors(plan: &DraftPlan, clusters: usize) -> Tensors {
    let (text, mut all) = (&plan.text, layers(&plan.text));
    let mut add = |name: &str, shape: Vec<usize>| all.push((name.to_owned(), shape));
    add(
        "pre_projection.weight",
        vec![text.hidden, 2 * plan.backbone],
    );
    add("post_projection.weight", vec![plan.backbone, text.hidden]);
    if clusters > 0 {
        add(
            "masked_embedding.centroids.weight",
            vec![clusters, text.hidden],
        );
        add("masked_embedding.token_ordering", vec![text.vocab]);
    }
    all
}

/// A file of such tensors in bf16, in memory; the mapping stays for the life of the process.
fn file(tensors: &Tensors) -> Checkpoint {
    let (mut header, mut at) = (serde_json::Map::new(), 0usize);
    let integers = |name: &str| name.ends_with("token_ordering");
    let mut places = Vec::new();
    for (name, shape) in tensors {
        let element = if integers(name) { 8 } else { 2 };
        let bytes = shape.iter().product::<usize>() * element;
        let dtype = if integers(name) { "I64" } else { "BF16" };
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        header.insert(name.clone(), entry);
        places.push(at..at + bytes);
        at += bytes;
    }
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let start = 8 + text.len();
    let mut map = memmap2::MmapOptions::new()
        .len(start + at)
        .no_reserve_swap()
        .map_anon()
        .unwrap();
    map[..8].copy_from_slice(&(text.len() as u64).to_le_bytes());
    map[8..start].copy_from_slice(&text);
    for ((name, shape), place) in tensors.iter().zip(places) {
        let data = &mut map[start + place.start..start + place.end];
        if integers(name) {
            for (i, word) in data.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&(i as u64).to_le_bytes());
            }
        } else if shape.len() == 1 {
            let one = half::bf16::ONE.to_le_bytes();
            data.chunks_exact_mut(2)
                .for_each(|x| x.copy_from_slice(&one));
        }
    }
    Checkpoint::embedded(tensors[0].0.as_str(), Box::leak(Box::new(map))).unwrap()
}

/// A released model with its assistant, without weights.
pub fn model(name: &str, like: LoadedModel) -> LoadedModel {
    let (target, assistant) = released(name);
    let plan = config::parse_target(&serde_json::to_vec(&target).unwrap()).unwrap();
    let draft = config::parse_assistant(&serde_json::to_vec(&assistant).unwrap()).unwrap();
    let clusters = if name == "e4b" { 2048 } else { 0 };
    let target = file(&target_tensors(&plan));
    let beside = file(&assistant_tensors(&draft, clusters));
    LoadedModel {
        weights: weights::target(&target, &plan).unwrap(),
        drafter: Some(LoadedDrafter {
            weights: weights::assistant(&beside, &draft).unwrap(),
            plan: draft,
        }),
        reading: Reading::start(Vec::new(), &[], numbers(&plan)),
        plan,
        ..like
    }
}
