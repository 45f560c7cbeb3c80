//! The CUDA back end: an [`Executor`] that runs a round on one card without a word from the host.
//!
//! A step's numbers go to the card in one piece, all launches follow, and the results come back in
//! one piece. A row's bits depend on that row alone: see the kernels' own pages. In what numbers a
//! model is computed is a property of its files: see `form`.

mod card;
mod experts;
mod form;
mod groups;
mod launch;
mod lists;
mod memory;
mod ops;
mod rope;
mod step;
mod weights;

use std::{collections::HashMap, sync::Arc};

use marathon_kernels::{
    device::{Device, DeviceError},
    graph::Graph,
};

use super::{ExecError, Executor, Limits, arena::Arena, ops::Rows};
use crate::{
    model::{LoadedModel, drafter::Drafter, fingerprint::Fingerprint, gemma::Gemma},
    sched::types::{Emitted, Logprobs, SeqOutput, Step, StepOutput, TokenId},
};
use card::Card;
use form::Form;
use launch::{CudaOps, Needs};
pub use memory::MemoryPlan;
use step::Shape;

/// Changes whenever a bit of the card's results may.
const NUMERIC_VERSION: u32 = 1;

/// Most drafts of a round.
pub const MAX_DRAFTS: usize = 8;

/// Rows up to which a step is a recorded graph: launches of larger ones hide behind their work.
const GRAPH_ROWS: usize = 64;
/// Recorded graphs at most; then all are forgotten and recorded anew.
const MOST_GRAPHS: usize = 512;

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
    /// Rounds as recorded graphs; single launches otherwise. It changes no bit.
    pub graphs: bool,
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
            graphs: true,
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
    /// No card, no kernels, or a driver call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Whether the card of this number can be used, and what it is called.
pub fn probe(ordinal: usize) -> Result<String, DeviceError> {
    Device::open(ordinal).map(|device| device.name.clone())
}

/// Runs steps on a card.
pub struct CudaExecutor {
    // Graphs and weights go before the card that they are on.
    graphs: HashMap<Shape, Graph>,
    gemma: Gemma<CudaOps>,
    drafter: Option<Drafter<CudaOps>>,
    ops: CudaOps,
    arena: Arena,
    limits: Limits,
    options: CudaOptions,
    device: Arc<Device>,
    plan: MemoryPlan,
    fingerprint: Fingerprint,
}

impl CudaExecutor {
    /// Opens the card, plans its memory and brings the weights there.
    pub fn new(model: &LoadedModel, options: &CudaOptions) -> Result<Self, CudaError> {
        let form = Form::of(model).map_err(CudaError::Model)?;
        let device = Arc::new(Device::open(options.ordinal)?);
        let capability = device.capability()?;
        let plan = MemoryPlan::make(model, form, options, device.memory()?)?;
        let limits = plan.limits.clone();
        let needs = Needs {
            blocks: [limits.full_blocks, limits.sliding_blocks],
            ..memory::needs(model, form, &limits)
        };
        let mut ops = CudaOps::new(Card::new(Some(device.clone())), &needs)?;
        let (gemma, drafter) = memory::build(&mut ops, model, &limits);
        if let Some(failure) = ops.card.take_failure() {
            return Err(failure.into());
        }
        let bad = ops.card.bad_codes()?;
        if bad > 0 {
            return Err(CudaError::Model(format!(
                "{bad} codes that no weight may have"
            )));
        }
        let recipe = format!(
            "numeric {NUMERIC_VERSION}; cuda {}.{}; activations {form}; weights as stored, by block and int4 as {form}; kv {form}; \
             tp 1",
            capability.0,
            capability.1,
            form = form.name(),
        );
        Ok(Self {
            graphs: HashMap::new(),
            gemma,
            drafter,
            ops,
            arena: Arena::default(),
            limits,
            options: options.clone(),
            device,
            plan,
            fingerprint: model.digest.with_recipe(&recipe),
        })
    }

    /// What its tokens are a function of, besides the request.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The card's name.
    pub fn name(&self) -> &str {
        &self.device.name
    }

    /// What the card's memory is used for.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Raw logits of the emitting rows of the last step, for tests against other back ends.
    pub fn last_logits(&self) -> Result<Vec<Vec<f32>>, DeviceError> {
        let rows = self.ops.count(Rows::Out);
        self.gemma.logits().download(&self.device, rows)
    }

