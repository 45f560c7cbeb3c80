use std::{fs, path::PathBuf};

use safetensors::SafeTensors;

use super::*;
use crate::model::{LoadError, LoadOptions, drafter_of, file::make_pipe, load};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens")
        .join(name)
}

/// A golden checkpoint that a test may damage.
fn copy(name: &str) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, to.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    to
}

fn failure(dir: &Path) -> String {
    load(dir, &LoadOptions::default()).unwrap_err().to_string()
}

/// Writes a safetensors file with this header over so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

#[test]
fn one_file_and_shards_are_read() {
    for name in ["e2b", "31b"] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        let t = checkpoint
            .tensors()
            .find(|t| t.name().ends_with("layers.0.layer_scalar"))
            .unwrap();
        assert_eq!((t.shape(), t.bytes().len()), (&[1][..], 4), "{name}");
        load(&golden(name), &LoadOptions::default()).unwrap();
    }
}

#[test]
fn truncation_anywhere_is_an_error_that_names_the_file() {
    let dir = copy("e4b");
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in [0, 4, 8, 100, 5000, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let message = failure(dir.path());
        assert!(
            message.contains("model.safetensors is damaged"),
            "{length}: {message}"
        );
    }
    fs::write(&path, [whole.as_slice(), b"tail"].concat()).unwrap();
    assert!(failure(dir.path()).contains("damaged"));
}

#[test]
fn hostile_headers_are_errors() {
    let dir = copy("e4b");
    let path = dir.path().join("model.safetensors");
    for bytes in [
        file("not json", 0),
        file(
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}"#,
            8,
        ),
        file(
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                "a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
            8,
        ),
    ] {
        fs::write(&path, bytes).unwrap();
        let message = failure(dir.path());
        assert!(
            message.contains("model.safetensors is damaged"),
            "{message}"
        );
    }
}

#[test]
fn every_flipped_byte_of_a_header_is_survived() {
    let dir = copy("e4b");
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
    let mut taken = 0;
    for i in 0..header {
        bytes[i] ^= 0x15;
        // Most are errors; a changed name or padding may still be taken. What is, lies in the file.
        match header::read(&bytes) {
            Err(fault) => assert!(!fault.problem.is_empty(), "byte {i}"),
            Ok(entries) => {
                taken += 1;
                let inside = |range: &Range<usize>| range.start <= range.end;
                let sound = entries.iter().all(|(_, range)| {
                    inside(range) && range.start >= header && range.end <= bytes.len()
                });
                assert!(sound, "byte {i}");
            }
        }
        // The whole way for some: every file is written, mapped and read.
        if i % 97 == 0 {
            fs::write(&path, &bytes).unwrap();
            if let Err(error) = load(dir.path(), &LoadOptions::default()) {
                let folder = dir.path().display().to_string();
                assert!(error.to_string().contains(&folder), "byte {i}: {error}");
            }
        }
        bytes[i] ^= 0x15;
    }
    assert!(taken > 0 && taken < header, "{taken} of {header}");
}

