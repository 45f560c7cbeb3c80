//! The real models, at full size, without their weights: what transformers' modules say of them
//! (`tests/shapes`, made by its `make.py`) against what this program says of files with those
//! headers over a hole.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
};

use brain::{
    inspect::{self, Options, report::Report},
    model::{checkpoint::Checkpoint, config, weights},
};
use serde_json::{Map, Value, json};

const MODELS: [&str; 5] = ["e2b", "e4b", "12b", "26b-a4b", "31b"];
/// Two files for most models.
const SHARD: u64 = 8 << 30;

struct Facts(Value);

impl Facts {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/shapes")
            .join(format!("{name}.json"));
        Self(serde_json::from_slice(&fs::read(path).unwrap()).unwrap())
    }

    fn total(&self, name: &str) -> u64 {
        self.0["totals"][name].as_u64().unwrap()
    }

    fn config(&self) -> Vec<u8> {
        serde_json::to_vec(&self.0["config"]).unwrap()
    }

    /// Every tensor: name, type, shape.
    fn tensors(&self) -> BTreeMap<String, (String, Vec<u64>)> {
        let mut all = BTreeMap::new();
        for line in self.0["tensors"].as_array().unwrap() {
            let text = |key: &str| line[key].as_str().unwrap();
            let shape = line["shape"].as_array().unwrap();
            let shape: Vec<u64> = shape.iter().map(|n| n.as_u64().unwrap()).collect();
            let names = match line.get("layers") {
                None => vec![text("name").to_owned()],
                Some(layers) => numbers(layers.as_str().unwrap())
                    .map(|i| text("name").replace("{}", &i.to_string()))
                    .collect(),
            };
            for name in names {
                let new = all.insert(name, (text("dtype").to_owned(), shape.clone()));
                assert!(new.is_none());
            }
        }
        all
    }
}

/// The numbers of `0-4,6`.
fn numbers(ranges: &str) -> impl Iterator<Item = usize> {
    ranges.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().unwrap()..=last.parse::<usize>().unwrap()
    })
}

/// A header, the bytes of its tensors, and where how many token ids are.
type Shard = (Map<String, Value>, u64, Option<(u64, u64)>);

/// Writes config.json and files of weights that are all header. Only a drafter's token ids are
/// written out, since the loader reads them.
fn write(dir: &Path, facts: &Facts) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), facts.config()).unwrap();
    let width = |dtype: &str| match dtype {
        "BF16" => 2,
        "I64" => 8,
        other => panic!("{other}"),
    };
    let mut shards: Vec<Shard> = Vec::new();
    for (name, (dtype, shape)) in facts.tensors() {
        let bytes = shape.iter().product::<u64>() * width(&dtype);
        if shards
            .last()
            .is_none_or(|(_, filled, _)| filled + bytes > SHARD)
        {
            shards.push((Map::new(), 0, None));
        }
        let (header, filled, ids) = shards.last_mut().unwrap();
        if dtype == "I64" {
            *ids = Some((*filled, shape[0]));
        }
        let described =
            json!({"dtype": dtype, "shape": shape, "data_offsets": [*filled, *filled + bytes]});
        header.insert(name, described);
        *filled += bytes;
    }
    let count = shards.len();
    let mut map = Map::new();
    for (i, (header, filled, ids)) in shards.into_iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        map.extend(header.keys().map(|t| (t.clone(), json!(name))));
        let text = serde_json::to_vec(&header).unwrap();
        let mut file = File::create(dir.join(name)).unwrap();
        file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&text).unwrap();
        let data = 8 + text.len() as u64;
        file.set_len(data + filled).unwrap();
        if let Some((at, length)) = ids {
            file.seek(SeekFrom::Start(data + at)).unwrap();
            let ids: Vec<u8> = (0..length).flat_map(u64::to_le_bytes).collect();
            file.write_all(&ids).unwrap();
        }
    }
    if count > 1 {
        let index = json!({"weight_map": map}).to_string();
        fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    }
}

/// A model and its assistant in a folder of their own.
fn sparse(name: &str) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (target, assistant) = (dir.path().join("target"), dir.path().join("assistant"));
    write(&target, &Facts::read(name));
    write(&assistant, &Facts::read(&format!("{name}-assistant")));
    (dir, target, assistant)
}

/// The problems that are not about the tokenizer and the template, which these folders lack.
fn problems(report: &Report) -> Vec<String> {
    let text = ["tokenizer.json", "chat_template.jinja"];
    let others = report
        .problems
        .iter()
        .filter(|p| !text.contains(&p.file.as_str()));
    others.map(|p| format!("{p:?}")).collect()
}

fn assert_tensors(name: &str, facts: &Facts, report: &Report) {
    let mut found = BTreeMap::new();
    for tensor in report.tensors.as_ref().unwrap() {
        let shape: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
        let new = found.insert(tensor.name.clone(), (tensor.dtype.clone(), shape));
        assert!(new.is_none(), "{name}: {tensor:?}");
        let tower = ["tower", "embed_vision", "embed_audio"];
        let of_tower = tower.iter().any(|t| tensor.name.contains(t));
        assert_eq!(tensor.used == "tower", of_tower, "{name}: {tensor:?}");
        assert!(!["unknown", "unread"].contains(&tensor.used), "{tensor:?}");
    }
    assert_eq!(found, facts.tensors(), "{name}");
}

