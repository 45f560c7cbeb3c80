//! What a checkpoint's configuration says of its weights' forms: a cross-check, never the judge.
//!
//! Exclude lists are written with and without prefixes, as wildcards, as regular expressions, and
//! sometimes wrongly; what the file holds decides. Where the two differ it is said, and served.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::Value;

use super::{
    names::text_name,
    weight::{Form, Weight},
};

/// A family of forms, as configurations tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    Plain,
    Nvfp4,
    Fp8,
    Int4,
}

impl Family {
    fn name(self) -> &'static str {
        match self {
            Family::Plain => "plain numbers",
            Family::Nvfp4 => "NVFP4",
            Family::Fp8 => "FP8",
            Family::Int4 => "int4",
        }
    }

    fn of(form: Form) -> Self {
        match form {
            Form::Bf16 | Form::F16 | Form::F32 => Family::Plain,
            Form::Fp8Tensor | Form::Fp8Row | Form::Fp8Block => Family::Fp8,
            Form::Nvfp4 => Family::Nvfp4,
            Form::Int4 { .. } => Family::Int4,
        }
    }

    /// ModelOpt's name of an algorithm.
    fn of_algorithm(name: &str) -> Option<Self> {
        let name = name.to_ascii_uppercase();
        [
            ("NVFP4", Family::Nvfp4),
            ("FP8", Family::Fp8),
            ("INT4", Family::Int4),
        ]
        .into_iter()
        .find_map(|(part, family)| name.contains(part).then_some(family))
    }

    /// compressed-tensors' `weights` of a group.
    fn of_weights(weights: &Value) -> Option<Self> {
        match (weights["type"].as_str()?, weights["num_bits"].as_u64()?) {
            ("float", 4) => Some(Family::Nvfp4),
            ("float", 8) => Some(Family::Fp8),
            ("int", 4) => Some(Family::Int4),
            _ => None,
        }
    }
}

/// An entry of a list of modules.
enum Pattern {
    /// Shell wildcards; a name stands for all that is below it too.
    Glob(String),
    Regex(Regex),
}

impl Pattern {
    /// `None` for an expression that cannot be read: nothing matches it.
    fn new(text: &str) -> Option<Self> {
        match text.strip_prefix("re:") {
            Some(expression) => Regex::new(&format!("^(?:{expression})"))
                .ok()
                .map(Self::Regex),
            None => Some(Self::Glob(bare(text).to_owned())),
        }
    }

    /// `module` by its full name.
    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Regex(regex) => regex.is_match(module),
            Self::Glob(glob) => {
                let module = bare(module);
                let below = || {
                    module
                        .strip_prefix(glob.as_str())
                        .is_some_and(|r| r.starts_with('.'))
                };
                matches_glob(glob.as_bytes(), module.as_bytes()) || below()
            }
        }
    }
}

/// A module's name without the prefixes that exports differ in.
fn bare(module: &str) -> &str {
    text_name(module).unwrap_or(module)
}

