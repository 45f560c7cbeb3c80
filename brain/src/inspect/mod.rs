//! What a checkpoint is: sizes, forms, memory, and everything that is wrong with it.
//!
//! Only headers and small files are read, so that a checkpoint of any size takes a moment, and one
//! whose weights are still missing can be looked at.

pub mod header;
pub mod memory;
pub mod print;
pub mod problem;
pub mod report;
mod weights;

use std::path::{Path, PathBuf};

use serde_json::Value;

use self::{
    header::{Entry, Header},
    memory::Kv,
    problem::Problem,
    report::{Architecture, DrafterFacts, FileFacts, Parameters, Report, TextFacts},
    weights::Weights,
};
use crate::{
    model::{
        audit::Audit,
        check_fit, check_folder,
        config::{ConfigError, parse_assistant, parse_target},
        drafter_of, file, generation,
        inventory::Inventory,
        plan::{DraftHead, DraftPlan, Kind, Plan},
        quant_config,
        weight::Weight,
    },
    text::{append::GenerationPrompts, template::Template, tokenizer::Tokenizer},
};

/// What to look at beside the checkpoint itself.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The drafter's folder; without one, that which belongs to the checkpoint, if it is there.
    pub drafter: Option<PathBuf>,
    /// The device's memory and the share of it to plan with.
    pub memory: Option<(u64, f64)>,
    /// Tokens of a sequence; without them, what the model was made for.
    pub tokens: Option<u64>,
    /// Whether to list every tensor.
    pub tensors: bool,
}

/// Looks at a checkpoint folder or at one safetensors file.
pub fn inspect(path: &Path, options: &Options) -> Report {
    if path.is_dir() {
        with_drafter(path, options)
    } else {
        file(path, options)
    }
}

fn empty(path: &Path, kind: &'static str) -> Report {
    Report {
        path: path.display().to_string(),
        kind,
        architecture: None,
        parameters: None,
        quantization: None,
        storage: Vec::new(),
        files: Vec::new(),
        kv: None,
        kv_scales: 0,
        asks_for_fp8_cache: false,
        memory: None,
        drafter: None,
        text: None,
        notes: Vec::new(),
        problems: Vec::new(),
        tensors: None,
    }
}

fn file(path: &Path, options: &Options) -> Report {
    let mut report = empty(path, "file");
    let header = header::read(path, &mut report.problems);
    report.storage = report::storage_of_file(&header);
    report.files = vec![facts(&header)];
    if options.tensors {
        let entries: Vec<&Entry> = header.entries.iter().collect();
        report.tensors = Some(report::tensors(None, &entries));
    }
    report
}

fn facts(header: &Header) -> FileFacts {
    FileFacts {
        file: header.file.clone(),
        bytes: header.bytes,
        tensors: header.entries.len(),
    }
}

/// What config.json describes.
enum Described {
    Target(Plan),
    Assistant(DraftPlan),
}

impl Described {
    fn plan(&self) -> &Plan {
        match self {
            Self::Target(plan) => plan,
            Self::Assistant(plan) => &plan.text,
        }
    }
}

/// A folder and, if it is a target's, what belongs to serving it.
fn with_drafter(dir: &Path, options: &Options) -> Report {
    let (mut report, described) = folder(dir, options);
    if let Some(Described::Target(plan)) = &described {
        report.kv = Some(Kv::of(plan));
        drafter(dir, plan, options, &mut report);
        let json = file::read(&dir.join("config.json")).unwrap_or_default();
        report.text = Some(text(dir, plan, &json, &mut report.problems));
        length(plan, options, &mut report.problems);
        memory(plan, options, &mut report);
    }
    report
}