/// Every tensor that a loader's plan uses, of which none may be used twice.
fn assert_used_once<'a>(
    name: &str,
    facts: &Facts,
    used: impl Iterator<Item = &'a brain::model::checkpoint::Tensor>,
) {
    let mut names: Vec<&str> = used.map(|t| t.name()).collect();
    names.sort_unstable();
    // The experts of a layer are parts of one tensor.
    names.dedup_by(|a, b| a == b && a.contains(".experts."));
    let text = |name: &&String| brain::model::names::text_name(name).is_some();
    let tensors = facts.tensors();
    let expected: Vec<&str> = tensors.keys().filter(text).map(String::as_str).collect();
    assert_eq!(names, expected, "{name}");
}

#[test]
fn inspect_agrees_with_the_reference_on_every_model() {
    for name in MODELS {
        let facts = Facts::read(name);
        let (_guard, target, assistant) = sparse(name);
        let options = Options {
            drafter: Some(assistant.clone()),
            tensors: true,
            ..Options::default()
        };
        let report = inspect::inspect(&target, &options);
        assert_eq!(problems(&report), [""; 0], "{name}");
        assert_eq!(report.kind, "target");
        assert_tensors(name, &facts, &report);

        let p = report.parameters.unwrap();
        for (total, found) in [
            ("text_parameters", p.total),
            ("tower_parameters", p.towers),
            ("embedding_parameters", p.embedding),
            ("per_layer_table_parameters", p.per_layer_table),
            ("expert_parameters", p.experts),
            ("active_parameters", p.active),
        ] {
            assert_eq!(found, facts.total(total), "{name}: {total}");
        }
        let (towers, text): (Vec<_>, Vec<_>) =
            report.storage.iter().partition(|s| s.part == "towers");
        let count = |rows: Vec<&inspect::report::Stored>| {
            rows.iter().map(|s| s.tensors as u64).sum::<u64>()
        };
        assert_eq!(count(text), facts.total("text_tensors"), "{name}");
        assert_eq!(count(towers), facts.total("tower_tensors"), "{name}");
        let kv = report.kv.unwrap();
        assert_eq!(kv.full.elements, facts.total("kv_elements_full"), "{name}");
        assert_eq!(
            kv.sliding.elements,
            facts.total("kv_elements_sliding"),
            "{name}"
        );

        let drafter = report.drafter.unwrap();
        assert!(drafter.fits, "{name}");
        let facts = Facts::read(&format!("{name}-assistant"));
        assert_eq!(drafter.parameters, facts.total("parameters"), "{name}");
        let options = Options {
            tensors: true,
            ..Options::default()
        };
        let report = inspect::inspect(&assistant, &options);
        assert_eq!(report.problems, [], "{name}");
        assert_eq!(report.kind, "assistant");
        assert_tensors(name, &facts, &report);
    }
}

#[test]
fn the_loader_uses_every_tensor_of_every_model_exactly_once() {
    for name in MODELS {
        let facts = Facts::read(name);
        let (_guard, target, assistant) = sparse(name);
        let plan = config::parse_target(&facts.config()).unwrap();
        let checkpoint = Checkpoint::open(&target).unwrap();
        let weights = weights::target(&checkpoint, &plan).unwrap();
        let all = weights.all();
        assert_used_once(name, &facts, all.iter().flat_map(|w| w.tensors()));

        let facts = Facts::read(&format!("{name}-assistant"));
        let plan = config::parse_assistant(&facts.config()).unwrap();
        let checkpoint = Checkpoint::open(&assistant).unwrap();
        let weights = weights::assistant(&checkpoint, &plan).unwrap();
        let all = weights.all();
        let ids = weights.centroids.as_ref().map(|c| &c.ordering_tensor);
        let tensors = all.iter().flat_map(|w| w.tensors()).chain(ids);
        assert_used_once(name, &facts, tensors);
    }
}

#[test]
fn both_forms_of_a_configuration_are_one_plan() {
    for name in MODELS {
        let facts = Facts::read(name);
        let released = config::parse_target(&facts.config()).unwrap();
        let resaved = serde_json::to_vec(&facts.0["resaved_text_config"]).unwrap();
        assert_eq!(config::parse_target(&resaved).unwrap(), released, "{name}");
    }
}

#[test]
fn every_problem_is_found_at_once() {
    let (_guard, target, assistant) = sparse("e2b");
    // A drafter of another model, a tensor of another shape, one that is missing, one too many.
    fs::remove_dir_all(&assistant).unwrap();
    write(&assistant, &Facts::read("31b-assistant"));
    let mut facts = Facts::read("e2b");
    let lines = facts.0["tensors"].as_array_mut().unwrap();
    let named = |lines: &[Value], name: &str| {
        let is = |l: &Value| l["name"].as_str().unwrap().ends_with(name);
        lines.iter().position(is).unwrap()
    };
    let norm = named(lines, "language_model.norm.weight");
    lines[norm]["shape"] = json!([7]);
    let table = named(lines, "embed_tokens.weight");
    lines[table]["name"] = json!("model.language_model.embed_token.weight");
    fs::remove_dir_all(&target).unwrap();
    write(&target, &facts);
    let options = Options {
        drafter: Some(assistant),
        ..Options::default()
    };
    let report = inspect::inspect(&target, &options);
    let problems = problems(&report).join("\n");
    for expected in [
        "has shape [7] where config.json asks for [1536]",
        "embed_tokens.weight",
        "embed_token.weight",
        "is no part of the model",
        "does not fit: it reads a width of 5376, not 1536",
    ] {
        assert!(problems.contains(expected), "{expected}: {problems}");
    }
    assert_eq!(report.problems.len(), 6, "{problems}");
    let text = inspect::print::text(&report);
    assert!(text.contains("6 problems:"), "{text}");
}
