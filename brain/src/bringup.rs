//! From settings to something that computes: tokenizer, template, weights, device.

use std::{sync::Arc, time::Duration};

use crate::{
    backend::{
        Executor, Limits,
        cpu::{CpuError, CpuExecutor, CpuOptions, MAX_DRAFTS, auto_kv_memory},
        cuda::{self, CudaError, CudaExecutor, CudaOptions},
        fake::{FakeExecutor, FakeOptions, Fault, slot_bytes},
        synthetic::Synthetic,
    },
    config::{Config, Device, DraftTokens, Drafter, Model},
    demo,
    engine::{Engine, EngineConfig, Storage, clock::SystemClock},
    error::Error,
    hub::locate::{Drafting, Located, Place, locate},
    memory,
    model::{
        self, LoadOptions, LoadedModel,
        kv_dtype::{KvChoice, KvDtype},
    },
    sched::{
        prefix::CacheConfig,
        scheduler::SchedConfig,
        types::{DraftDepth, TokenId},
    },
    serving::{ModelFacts, Serving, lower, sampling::Defaults},
    snapshot::{Folder, Identity},
    text::{
        model::TextModel,
        template::Template,
        tokenizer::{TokenText, Tokenizer},
    },
};

/// What can be said about the settings before anything is loaded.
pub fn check(config: &Config) -> Result<(), Error> {
    match &config.model {
        Model::Demo | Model::Hub(_) => Ok(()),
        Model::Dir(dir) => {
            model::check_folder(dir).map_err(|error| Error::Checkpoint(error.to_string()))
        }
    }
}

/// What is loaded, once it is on this disk.
enum Files {
    /// Built into the program.
    Demo,
    /// A checkpoint, and perhaps its drafter.
    Folders(Located),
}

/// Finds the files, fetching what is on the hub.
fn files(config: &Config) -> Result<Files, Error> {
    let model = match &config.model {
        Model::Demo => return Ok(Files::Demo),
        Model::Dir(dir) => Place::Folder(dir.clone()),
        Model::Hub(name) => Place::Hub(name.clone()),
    };
    let drafting = match &config.drafter {
        _ if config.draft_tokens == DraftTokens::Off => Drafting::None,
        Drafter::None => Drafting::None,
        Drafter::Auto => Drafting::Auto,
        Drafter::Dir(dir) => Drafting::At(Place::Folder(dir.clone())),
        Drafter::Hub(name) => Drafting::At(Place::Hub(name.clone())),
    };
    let say = Box::new(|text: &str| tracing::info!("{text}"));
    Ok(Files::Folders(locate(&model, &drafting, say)?))
}

/// Generations that may wait or be computed: for each that is computed at a time, and at least.
const LIVE_PER_SEQUENCE: usize = 16;
const LEAST_LIVE: usize = 256;
/// Generations that are known, ended ones included, for each that may wait or be computed.
const KNOWN_PER_LIVE: usize = 4;

/// What a measurement asks for and a server never does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trial {
    /// Positions beyond those that the checkpoint was trained for. What it says there means nothing.
    pub stretch: Option<usize>,
    /// Drafts that are right in these shares of the rounds (see [`Synthetic`]); its own if empty.
    pub acceptance: Vec<f64>,
}

/// Loads everything and starts the engine. Blocks for as long as that takes.
pub fn bring_up(config: &Config) -> Result<Serving, Error> {
    bring_up_for(config, &Trial::default())
}

