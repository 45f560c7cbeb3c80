//! In what numbers a model is computed on the card, decided by what its files hold.
//!
//! bf16 checkpoints whose heads the fast kernels have run in bf16: rounded where the processor's
//! back end rounds. Everything else, fp32 checkpoints and heads of unusual sizes, runs in fp32
//! through simple kernels: right, not fast, and meant for small models. The form is a property of
//! the model: never of a step.

use marathon_kernels::abi::{MAX_EXPERTS, MAX_TOP_EXPERTS};

use crate::{
    backend::cpu::rope::RopeTable,
    model::{
        LoadedModel,
        checkpoint::Dtype,
        kv_dtype::KvDtype,
        plan::{KvSource, LayerPlan, Plan},
    },
};

/// The numbers of activations, and of keys and values unless those are in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// bf16 by tensor cores.
    Bf16,
    /// fp32 by the unit `plain`.
    F32,
}

/// In what a model is computed, and what its cache is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) form: Form,
    pub(super) kv: KvDtype,
}

/// Heads that the simple kernels have.
const PLAIN_HEADS: [usize; 7] = [8, 16, 32, 64, 128, 256, 512];
/// Weights above which fp32 would be a mistake, in elements.
const PLAIN_MOST: usize = 1 << 30;

impl Form {
    /// The form of a model, or why the card cannot compute it.
    pub(super) fn of(model: &LoadedModel) -> Result<Self, String> {
        let drafter = model.drafter.as_ref().map(|d| &d.plan.text);
        let plans = || std::iter::once(&model.plan).chain(drafter);
        for moe in plans().filter_map(|p| p.moe) {
            if moe.experts > MAX_EXPERTS || moe.top_k > MAX_TOP_EXPERTS {
                return Err(format!(
                    "{} experts of which {} are chosen have no kernel; there are kernels for up to \
                     {MAX_EXPERTS} of which up to {MAX_TOP_EXPERTS} are chosen",
                    moe.experts, moe.top_k
                ));
            }
        }
        let mut fast = model.weights.embed.dtype() == Dtype::BF16;
        if let Some(d) = &model.drafter {
            fast &= d.weights.embed.dtype() == Dtype::BF16;
        }
        if fast && plans().all(fits_fast) {
            return Ok(Self::Bf16);
        }
        for layer in plans().flat_map(|p| &p.layers) {
            if !PLAIN_HEADS.contains(&layer.head_dim) {
                return Err(format!(
                    "heads of {} elements have no kernel; there are kernels for {PLAIN_HEADS:?}",
                    layer.head_dim
                ));
            }
        }
        let most = plans().map(elements).sum::<usize>();
        if most > PLAIN_MOST {
            return Err(format!(
                "{most} weights in fp32 or with unusual heads: the card computes models of that \
                 size from bf16 checkpoints only"
            ));
        }
        Ok(Self::F32)
    }

    /// Bytes of an element.
    pub(super) fn size(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// What keys and values are of themselves.
    pub(super) fn kv(self) -> KvDtype {
        match self {
            Self::Bf16 => KvDtype::Bf16,
            Self::F32 => KvDtype::F32,
        }
    }

    /// Its name in fingerprints.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "fp32",
        }
    }

    /// The kernel of this form, whose fast name is given.
    pub(super) fn kernel(self, fast: &str) -> String {
        match self {
            Self::Bf16 => fast.to_owned(),
            Self::F32 => format!("plain_{fast}"),
        }
    }
}

fn fits_fast(plan: &Plan) -> bool {
    let head = |l: &LayerPlan| match l.kv {
        // Keys are formed of values two pairs at a time.
        KvSource::Own { values_only: true } => {
            let pairs = RopeTable::pairs_of(plan.rope(l.kind), l.head_dim);
            l.head_dim == 512 && pairs.is_multiple_of(2)
        }
        _ => [64, 128, 256, 512].contains(&l.head_dim),
    };
    let wide = |n: usize| n.is_multiple_of(8);
    plan.layers
        .iter()
        .all(|l| head(l) && wide(l.intermediate) && plan.heads.is_multiple_of(l.kv_heads))
        && wide(plan.hidden)
        && plan.hidden <= 8192
        && plan.per_layer_input.is_none_or(|p| wide(p.dim))
        && plan.moe.is_none_or(|m| wide(m.intermediate))
}

/// Weights of a decoder, roughly.
fn elements(plan: &Plan) -> usize {
    let layer = |l: &LayerPlan| {
        let attention = (2 * plan.heads + 2 * l.kv_heads) * l.head_dim;
        let experts = plan.moe.map_or(0, |m| m.experts * m.intermediate);
        plan.hidden * (attention + 3 * l.intermediate + 3 * experts)
    };
    let tables = plan
        .per_layer_input
        .map_or(0, |p| p.vocab * p.dim * plan.layers.len());
    plan.layers.iter().map(layer).sum::<usize>() + plan.vocab * plan.hidden + tables
}
