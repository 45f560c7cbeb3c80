//! The CPU back end: an [`Executor`] whose every bit is defined.
//!
//! A row's result does not depend on the rows beside it, on the chunking of the prompt, on drafts,
//! on the number of threads or on the vector instructions used: see `product` and `attend`.

mod arranged;
mod attend;
mod budget;
mod claim;
mod clusters;
mod codes;
mod decode;
mod elementwise;
mod experts;
mod form;
mod gates;
mod kv;
mod matrix;
mod memory;
mod mix;
mod ops;
mod panel;
mod pool;
pub mod probe;
mod product;
pub(super) mod rope;
mod scales;
mod sheet;
mod simd;
mod tile;

pub use budget::auto_kv_memory;
pub use simd::Level;

use budget::{limits, positions};

use super::{ExecError, Executor, Limits, Lost, arena::Arena, ops::Rows};
use crate::{
    model::{
        LoadedModel,
        checkpoint::Dtype,
        drafter::Drafter,
        fingerprint::Fingerprint,
        gemma::Gemma,
        kv_dtype::{KvChoice, KvDtype},
        names::NameError,
        plan::Kind,
        weight::Form,
    },
    sched::types::{BlockId, Group, SeqOutput, Step, StepOutput},
};
use ops::{CpuOps, Sizes};
use pool::Pool;

/// Changes whenever a bit of the CPU's results may.
const NUMERIC_VERSION: u32 = 4;

/// Most drafts of a round.
pub const MAX_DRAFTS: usize = 8;

/// How to run on the CPU. `Default` suits a small model on a small machine.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Compute threads; 0 is one per core.
    pub threads: usize,
    /// Cores that they are bound to, the first that of the thread that runs steps; threads beyond
    /// the list are moved by the system.
    pub cpus: Vec<usize>,
    /// Bytes for the KV pools.
    pub kv_memory: usize,
    /// Prompt and answer together at most; 0 is what the model was made for.
    pub max_model_len: usize,
    /// Sequences of a step at most.
    pub max_seqs: usize,
    /// Input rows of a step at most.
    pub max_rows: usize,
    /// Drafts per round at most, up to [`MAX_DRAFTS`]; without a drafter there are none.
    pub max_drafts: usize,
    /// How keys and values are stored.
    pub kv_dtype: KvChoice,
    /// Vector instructions; `None` is the best there is.
    pub level: Option<Level>,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            cpus: Vec::new(),
            kv_memory: 128 << 20,
            max_model_len: 0,
            max_seqs: 8,
            max_rows: 256,
            max_drafts: MAX_DRAFTS,
            kv_dtype: KvChoice::Auto,
            level: None,
        }
    }
}

/// The model cannot run with these options on this machine.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// An option makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// Its name on the command line.
        option: &'static str,
        /// What is wrong and what would do.
        problem: String,
    },
    /// No threads.
    #[error("cannot start compute threads: {0}")]
    Threads(#[from] std::io::Error),
    /// Something is wrong with the weights that only reading all of them shows.
    #[error(transparent)]
    Weights(#[from] NameError),
}

/// Runs steps on the CPU.
pub struct CpuExecutor {
    ops: CpuOps,
    limits: Limits,
    gemma: Gemma<CpuOps>,
    drafter: Option<Drafter<CpuOps>>,
    fingerprint: Fingerprint,
}

impl CpuExecutor {
    /// Finds the weights, which stay where they are, and makes the pools.
    pub fn new(model: LoadedModel, options: &CpuOptions) -> Result<Self, CpuError> {
        let level = level(options)?;
        let bf16 = computes_in_bf16(&model);
        let kv = kv_dtype(&model, options)?;
        let limits = limits(&model, options, kv)?;
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n.min(256),
        };
        let sizes = Sizes {
            rows: limits.max_rows,
            out_rows: limits.max_rows.min(limits.max_seqs * (MAX_DRAFTS + 1)),
            seqs: limits.max_seqs,
            positions: positions(limits.max_model_len),
            full_blocks: limits.full_blocks,
            sliding_blocks: limits.sliding_blocks,
            window: limits.window,
        };
        let head_dim = model
            .plan
            .layers
            .iter()
            .map(|l| l.head_dim)
            .max()
            .unwrap_or(0);
        let pool = Pool::bound(threads, &options.cpus)?;
        let mut ops = CpuOps::new(pool, level, (bf16, kv), sizes, head_dim);
        let gemma = Gemma::new(&mut ops, &model.plan, &model.weights);
        let drafter = (limits.max_drafts > 0)
            .then_some(model.drafter.as_ref())
            .flatten()
            .map(|d| Drafter::new(&mut ops, &d.plan, &d.weights));
        let fingerprint =
            model
                .reading
                .digest()?
                .with_recipe(&recipe(bf16, kv, &model.weights.forms()));
        Ok(Self {
            ops,
            limits,
            gemma,
            drafter,
            fingerprint,
        })
    }

    /// What its tokens are a function of, besides the request.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Fills every page with NaN, as a broken sequence could: nothing may come of it.
    pub fn poison_pages(&mut self) {
        self.ops.poison_pages();
    }

    /// Raw logits of the emitting rows of the last step, for tests against references.
    pub fn last_logits(&self) -> impl Iterator<Item = &[f32]> {
        let rows = self.ops.count(Rows::Out);
        (0..rows).map(|i| self.gemma.logits().row(i))
    }
}