/// A folder by itself.
fn folder(dir: &Path, options: &Options) -> (Report, Option<Described>) {
    let mut report = empty(dir, "unknown");
    let config = read(dir, "config.json", &mut report.problems);
    let described = config
        .as_deref()
        .and_then(|json| describe(json, &mut report.problems));
    let weights = Weights::read(dir, &mut report.problems);
    report.files = weights.headers.iter().map(facts).collect();
    let entries: Vec<&Entry> = weights.headers.iter().flat_map(|h| &h.entries).collect();
    let beside = read_optional(dir, "hf_quant_config.json", &mut report.problems);
    if let Some(json) = config.as_deref() {
        report.quantization = recipe(json, beside.as_deref());
    }
    let mut found = None;
    if let Some(described) = &described {
        let json = config.as_deref().unwrap_or_default();
        report.kind = match described {
            Described::Target(_) => "target",
            Described::Assistant(_) => "assistant",
        };
        report.architecture = Some(architecture(json, described));
        let inventory = match described {
            Described::Target(plan) => Inventory::target(plan),
            Described::Assistant(plan) => Inventory::assistant(plan),
        };
        found = weights.audit(&inventory, &mut report.problems);
        if let Some(audit) = &found {
            report.parameters = Some(Parameters::of(audit, described.plan(), &entries));
            report.storage = report::storage(audit, &entries);
            report.kv_scales = audit.kv_scales;
            report.notes = differences(json, beside.as_deref(), audit);
            report.asks_for_fp8_cache = quant_config::asks_for_fp8_cache(json, beside.as_deref());
        }
    }
    if options.tensors {
        report.tensors = Some(report::tensors(found.as_ref(), &entries));
    }
    (report, described)
}

fn read(dir: &Path, name: &str, problems: &mut Vec<Problem>) -> Option<Vec<u8>> {
    match file::read(&dir.join(name)) {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            problems.push(Problem::of_reading(name, &error));
            None
        }
    }
}

/// The same for a file that need not be there. One that is and cannot be read is a problem, as
/// serving refuses it.
fn read_optional(dir: &Path, name: &str, problems: &mut Vec<Problem>) -> Option<Vec<u8>> {
    match file::is_there(&dir.join(name)) {
        Ok(false) => None,
        Ok(true) | Err(_) => read(dir, name, problems),
    }
}

fn describe(json: &[u8], problems: &mut Vec<Problem>) -> Option<Described> {
    let target = parse_target(json);
    let described = match target {
        Err(ConfigError::Assistant(_)) => parse_assistant(json).map(Described::Assistant),
        target => target.map(Described::Target),
    };
    match described {
        Ok(described) => Some(described),
        Err(error) => {
            let remedy = match error {
                ConfigError::Architecture { .. } => "take a Gemma 4 checkpoint or its assistant",
                _ => "take config.json from the checkpoint's own repository",
            };
            problems.push(Problem::of_file("config.json", error.to_string(), remedy));
            None
        }
    }
}

fn architecture(json: &[u8], described: &Described) -> Architecture {
    let model_type = serde_json::from_slice::<Value>(json)
        .ok()
        .and_then(|config| Some(config.get("model_type")?.as_str()?.to_owned()))
        .unwrap_or_default();
    let mut architecture = Architecture::of(model_type, described.plan());
    if let Described::Assistant(plan) = described {
        architecture.backbone = Some(plan.backbone);
        if let DraftHead::Centroids { count, top_k } = plan.head {
            architecture.clusters = Some([count, top_k]);
        }
    }
    architecture
}

/// What config.json or hf_quant_config.json says of the weights' form.
fn recipe(config: &[u8], beside: Option<&[u8]>) -> Option<String> {
    let config: Value = serde_json::from_slice(config).ok()?;
    let inside = |v: &Value| {
        let name = |key: &str| v.get(key).and_then(Value::as_str).map(str::to_owned);
        let method = name("quant_method").unwrap_or_else(|| "modelopt".into());
        let form = name("quant_algo").or_else(|| name("format"))?;
        Some(format!("{method} {form}"))
    };
    if let Some(found) = config.get("quantization_config").and_then(inside) {
        return Some(found);
    }
    let beside: Value = serde_json::from_slice(beside?).ok()?;
    inside(beside.get("quantization")?)
}

