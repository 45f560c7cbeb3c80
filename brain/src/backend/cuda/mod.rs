//! The CUDA back end: an [`Executor`] that runs a round on one card without a word from the host.
//!
//! A step's numbers go to the card in one piece, all launches follow, and the results come back in
//! one piece. A row's bits depend on that row alone: see the kernels' own pages. In what numbers a
//! model is computed is a property of its files: see `form`.

mod buffers;
mod card;
mod experts;
mod form;
mod groups;
mod held;
mod launch;
mod lists;
mod memory;
mod ops;
mod rope;
mod rounds;
mod staging;
mod step;
mod tiles;
mod weights;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use marathon_kernels::device::{Device, DeviceError};

use super::{ExecError, Executor, Limits, Lost, arena::Arena};
use crate::{
    model::{LoadedModel, fingerprint::Fingerprint, kv_dtype::KvChoice, names::NameError},
    sched::types::{BlockId, Group, Step, StepOutput},
};
use form::{Form, Numbers};
use held::{Failed, Held};
pub use memory::MemoryPlan;

/// Changes whenever a bit of the card's results may.
const NUMERIC_VERSION: u32 = 3;

/// Most drafts of a round.
pub const MAX_DRAFTS: usize = 8;

/// How to run on a card.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which card.
    pub ordinal: usize,
    /// Prompt and answer together at most; 0 is what the model was made for.
    pub max_model_len: usize,
    /// Sequences of a step at most.
    pub max_seqs: usize,
    /// Input rows of a step at most.
    pub max_rows: usize,
    /// Drafts per round at most, up to [`MAX_DRAFTS`]; without a drafter there are none.
    pub max_drafts: usize,
    /// Bytes for keys and values; `None`: what `memory_share` leaves.
    pub kv_memory: Option<usize>,
    /// Share of the card's memory that may be used in all.
    pub memory_share: f64,
    /// How keys and values are stored.
    pub kv_dtype: KvChoice,
    /// Rounds as recorded graphs; single launches otherwise. It changes no bit.
    pub graphs: bool,
    /// A step that takes longer is given up, and the card with it.
    pub step_limit: Duration,
    /// Matrices are random numbers made on the card, for measuring models without their files.
    pub random_weights: bool,
    /// Steps after which a kernel traps, for tests of what follows.
    pub fault_after: Option<u64>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            ordinal: 0,
            max_model_len: 0,
            max_seqs: 8,
            max_rows: 2048,
            max_drafts: MAX_DRAFTS,
            kv_memory: None,
            memory_share: 0.9,
            kv_dtype: KvChoice::Auto,
            graphs: true,
            step_limit: Duration::from_secs(60),
            random_weights: false,
            fault_after: None,
        }
    }
}

/// The model cannot run with these options on this card.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// An option makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// Its name on the command line.
        option: &'static str,
        /// What is wrong and what would do.
        problem: String,
    },
    /// The card has no kernels for the model.
    #[error("the card cannot compute this model: {0}")]
    Model(String),
    /// It does not fit.
    #[error("{0}")]
    Memory(String),
    /// Something is wrong with the weights that only reading all of them shows.
    #[error(transparent)]
    Weights(#[from] NameError),
    /// Rounds could not be recorded.
    #[error("recording rounds on the card failed: {0}; lower --gpu-memory-utilization")]
    Recording(String),
    /// No card, no kernels, or a driver call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Whether the card of this number can be used, and what it is called.
pub fn probe(ordinal: usize) -> Result<String, DeviceError> {
    Device::open(ordinal).map(|device| device.name.clone())
}

/// Runs steps on a card.
///
/// What fails on the card, a kernel that hangs included, ends it for this process: the driver gives
/// out no new context after an error that stays with the old one. Whoever serves ends the process,
/// and a supervisor starts the next.
pub struct CudaExecutor {
    /// What is on the card, or why the card is gone.
    held: Result<Held, String>,
    arena: Arena,
    limits: Limits,
    options: CudaOptions,
    plan: MemoryPlan,
    name: String,
    fingerprint: Fingerprint,
    steps: u64,
}

/// What goes wrong on purpose ([`CudaExecutor::break_card`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A kernel that traps: the context is lost.
    Trap,
    /// A kernel that keeps the card busy for so many ticks of its clock.
    Spin(u64),
}