#[test]
fn an_index_cannot_point_elsewhere_or_nowhere() {
    let dir = copy("31b");
    let index = dir.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    let first = "model-00001-of-00002.safetensors";
    for name in ["../x.safetensors", "/etc/passwd", "", ".."] {
        fs::write(&index, text.replacen(first, name, 1)).unwrap();
        assert!(
            failure(dir.path()).contains("not a plain file name"),
            "{name}"
        );
    }
    fs::write(
        &index,
        text.replacen(first, "model-00002-of-00002.safetensors", 1),
    )
    .unwrap();
    assert!(failure(dir.path()).contains("should hold tensor"));
    fs::write(&index, &text).unwrap();
    fs::remove_file(dir.path().join(first)).unwrap();
    assert!(failure(dir.path()).contains(first));
    fs::write(&index, "{").unwrap();
    assert!(failure(dir.path()).contains("index.json"));
    fs::write(&index, r#"{"weight_map":{}}"#).unwrap();
    assert!(failure(dir.path()).contains("index.json is damaged: it names no file"));
}

/// Writes fp32 `value` over the first element of the tensor whose name ends so; its full name.
fn overwrite(file: &Path, name: &str, value: f32) -> String {
    let mut bytes = fs::read(file).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = metadata.tensors();
    let mut named = tensors.into_iter().filter(|(n, _)| n.ends_with(name));
    let (name, info) = named.next().unwrap();
    assert_eq!(info.dtype, Dtype::F32);
    let at = 8 + header + info.data_offsets.0;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(file, bytes).unwrap();
    name
}

#[test]
fn a_weight_that_is_no_finite_number_is_refused() {
    for (part, value, said) in [
        ("model.norm.weight", f32::NAN, "NaN"),
        ("layers.0.layer_scalar", f32::INFINITY, "inf"),
        ("layers.1.mlp.down_proj.weight", f32::NEG_INFINITY, "-inf"),
        ("embed_tokens.weight", f32::NAN, "NaN"),
    ] {
        let dir = copy("e2b");
        let name = overwrite(&dir.path().join("model.safetensors"), part, value);
        let model = load(dir.path(), &LoadOptions::default()).unwrap();
        let message = model.reading.digest().unwrap_err().to_string();
        let expected = format!(
            "tensor {name}: element 0 is {said}, not a finite number; fetch the file again (in \
             model.safetensors)"
        );
        assert_eq!(message, expected);
    }
    // An assistant is looked at before anything is drafted with it.
    let (dir, from) = (
        tempfile::tempdir().unwrap(),
        golden("e2b").join("assistant"),
    );
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let file = dir.path().join("model.safetensors");
    let name = overwrite(&file, "layers.0.layer_scalar", f32::NAN);
    let drafter = Some(dir.path().to_owned());
    let error = load(&golden("e2b"), &LoadOptions { drafter }).unwrap_err();
    let expected = format!("tensor {name}: element 0 is NaN, not a finite number");
    assert!(error.to_string().contains(&expected), "{error}");
}

#[test]
fn a_shard_that_is_still_being_fetched_is_named() {
    let dir = copy("31b");
    let shard = "model-00002-of-00002.safetensors";
    fs::remove_file(dir.path().join(shard)).unwrap();
    let gone = failure(dir.path());
    assert!(
        gone.contains(shard) && gone.contains("fetch the checkpoint again"),
        "{gone}"
    );
    fs::write(dir.path().join(format!("{shard}.incomplete")), b"half").unwrap();
    let message = failure(dir.path());
    assert!(
        message.contains(shard) && message.contains("has not finished"),
        "{message}"
    );
    let dir = copy("e4b");
    fs::rename(
        dir.path().join("model.safetensors"),
        dir.path().join("model.safetensors.part"),
    )
    .unwrap();
    assert!(failure(dir.path()).contains("run the download again"));
    // Of the full length, and marked all the same.
    let dir = copy("e4b");
    fs::write(dir.path().join("model.safetensors.aria2"), b"").unwrap();
    let message = failure(dir.path());
    assert!(message.contains("has not finished"), "{message}");
}

#[test]
fn the_wrong_kind_of_checkpoint_is_named_with_a_remedy() {
    let assistant = golden("31b").join("assistant");
    let message = failure(&assistant);
    assert!(
        message.contains("config.json") && message.contains("give it as --drafter"),
        "{message}"
    );
    let drafter = Some(golden("12b"));
    let error = load(&golden("31b"), &LoadOptions { drafter }).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("12b/config.json: is a whole model"),
        "{message}"
    );
    let dir = copy("e4b");
    fs::write(dir.path().join("config.json"), r#"{"model_type":"llama"}"#).unwrap();
    let message = failure(dir.path());
    assert!(
        message.contains("config.json") && message.contains("another family"),
        "{message}"
    );
}

#[test]
fn scales_of_an_fp8_cache_are_found_under_every_name() {
    let load_with = |names: &[(&str, f32)]| {
        let dir = copy("12b");
        rewrite(dir.path(), |tensors| {
            for (name, scale) in names {
                let scale = scale.to_le_bytes().to_vec();
                tensors.push((format!("model.layers.{name}"), vec![1], scale));
            }
        });
        load(dir.path(), &LoadOptions::default())
    };
    for (key, value) in [
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ] {
        // Layers 0 and 1 slide; layer 2 stores values only, heads of 16.
        let model = load_with(&[
            (&format!("1.{key}"), 0.003),
            (&format!("1.{value}"), 0.5),
            (&format!("2.{key}"), 0.003),
            (&format!("2.{value}"), 0.5),
        ])
        .unwrap();
        let scales = |i: usize| {
            let s = model.plan.layers[i].kv_scales;
            (s.key, s.value)
        };
        assert_eq!(scales(0), (1.0, 1.0));
        assert_eq!(scales(1), (0.003, 0.5));
        assert_eq!(scales(2), (1.0, 0.5), "keys come from values");
        assert_eq!(model.kv_scales, 4);
    }
    let one = load_with(&[
        ("0.self_attn.kv_scale", 0.25),
        ("2.self_attn.kv_scale", 0.003),
    ])
    .unwrap();
    let of = |i: usize| {
        (
            one.plan.layers[i].kv_scales.key,
            one.plan.layers[i].kv_scales.value,
        )
    };
    assert_eq!(
        (of(0), of(2)),
        ((0.25, 0.25), (1.0, 1.0)),
        "448 * 0.003 is below sqrt(16)"
    );
    for bad in [0.0, f32::NAN, -1.0] {
        let message = load_with(&[("0.self_attn.k_scale", bad)])
            .unwrap_err()
            .to_string();
        assert!(message.contains("layers.0.self_attn.k_scale"), "{message}");
    }
}

/// `brain inspect` counts what the loader takes, in layers too whose other tensors nobody reads.
#[test]
fn scales_of_layers_that_share_a_cache_are_counted_alike() {
    use crate::model::{audit::audit, config::parse_target, inventory::Inventory};
    let dir = copy("e4b");
    rewrite(dir.path(), |tensors| {
        for name in ["5.self_attn.k_proj.k_scale", "0.self_attn.k_proj.k_scale"] {
            let one = 1f32.to_le_bytes().to_vec();
            tensors.push((format!("model.layers.{name}"), vec![1], one));
        }
    });
    let model = load(dir.path(), &LoadOptions::default()).unwrap();
    assert!(matches!(
        model.plan.layers[5].kv,
        crate::model::plan::KvSource::Shared { .. }
    ));
    let plan = parse_target(&fs::read(dir.path().join("config.json")).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let found = audit(&checkpoint, &Inventory::target(&plan)).unwrap();
    assert_eq!((model.kv_scales, found.kv_scales), (2, 2));
    assert!(found.unknown.is_empty(), "{:?}", found.unknown);
    // Both refuse one that is no number.
    rewrite(dir.path(), |tensors| {
        let scale = tensors
            .iter_mut()
            .find(|(n, ..)| n.ends_with("0.self_attn.k_proj.k_scale"));
        scale.unwrap().2 = 0f32.to_le_bytes().to_vec();
    });
    assert!(failure(dir.path()).contains("the scale is 0"));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let found = audit(&checkpoint, &Inventory::target(&plan)).unwrap();
    assert!(found.faults[0].1.to_string().contains("the scale is 0"));
}

#[test]
fn missing_parts_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(failure(&dir.path().join("nowhere")).contains("nowhere is not there: give"));
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(failure(&file).contains("is not a folder"));
    assert!(failure(dir.path()).contains("config.json"));
    let dir = copy("e4b");
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert!(failure(dir.path()).contains("neither model.safetensors"));
    // A link that leads nowhere is not as if there were none.
    std::os::unix::fs::symlink("blob", dir.path().join("model.safetensors")).unwrap();
    let message = failure(dir.path());
    assert!(
        message.contains("cannot read") && message.contains("; fetch it"),
        "{message}"
    );
}

/// Changes the tensors of a folder.
fn rewrite(dir: &Path, edit: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(n, t)| (n, t.shape().to_vec(), t.data().to_vec()))
        .collect();
    edit(&mut tensors);
    let views = tensors.iter().map(|(n, s, d)| {
        (
            n.as_str(),
            safetensors::tensor::TensorView::new(Dtype::F32, s.clone(), d).unwrap(),
        )
    });
    safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, &path).unwrap();
}