/// Where the configuration says one thing of the weights' forms and the files hold another.
fn differences(config: &[u8], beside: Option<&[u8]>, audit: &Audit) -> Vec<String> {
    let weights: Vec<&Weight> = audit.filled.iter().flat_map(|f| &f.weights).collect();
    quant_config::differences(config, beside, &weights)
}

fn drafter(dir: &Path, target: &Plan, options: &Options, report: &mut Report) {
    let Some(path) = options.drafter.clone().or_else(|| drafter_of(dir)) else {
        return;
    };
    if let Err(wrong) = check_folder(&path) {
        let remedy = "give the folder of the assistant, or take away what lies in its place";
        let file = path.display().to_string();
        let problem = Problem::of_file(&file, wrong.why(), remedy);
        report.problems.push(problem);
        return;
    }
    let (mut inner, _) = folder(&path, &Options::default());
    let label = |file: &str| path.join(file).display().to_string();
    for problem in &mut inner.problems {
        problem.file = label(&problem.file);
    }
    let mut problems = inner.problems;
    let config = file::read(&path.join("config.json")).unwrap_or_default();
    if let Ok(plan) = parse_assistant(&config) {
        if let Err(problem) = check_fit(target, &plan) {
            let remedy = "take the assistant that was made for this model";
            let file = label("config.json");
            problems.push(Problem::of_file(
                &file,
                format!("does not fit: {problem}"),
                remedy,
            ));
        }
    } else if inner.kind == "target" {
        let problem = "describes a target where an assistant is asked for";
        let remedy = "give the folder of the assistant";
        problems.push(Problem::of_file(&label("config.json"), problem, remedy));
    }
    let notes = inner.notes.iter();
    report
        .notes
        .extend(notes.map(|note| format!("{}: {note}", path.display())));
    report.drafter = Some(DrafterFacts {
        path: path.display().to_string(),
        fits: problems.is_empty(),
        parameters: inner.parameters.map_or(0, |p| p.total),
        bytes: inner.storage.iter().map(|s| s.bytes).sum(),
        reads: [Kind::Sliding, Kind::Full].map(|kind| target.last_owner(kind)),
    });
    report.problems.extend(problems);
}

fn memory(plan: &Plan, options: &Options, report: &mut Report) {
    let (Some((memory, utilization)), Some(kv)) = (options.memory, &report.kv) else {
        return;
    };
    let read = report.storage.iter().filter(|s| s.part != "towers");
    let weights = read.map(|s| s.bytes).sum();
    let drafter = report.drafter.as_ref().map_or(0, |d| d.bytes);
    let longest = plan.max_positions as u64;
    let request = memory::Request {
        memory,
        utilization,
        tokens: options.tokens.unwrap_or(longest),
    };
    let plan = memory::plan(&request, kv, weights, drafter, longest);
    if let Some(short) = plan.shortage(options.tokens.is_some()) {
        let remedy = "plan with more memory or a shorter --max-model-len, or see brain quantize";
        let problem = Problem::of_file(&report.path, short, remedy);
        report.problems.push(problem);
    }
    report.memory = Some(plan);
}

/// What is asked for beyond what the model was made for.
fn length(plan: &Plan, options: &Options, problems: &mut Vec<Problem>) {
    let most = plan.max_positions as u64;
    if let Some(tokens) = options.tokens.filter(|tokens| *tokens > most) {
        let problem = format!("knows {most} positions, and --max-model-len asks for {tokens}");
        let remedy = format!("ask for {most} at most");
        problems.push(Problem::of_file("config.json", problem, remedy));
    }
}