/// How this back end computes, for the fingerprint.
fn recipe(bf16: bool, kv: KvDtype, forms: &[Form]) -> String {
    let activations = if bf16 { "bf16" } else { "fp32" };
    let weights: Vec<String> = forms.iter().map(Form::to_string).collect();
    let weights = weights.join("+");
    format!(
        "numeric {NUMERIC_VERSION}; cpu; activations {activations}; weights {weights}; \
         kv {kv}; tp 1"
    )
}

/// How keys and values of a model are stored under these options.
fn kv_dtype(model: &LoadedModel, options: &CpuOptions) -> Result<KvDtype, CpuError> {
    let own = match computes_in_bf16(model) {
        true => KvDtype::Bf16,
        false => KvDtype::F32,
    };
    let resolved = options.kv_dtype.resolve(own, model.asks_for_fp8_cache);
    resolved.map_err(|problem| CpuError::Option {
        option: "kv-cache-dtype",
        problem,
    })
}

fn level(options: &CpuOptions) -> Result<Level, CpuError> {
    match options.level {
        None => Ok(Level::detect()),
        Some(level) if level.is_available() => Ok(level),
        Some(level) => Err(CpuError::Option {
            option: "level",
            problem: format!("this machine has no {level:?}"),
        }),
    }
}

/// Whether activations are bf16: those of a model whose table is.
fn computes_in_bf16(model: &LoadedModel) -> bool {
    model.weights.embed.dtype() == Dtype::BF16
}

impl Executor for CpuExecutor {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn run(&mut self, step: &Step) -> Result<StepOutput, ExecError> {
        let Self {
            ops,
            gemma,
            drafter,
            limits,
            ..
        } = self;
        ops.pool.bind_caller();
        ops.arena.load(step, limits).map_err(|reason| ExecError {
            device: "cpu",
            reason: format!("bad step: {reason}"),
            lost: Lost::Nothing,
        })?;
        gemma.forward(ops);
        super::ops::Ops::sample_and_verify(ops, gemma.logits());
        if let Some(drafter) = drafter {
            drafter.begin(ops, gemma);
            for pass in 0.. {
                if ops.count(Rows::Draft) == 0 {
                    break;
                }
                drafter.step(ops, gemma, pass);
            }
        }
        Ok(output(&mut ops.arena))
    }

    fn save_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        into: &mut Vec<u8>,
    ) -> Result<(), ExecError> {
        for block in blocks {
            for layer in self.ops.layers_of(kind(group)) {
                let page = layer
                    .page(block.0 as usize)
                    .ok_or_else(|| no_block(*block))?;
                into.extend_from_slice(page);
            }
        }
        Ok(())
    }

    fn load_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        mut bytes: &[u8],
    ) -> Result<(), ExecError> {
        for block in blocks {
            for layer in self.ops.layers_of(kind(group)) {
                let page = layer.page_mut(block.0 as usize);
                let page = page.ok_or_else(|| no_block(*block))?;
                let (mine, rest) = bytes
                    .split_at_checked(page.len())
                    .ok_or_else(|| failed("fewer bytes than the blocks hold".into()))?;
                page.copy_from_slice(mine);
                bytes = rest;
            }
        }
        match bytes.is_empty() {
            true => Ok(()),
            false => Err(failed("more bytes than the blocks hold".into())),
        }
    }
}

fn kind(group: Group) -> Kind {
    match group {
        Group::Full => Kind::Full,
        Group::Sliding => Kind::Sliding,
    }
}

fn failed(reason: String) -> ExecError {
    ExecError {
        device: "cpu",
        reason,
        lost: Lost::Nothing,
    }
}

fn no_block(block: BlockId) -> ExecError {
    failed(format!("block {} is not in its pool", block.0))
}

fn output(arena: &mut Arena) -> StepOutput {
    let seqs = arena.seqs.iter_mut().map(|s| SeqOutput {
        tokens: std::mem::take(&mut s.emitted),
        drafts: std::mem::take(&mut s.drafts),
    });
    StepOutput {
        seqs: seqs.collect(),
    }
}

#[cfg(test)]
#[path = "product_tests.rs"]
mod product_tests;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