/// What is said of a copy with its tensors changed.
fn rewritten(name: &str, edit: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) -> String {
    let dir = copy(name);
    rewrite(dir.path(), edit);
    match load(dir.path(), &LoadOptions::default()) {
        Ok(_) => String::new(),
        Err(e) => e.to_string(),
    }
}

#[test]
fn every_text_tensor_is_used_exactly_once() {
    assert_eq!(rewritten("e4b", |_| ()), "");
    let missing = rewritten("e4b", |t| {
        t.retain(|(n, ..)| n != "model.layers.1.layer_scalar")
    });
    assert!(
        missing.contains("layers.1.layer_scalar is missing"),
        "{missing}"
    );
    let unknown = rewritten("e4b", |t| {
        t.push(("model.layers.1.self_attn.sinks".into(), vec![1], vec![0; 4]));
    });
    assert!(
        unknown.contains("model.layers.1.self_attn.sinks"),
        "{unknown}"
    );
    let shape = rewritten("e4b", |t| {
        let norm = t
            .iter_mut()
            .find(|(n, ..)| n == "model.norm.weight")
            .unwrap();
        (norm.1, norm.2) = (vec![16], vec![0; 64]);
    });
    assert!(
        shape.contains("model.norm.weight has shape [16]"),
        "{shape}"
    );
    let twice = rewritten("e4b", |t| {
        t.push((
            "model.language_model.norm.weight".into(),
            vec![32],
            vec![0; 128],
        ));
    });
    assert!(twice.contains("stand for the same weights"), "{twice}");
    // Layers that share a cache may carry projections nobody reads.
    let spare = rewritten("e4b", |t| {
        t.push((
            "model.layers.5.self_attn.k_proj.weight".into(),
            vec![1],
            vec![0; 4],
        ));
    });
    assert_eq!(spare, "");
}