fn text(dir: &Path, plan: &Plan, config: &[u8], problems: &mut Vec<Problem>) -> TextFacts {
    let generation = read_optional(dir, "generation_config.json", problems);
    let defaults = generation::parse(generation.as_deref(), config, plan.vocab)
        .map_err(|wrong| {
            let remedy = "correct the file or take the checkpoint's own";
            let problem = wrong.problem.to_string();
            problems.push(Problem::of_file(wrong.file, problem, remedy));
        })
        .ok();
    let own = "take it from the checkpoint's own repository";
    let tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json"))
        .map_err(|error| problems.push(Problem::of_file("tokenizer.json", error.to_string(), own)))
        .ok();
    if let Some(tokenizer) = &tokenizer {
        if let Err(error) = tokenizer.check_vocabulary(plan.vocab) {
            problems.push(Problem::of_file("tokenizer.json", error.to_string(), own));
        }
        let bos = tokenizer.markers().bos;
        let other = defaults.as_ref().and_then(|d| d.bos).filter(|b| *b != bos);
        if let Some(other) = other {
            let problem =
                format!("begins prompts with token {bos}, the configuration with {other}");
            problems.push(Problem::of_file("tokenizer.json", problem, own));
        }
    }
    let template = Template::from_checkpoint(dir)
        .and_then(|template| GenerationPrompts::of(&template).map(|_| template))
        .map_err(|error| {
            problems.push(Problem::of_file(
                "chat_template.jinja",
                error.to_string(),
                own,
            ));
        })
        .ok();
    // With its tokenizer it is known where a turn ends, whatever the configuration leaves out.
    let eos = defaults.as_ref().map_or(Vec::new(), |d| d.eos.clone());
    let eos = match &tokenizer {
        Some(tokenizer) => tokenizer.markers().stops(&eos),
        None => eos,
    };
    TextFacts {
        tokens: tokenizer.as_ref().map(Tokenizer::vocab_size),
        template: template.map(|t| t.hash().to_hex().to_string()),
        temperature: defaults.as_ref().map(|d| d.temperature),
        top_k: defaults.as_ref().map(|d| d.top_k),
        top_p: defaults.as_ref().map(|d| d.top_p),
        eos,
        suppressed: defaults.map_or(Vec::new(), |d| d.suppressed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A golden checkpoint that a test may damage.
    fn copy(name: &str) -> tempfile::TempDir {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(goldens.join(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        dir
    }

    /// What is wrong with its weights, as `file: problem`.
    fn wrong(dir: &Path) -> Vec<String> {
        let problems = inspect(dir, &Options::default()).problems.into_iter();
        problems
            .filter(|p| !["tokenizer.json", "chat_template.jinja"].contains(&p.file.as_str()))
            .map(|p| format!("{}: {}", p.file, p.problem))
            .collect()
    }

    #[test]
    fn a_cause_is_told_without_what_follows_from_it() {
        let one = |dir: &Path, expected: &str| {
            let found = wrong(dir);
            assert_eq!(found.len(), 1, "{expected}: {found:?}");
            assert!(found[0].contains(expected), "{expected}: {found:?}");
        };
        let dir = copy("e2b");
        let weights = dir.path().join("model.safetensors");
        assert_eq!(wrong(dir.path()), [] as [String; 0]);
        std::fs::remove_file(&weights).unwrap();
        one(dir.path(), "has neither model.safetensors nor");
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("/nowhere/at/all", &weights).unwrap();
            let expected = "model.safetensors: is a link to /nowhere/at/all, which is not there";
            one(dir.path(), expected);
        }

        let dir = copy("31b");
        let index = dir.path().join("model.safetensors.index.json");
        let text = std::fs::read_to_string(&index).unwrap();
        let name = "model.safetensors.index.json: ";
        assert_eq!(wrong(dir.path()), [] as [String; 0]);
        std::fs::write(&index, "").unwrap();
        one(dir.path(), &format!("{name}is not an index"));
        std::fs::write(&index, r#"{"weight_map":7}"#).unwrap();
        one(dir.path(), &format!("{name}is not an index"));
        std::fs::write(&index, r#"{"weight_map":{}}"#).unwrap();
        one(dir.path(), &format!("{name}names no file of weights"));
        let shard = "model-00001-of-00002.safetensors";
        std::fs::write(&index, text.replacen(shard, "../x", 1)).unwrap();
        one(dir.path(), "which is not a plain file name");
        std::fs::write(&index, &text).unwrap();
        std::fs::remove_file(dir.path().join(shard)).unwrap();
        one(dir.path(), &format!("{shard}: is not there"));
    }

    #[test]
    fn a_tensor_that_whole_files_lack_is_missing() {
        let dir = copy("e2b");
        let path = dir.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        // Of the same length, so that all else is as it was.
        let (name, other) = (b"layers.0.layer_scalar", b"layers.0.layer_scalax");
        let found = bytes.windows(name.len()).position(|w| w == name);
        bytes[found.unwrap()..][..name.len()].copy_from_slice(other);
        std::fs::write(&path, bytes).unwrap();
        let found = wrong(dir.path());
        assert!(found.iter().any(|p| p.ends_with("is missing")), "{found:?}");
    }

    /// What serving refuses is not passed over.
    #[cfg(unix)]
    #[test]
    fn small_files_that_are_there_and_cannot_be_read_are_problems() {
        for name in ["generation_config.json", "hf_quant_config.json"] {
            let dir = copy("e2b");
            let path = dir.path().join(name);
            let _ = std::fs::remove_file(&path);
            std::os::unix::fs::symlink("gone", &path).unwrap();
            let found = wrong(dir.path());
            assert_eq!(found, [format!("{name}: is not there")]);
            std::fs::remove_file(&path).unwrap();
            file::make_pipe(&path);
            let found = wrong(dir.path());
            assert_eq!(found, [format!("{name}: is a named pipe, not a file")]);
        }
    }

    #[test]
    fn what_is_asked_beyond_the_model_or_the_device_is_a_problem() {
        let dir = copy("e2b");
        let asked = |memory: Option<u64>, tokens: Option<u64>| {
            let options = Options {
                memory: memory.map(|bytes| (bytes, 0.9)),
                tokens,
                ..Options::default()
            };
            let problems = inspect(dir.path(), &options).problems.into_iter();
            let ours = |p: &Problem| p.remedy.contains("at most") || p.remedy.contains("memory");
            problems.filter(ours).map(|p| p.problem).collect::<Vec<_>>()
        };
        assert_eq!(asked(Some(1 << 30), None), [] as [String; 0]);
        let beyond = asked(None, Some(1 << 20));
        assert!(
            beyond[0].contains("--max-model-len asks for 1048576"),
            "{beyond:?}"
        );
        let small = asked(Some(1000), None);
        assert!(small[0].contains("too little"), "{small:?}");
    }

    #[test]
    fn tokens_that_the_model_has_not_are_a_problem() {
        let dir = copy("e2b");
        let file = dir.path().join("generation_config.json");
        std::fs::write(&file, r#"{"suppress_tokens":[1000000]}"#).unwrap();
        let found = wrong(dir.path());
        assert_eq!(found.len(), 1, "{found:?}");
        let expected = "generation_config.json: suppress_tokens: names token 1000000";
        assert!(found[0].starts_with(expected), "{found:?}");
    }

    #[test]
    fn a_configuration_of_another_form_is_noted_and_is_no_problem() {
        let dir = copy("e2b");
        let before = inspect(dir.path(), &Options::default());
        assert_eq!(before.notes, [] as [String; 0]);
        assert!(!before.asks_for_fp8_cache);
        let says = r#"{"quantization":{"quant_algo":"NVFP4","kv_cache_quant_algo":"FP8"}}"#;
        std::fs::write(dir.path().join("hf_quant_config.json"), says).unwrap();
        let after = inspect(dir.path(), &Options::default());
        assert_eq!(after.problems, before.problems);
        assert_eq!(after.notes.len(), 1, "{:?}", after.notes);
        let expected = "hf_quant_config.json says NVFP4 of";
        assert!(after.notes[0].starts_with(expected), "{:?}", after.notes);
        assert!(print::text(&after).contains(&format!("note  {expected}")));
        assert!(after.asks_for_fp8_cache);
        assert!(print::text(&after).contains("--kv-cache-dtype auto is fp8"));
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_is_a_problem_and_is_not_waited_for() {
        for (golden, name) in [
            ("e2b", "model.safetensors"),
            ("e2b", "config.json"),
            ("31b", "model-00001-of-00002.safetensors"),
            ("31b", "model.safetensors.index.json"),
        ] {
            let dir = copy(golden);
            std::fs::remove_file(dir.path().join(name)).unwrap();
            file::make_pipe(&dir.path().join(name));
            let problems = inspect(dir.path(), &Options::default()).problems;
            let found = problems.iter().find(|p| p.file == name);
            let found = found.unwrap_or_else(|| panic!("{name}: {problems:?}"));
            assert_eq!(found.problem, "is a named pipe, not a file");
        }
    }

    /// What serving takes for the drafter is what is looked at.
    #[cfg(unix)]
    #[test]
    fn the_drafter_is_found_where_serving_finds_it() {
        let root = tempfile::tempdir().unwrap();
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
        let target = copy("e2b");
        let model = root.path().join("model");
        std::fs::rename(target.keep(), &model).unwrap();
        let sibling = root.path().join("model-assistant");
        let link = |to: &Path, place: &Path| std::os::unix::fs::symlink(to, place).unwrap();
        let drafter = || inspect(&model, &Options::default());

        assert!(drafter().drafter.is_none());
        link(&goldens.join("e2b/assistant"), &sibling);
        let found = drafter().drafter.unwrap();
        assert_eq!(found.path, sibling.display().to_string());
        assert!(found.fits);

        // One in the folder comes first, be it broken: serving refuses it.
        let inside = model.join("assistant");
        link(Path::new("gone"), &inside);
        let broken = drafter();
        let names = |p: &Problem| p.file.ends_with("assistant") && p.problem == "is not there";
        assert!(broken.problems.iter().any(names), "{:?}", broken.problems);

        // A target in its place is not asked for a drafter in its turn.
        std::fs::remove_file(&inside).unwrap();
        link(Path::new("."), &inside);
        let wrong = drafter();
        let says = |p: &Problem| p.problem.contains("where an assistant is asked for");
        assert!(wrong.problems.iter().any(says), "{:?}", wrong.problems);
        assert!(!wrong.drafter.unwrap().fits);
    }

    #[test]
    fn names_out_of_files_cannot_reach_the_terminal() {
        for name in [r"\n\u001b[2J".to_owned(), "x".repeat(1 << 16)] {
            let dir = copy("e2b");
            let header = format!(
                r#"{{"a{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},
                    "b{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
            );
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.push(0);
            std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
            let options = Options {
                tensors: true,
                ..Options::default()
            };
            let whole = print::text(&inspect(dir.path(), &options));
            std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
            let index = format!(r#"{{"weight_map":{{"v{name}":"f{name}","w":"/{name}"}}}}"#);
            let file = dir.path().join("model.safetensors.index.json");
            std::fs::write(file, index).unwrap();
            let sharded = print::text(&inspect(dir.path(), &options));
            for text in [whole, sharded] {
                assert!(!text.contains("no problem found"), "{text}");
                for line in text.lines() {
                    assert!(!line.contains(char::is_control), "{line:?}");
                    assert!(line.len() < 1000, "{line}");
                    assert!(!line.starts_with("[2J"), "{line}");
                }
            }
        }
    }
}
