//! Which files of a repository brain needs. Pure: a listing in, names out.

use std::collections::BTreeSet;

use crate::model::index::{INDEX, Index, WHOLE};

/// What a repository is fetched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// To be served: weights, configuration, tokenizer and template.
    Target,
    /// To draft for another: weights and configuration. Its tokenizer is never used.
    Drafter,
}

/// The files of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Small files, the index of the weights among them.
    pub small: Vec<String>,
    /// Where the weights are.
    pub weights: Weights,
}

/// Files of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// One file.
    Whole(String),
    /// Many, named by this index.
    Indexed(String),
}

const NEEDED: &[&str] = &["config.json", "tokenizer.json"];
const NEEDED_TO_DRAFT: &[&str] = &["config.json"];
const USED: &[&str] = &[
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "hf_quant_config.json",
    // Its head names the model that this one was made from: that is how a drafter is found.
    "README.md",
];
const USED_TO_DRAFT: &[&str] = &["generation_config.json", "hf_quant_config.json"];

/// The files of `part` in the folder `prefix` (empty, or with a slash at its end) of a listing;
/// the error is the name of a file that is missing.
pub fn wanted(listing: &BTreeSet<String>, prefix: &str, part: Part) -> Result<Wanted, String> {
    let (needed, used) = match part {
        Part::Target => (NEEDED, USED),
        Part::Drafter => (NEEDED_TO_DRAFT, USED_TO_DRAFT),
    };
    let path = |name: &str| format!("{prefix}{name}");
    let there = |name: &str| listing.contains(&path(name));
    if let Some(missing) = needed.iter().find(|name| !there(name)) {
        return Err(path(missing));
    }
    let mut small: Vec<String> = needed
        .iter()
        .chain(used.iter().filter(|name| there(name)))
        .map(|name| path(name))
        .collect();
    let weights = if there(WHOLE) {
        Weights::Whole(path(WHOLE))
    } else if there(INDEX) {
        small.push(path(INDEX));
        Weights::Indexed(path(INDEX))
    } else {
        return Err(path(WHOLE));
    };
    Ok(Wanted { small, weights })
}

/// Folder of an assistant inside its target's repository.
pub const ASSISTANT: &str = "assistant/";

/// Whether a listing has anything in the folder of an assistant.
pub fn has_assistant(listing: &BTreeSet<String>) -> bool {
    listing.iter().any(|file| file.starts_with(ASSISTANT))
}

/// The files of weights that an index at `prefix` names, each once.
pub fn shards(index: &[u8], prefix: &str) -> Result<Vec<String>, String> {
    let index = Index::sound(index).map_err(|fault| format!("it {fault}"))?;
    let files = index.files().into_iter();
    Ok(files.map(|name| format!("{prefix}{name}")).collect())
}

/// Whether a path from a hub stays inside the folder that it is put in.
pub fn is_inside(path: &str) -> bool {
    path.split('/').all(is_part)
}

/// Whether this names something in a folder, be it hidden.
fn is_part(name: &str) -> bool {
    !name.is_empty()
        && !matches!(name, "." | "..")
        && name.len() <= 200
        && !name.contains(['/', '\\'])
        && !name.contains(char::is_control)
}

/// The models that the head of a model card says its model was made from.
pub fn base_models(card: &str) -> Vec<String> {
    let Some(head) = card
        .strip_prefix("---")
        .and_then(|rest| rest.split_once("\n---"))
        .map(|(head, _)| head)
    else {
        return Vec::new();
    };
    let clean = |text: &str| text.trim().trim_matches(['"', '\'']).to_owned();
    let mut found = Vec::new();
    let mut lines = head.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(value) = line.strip_prefix("base_model:") else {
            continue;
        };
        let inline = value.trim().trim_start_matches('[').trim_end_matches(']');
        found.extend(inline.split(',').map(clean));
        while let Some(item) = lines.next_if(|line| line.trim_start().starts_with('-')) {
            found.push(clean(item.trim_start().trim_start_matches('-')));
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(files: &[&str]) -> BTreeSet<String> {
        files.iter().map(|file| (*file).to_owned()).collect()
    }

    #[test]
    fn only_what_brain_reads_is_wanted() {
        let files = listing(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "tokenizer.json",
            "tokenizer.model",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/model.onnx",
            "assistant/config.json",
        ]);
        let target = wanted(&files, "", Part::Target).unwrap();
        assert_eq!(
            target.small,
            [
                "config.json",
                "tokenizer.json",
                "chat_template.jinja",
                "README.md",
                "model.safetensors.index.json"
            ]
        );
        assert_eq!(
            target.weights,
            Weights::Indexed("model.safetensors.index.json".into())
        );
        assert!(has_assistant(&files));
        assert_eq!(
            wanted(&files, ASSISTANT, Part::Drafter).unwrap_err(),
            "assistant/model.safetensors"
        );
    }

    #[test]
    fn a_whole_file_wins_over_an_index_as_it_does_when_loading() {
        let files = listing(&[
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "model.safetensors.index.json",
        ]);
        let whole = Weights::Whole("model.safetensors".into());
        assert_eq!(wanted(&files, "", Part::Target).unwrap().weights, whole);
        let drafter = wanted(&files, "", Part::Drafter).unwrap();
        assert_eq!(drafter.small, ["config.json"]);
        let without = listing(&["config.json", "model.safetensors"]);
        assert_eq!(
            wanted(&without, "", Part::Target).unwrap_err(),
            "tokenizer.json"
        );
    }

    #[test]
    fn an_index_names_plain_files() {
        let index = br#"{"weight_map": {"a": "x-2", "b": "x-1", "c": "x-2"}}"#;
        assert_eq!(shards(index, "p/").unwrap(), ["p/x-1", "p/x-2"]);
        for bad in [
            &br#"{"weight_map": {"a": "../x"}}"#[..],
            br#"{"weight_map": {}}"#,
            br#"{"weight_map": {"a": ""}}"#,
            b"[]",
        ] {
            assert!(shards(bad, "").is_err());
        }
    }

    #[test]
    fn paths_stay_inside() {
        assert!(is_inside("a/b.json"));
        for bad in ["", "/a", "a//b", "../a", "a/../b", "a\\b", "a\nb", "./a"] {
            assert!(!is_inside(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_card_names_its_base() {
        for card in [
            "---\nlicense: x\nbase_model: google/gemma-4-31B-it\ntags:\n- a\n---\n# Text",
            "---\nbase_model:\n- google/gemma-4-31B-it\ntags:\n- a\n---\n",
            "---\nbase_model: [\"google/gemma-4-31B-it\"]\n---\n",
        ] {
            assert_eq!(base_models(card), ["google/gemma-4-31B-it"], "{card}");
        }
        for card in ["", "# No head\nbase_model: x/y", "---\nbase_model: x/y"] {
            assert!(base_models(card).is_empty(), "{card}");
        }
    }
}
