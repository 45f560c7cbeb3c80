//! The engine's seam to a device.

pub mod arena;
pub mod cpu;
pub mod cuda;
pub mod fake;
pub mod ops;
pub mod synthetic;

use crate::sched::types::{BlockId, Group, Step, StepOutput};

/// What an executor can hold and compute. Fixed from its creation on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Prompt and answer together, at most.
    pub max_model_len: usize,
    /// Input rows of one step, at most.
    pub max_rows: usize,
    /// Sequences of one step, at most.
    pub max_seqs: usize,
    /// Drafts per round, at most; 0 without a drafter.
    pub max_drafts: usize,
    /// Slots of a block of the full-attention group.
    pub full_block_size: usize,
    /// Blocks of the full-attention group.
    pub full_blocks: usize,
    /// Slots of a block of the sliding group.
    pub sliding_block_size: usize,
    /// Bytes of a block of the full-attention group, all its layers together.
    pub full_block_bytes: usize,
    /// Bytes of a block of the sliding group, all its layers together.
    pub sliding_block_bytes: usize,
    /// Blocks of the sliding group.
    pub sliding_blocks: usize,
    /// Keys a sliding layer sees, the query's own included.
    pub window: usize,
    /// Rows of a sequence whose choices can be confined to masks in one step: a grammar needs one,
    /// and one more for each draft. 0: this device keeps to no grammar.
    pub masked_rows: usize,
}

/// What a failure took with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Nothing: the step may be run again as it is.
    Nothing,
    /// Keys and values: every sequence has to be computed again.
    Memory,
    /// The device, for as long as this process lives: nothing can be computed here any more.
    Device,
}

/// A failed step. Nothing of it counts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {device} failed: {reason}")]
pub struct ExecError {
    /// "cpu", "cuda" or "fake".
    pub device: &'static str,
    /// What went wrong.
    pub reason: String,
    /// What is gone.
    pub lost: Lost,
}

/// Computes steps. One owner, one thread.
///
/// Contract: the result of a sequence depends on nothing but that sequence's own tokens,
/// positions and parameters, bit for bit: not on the other sequences of the step, not on how its
/// tokens were cut into steps, not on the drafts.
pub trait Executor: Send {
    /// Its fixed limits.
    fn limits(&self) -> &Limits;

    /// Runs one step: writes keys and values of every row, samples, verifies and drafts.
    fn run(&mut self, step: &Step) -> Result<StepOutput, ExecError>;

    /// Appends the bytes of blocks, one block after the other, each as long as the limits say.
    ///
    /// # Errors
    /// A device that does not save blocks says so: nothing is saved then.
    fn save_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        into: &mut Vec<u8>,
    ) -> Result<(), ExecError> {
        let _ = (group, blocks, into);
        Err(ExecError {
            device: "device",
            reason: "it does not save blocks".into(),
            lost: Lost::Nothing,
        })
    }

    /// Fills blocks with the bytes that [`Executor::save_blocks`] gave for them.
    ///
    /// # Errors
    /// As many bytes as do not fit the blocks, or a device that does not load blocks. What the
    /// blocks hold then is not defined.
    fn load_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), ExecError> {
        let _ = (group, blocks, bytes);
        Err(ExecError {
            device: "device",
            reason: "it does not load blocks".into(),
            lost: Lost::Nothing,
        })
    }
}
