//! Golden checkpoints, and sequences that drive an executor as the engine does.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses its own part"
)]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

pub mod bits;
pub mod golden;
pub mod grown;
pub mod scaled;
pub mod sparse;

use brain::{
    backend::{Executor, cpu::CpuOptions},
    sched::types::{
        BlockId, BlockTables, Emitted, SampleStep, SamplingParams, SeqId, SeqStep, Step, TokenId,
    },
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// The folder of a golden checkpoint.
///
/// Of the sources it was built from, or, on another machine, of the folder it runs in.
pub fn golden_folder(name: &str) -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
    let here = PathBuf::from("tests/goldens");
    let root = if built.is_dir() { built } else { here };
    root.join(name)
}

/// A copy of a golden checkpoint with every fp32 tensor rounded to bf16.
pub fn bf16_copy(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&golden_folder(name), copy.path(), &round_file);
    copy
}

/// A copy of a golden checkpoint as it is.
pub fn plain_copy(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&golden_folder(name), copy.path(), &|from, to| {
        std::fs::copy(from, to).unwrap();
    });
    copy
}

/// Copies a folder, files of tensors by `tensors`.
fn copy_folder(from: &Path, to: &Path, tensors: &dyn Fn(&Path, &Path)) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy_folder(&path, &target, tensors);
        } else if path.extension().is_some_and(|e| e == "safetensors") {
            tensors(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

fn round_file(from: &Path, to: &Path) {
    let bytes = std::fs::read(from).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let rounded: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, t)| match t.dtype() {
            Dtype::F32 => {
                let words = t.data().chunks_exact(4).flat_map(|b| {
                    half::bf16::from_f32(f32::from_le_bytes(b.try_into().unwrap())).to_le_bytes()
                });
                (name, Dtype::BF16, t.shape().to_vec(), words.collect())
            }
            other => (name, other, t.shape().to_vec(), t.data().to_vec()),
        })
        .collect();
    let views = rounded
        .iter()
        .map(|(name, dtype, shape, data)| {
            (
                name.as_str(),
                TensorView::new(*dtype, shape.clone(), data).unwrap(),
            )
        })
        .collect::<Vec<_>>();
    safetensors::serialize_to_file(views, None, to).unwrap();
}

/// Small pools for small models.
pub fn options() -> CpuOptions {
    CpuOptions {
        threads: 1,
        kv_memory: 8 << 20,
        max_seqs: 8,
        max_rows: 128,
        ..Default::default()
    }
}

/// Plain sampling at a temperature.
pub fn params(temperature: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 42,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Default::default(),
        suppressed: Vec::new(),
        stop_tokens: Vec::new(),
        min_tokens: 0,
        max_tokens: 1 << 20,
        logprobs: 0,
    }
}

/// What happened in a round of verification.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// Positions in the cache before it.
    pub committed: usize,
    /// Drafts that were right.
    pub accepted: usize,
    /// The drafts.
    pub drafts: Vec<TokenId>,
}

/// One generation with blocks of its own.
pub struct Sequence {
    number: usize,
    params: Arc<SamplingParams>,
    tables: BlockTables,
    sliding_blocks: Vec<BlockId>,
    prompt_len: usize,
    /// All tokens: prompt and emitted.
    pub tokens: Vec<TokenId>,
    /// How many of them are in the cache.
    pub cached: usize,
    /// What was emitted, with log-probabilities if asked for.
    pub emitted: Vec<Emitted>,
    /// Drafts for the next round.
    pub pending: Vec<TokenId>,
    /// Past rounds that had drafts.
    pub rounds: Vec<Round>,
    window: usize,
    block: usize,
}

impl Sequence {
    /// Sequence `number` of an executor: it uses the `number`-th share of the blocks.
    pub fn new(executor: &dyn Executor, number: usize, params: SamplingParams) -> Self {
        let limits = executor.limits();
        let share = |blocks: usize, each: usize| -> Vec<BlockId> {
            let each = each.min(blocks / limits.max_seqs);
            // Backwards, so that a table that is not read as a table shows.
            (0..each)
                .rev()
                .map(|i| BlockId((number * each + i) as u32))
                .collect()
        };
        let whole = limits.max_model_len.div_ceil(limits.full_block_size);
        Self {
            number,
            params: Arc::new(params),
            tables: BlockTables {
                full: share(limits.full_blocks, whole),
                ..BlockTables::default()
            },
            sliding_blocks: share(limits.sliding_blocks, usize::MAX),
            prompt_len: 0,
            tokens: Vec::new(),
            cached: 0,
            emitted: Vec::new(),
            pending: Vec::new(),
            rounds: Vec::new(),
            window: limits.window,
            block: limits.sliding_block_size,
        }
    }

