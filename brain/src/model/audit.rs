//! Holds a checkpoint against what its configuration asks for, and finds everything that is wrong
//! with it, where the loader ends at the first thing.

use super::{
    checkpoint::{Checkpoint, Dtype, Tensor},
    inventory::{Inventory, Slot, Storage},
    kv_scales::KvScaleTensors,
    names::{NameError, Unused},
    weight::{Weight, experts, linear, plain},
};

/// A slot and what fills it.
#[derive(Clone, Debug)]
pub struct Filled {
    /// The slot.
    pub slot: Slot,
    /// Its matrices or its vector; of experts three or two for each expert.
    pub weights: Vec<Weight>,
}

/// A checkpoint held against an inventory. No byte of a weight was read for it.
#[derive(Debug, Default)]
pub struct Audit {
    /// Slots that are filled as they should be.
    pub filled: Vec<Filled>,
    /// What is wrong with the others, each by its name.
    pub faults: Vec<(String, NameError)>,
    /// Text tensors that nothing uses.
    pub unknown: Vec<Tensor>,
    /// Calibrated scales of an FP8 cache.
    pub kv_scales: usize,
    /// Token ids of a drafter's clusters.
    pub tokens: Option<Tensor>,
}

/// Takes every tensor that the inventory asks for.
pub fn audit(checkpoint: &Checkpoint, inventory: &Inventory) -> Result<Audit, NameError> {
    let mut unused = Unused::new(checkpoint)?;
    let mut audit = Audit::default();
    // First, as the loader does: some stand among the tensors of a slot, or of what nothing reads.
    for i in 0..inventory.layers {
        match KvScaleTensors::take(&mut unused, i).and_then(KvScaleTensors::checked) {
            Ok(scales) => audit.kv_scales += scales.count(),
            Err(error) => audit.faults.push((format!("layers.{i}.self_attn"), error)),
        }
    }
    for slot in &inventory.slots {
        match fill(&mut unused, slot, &mut audit.tokens) {
            Ok(weights) => audit.filled.push(Filled {
                slot: slot.clone(),
                weights,
            }),
            Err(NameError::Missing(_)) if slot.optional => {}
            Err(error) => {
                // What is left of a faulty slot is part of that fault.
                unused.drop_prefix(&format!("{}.", slot.name));
                audit.faults.push((slot.name.clone(), error));
            }
        }
    }
    for prefix in &inventory.unread {
        unused.drop_prefix(prefix);
    }
    audit.unknown = unused.into_rest().collect();
    Ok(audit)
}

fn fill(
    unused: &mut Unused,
    slot: &Slot,
    tokens: &mut Option<Tensor>,
) -> Result<Vec<Weight>, NameError> {
    match slot.storage {
        Storage::Plain => Ok(vec![plain(unused, &slot.name, &slot.shape)?]),
        Storage::Matrix => {
            let shape = [slot.shape[0], slot.shape[1]];
            Ok(vec![linear(unused, &slot.name, shape)?])
        }
        Storage::Experts(moe) => Ok(experts(unused, &slot.name, &moe, slot.shape[1])?
            .into_iter()
            .flat_map(|e| e.gate_up.into_iter().chain([e.down]))
            .collect()),
        Storage::Tokens => {
            let tensor = unused.take(&slot.name, &slot.shape)?;
            if !matches!(tensor.dtype(), Dtype::I64 | Dtype::I32) {
                return Err(NameError::dtype(&tensor, "int64 or int32"));
            }
            *tokens = Some(tensor);
            Ok(Vec::new())
        }
    }
}
