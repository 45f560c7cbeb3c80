//! What the card's memory is used for, planned before anything is allocated.
//!
//! The model is built once without a card, which only counts; what is left of the share that may
//! be used goes to keys and values.

use super::{
    CudaError, CudaOptions, MAX_DRAFTS,
    card::Card,
    form::Numbers,
    launch::{CudaOps, Needs},
    step::Sizes,
};
use crate::{
    backend::Limits,
    model::{
        LoadedModel,
        drafter::Drafter,
        gemma::Gemma,
        kv_dtype::KvDtype,
        plan::{Kind, KvSource, LayerPlan, Plan},
    },
};

/// Slots of a page, in both groups.
const PAGE: usize = 32;
/// Left to the driver: its context, the kernels, recorded graphs.
const DRIVER: usize = 768 << 20;

/// The card's memory by use, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// Of the card.
    pub total: usize,
    /// Free when the plan was made.
    pub free: usize,
    /// Weights, tables, activations and room to work in.
    pub model: usize,
    /// Keys and values.
    pub kv: usize,
    /// What fits.
    pub limits: Limits,
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} for the model, {} for keys and values ({} tokens), of {} free and {} in all",
            size(self.model),
            size(self.kv),
            self.limits.full_blocks * self.limits.full_block_size,
            size(self.free),
            size(self.total),
        )
    }
}

/// Bytes for people.
fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 {
        format!("{mib:.0} MiB")
    } else {
        format!("{:.1} GiB", mib / 1024.0)
    }
}

fn bad(option: &'static str, problem: String) -> CudaError {
    CudaError::Option { option, problem }
}

impl MemoryPlan {
    /// Plans a model on a card with this much free and total memory.
    pub(super) fn make(
        model: &LoadedModel,
        numbers: Numbers,
        options: &CudaOptions,
        (free, total): (usize, usize),
    ) -> Result<Self, CudaError> {
        let mut limits = limits(model, options)?;
        let counted = count(model, numbers, &limits)?;
        let share = options.memory_share;
        if !(share > 0.0 && share <= 1.0) {
            return Err(bad(
                "gpu-memory-utilization",
                format!("{share} is not above 0 and at most 1"),
            ));
        }
        let usable = ((total as f64 * share) as usize).min(free);
        let needed = counted + DRIVER;
        let left = usable.saturating_sub(needed);
        let budget = options.kv_memory.unwrap_or(left);
        if budget > left {
            return Err(CudaError::Memory(format!(
                "the model takes {} and the driver {}; with {} for keys and values that is more \
                 than the {} that may be used (of {} free, {} in all): lower --kv-cache-memory or \
                 raise --gpu-memory-utilization",
                size(counted),
                size(DRIVER),
                size(budget),
                size(usable),
                size(free),
                size(total)
            )));
        }
        let kv = blocks(&model.plan, numbers.kv, &mut limits, budget)?;
        Ok(Self {
            total,
            free,
            model: counted,
            kv,
            limits,
        })
    }
}

/// Everything but the number of blocks.
fn limits(model: &LoadedModel, options: &CudaOptions) -> Result<Limits, CudaError> {
    let plan = &model.plan;
    if options.max_seqs == 0 || options.max_seqs > 4096 {
        let problem = format!("{} is not in 1..=4096", options.max_seqs);
        return Err(bad("max-num-seqs", problem));
    }
    let fewest = MAX_DRAFTS + 1;
    if options.max_rows < fewest || options.max_rows > 32768 {
        let problem = format!("{} is not in {fewest}..=32768", options.max_rows);
        return Err(bad("max-num-batched-tokens", problem));
    }
    let length = match options.max_model_len {
        0 => plan.max_positions,
        n if n <= plan.max_positions => n,
        n => {
            let known = plan.max_positions;
            let problem = format!("{n} is more than the {known} the model knows");
            return Err(bad("max-model-len", problem));
        }
    };
    Ok(Limits {
        vocab_size: plan.vocab,
        max_model_len: length,
        max_rows: options.max_rows,
        max_seqs: options.max_seqs,
        max_drafts: match &model.drafter {
            None => 0,
            Some(_) => options.max_drafts.min(MAX_DRAFTS),
        },
        full_block_size: PAGE,
        full_blocks: 0,
        full_block_bytes: 0,
        sliding_block_bytes: 0,
        sliding_block_size: PAGE,
        sliding_blocks: 0,
        window: plan.window,
        masked_rows: usize::MAX,
    })
}

