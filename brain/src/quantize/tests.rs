//! Whole runs over small checkpoints of every variant.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Mutex,
};

use super::{
    config,
    journal::{self, JournalError},
    layout::{Format, Layout, Recipe},
    report::{self, Report},
    run::{QuantizeError, Task, Watch, run},
    testing::{matches, mixture, mixture_spelled},
};
use crate::model::{
    LoadOptions,
    audit::audit,
    checkpoint::{Checkpoint, Dtype},
    config::parse_target,
    file::make_pipe,
    inventory::Inventory,
    load,
    names::text_name,
    weight::Weight,
};

const GOLDENS: [&str; 6] = ["e2b", "e4b", "12b", "26b", "31b", "all"];

struct Silent;

impl Watch for Silent {
    fn made(&self, _: &Path) {}
    fn look(&self, _: u64) {}
    fn begin(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn again(&self, _: &str) {}
    fn shard(&self, _: &str, _: usize, _: usize) {}
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/goldens")
        .join(name)
}

fn task(source: &Path, target: &Path, format: Format) -> Task {
    Task {
        source: source.to_owned(),
        target: target.to_owned(),
        recipe: Recipe {
            format,
            attention: true,
            shard_size: 16 << 10,
        },
        threads: 2,
    }
}

/// Every file of a folder with its bytes.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_file())
        .map(|p| {
            let name = p.file_name().unwrap().to_string_lossy().into_owned();
            (name, fs::read(p).unwrap())
        })
        .collect();
    all.sort();
    all
}

/// The matrices of a loaded checkpoint, by their order in it, experts side by side.
fn matrices(dir: &Path) -> Vec<Vec<f32>> {
    let model = load(dir, &LoadOptions::default()).unwrap();
    let all = model.weights.all();
    all.iter()
        .filter(|w| w.cols() > 1)
        .map(|w| w.to_vec())
        .collect()
}

#[test]
fn every_variant_loads_again_with_the_error_that_is_reported() {
    let made = tempfile::tempdir().unwrap();
    mixture(made.path(), |_, w| w);
    let made = ("mixture", made.path().to_owned());
    for (name, source) in GOLDENS.map(|n| (n, golden(n))).into_iter().chain([made]) {
        for format in [Format::Nvfp4, Format::Fp8] {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("q");
            let task = task(&source, &target, format);
            let report = run(&task, &Silent).unwrap();
            let kept: Report =
                serde_json::from_slice(&fs::read(target.join(report::FILE)).unwrap()).unwrap();
            assert_eq!(kept.matrices.len(), report.matrices.len());
            assert!(!target.join(journal::FILE).exists());

            // Fused experts are two matrices afterwards: compare all weights in a row.
            let flat = |dir: &Path| matrices(dir).concat();
            let (before, after) = (flat(&source), flat(&target));
            assert_eq!(before.len(), after.len(), "{name}");
            let error: f64 = before
                .iter()
                .zip(&after)
                .map(|(a, b)| f64::from(a - b).powi(2))
                .sum();
            let reported = report.total.squared_error;
            assert!((error / reported - 1.0).abs() < 1e-3, "{name} {format:?}");
            let expected = if format == Format::Fp8 { 0.03 } else { 0.1 };
            assert!(report.total.relative_rms < expected, "{name} {format:?}");
        }
    }
}