/// `*` is any run of characters, `?` is one. In time linear in the product of the lengths.
fn matches_glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == text[t] => (p, t) = (p + 1, t + 1),
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    (p, t) = (at + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// What a configuration says.
struct Stated {
    /// Which file says it.
    file: &'static str,
    /// Modules that are left alone.
    ignored: Vec<Pattern>,
    /// Modules of a form of their own, first match wins.
    groups: Vec<(Vec<Pattern>, Family)>,
    /// All others.
    default: Option<Family>,
}

impl Stated {
    fn of(&self, module: &str) -> Option<Family> {
        if self.ignored.iter().any(|p| p.matches(module)) {
            return Some(Family::Plain);
        }
        let listed = self
            .groups
            .iter()
            .find(|(patterns, _)| patterns.iter().any(|p| p.matches(module)));
        listed.map(|(_, family)| *family).or(self.default)
    }

    fn parse(file: &'static str, q: &Value) -> Self {
        let list = |v: &Value| -> Vec<Pattern> {
            let entries = v.as_array().map(Vec::as_slice).unwrap_or_default();
            entries
                .iter()
                .filter_map(|e| Pattern::new(e.as_str()?))
                .collect()
        };
        let ignored = ["ignore", "exclude_modules", "modules_to_not_convert"]
            .iter()
            .flat_map(|name| list(&q[*name]))
            .collect();
        let algorithm = |v: &Value| Family::of_algorithm(v["quant_algo"].as_str()?);
        let mut groups: Vec<(Vec<Pattern>, Family)> = object(&q["quantized_layers"])
            .filter_map(|(name, layer)| Some((vec![Pattern::new(name)?], algorithm(layer)?)))
            .collect();
        let native = (q["quant_method"] == "fp8").then_some(Family::Fp8);
        let mut default = algorithm(q).or(native);
        for (_, group) in object(&q["config_groups"]) {
            let Some(family) = Family::of_weights(&group["weights"]) else {
                continue;
            };
            let targets = &group["targets"];
            if targets
                .as_array()
                .is_none_or(|t| t.iter().any(|e| e == "Linear"))
            {
                default = Some(family);
            } else {
                groups.push((list(targets), family));
            }
        }
        Self {
            file,
            ignored,
            groups,
            default,
        }
    }
}

fn object(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// The parts of config.json and hf_quant_config.json that speak of quantisation, with the file's
/// name. What cannot be read says nothing.
fn sections(config: &[u8], separate: Option<&[u8]>) -> Vec<(&'static str, Value)> {
    let parse = |json: &[u8]| serde_json::from_slice::<Value>(json).unwrap_or(Value::Null);
    let mut config = parse(config);
    let mut separate = separate.map_or(Value::Null, parse);
    let take = |json: &mut Value, at: &str| json.pointer_mut(at).map_or(Value::Null, Value::take);
    let text = "/text_config/quantization_config";
    let found = [
        ("config.json", take(&mut config, "/quantization_config")),
        ("config.json", take(&mut config, text)),
        ("hf_quant_config.json", take(&mut separate, "/quantization")),
    ];
    found.into_iter().filter(|(_, q)| q.is_object()).collect()
}

/// Whether the configuration asks for keys and values in E4M3 with one scale for all of a layer's:
/// ModelOpt's `kv_cache_quant_algo`, or a `kv_cache_scheme` of eight-bit floats.
pub fn asks_for_fp8_cache(config: &[u8], separate: Option<&[u8]>) -> bool {
    sections(config, separate).iter().any(|(_, q)| {
        let algorithm = q["kv_cache_quant_algo"].as_str();
        let scheme = &q["kv_cache_scheme"];
        algorithm.is_some_and(|name| name.eq_ignore_ascii_case("fp8"))
            || (scheme["type"] == "float" && scheme["num_bits"] == 8 && scheme["dynamic"] != true)
    })
}

/// Where the configuration and the file differ, one line for each way in which they do.
///
/// `config` is config.json, `separate` hf_quant_config.json if there is one. What neither can be
/// read for, nothing is said of.
pub fn differences(config: &[u8], separate: Option<&[u8]>, weights: &[&Weight]) -> Vec<String> {
    let stated: Vec<Stated> = sections(config, separate)
        .iter()
        .map(|(file, q)| Stated::parse(file, q))
        .collect();
    let mut found: BTreeMap<(&str, Family, Family), (usize, &str)> = BTreeMap::new();
    for weight in weights {
        let Some(module) = module(weight) else {
            continue;
        };
        let holds = Family::of(weight.form());
        for stated in &stated {
            let Some(says) = stated.of(module).filter(|says| *says != holds) else {
                continue;
            };
            let entry = found
                .entry((stated.file, says, holds))
                .or_insert((0, module));
            entry.0 += 1;
        }
    }
    found
        .into_iter()
        .map(|((file, says, holds), (count, first))| {
            let (says, holds) = (says.name(), holds.name());
            format!("{file} says {says} of {count} matrices that are {holds}, the first is {first}; the weights are taken as they are")
        })
        .collect()
}

/// The module of a projection, which is what configurations speak of; others (tables, norms,
/// routers) are left alone by most quantisers without a word.
fn module(weight: &Weight) -> Option<&str> {
    let name = weight.tensors().into_iter().next()?.name();
    let module = [".weight_packed", ".weight"]
        .iter()
        .find_map(|end| name.strip_suffix(end))
        .unwrap_or(name);
    let last = module.rsplit('.').next()?;
    let projections = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
    ];
    projections.contains(&last).then_some(module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{checkpoint::Checkpoint, names::Unused, weight::linear};

    use crate::model::forms::{self, Written, quantise};

    fn weight(module: &str, form: Written) -> Weight {
        let matrix = quantise(module, &vec![0.5; 32 * 64], 32, 64, form);
        let file = Vec::leak(forms::file(&matrix.tensors));
        let mut unused = Unused::new(&Checkpoint::embedded("test", file).unwrap()).unwrap();
        linear(&mut unused, text_name(module).unwrap(), [32, 64]).unwrap()
    }

    fn check(config: &str, separate: Option<&str>) -> Vec<String> {
        let prefix = "model.language_model.layers";
        let weights = [
            weight(&format!("{prefix}.0.self_attn.q_proj"), Written::Bf16),
            weight(&format!("{prefix}.3.self_attn.q_proj"), Written::Bf16),
            weight(&format!("{prefix}.0.mlp.up_proj"), Written::Nvfp4),
            weight(&format!("{prefix}.0.mlp.down_proj"), Written::Fp8Row),
            weight(&format!("{prefix}.0.router.proj"), Written::Bf16),
        ];
        differences(
            config.as_bytes(),
            separate.map(str::as_bytes),
            &weights.each_ref(),
        )
    }

    #[test]
    fn agreement_is_silent_however_it_is_written() {
        for config in [
            r#"{}"#,
            "not json",
            r#"{"quantization_config":{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION",
                "quantized_layers":{"model.language_model.layers.0.mlp.up_proj":{"quant_algo":"NVFP4"},
                "layers.0.mlp.down_proj":{"quant_algo":"FP8"}}}}"#,
            r#"{"quantization_config":{"quant_method":"compressed-tensors","ignore":["re:.*self_attn.*"],
                "config_groups":{"a":{"targets":["re:.*up_proj"],"weights":{"num_bits":4,"type":"float"}},
                "b":{"targets":["Linear"],"weights":{"num_bits":8,"type":"float"}}}}}"#,
            r#"{"quantization_config":{"quant_method":"fp8","modules_to_not_convert":
                ["model.layers.0.self_attn","model.layers.3.self_attn*"],
                "quantized_layers":{"layers.0.mlp.u?_proj":{"quant_algo":"NVFP4"}}}}"#,
        ] {
            assert_eq!(check(config, None), [] as [String; 0], "{config}");
        }
    }

    #[test]
    fn differences_are_counted_and_the_first_is_named() {
        let separate = r#"{"quantization":{"quant_algo":"NVFP4","exclude_modules":
            ["model.language_model.layers.3.self_attn*"]}}"#;
        let notes = check("{}", Some(separate));
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(
            notes[0].starts_with(
                "hf_quant_config.json says NVFP4 of 1 matrices that are plain numbers"
            )
        );
        assert!(
            notes[0].contains("model.language_model.layers.0.self_attn.q_proj"),
            "{notes:?}"
        );
        assert!(
            notes[1].contains("that are FP8") && notes[1].contains("layers.0.mlp.down_proj"),
            "{notes:?}"
        );
    }

    #[test]
    fn an_fp8_cache_is_asked_for_in_either_way() {
        let scheme = |scheme: &str| {
            let config = format!(r#"{{"quantization_config":{{"kv_cache_scheme":{scheme}}}}}"#);
            asks_for_fp8_cache(config.as_bytes(), None)
        };
        assert!(scheme(r#"{"type":"float","num_bits":8,"dynamic":false}"#));
        assert!(scheme(r#"{"type":"float","num_bits":8}"#));
        for other in [
            "null",
            r#"{"type":"int","num_bits":8}"#,
            r#"{"type":"float","num_bits":4}"#,
            r#"{"type":"float","num_bits":8,"dynamic":true}"#,
        ] {
            assert!(!scheme(other), "{other}");
        }
        let nested = r#"{"text_config":{"quantization_config":{"kv_cache_quant_algo":"FP8"}}}"#;
        assert!(asks_for_fp8_cache(nested.as_bytes(), None));
        let separate = br#"{"quantization":{"kv_cache_quant_algo":"FP8"}}"#;
        assert!(asks_for_fp8_cache(b"{}", Some(separate)));
        let none = br#"{"quantization":{"kv_cache_quant_algo":null,"quant_algo":"FP8"}}"#;
        assert!(!asks_for_fp8_cache(b"not json", Some(none)));
    }

    #[test]
    fn wildcards_take_no_time() {
        let pattern = "*a".repeat(2000);
        let text = "a".repeat(1999) + "b";
        assert!(!matches_glob(pattern.as_bytes(), text.as_bytes()));
        assert!(matches_glob(b"a*b?d*", b"axxbcd"));
        assert!(!matches_glob(b"a*b?", b"axxb"));
    }
}
