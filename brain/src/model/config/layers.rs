//! Kinds and sizes of the layers, one by one.

use std::collections::BTreeMap;

use super::{ConfigError, MAX_HEAD, RawOverride, RawText, check_width, field};
use crate::model::{
    kv_scales::KvScales,
    plan::{Kind, KvSource, LayerPlan},
};

/// The layers, first to last. All sizes are within bounds, and layers of a kind have heads of one
/// size, as they share a rotary embedding.
pub(super) fn layers(raw: &RawText, assistant: bool) -> Result<Vec<LayerPlan>, ConfigError> {
    let kinds = kinds(raw)?;
    let first_shared = first_shared(raw, assistant)?;
    let overrides = overrides(raw)?;
    let mut layers: Vec<LayerPlan> = Vec::with_capacity(kinds.len());
    for (i, &kind) in kinds.iter().enumerate() {
        let (head_dim, kv_heads) = geometry(raw, kind, overrides.get(&i));
        check_geometry(raw, head_dim, kv_heads)?;
        let alike = layers.iter().find(|l| l.kind == kind);
        if let Some(other) = alike.filter(|l| l.head_dim != head_dim) {
            let problem = format!(
                "heads of layer {i} have a size of {head_dim}, those of an earlier {} layer one \
                 of {}: all layers of a kind must have the same",
                kind.name(),
                other.head_dim
            );
            return Err(field("per_layer_config", problem));
        }
        let kv = match (assistant, i < first_shared) {
            (true, _) => KvSource::Target,
            (false, true) => KvSource::Own {
                values_only: raw.attention_k_eq_v && kind == Kind::Full,
            },
            (false, false) => shared(&layers[..first_shared], i, kind, kv_heads)?,
        };
        let wide = raw.use_double_wide_mlp && matches!(kv, KvSource::Shared { .. });
        let intermediate = raw.intermediate_size * if wide { 2 } else { 1 };
        layers.push(LayerPlan {
            kind,
            head_dim,
            kv_heads,
            kv,
            intermediate,
            kv_scales: KvScales::default(),
        });
    }
    Ok(layers)
}

fn kinds(raw: &RawText) -> Result<Vec<Kind>, ConfigError> {
    let n = raw.num_hidden_layers;
    let mut kinds = match &raw.layer_types {
        None => (1..=n)
            .map(|i| match i % 6 {
                0 => Kind::Full,
                _ => Kind::Sliding,
            })
            .collect::<Vec<_>>(),
        Some(names) => names
            .iter()
            .map(|name| match name.as_str() {
                "sliding_attention" => Ok(Kind::Sliding),
                "full_attention" => Ok(Kind::Full),
                other => Err(field("layer_types", format!("{other:?} is unknown"))),
            })
            .collect::<Result<_, _>>()?,
    };
    if kinds.len() != n {
        return Err(field(
            "layer_types",
            format!("has {} entries for {n} layers", kinds.len()),
        ));
    }
    kinds[n - 1] = Kind::Full; // the reference forces it whatever the file says
    Ok(kinds)
}

/// The first layer that reads an earlier one's cache.
fn first_shared(raw: &RawText, assistant: bool) -> Result<usize, ConfigError> {
    let first = raw
        .num_hidden_layers
        .saturating_sub(raw.num_kv_shared_layers);
    if first == 0 && !assistant {
        let problem = "leaves no layer that owns keys and values";
        return Err(field("num_kv_shared_layers", problem));
    }
    Ok(first)
}

fn check_geometry(raw: &RawText, head_dim: usize, kv_heads: usize) -> Result<(), ConfigError> {
    check_width("head_dim", head_dim)?;
    if !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD {
        let problem = format!("{head_dim} is odd or above {MAX_HEAD}");
        return Err(field("head_dim", problem));
    }
    let heads = raw.num_attention_heads;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let problem = format!("{kv_heads} does not divide {heads} query heads");
        return Err(field("num_key_value_heads", problem));
    }
    Ok(())
}

/// The cache that layer `i` reads: that of the last of its kind among `owners`.
fn shared(
    owners: &[LayerPlan],
    i: usize,
    kind: Kind,
    kv_heads: usize,
) -> Result<KvSource, ConfigError> {
    let Some(owner) = owners.iter().rposition(|l| l.kind == kind) else {
        let problem = format!("layer {i} has no {} owner", kind.name());
        return Err(field("num_kv_shared_layers", problem));
    };
    if owners[owner].kv_heads != kv_heads {
        let problem = format!("layer {i} shares the cache of layer {owner} and differs from it");
        return Err(field("per_layer_config", problem));
    }
    Ok(KvSource::Shared { owner })
}

fn overrides(raw: &RawText) -> Result<BTreeMap<usize, &RawOverride>, ConfigError> {
    let n = raw.num_hidden_layers;
    let all = raw.per_layer_config.iter().flatten();
    all.map(|(key, over)| match key.parse::<usize>() {
        Ok(i) if i < n => Ok((i, over)),
        _ => Err(field(
            "per_layer_config",
            format!("{key:?} is not a layer of {n}"),
        )),
    })
    .collect()
}

/// Head size and KV heads of a layer: an override wins over the global keys of full layers.
fn geometry(raw: &RawText, kind: Kind, over: Option<&&RawOverride>) -> (usize, usize) {
    let (mut dim, mut kv_heads) = (raw.head_dim, raw.num_key_value_heads);
    if kind == Kind::Full {
        if raw.per_layer_config.is_none() {
            dim = raw.global_head_dim.unwrap_or(512);
        } else if let Some(global) = raw.global_head_dim {
            dim = global;
        }
        if let (true, Some(global)) = (raw.attention_k_eq_v, raw.num_global_key_value_heads) {
            kv_heads = global;
        }
    }
    if let Some(over) = over {
        dim = over.head_dim.unwrap_or(dim);
        kv_heads = over.num_key_value_heads.unwrap_or(kv_heads);
    }
    (dim, kv_heads)
}