/// What `brain` loads under another name is quantised as under the usual one.
#[test]
fn every_spelling_that_loads_is_encoded_whole() {
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str, spell: fn(&str) -> String, format| {
        let source = dir.path().join(name);
        mixture_spelled(&source, spell, |_, w| w);
        let target = dir.path().join(format!("{name} {format:?}"));
        run(&task(&source, &target, format), &Silent).unwrap();
        matrices(&target)
    };
    type Spelling = (&'static str, fn(&str) -> String);
    let spellings: [Spelling; 5] = [
        ("moe", |name| name.replace(".experts.", ".moe.")),
        ("dot", |name| {
            name.replace("_proj", "_proj.weight")
                .replace(".weight.weight", ".weight")
        }),
        ("joined", |name| match name.contains(".experts.") {
            true => format!("{name}_weight"),
            false => name.to_owned(),
        }),
        ("moe and dot", |name| match name.contains(".experts.") {
            true => format!("{}.weight", name.replace(".experts.", ".moe.")),
            false => name.to_owned(),
        }),
        ("packed", |name| {
            name.replace("up_proj.weight", "up_proj.weight_packed")
        }),
    ];
    for format in [Format::Nvfp4, Format::Fp8] {
        let usual = made("usual", str::to_owned, format);
        for (name, spell) in spellings {
            assert!(made(name, spell, format) == usual, "{name} {format:?}");
        }
    }
}

#[test]
fn the_excluded_modules_are_exactly_those_that_are_not_encoded() {
    for name in GOLDENS {
        for (format, attention) in [
            (Format::Nvfp4, false),
            (Format::Nvfp4, true),
            (Format::Fp8, false),
            (Format::Fp8, true),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("q");
            let mut task = task(&golden(name), &target, format);
            task.recipe.attention = attention;
            run(&task, &Silent).unwrap();
            let read = |file: &str| -> serde_json::Value {
                serde_json::from_slice(&fs::read(target.join(file)).unwrap()).unwrap()
            };
            let recipe = &read("config.json")["quantization_config"];
            let beside = &read("hf_quant_config.json")["quantization"];
            assert_eq!(recipe["ignore"], beside["exclude_modules"]);
            assert_eq!(recipe["quant_algo"], config::algorithm(format));
            let patterns: Vec<&str> = recipe["ignore"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| p.as_str().unwrap())
                .collect();
            let checkpoint = Checkpoint::open(&target).unwrap();
            for t in checkpoint.tensors() {
                let module = t.name().strip_suffix(".weight").unwrap_or(t.name());
                if t.shape().len() < 2
                    || module.contains("embed_tokens")
                    || module.contains("scale")
                {
                    continue;
                }
                let excluded = patterns.iter().any(|p| matches(p, module));
                let plain = t.dtype() == Dtype::F32;
                let fused = module.ends_with("experts.gate_up_proj");
                assert_eq!(excluded, plain, "{name} {format:?} {attention} {module}");
                assert!(!fused || plain, "{module}");
                if !attention && module.contains("self_attn") {
                    assert!(plain, "{module}");
                }
            }
        }
    }
}

#[test]
fn files_are_laid_out_as_other_readers_need_them() {
    for format in [Format::Nvfp4, Format::Fp8] {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("q");
        run(&task(&golden("26b"), &target, format), &Silent).unwrap();
        let weights: Vec<_> = files(&target)
            .into_iter()
            .filter(|(name, _)| name.ends_with(".safetensors"))
            .collect();
        assert!(weights.len() > 1, "one file alone shows little");
        for (name, bytes) in &weights {
            let (header, metadata) = safetensors::SafeTensors::read_metadata(bytes).unwrap();
            assert!(header.is_multiple_of(8), "{name}");
            for (tensor, info) in metadata.tensors() {
                let width = info.dtype.bitsize().div_ceil(8);
                assert!(info.data_offsets.0.is_multiple_of(width), "{tensor}");
            }
        }
    }
}

#[test]
fn matrices_that_are_computed_as_one_share_a_factor() {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("s"), dir.path().join("q"));
    mixture(&source, |_, w| w);
    run(&task(&source, &target, Format::Nvfp4), &Silent).unwrap();
    let checkpoint = Checkpoint::open(&target).unwrap();
    let factor = |module: &str| {
        let name = format!("{module}.weight_scale_2");
        let t = checkpoint.tensors().find(|t| t.name().ends_with(&name));
        let bytes = t.unwrap_or_else(|| panic!("{name}")).bytes();
        assert_eq!(bytes.len(), 4);
        bytes.to_vec()
    };
    for (one, other, same) in [
        (
            "layers.0.self_attn.q_proj",
            "layers.0.self_attn.v_proj",
            true,
        ),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", true),
        (
            "layers.1.experts.3.gate_proj",
            "layers.1.experts.3.up_proj",
            true,
        ),
        (
            "layers.1.experts.3.gate_proj",
            "layers.1.experts.2.gate_proj",
            false,
        ),
        ("layers.0.mlp.gate_proj", "layers.1.mlp.gate_proj", false),
    ] {
        assert_eq!(factor(one) == factor(other), same, "{one} {other}");
    }
}