/// The same for a measurement.
pub fn bring_up_for(config: &Config, trial: &Trial) -> Result<Serving, Error> {
    let files = files(config)?;
    // The disk first: while it reads the weights, the tokenizer is made.
    let (text, model) = std::thread::scope(|scope| {
        let text = scope.spawn(|| text_model(config, &files));
        let model = match config.device {
            Device::Fake => None,
            Device::Auto | Device::Cpu | Device::Cuda(_) => Some(load(config, trial, &files)),
        };
        match text.join() {
            Ok(text) => (text, model.transpose()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    });
    let (text, model) = (Arc::new(text?), model?);
    let (executor, mut facts) = match model {
        None => fake(config, &text),
        Some(model) => {
            check_model(&model, &files, &text)?;
            match config.device {
                Device::Cuda(ordinal) => cuda(config, ordinal, model)?,
                Device::Auto => auto(config, trial, &files, model)?,
                Device::Cpu | Device::Fake => cpu(config, model)?,
            }
        }
    };
    facts.stop_tokens = text.tokenizer().markers().stops(&facts.stop_tokens);
    let executor = with_acceptance(executor, trial)?;
    let live = LEAST_LIVE.max(LIVE_PER_SEQUENCE * config.max_num_seqs);
    let engine_config = EngineConfig {
        sched: SchedConfig {
            max_rows: config.max_num_batched_tokens,
            max_seqs: config.max_num_seqs,
            fingerprint: facts.fingerprint.clone(),
            turn_ends: vec![text.tokenizer().markers().turn_close],
            cache: cache_config(executor.limits(), config.lease),
            // Text that is looked up is right or wrong by itself.
            lookups: trial.acceptance.is_empty(),
            ..SchedConfig::default()
        },
        host_cache: host_cache(config, facts.device),
        lease: config.lease,
        live,
        known: KNOWN_PER_LIVE * live,
        ..EngineConfig::default()
    };
    let storage = storage(config, &text, &facts, executor.limits())?;
    let clock = Arc::new(SystemClock::start());
    let engine = Engine::start_with(executor, engine_config, clock, storage)
        .map_err(|error| Error::Device(error.to_string()))?;
    Ok(Serving::new(engine, text, Arc::new(facts)))
}

/// Bytes of the host tier, at most, when nothing is said.
const HOST_CACHE: u64 = 16 << 30;

/// Bytes of the host tier. What a processor computes with is this machine's memory already.
fn host_cache(config: &Config, device: &str) -> u64 {
    let chosen = || match (device, memory::available()) {
        ("cuda", Some(free)) => (free / 4).min(HOST_CACHE),
        _ => 0,
    };
    config.host_cache_bytes.unwrap_or_else(chosen)
}

/// Replaces the drafts, if that is asked for.
fn with_acceptance(executor: Box<dyn Executor>, trial: &Trial) -> Result<Box<dyn Executor>, Error> {
    if trial.acceptance.is_empty() {
        return Ok(executor);
    }
    if executor.limits().max_drafts == 0 {
        return Err(Error::Usage(
            "--synthetic-acceptance: nothing drafts here; give a model with a drafter".into(),
        ));
    }
    let acceptance = trial.acceptance.clone();
    Ok(Box::new(Synthetic::new(executor, acceptance)))
}

/// Bytes a second that snapshots are written with while the engine works.
const SNAPSHOT_BANDWIDTH: u64 = 256 << 20;

/// The snapshot folder, if there is to be one.
fn storage(
    config: &Config,
    text: &Arc<TextModel>,
    facts: &ModelFacts,
    limits: &Limits,
) -> Result<Option<Storage>, Error> {
    let Some(root) = &config.snapshot_dir else {
        return Ok(None);
    };
    let folder = Folder::open(root, Identity::new(&facts.fingerprint, limits))
        .map_err(|error| Error::Usage(format!("--snapshot-dir: {error}")))?;
    let text = text.clone();
    Ok(Some(Storage {
        folder: Arc::new(folder),
        quota: config.snapshot_quota,
        interval: config.snapshot_interval,
        bandwidth: SNAPSHOT_BANDWIDTH,
        revive: Box::new(move |request, revival| lower::revive(&text, request, revival)),
    }))
}

/// Pins may hold half of the memory for keys and values, one run all of that half.
fn cache_config(limits: &Limits, lease: Duration) -> CacheConfig {
    let full = limits.full_blocks.saturating_mul(limits.full_block_bytes);
    let sliding = limits
        .sliding_blocks
        .saturating_mul(limits.sliding_block_bytes);
    let half = (full.saturating_add(sliding) / 2) as u64;
    CacheConfig {
        pin_lease: lease,
        pin_bytes_per_run: half,
        pin_bytes: half,
        ..CacheConfig::default()
    }
}

fn text_model(config: &Config, files: &Files) -> Result<TextModel, Error> {
    let checkpoint = |error: &dyn std::fmt::Display| Error::Checkpoint(error.to_string());
    let (tokenizer, template) = match files {
        Files::Demo => (
            Tokenizer::from_bytes(demo::TOKENIZER, "the built-in tokenizer")
                .map_err(|e| checkpoint(&e))?,
            Template::new(demo::TEMPLATE).map_err(|e| checkpoint(&e))?,
        ),
        Files::Folders(Located { model: dir, .. }) => {
            model::check_config(dir).map_err(|e| checkpoint(&e))?;
            (
                Tokenizer::from_file(&dir.join("tokenizer.json")).map_err(|e| checkpoint(&e))?,
                Template::from_checkpoint(dir).map_err(|e| checkpoint(&e))?,
            )
        }
    };
    let tokenizer = tokenizer.trust_special_tokens(config.trust_special_tokens);
    TextModel::new(Arc::new(tokenizer), template).map_err(|e| checkpoint(&e))
}

/// The depth of requests that leave it open.
fn default_draft(draft_tokens: DraftTokens) -> DraftDepth {
    match draft_tokens {
        DraftTokens::Auto => DraftDepth::Auto,
        DraftTokens::Off => DraftDepth::Fixed(0),
        DraftTokens::Fixed(drafts) => DraftDepth::Fixed(drafts),
    }
}

/// The processor computes the checkpoint.
fn cpu(config: &Config, model: LoadedModel) -> Result<(Box<dyn Executor>, ModelFacts), Error> {
    let mut facts = facts(config, &model, "cpu", String::new());
    let mut options = CpuOptions {
        threads: config.threads,
        cpus: config.cpus.clone(),
        max_model_len: config.max_model_len.unwrap_or(0),
        max_seqs: config.max_num_seqs,
        max_rows: config.max_num_batched_tokens,
        max_drafts: max_drafts(config.draft_tokens),
        kv_dtype: config.kv_cache_dtype,
        ..CpuOptions::default()
    };
    let refused = |error: CpuError| match &error {
        CpuError::Option { option, .. } if *option != "kv-cache-memory" => {
            Error::Usage(error.to_string())
        }
        CpuError::Weights(_) => Error::Checkpoint(error.to_string()),
        _ => Error::Device(error.to_string()),
    };
    options.kv_memory = match (config.kv_cache_bytes, memory::available()) {
        (Some(bytes), _) => usize::try_from(bytes).unwrap_or(usize::MAX),
        (None, Some(free)) => auto_kv_memory(&model, &options, free).map_err(refused)?,
        // A system that does not say: as if there were enough.
        (None, None) => auto_kv_memory(&model, &options, u64::MAX).map_err(refused)?,
    };
    tracing::info!(
        bytes = options.kv_memory,
        chosen = config.kv_cache_bytes.is_none(),
        "memory for keys and values"
    );
    let executor = CpuExecutor::new(model, &options).map_err(refused)?;
    facts.fingerprint = executor.fingerprint().to_string();
    Ok((Box::new(executor), facts))
}

/// A card computes the checkpoint if there is one that can, else the processor; a line says which
/// and why.
fn auto(
    config: &Config,
    trial: &Trial,
    files: &Files,
    model: LoadedModel,
) -> Result<(Box<dyn Executor>, ModelFacts), Error> {
    let (why, model) = match cuda::probe(0) {
        Err(error) => (error.to_string(), model),
        Ok(_) => match cuda(config, 0, model) {
            Ok(made) => return Ok(made),
            Err(Error::Device(why)) => (why, load(config, trial, files)?),
            Err(error) => return Err(error),
        },
    };
    tracing::info!(why, "the processor computes, not a card");
    cpu(config, model)
}

/// A card computes the checkpoint.
fn cuda(
    config: &Config,
    ordinal: usize,
    model: LoadedModel,
) -> Result<(Box<dyn Executor>, ModelFacts), Error> {
    model.reading.copied();
    let model = Arc::new(model);
    let options = CudaOptions {
        ordinal,
        max_model_len: config.max_model_len.unwrap_or(0),
        max_seqs: config.max_num_seqs,
        max_rows: config.max_num_batched_tokens,
        max_drafts: max_drafts(config.draft_tokens),
        kv_memory: config
            .kv_cache_bytes
            .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
        memory_share: f64::from(config.gpu_memory_thousandths) / 1000.0,
        kv_dtype: config.kv_cache_dtype,
        fault_after: config.device_fault_after,
        ..CudaOptions::default()
    };
    let begin = std::time::Instant::now();
    let executor = CudaExecutor::new(model.clone(), &options).map_err(|error| match &error {
        CudaError::Option { .. } => Error::Usage(error.to_string()),
        CudaError::Weights(_) => Error::Checkpoint(error.to_string()),
        _ => Error::Device(error.to_string()),
    })?;
    tracing::info!(
        card = executor.name(),
        memory = %executor.memory(),
        seconds = begin.elapsed().as_secs_f32(),
        "the model is on the card"
    );
    let facts = facts(config, &model, "cuda", executor.fingerprint().to_string());
    Ok((Box::new(executor), facts))
}

fn max_drafts(draft_tokens: DraftTokens) -> usize {
    match draft_tokens {
        DraftTokens::Auto => MAX_DRAFTS,
        DraftTokens::Off => 0,
        DraftTokens::Fixed(drafts) => drafts as usize,
    }
}

/// A tokenizer and a model that belong together; what is odd about the model is logged.
fn check_model(model: &LoadedModel, files: &Files, text: &TextModel) -> Result<(), Error> {
    let markers = text.tokenizer().markers();
    text.tokenizer()
        .check_vocabulary(model.plan.vocab)
        .map_err(|error| Error::Checkpoint(error.to_string()))?;
    if let Some(bos) = model.defaults.bos.filter(|bos| *bos != markers.bos) {
        return Err(Error::Checkpoint(format!(
            "the checkpoint begins prompts with token {bos}, its tokenizer with {}: \
             take config.json and tokenizer.json from the same checkpoint",
            markers.bos
        )));
    }
    if let Some(warning) = foreign_tokenizer(files, text.tokenizer(), model.defaults.video) {
        tracing::warn!("{warning}");
    }
    for note in &model.notes {
        tracing::warn!("{note}");
    }
    if model.kv_scales > 0 {
        tracing::info!(found = model.kv_scales, "calibrated scales of an FP8 cache");
    }
    Ok(())
}

/// What clients are told of a model.
fn facts(
    config: &Config,
    model: &LoadedModel,
    device: &'static str,
    fingerprint: String,
) -> ModelFacts {
    let given = model.defaults.clone();
    let drafter = if model.drafter.is_some() { "mtp" } else { "" };
    ModelFacts {
        name: config.name.clone(),
        fingerprint,
        device,
        drafter: drafter.into(),
        draft: default_draft(config.draft_tokens),
        defaults: Defaults {
            temperature: given.temperature,
            top_k: given.top_k,
            top_p: given.top_p,
        },
        suppressed: given.suppressed,
        stop_tokens: given.eos,
    }
}

/// A tokenizer that lacks what only a target's has is most likely its assistant's. It encodes text
/// alike, and so is not refused.
fn foreign_tokenizer(
    files: &Files,
    tokenizer: &Tokenizer,
    video: Option<TokenId>,
) -> Option<String> {
    let (Files::Folders(Located { model, .. }), Some(video)) = (files, video) else {
        return None;
    };
    if matches!(tokenizer.token(video), TokenText::Special(_)) {
        return None;
    }
    Some(format!(
        "config.json names token {video} for videos, and {} has none such: it is the tokenizer of \
         the assistant or of another model; take tokenizer.json from the checkpoint itself",
        model.join("tokenizer.json").display()
    ))
}

fn load(config: &Config, trial: &Trial, files: &Files) -> Result<LoadedModel, Error> {
    let loaded = match files {
        Files::Folders(Located { model, drafter }) => {
            let drafter = drafter.clone();
            model::load(model, &LoadOptions { drafter })
        }
        Files::Demo => {
            let drafting = config.draft_tokens != DraftTokens::Off;
            if drafting && !matches!(config.drafter, Drafter::Auto | Drafter::None) {
                return Err(Error::Usage(
                    "the built-in model has its own drafter: give --drafter auto or none".into(),
                ));
            }
            let with_drafter = drafting && config.drafter == Drafter::Auto;
            model::load_embedded(&demo::CHECKPOINT, with_drafter)
        }
    };
    let mut loaded = loaded.map_err(|error| Error::Checkpoint(error.to_string()))?;
    if let Some(positions) = trial.stretch {
        loaded.plan.max_positions = loaded.plan.max_positions.max(positions);
    }
    Ok(loaded)
}

/// Drafts that a fake device makes, at most.
const FAKE_DRAFTS: usize = 8;
/// Context of a fake device.
const FAKE_CONTEXT: usize = 4096;
const FAKE_BLOCK: usize = 16;

/// A device without a model: for tests of everything around it.
fn fake(config: &Config, text: &TextModel) -> (Box<dyn Executor>, ModelFacts) {
    let tokenizer = text.tokenizer();
    let drafts = config.drafter != Drafter::None && config.draft_tokens != DraftTokens::Off;
    let max_model_len = config.max_model_len.unwrap_or(FAKE_CONTEXT);
    let max_seqs = config.max_num_seqs;
    let kv = match config.kv_cache_dtype {
        KvChoice::Auto | KvChoice::Bf16 => KvDtype::Bf16,
        KvChoice::Fp8 => KvDtype::Fp8,
    };
    let fingerprint = match kv {
        KvDtype::Fp8 => "marathon fake device 1; kv fp8",
        KvDtype::Bf16 | KvDtype::F32 => "marathon fake device 1",
    };
    let options = FakeOptions {
        limits: Limits {
            vocab_size: tokenizer.vocab_size(),
            max_model_len,
            max_rows: config.max_num_batched_tokens,
            max_seqs,
            max_drafts: if drafts { FAKE_DRAFTS } else { 0 },
            full_block_size: FAKE_BLOCK,
            full_blocks: (max_model_len.div_ceil(FAKE_BLOCK) + 1) * max_seqs,
            sliding_block_size: FAKE_BLOCK,
            sliding_blocks: 32 * max_seqs,
            full_block_bytes: FAKE_BLOCK * slot_bytes(kv),
            sliding_block_bytes: FAKE_BLOCK * slot_bytes(kv),
            window: 64,
            masked_rows: usize::MAX,
        },
        kv,
        step_time: config.fake_step_time,
        faults: config
            .device_fault_after
            .map(|steps| (steps, Fault::Death))
            .into_iter()
            .collect(),
        ..FakeOptions::default()
    };
    let facts = ModelFacts {
        name: config.name.clone(),
        fingerprint: blake3::hash(fingerprint.as_bytes()).to_hex().to_string(),
        device: "fake",
        drafter: if drafts { "fake".into() } else { String::new() },
        draft: default_draft(config.draft_tokens),
        defaults: Defaults::default(),
        suppressed: Vec::new(),
        stop_tokens: Vec::new(),
    };
    (Box::new(FakeExecutor::new(options)), facts)
}