    /// Gives it its prompt.
    pub fn with_prompt(mut self, prompt: &[TokenId]) -> Self {
        self.tokens = prompt.to_vec();
        self.prompt_len = prompt.len();
        self
    }

    /// The rows of this sequence for `count` tokens from the cache's end on.
    pub fn step(&mut self, inputs: &[TokenId], sample: Option<SampleStep>) -> SeqStep {
        let start = self.cached;
        // A ring of blocks: old ones are given back and used again, as the scheduler does.
        let oldest = (start + 1).saturating_sub(self.window) / self.block;
        let newest = (start + inputs.len()).div_ceil(self.block);
        let ring = &self.sliding_blocks;
        assert!(newest - oldest <= ring.len(), "too many rows for the ring");
        self.tables.sliding_first = oldest;
        self.tables.sliding = (oldest..newest).map(|b| ring[b % ring.len()]).collect();
        SeqStep {
            seq: SeqId(self.number as u64),
            tokens: inputs.to_vec(),
            start,
            tables: self.tables.clone(),
            sample,
        }
    }

    /// What to sample when the last `drafts` inputs are drafts.
    pub fn sample(&self, drafts: usize, next_drafts: usize) -> SampleStep {
        SampleStep {
            drafts,
            params: self.params.clone(),
            generated: self.emitted.len() as u32,
            history: match self.params.reads_history() {
                true => self.tokens.clone(),
                false => Vec::new(),
            },
            prompt_len: self.prompt_len,
            next_drafts,
            masks: Vec::new(),
        }
    }

    /// Takes the result of a step with `inputs` rows in.
    pub fn commit(
        &mut self,
        inputs: usize,
        drafts: &[TokenId],
        output: brain::sched::types::SeqOutput,
    ) {
        let emitted = output.tokens.len();
        if emitted == 0 {
            self.cached += inputs;
            return;
        }
        assert!(emitted <= drafts.len() + 1);
        if !drafts.is_empty() {
            self.rounds.push(Round {
                committed: self.cached,
                accepted: emitted - 1,
                drafts: drafts.to_vec(),
            });
        }
        self.cached += inputs - drafts.len() + emitted - 1;
        self.tokens.extend(output.tokens.iter().map(|e| e.id));
        self.emitted.extend(output.tokens);
        self.pending = output.drafts;
    }

    /// Feeds tokens of the prompt; the last piece emits a token, which is dropped again.
    pub fn feed(&mut self, executor: &mut dyn Executor, tokens: &[TokenId], emit: bool) {
        self.tokens.extend(tokens);
        self.prompt_len = self.tokens.len();
        let sample = emit.then(|| self.sample(0, 0));
        let step = Step {
            seqs: vec![self.step(tokens, sample)],
        };
        let output = executor.run(&step).unwrap();
        self.commit(tokens.len(), &[], output.seqs.into_iter().next().unwrap());
    }

    /// The rows of the next round, and the drafts in it.
    pub fn round(&mut self, depth: usize, left: usize) -> (SeqStep, Vec<TokenId>) {
        let drafts: Vec<TokenId> = self
            .pending
            .iter()
            .copied()
            .take(depth.min(left.saturating_sub(1)))
            .collect();
        let mut inputs = self.tokens[self.cached..].to_vec();
        inputs.extend(&drafts);
        let sample = self.sample(drafts.len(), depth);
        (self.step(&inputs, Some(sample)), drafts)
    }

    /// Prompt in one piece, then rounds with `depth` drafts, until `count` tokens are there.
    pub fn generate(
        &mut self,
        executor: &mut dyn Executor,
        prompt: &[TokenId],
        count: usize,
        depth: usize,
    ) -> Vec<TokenId> {
        self.tokens.extend(prompt);
        self.go_on(executor, prompt.len(), count, depth)
    }

    /// What of its tokens is not cached, then rounds with `depth` drafts, until `count` tokens are
    /// there.
    pub fn go_on(
        &mut self,
        executor: &mut dyn Executor,
        prompt_len: usize,
        count: usize,
        depth: usize,
    ) -> Vec<TokenId> {
        self.prompt_len = prompt_len;
        while self.emitted.len() < count {
            let (step, drafts) = self.round(depth, count - self.emitted.len());
            let inputs = step.tokens.len();
            let output = executor.run(&Step { seqs: vec![step] }).unwrap();
            self.commit(inputs, &drafts, output.seqs.into_iter().next().unwrap());
        }
        self.emitted.iter().take(count).map(|e| e.id).collect()
    }
}