impl CudaExecutor {
    /// Opens the card, plans its memory and brings the weights there.
    pub fn new(model: Arc<LoadedModel>, options: &CudaOptions) -> Result<Self, CudaError> {
        let form = Form::of(&model).map_err(CudaError::Model)?;
        let kv = options
            .kv_dtype
            .resolve(form.kv(), model.asks_for_fp8_cache)
            .map_err(|problem| CudaError::Option {
                option: "kv-cache-dtype",
                problem,
            })?;
        let numbers = Numbers { form, kv };
        let device = Arc::new(Device::open(options.ordinal)?);
        let capability = device.capability()?;
        let plan = MemoryPlan::make(&model, numbers, options, device.memory()?)?;
        let name = device.name.clone();
        let mut held = Held::new(
            device,
            &model,
            numbers,
            &plan.limits,
            options.random_weights,
        )?;
        if options.graphs {
            let begin = Instant::now();
            let parts = held
                .record_rounds(&plan.limits, &model.defaults.suppressed)
                .map_err(|failed| match failed {
                    Failed::Step(why) | Failed::Card(why) => CudaError::Recording(why),
                })?;
            let seconds = begin.elapsed().as_secs_f32();
            tracing::info!(parts, seconds, "rounds are recorded");
        }
        let recipe = format!(
            "numeric {NUMERIC_VERSION}; cuda {}.{}; activations {form}; weights as stored, by \
             block and int4 as {form}; kv {kv}; tp 1",
            capability.0,
            capability.1,
            form = form.name(),
        );
        Ok(Self {
            held: Ok(held),
            arena: Arena::default(),
            limits: plan.limits.clone(),
            options: options.clone(),
            plan,
            name,
            fingerprint: model.reading.digest()?.with_recipe(&recipe),
            steps: 0,
        })
    }

    /// What its tokens are a function of, besides the request.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The card's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the card's memory is used for.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Raw logits of the emitting rows of the last step, for tests against other back ends.
    pub fn last_logits(&self) -> Result<Vec<Vec<f32>>, DeviceError> {
        let held = self.held.as_ref();
        held.map_or_else(|_| Ok(Vec::new()), Held::last_logits)
    }

    /// Breaks the card, for tests of what follows.
    pub fn break_card(&mut self, fault: Fault) -> Result<(), DeviceError> {
        self.held.as_mut().map_or(Ok(()), |held| held.fail(fault))
    }

    /// Does something with what is on the card, bound to this thread.
    fn with_card<T>(
        &mut self,
        work: impl FnOnce(&mut Held) -> Result<T, Failed>,
    ) -> Result<T, ExecError> {
        let held = match &mut self.held {
            Ok(held) => held,
            Err(reason) => return Err(failed(reason.clone(), Lost::Device)),
        };
        let bound = held.device.bind().map_err(Failed::from);
        match bound.and_then(|()| work(held)) {
            Ok(result) => Ok(result),
            Err(Failed::Step(reason)) => Err(failed(reason, Lost::Nothing)),
            Err(Failed::Card(reason)) => {
                let held = std::mem::replace(&mut self.held, Err(reason.clone()));
                // Freeing memory waits for the card's work, which may never end. The driver takes
                // everything back when the process ends.
                std::mem::forget(held);
                Err(failed(reason, Lost::Device))
            }
        }
    }
}

fn failed(reason: String, lost: Lost) -> ExecError {
    ExecError {
        device: "cuda",
        reason,
        lost,
    }
}

impl Executor for CudaExecutor {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn run(&mut self, step: &Step) -> Result<StepOutput, ExecError> {
        let mut arena = std::mem::take(&mut self.arena);
        let loaded = arena.load(step, &self.limits);
        let result = match loaded {
            Err(reason) => Err(failed(format!("bad step: {reason}"), Lost::Nothing)),
            Ok(()) if arena.all.rows.is_empty() => Ok(StepOutput::default()),
            Ok(()) => self.round(&arena),
        };
        self.arena = arena;
        result
    }

    fn save_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        into: &mut Vec<u8>,
    ) -> Result<(), ExecError> {
        self.with_card(|held| held.save(group, blocks, into))
    }

    fn load_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), ExecError> {
        self.with_card(|held| held.load(group, blocks, bytes))
    }
}

impl CudaExecutor {
    fn round(&mut self, arena: &Arena) -> Result<StepOutput, ExecError> {
        let breaks = self.options.fault_after == Some(self.steps);
        self.steps += 1;
        let (graphs, limit) = (self.options.graphs, self.options.step_limit);
        self.with_card(|held| {
            if breaks {
                held.fail(Fault::Trap)?;
            }
            held.round(arena, graphs, limit)?;
            Ok(held.output(arena))
        })
    }
}