/// Does something whenever a file of the result is done, of which it gets the number.
struct Done<F>(F);

impl<F: Fn(usize) + Sync> Watch for Done<F> {
    fn made(&self, _: &Path) {}
    fn look(&self, _: u64) {}
    fn begin(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn again(&self, _: &str) {}
    fn shard(&self, _: &str, number: usize, _: usize) {
        (self.0)(number);
    }
}

/// Ends the run when so many files are done.
fn stop(after: usize) -> Done<impl Fn(usize) + Sync> {
    Done(move |number| assert!(number < after, "the test stops here"))
}

#[test]
fn an_interrupted_run_goes_on_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    run(&task(&golden("all"), &whole, Format::Nvfp4), &Silent).unwrap();
    let target = dir.path().join("stopped");
    let task = task(&golden("all"), &target, Format::Nvfp4);
    for number in [1, 2] {
        let stopped = catch_unwind(AssertUnwindSafe(|| run(&task, &stop(number))));
        assert!(stopped.is_err());
        assert!(
            !target.join("config.json").exists(),
            "it is no checkpoint yet"
        );
    }
    let first = fs::read_dir(&target)
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.to_string_lossy().contains("00001-of"))
        .unwrap();
    let made = fs::metadata(&first).unwrap().modified().unwrap();
    run(&task, &Silent).unwrap();
    assert_eq!(fs::metadata(&first).unwrap().modified().unwrap(), made);
    assert_eq!(files(&target), files(&whole));
    // What is finished is not begun again, and nothing else is written over.
    let error = run(&task, &Silent).unwrap_err();
    assert!(matches!(error, QuantizeError::Exists(_)), "{error}");
}

/// Keeps which files were made again, and which were made.
#[derive(Default)]
struct Heard {
    again: Mutex<Vec<String>>,
    made: Mutex<Vec<String>>,
}