    /// Everything that the card does in a round.
    fn launch_round(&mut self) {
        let Self {
            ops,
            gemma,
            drafter,
            ..
        } = self;
        gemma.forward(ops);
        if ops.count(Rows::Out) == 0 {
            return;
        }
        super::ops::Ops::sample_and_verify(ops, gemma.logits());
        let Some(drafter) = drafter else { return };
        if ops.count(Rows::Draft) == 0 {
            return;
        }
        drafter.begin(ops, gemma);
        while ops.count(Rows::Draft) > 0 {
            drafter.step(ops, gemma);
        }
    }

    fn compute(&mut self) -> Result<(), DeviceError> {
        let shape = self.ops.step.shape.clone();
        if !self.options.graphs || shape.rows > GRAPH_ROWS {
            self.launch_round();
            return self.ops.card.take_failure().map_or(Ok(()), Err);
        }
        if !self.graphs.contains_key(&shape) {
            if self.graphs.len() >= MOST_GRAPHS {
                self.graphs.clear();
            }
            let device = self.device.clone();
            let recorded = Graph::record(&device, || {
                self.launch_round();
                self.ops.card.take_failure().map_or(Ok(()), Err)
            })?;
            if let Some(graph) = recorded {
                self.graphs.insert(shape.clone(), graph);
            }
        }
        self.graphs.get(&shape).map_or(Ok(()), Graph::launch)
    }

    fn run_on_card(&mut self, step: &Step) -> Result<StepOutput, String> {
        self.device.bind().map_err(|e| e.to_string())?;
        self.arena
            .load(step, &self.limits)
            .map_err(|reason| format!("bad step: {reason}"))?;
        if self.arena.all.rows.is_empty() {
            return Ok(StepOutput::default());
        }
        let group_rows = self.ops.group_rows;
        self.ops
            .step
            .send(&self.ops.card, &self.arena, group_rows)
            .map_err(|e| e.to_string())?;
        self.compute().map_err(|e| e.to_string())?;
        self.ops
            .step
            .fetch(&self.ops.card)
            .map_err(|e| e.to_string())?;
        self.device.wait().map_err(|e| e.to_string())?;
        Ok(self.output())
    }

    /// What each sequence emits and drafts, from the tokens that the card chose.
    fn output(&mut self) -> StepOutput {
        let Self { ops, arena, .. } = self;
        let step = &ops.step;
        let wanting = arena.wanting_drafts();
        let mut seqs: Vec<SeqOutput> = Vec::with_capacity(arena.seqs.len());
        for seq in &arena.seqs {
            let mut output = SeqOutput::default();
            let wanted = seq.params.as_ref().map_or(0, |p| p.logprobs as usize);
            for row in seq.out.clone() {
                let id = step.token(row);
                let logprobs = (wanted > 0).then(|| {
                    let (chosen, top) = step.logprobs(row, wanted);
                    Logprobs { chosen, top }
                });
                output.tokens.push(Emitted { id, logprobs });
                let next = arena.all.rows.get(arena.out_source[row] + 1);
                if row + 1 == seq.out.end || next.map(|r| r.token) != Some(id) {
                    break;
                }
            }
            seqs.push(output);
        }
        if self.drafter.is_some() {
            for (row, (seq, wanted)) in wanting.into_iter().enumerate() {
                let last = seqs[seq].tokens.last().map(|e| e.id);
                let stops = arena.seqs[seq].params.as_ref().map(|p| &p.stop_tokens);
                // A round that ended in a stop token drafts nothing.
                if last
                    .zip(stops)
                    .is_none_or(|(id, stops)| stops.contains(&id))
                {
                    continue;
                }
                let drafts: Vec<TokenId> = (0..wanted).map(|pass| step.draft(pass, row)).collect();
                seqs[seq].drafts = drafts;
            }
        }
        StepOutput { seqs }
    }
}

impl Executor for CudaExecutor {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn run(&mut self, step: &Step) -> Result<StepOutput, ExecError> {
        self.run_on_card(step).map_err(|reason| ExecError {
            device: "cuda",
            reason,
        })
    }
}