#[test]
fn an_assistant_of_another_model_is_refused() {
    let drafter = Some(golden("31b").join("assistant"));
    let error = load(&golden("12b"), &LoadOptions { drafter }).unwrap_err();
    assert!(matches!(error, LoadError::Mismatch { .. }), "{error}");
    assert!(error.to_string().contains("caches"), "{error}");
    let options = LoadOptions {
        drafter: drafter_of(&golden("12b")),
    };
    let own = load(&golden("12b"), &options).unwrap();
    assert!(own.drafter.is_some());
    let none = load(&golden("12b"), &LoadOptions::default()).unwrap();
    assert!(none.drafter.is_none());
}

#[test]
fn the_digest_covers_every_byte_and_not_the_form() {
    let digest = |dir: &Path| {
        let model = load(dir, &LoadOptions::default()).unwrap();
        model.reading.digest().unwrap()
    };
    let original = digest(&golden("e4b"));
    let dir = copy("e4b");
    assert_eq!(
        digest(dir.path()),
        original,
        "neither path nor assistant counts"
    );
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(digest(dir.path()), original);
    assert_ne!(original.with_recipe("a"), original.with_recipe("b"));
}

#[test]
fn what_is_no_file_is_named_and_never_waited_for() {
    let dir = copy("e4b");
    let single = dir.path().join("model.safetensors");
    fs::remove_file(&single).unwrap();
    make_pipe(&single);
    let message = failure(dir.path());
    let expected = "model.safetensors: it is a named pipe, not a file: put the file";
    assert!(message.contains(expected), "{message}");

    for name in [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
    ] {
        let dir = copy("31b");
        let path = dir.path().join(name);
        let _ = fs::remove_file(&path);
        make_pipe(&path);
        let message = failure(dir.path());
        let expected = format!("{name}: it is a named pipe");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn names_out_of_files_are_shown_safely() {
    let safe = |message: &str| {
        assert!(!message.contains(char::is_control), "{message:?}");
        assert!(message.len() < 1000, "{message}");
    };
    let hostile = [r"\n\u001b[2J".to_owned(), "x".repeat(1 << 16)];
    for name in hostile {
        let dir = copy("e4b");
        let path = dir.path().join("model.safetensors");
        let tensor = |kind: &str| {
            format!(r#"{{"a{name}":{{"dtype":"{kind}","shape":[1],"data_offsets":[0,1]}}}}"#)
        };
        for header in [tensor("F32"), tensor("U8"), tensor(&name)] {
            fs::write(&path, file(&header, 1)).unwrap();
            safe(&failure(dir.path()));
        }
        let dir = copy("31b");
        let index = dir.path().join("model.safetensors.index.json");
        for map in [
            format!(r#"{{"weight_map":{{"w":"{name}"}}}}"#),
            format!(r#"{{"weight_map":{{"w":"a/{name}"}}}}"#),
            format!(r#"{{"weight_map":{{"{name}":"model-00001-of-00002.safetensors"}}}}"#),
            format!(r#"{{"weight_map":"{name}"}}"#),
        ] {
            fs::write(&index, map).unwrap();
            safe(&failure(dir.path()));
        }
    }
}