impl Watch for Heard {
    fn made(&self, _: &Path) {}
    fn look(&self, _: u64) {}
    fn begin(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn again(&self, file: &str) {
        self.again.lock().unwrap().push(file.to_owned());
    }
    fn shard(&self, file: &str, _: usize, _: usize) {
        self.made.lock().unwrap().push(file.to_owned());
    }
}

#[test]
fn a_finished_file_that_was_changed_is_made_again_and_no_other() {
    /// Changes a file that a run finished.
    type Damage = fn(&Path, &[u8]);
    let damages: [(&str, Damage); 8] = [
        ("cut", |path, bytes| fs::write(path, &bytes[..100]).unwrap()),
        ("longer", |path, bytes| {
            fs::write(path, [bytes, &[0]].concat()).unwrap();
        }),
        ("a bit of the header", |path, bytes| flip(path, bytes, 9)),
        ("a bit of the first tensor", |path, bytes| {
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            flip(path, bytes, 8 + header as usize);
        }),
        ("the last bit", |path, bytes| {
            flip(path, bytes, bytes.len() - 1);
        }),
        ("zeros of the same length", |path, bytes| {
            fs::write(path, vec![0; bytes.len()]).unwrap();
        }),
        ("gone", |path, _| fs::remove_file(path).unwrap()),
        ("a pipe", |path, _| {
            fs::remove_file(path).unwrap();
            make_pipe(path);
        }),
    ];
    for format in [Format::Fp8, Format::Nvfp4] {
        let dir = tempfile::tempdir().unwrap();
        let whole = dir.path().join("whole");
        run(&task(&golden("all"), &whole, format), &Silent).unwrap();
        for (what, damage) in damages {
            let target = dir.path().join(what);
            let task = task(&golden("all"), &target, format);
            // The run ends when the second is finished and the journal says so.
            assert!(catch_unwind(AssertUnwindSafe(|| run(&task, &stop(2)))).is_err());
            let mut finished: Vec<String> = files(&target)
                .into_iter()
                .map(|(name, _)| name)
                .filter(|name| name.ends_with(".safetensors"))
                .collect();
            assert!(finished.len() >= 2, "{finished:?}");
            let victim = finished.remove(0);
            let path = target.join(&victim);
            let bytes = fs::read(&path).unwrap();
            damage(&path, &bytes);
            let heard = Heard::default();
            run(&task, &heard).unwrap();
            assert_eq!(*heard.again.lock().unwrap(), [victim.as_str()], "{what}");
            let made = heard.made.lock().unwrap();
            assert!(made.contains(&victim), "{what}: {made:?}");
            assert!(!made.contains(&finished[0]), "{what}: {made:?}");
            assert!(files(&target) == files(&whole), "{format:?}: {what}");
        }
    }
}

fn flip(path: &Path, bytes: &[u8], at: usize) {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// A golden checkpoint that a test may change.
fn copy(name: &str, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for (file, bytes) in files(&golden(name)) {
        fs::write(to.join(file), bytes).unwrap();
    }
}

#[test]
fn bad_sources_and_results_are_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let refused = |source: &Path, target: &Path, format| {
        let error = run(&task(source, target, format), &Silent).unwrap_err();
        error.to_string()
    };
    let e2b = golden("e2b");
    fs::create_dir(path("used")).unwrap();
    fs::write(path("used").join("x"), "mine").unwrap();
    let message = refused(&e2b, &path("used"), Format::Fp8);
    assert!(message.contains("is there already"), "{message}");
    assert_eq!(fs::read(path("used").join("x")).unwrap(), b"mine");

    copy("e2b", &path("own"));
    let inside = path("own").join("q");
    let message = refused(&path("own"), &inside, Format::Fp8);
    assert!(message.contains("cannot be the source"), "{message}");
    assert!(!inside.exists());

    let message = refused(&e2b.join("assistant"), &path("a"), Format::Fp8);
    assert!(message.contains("gemma4_assistant"), "{message}");

    run(&task(&e2b, &path("q"), Format::Nvfp4), &Silent).unwrap();
    let message = refused(&path("q"), &path("qq"), Format::Fp8);
    assert!(message.contains("is nvfp4 already"), "{message}");

    // A weight that is not a number, in a matrix that is encoded.
    let file = path("own").join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let (name, info) = metadata
        .tensors()
        .into_iter()
        .find(|(name, _)| name.ends_with("layers.0.mlp.up_proj.weight"))
        .unwrap();
    let at = 8 + header + info.data_offsets.0 + 40;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let message = refused(&path("own"), &path("nan"), Format::Nvfp4);
    assert!(message.contains(&name), "{message}");
    assert!(message.contains("not a finite number"), "{message}");
    assert!(!path("nan").exists(), "nobody can go on with it");

    // Unfinished work is gone on with only as it was begun.
    let stopped = task(&e2b, &path("stopped"), Format::Nvfp4);
    assert!(catch_unwind(AssertUnwindSafe(|| run(&stopped, &stop(1)))).is_err());
    let other = task(&e2b, &path("stopped"), Format::Fp8);
    let error = run(&other, &Silent).unwrap_err();
    let other = matches!(error, QuantizeError::Journal(JournalError::Other { .. }));
    assert!(other, "{error}");

    let message = refused(&e2b, Path::new("/proc/no/such/folder"), Format::Fp8);
    assert!(message.contains("cannot make"), "{message}");
    let message = refused(&e2b.join("config.json"), &path("x"), Format::Fp8);
    assert!(message.contains("is not a folder: give"), "{message}");
}

/// Writes over bytes of a tensor whose name ends so, in place.
fn overwrite(file: &Path, name: &str, bytes: &[u8]) {
    let mut content = fs::read(file).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&content).unwrap();
    let mut named = metadata
        .tensors()
        .into_iter()
        .filter(|(n, _)| n.ends_with(name));
    let at = 8 + header + named.next().unwrap().1.data_offsets.0;
    content[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(file, content).unwrap();
}

#[test]
fn what_is_copied_is_looked_at_too() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("s");
    copy("e2b", &source);
    let file = source.join("model.safetensors");
    overwrite(&file, "model.norm.weight", &f32::NAN.to_le_bytes());
    let target = dir.path().join("q");
    let error = run(&task(&source, &target, Format::Fp8), &Silent).unwrap_err();
    assert!(matches!(error, QuantizeError::NotFinite(_)), "{error}");
    assert!(!target.exists());