/// What the operations are made for, without blocks.
pub(super) fn needs<'a>(model: &'a LoadedModel, numbers: Numbers, limits: &Limits) -> Needs<'a> {
    let drafter = model.drafter.as_ref().map(|d| &d.plan.text);
    let plans = || std::iter::once(&model.plan).chain(drafter);
    let head_dim = plans().flat_map(|p| &p.layers).map(|l| l.head_dim).max();
    Needs {
        numbers,
        sizes: Sizes {
            rows: limits.max_rows,
            out_rows: limits.max_rows.min(limits.max_seqs * (MAX_DRAFTS + 1)),
            seqs: limits.max_seqs,
            drafts: MAX_DRAFTS,
            // A drafting row stands one position behind the last.
            positions: limits.max_model_len + 1,
            window: limits.window,
            vocab: limits.vocab_size,
            page: PAGE,
        },
        blocks: [0, 0],
        heads: plans().map(|p| p.heads).max().unwrap_or(0),
        head_dim: head_dim.unwrap_or(0),
        tied: match model.weights.head {
            None => Some(&model.weights.embed),
            Some(_) => None,
        },
    }
}

/// Puts the model on the card, or counts what that takes.
pub(super) fn build(
    ops: &mut CudaOps,
    model: &LoadedModel,
    limits: &Limits,
) -> (Gemma<CudaOps>, Option<Drafter<CudaOps>>) {
    let gemma = Gemma::new(ops, &model.plan, &model.weights);
    let drafter = (limits.max_drafts > 0)
        .then_some(model.drafter.as_ref())
        .flatten()
        .map(|d| Drafter::new(ops, &d.plan, &d.weights));
    (gemma, drafter)
}

/// Bytes of everything but keys and values.
fn count(model: &LoadedModel, numbers: Numbers, limits: &Limits) -> Result<usize, CudaError> {
    let mut ops = CudaOps::new(Card::new(None), &needs(model, numbers, limits))?;
    build(&mut ops, model, limits);
    Ok(ops.card.taken)
}

/// Bytes of a page of a group: all its layers together.
fn page_bytes(plan: &Plan, kind: Kind, kv: KvDtype) -> usize {
    let of = |l: &LayerPlan| match l.kv {
        KvSource::Own { values_only } if l.kind == kind => {
            PAGE * l.kv_heads * l.head_dim * kv.bytes() * if values_only { 1 } else { 2 }
        }
        _ => 0,
    };
    plan.layers.iter().map(of).sum()
}

/// Shares the budget between the two groups; returns the bytes used.
///
/// Sliding pages come first: a window for every sequence and as many kept ones besides, at most
/// half of the budget. The rest is full pages, never more than all sequences could fill twice.
fn blocks(
    plan: &Plan,
    kv: KvDtype,
    limits: &mut Limits,
    budget: usize,
) -> Result<usize, CudaError> {
    let (full_bytes, sliding_bytes) = (
        page_bytes(plan, Kind::Full, kv),
        page_bytes(plan, Kind::Sliding, kv),
    );
    (limits.full_block_bytes, limits.sliding_block_bytes) = (full_bytes, sliding_bytes);
    let length = limits.max_model_len;
    let whole = length.div_ceil(PAGE);
    let window = (limits.window + limits.max_rows + MAX_DRAFTS).div_ceil(PAGE) + 2;
    let window = window.min(whole + 1);
    let wanted = 2 * limits.max_seqs * window;
    let affordable = budget / 2 / sliding_bytes.max(1);
    let sliding = wanted.min(affordable).max(window);
    let left = budget.saturating_sub(sliding * sliding_bytes);
    let full = (left / full_bytes.max(1)).min(2 * limits.max_seqs * whole);
    if full < whole || sliding * sliding_bytes > budget {
        let needed = window * sliding_bytes * 2 + whole * full_bytes;
        return Err(CudaError::Memory(format!(
            "{} are left for keys and values; one sequence of {length} tokens takes {}: lower \
             --max-model-len or raise --gpu-memory-utilization",
            size(budget),
            size(needed)
        )));
    }
    (limits.full_blocks, limits.sliding_blocks) = (full, sliding);
    Ok(full * full_bytes + sliding * sliding_bytes)
}
