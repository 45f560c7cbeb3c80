//! Whatever lies in a checkpoint folder: it loads or is refused with a reason, without a panic and
//! without taking memory that the files do not account for.

#![no_main]

use std::{fs, path::Path, sync::LazyLock};

use brain::model::{self, LoadOptions};
use libfuzzer_sys::fuzz_target;
use marathon_fuzz::{checkpoint::Files, seeds};
use tempfile::TempDir;

/// A folder for every input of this process, with a target in order for assistants.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder for the inputs");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/12b");
    let target = folder.path().join("target");
    fs::create_dir(&target).expect("a folder for the target");
    fs::create_dir(folder.path().join("input")).expect("a folder for the input");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), target.join(name)).expect("a golden checkpoint");
    }
    folder
});

fuzz_target!(init: seeds::checkpoints().expect("seeds"), |input: &[u8]| {
    let Some(files) = Files::read(input) else {
        return;
    };
    let folder = FOLDER.path().join("input");
    fs::write(folder.join("config.json"), files.config).expect("room for config.json");
    fs::write(folder.join("model.safetensors"), &files.weights).expect("room for the weights");
    let loaded = if files.assistant {
        let drafter = Some(folder);
        model::load(&FOLDER.path().join("target"), &LoadOptions { drafter })
    } else {
        model::load(&folder, &LoadOptions::default())
    };
    let refused = match loaded {
        Ok(model) => model.reading.digest().err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    assert_ne!(refused.as_deref(), Some(""));
});
