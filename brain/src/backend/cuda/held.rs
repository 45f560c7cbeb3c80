//! What is on the card, and a round of it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use marathon_kernels::{
    abi::YardstickArgs,
    device::{Device, DeviceError},
    graph::Graph,
};

use super::{
    CudaError, Fault,
    card::Card,
    form::Numbers,
    launch::{CudaOps, Needs},
    memory,
    rounds::Part,
    staging::{Extent, Staging},
    step::StepError,
};
use crate::{
    backend::{Limits, arena::Arena, ops::Rows},
    model::{LoadedModel, drafter::Drafter, gemma::Gemma, plan::Kind},
    sched::types::{BlockId, Emitted, Group, Logprobs, SeqOutput, StepOutput, TokenId},
};

/// The model, its pools and the recorded rounds on one card.
pub(super) struct Held {
    // Graphs and weights go before the card that they are on.
    pub(super) graphs: HashMap<Part, Graph>,
    pub(super) gemma: Gemma<CudaOps>,
    pub(super) drafter: Option<Drafter<CudaOps>>,
    pub(super) ops: CudaOps,
    staging: Staging,
    pub(super) device: Arc<Device>,
}

/// Why a round gave no result.
pub(super) enum Failed {
    /// The step itself.
    Step(String),
    /// The card.
    Card(String),
}

impl From<DeviceError> for Failed {
    fn from(error: DeviceError) -> Self {
        Self::Card(error.to_string())
    }
}

impl Held {
    pub(super) fn new(
        device: Arc<Device>,
        model: &LoadedModel,
        numbers: Numbers,
        limits: &Limits,
        random: bool,
    ) -> Result<Self, CudaError> {
        let needs = Needs {
            blocks: [limits.full_blocks, limits.sliding_blocks],
            ..memory::needs(model, numbers, limits)
        };
        let mut card = Card::new(Some(device.clone()));
        card.random = random;
        let mut ops = CudaOps::new(card, &needs)?;
        let (gemma, drafter) = memory::build(&mut ops, model, limits);
        if let Some(failure) = ops.card.take_failure() {
            return Err(failure.into());
        }
        let staging = ops.card.loaded()?;
        let bad = ops.card.bad_codes()?;
        if bad > 0 {
            return Err(CudaError::Model(format!(
                "{bad} codes that no weight may have"
            )));
        }
        Ok(Self {
            graphs: HashMap::new(),
            gemma,
            drafter,
            ops,
            staging,
            device,
        })
    }

    pub(super) fn last_logits(&self) -> Result<Vec<Vec<f32>>, DeviceError> {
        let rows = self.ops.count(Rows::Out);
        self.gemma.logits().download(&self.device, rows)
    }

    pub(super) fn fail(&mut self, fault: Fault) -> Result<(), DeviceError> {
        self.device.bind()?;
        let (kernel, ticks) = match fault {
            Fault::Trap => ("fault_trap", 0),
            Fault::Spin(ticks) => ("fault_spin", ticks),
        };
        let args = YardstickArgs {
            data: 0,
            out: 0,
            bytes: ticks,
            seed: 0,
            kind: 0,
        };
        self.ops.card.fault(kernel, &args);
        self.ops.card.take_failure().map_or(Ok(()), Err)
    }

    /// Sends what a step is to the card.
    pub(super) fn send(&mut self, arena: &Arena) -> Result<(), Failed> {
        let group_rows = self.ops.group_rows;
        let sent = self.ops.step.send(&self.ops.card, arena, group_rows);
        sent.map_err(|error| match error {
            StepError::Device(error) => error.into(),
            lost @ StepError::Room => Failed::Card(lost.to_string()),
            other => Failed::Step(format!("bad step: {other}")),
        })
    }

    /// Runs the step in the arena; the results are on the host after it.
    pub(super) fn round(
        &mut self,
        arena: &Arena,
        graphs: bool,
        limit: Duration,
    ) -> Result<(), Failed> {
        self.send(arena)?;
        self.compute(graphs)?;
        self.ops.step.fetch(&self.ops.card)?;
        match self.device.wait_within(limit)? {
            true => Ok(()),
            false => Err(Failed::Card(format!(
                "a step is not done after {limit:?}: a kernel hangs"
            ))),
        }
    }

    /// Where blocks lie, one after the other, each with all layers of its group.
    fn pages(&self, group: Group, blocks: &[BlockId]) -> Result<Vec<Extent>, Failed> {
        let (kind, count) = match group {
            Group::Full => (Kind::Full, self.ops.blocks[0]),
            Group::Sliding => (Kind::Sliding, self.ops.blocks[1]),
        };
        let layers: Vec<_> = self.gemma.caches().filter(|c| c.kind == kind).collect();
        let mut pages = Vec::with_capacity(blocks.len() * layers.len());
        for block in blocks {
            let number = block.0 as usize;
            if number >= count {
                return Err(Failed::Step(format!("block {number} of {count}")));
            }
            pages.extend(layers.iter().map(|layer| layer.page(number)));
        }
        Ok(pages)
    }

    /// Appends what blocks hold.
    pub(super) fn save(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        into: &mut Vec<u8>,
    ) -> Result<(), Failed> {
        let pages = self.pages(group, blocks)?;
        into.reserve(pages.iter().map(|page| page.bytes).sum());
        Ok(self.staging.fetch(&self.device, &pages, into)?)
    }

    /// Fills blocks.
    pub(super) fn load(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), Failed> {
        let pages = self.pages(group, blocks)?;
        let room: usize = pages.iter().map(|page| page.bytes).sum();
        if room != bytes.len() {
            return Err(Failed::Step(format!(
                "{} bytes for blocks of {room}",
                bytes.len()
            )));
        }
        Ok(self.staging.send(&self.device, &pages, bytes)?)
    }

    /// What each sequence emits and drafts, from the tokens that the card chose.
    pub(super) fn output(&self, arena: &Arena) -> StepOutput {
        let step = &self.ops.step;
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