    let source = dir.path().join("drafted");
    copy("e2b", &source);
    let assistant = source.join("assistant");
    fs::create_dir(&assistant).unwrap();
    fs::write(assistant.join("model.safetensors"), "junk").unwrap();
    fs::copy(
        golden("e2b/assistant/config.json"),
        assistant.join("config.json"),
    )
    .unwrap();
    let error = run(&task(&source, &target, Format::Fp8), &Silent).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("assistant/model.safetensors is damaged"),
        "{error}"
    );
    assert!(!target.exists());
}

/// Writes to the source once a file of the result is done.
fn meddler(source: &Path) -> Done<impl Fn(usize) + Sync> {
    Done(move |number| {
        if number == 1 {
            let about = fs::metadata(source).unwrap();
            overwrite(source, "layers.0.layer_scalar", &0.5f32.to_le_bytes());
            // As if nothing had been: the time is set back.
            let file = fs::File::options().write(true).open(source).unwrap();
            file.set_modified(about.modified().unwrap()).unwrap();
        }
    })
}

#[test]
fn a_source_that_is_written_to_is_noticed_and_nothing_of_it_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("s"), dir.path().join("q"));
    copy("all", &source);
    let file = source.join("model.safetensors");
    let task = task(&source, &target, Format::Nvfp4);
    let error = run(&task, &meddler(&file)).unwrap_err();
    assert!(matches!(error, QuantizeError::Changed { .. }), "{error}");
    assert!(!target.exists());

    // Between two runs, too.
    assert!(catch_unwind(AssertUnwindSafe(|| run(&task, &stop(1)))).is_err());
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    overwrite(&file, "layers.0.layer_scalar", &0.25f32.to_le_bytes());
    let opened = fs::File::options().write(true).open(&file).unwrap();
    opened.set_modified(modified).unwrap();
    let error = run(&task, &Silent).unwrap_err();
    let other = matches!(error, QuantizeError::Journal(JournalError::Other { .. }));
    assert!(other, "{error}");
}

#[test]
fn weights_on_the_grid_of_q4_0_are_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("s"), dir.path().join("q"));
    // A step for every block of 32, and whole numbers from -8 to 8 of it.
    let grid = |i: usize, w: f32| {
        let step = 0.01 + (i / 32 % 7) as f32 * 0.003;
        (w / 0.005).round().clamp(-8.0, 7.0) * step
    };
    mixture(&source, grid);
    let report = run(&task(&source, &target, Format::Nvfp4), &Silent).unwrap();
    assert_eq!(report.on_q4_0_grid, report.matrices.len());
    assert!(report.text().contains("grid of Q4_0"), "{}", report.text());
    let plain = dir.path().join("plain");
    mixture(&plain, |_, w| w);
    let report = run(
        &task(&plain, &dir.path().join("qq"), Format::Nvfp4),
        &Silent,
    )
    .unwrap();
    assert_eq!(report.on_q4_0_grid, 0);
}

#[test]
fn everything_that_could_be_encoded_is_counted() {
    for name in GOLDENS {
        let dir = golden(name);
        let plan = parse_target(&fs::read(dir.join("config.json")).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let audit = audit(&checkpoint, &Inventory::target(&plan)).unwrap();
        let sources: Vec<_> = checkpoint.tensors().cloned().collect();
        let recipe = Recipe {
            format: Format::Nvfp4,
            attention: true,
            shard_size: 1 << 30,
        };
        let layout = Layout::new(&sources, &audit, &recipe).unwrap();
        let names: Vec<&str> = layout
            .shards
            .iter()
            .flat_map(|s| &s.jobs)
            .flat_map(|j| &j.outputs)
            .map(|o| o.name.as_str())
            .collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{name}: a name twice");
        assert!(layout.encoded.is_disjoint(&layout.kept), "{name}");
        // 40 columns do not divide into blocks of 16: those matrices are kept and said to be.
        let odd = layout.kept.iter().any(|m| m.ends_with("mlp.down_proj"));
        assert!(odd, "{name}");
        let text = |m: &&String| text_name(m).is_some();
        assert!(layout.kept.iter().all(|m| text(&m)));
        let float = |w: &Weight| matches!(w, Weight::Float(_));
        assert!(audit.filled.iter().flat_map(|f| &f.weights).all(float));
    }
}
