//! An executor without a model: a hash of the tokens so far picks the next one.
//!
//! It keeps tokens where others keep keys and values, and reads them back through the block
//! tables. A wrong table, a block in two hands, a slot of a rejected draft or of an earlier owner:
//! each is a wrong or missing token here, found at once. Drafts are right with a set chance, so
//! every property of the scheduler and of the engine can be tested in microseconds.

use std::{collections::BTreeMap, time::Duration};

use super::{ExecError, Executor, Limits, Lost};
use crate::{
    model::kv_dtype::KvDtype,
    sched::{
        mask::Mask,
        types::{
            BlockId, Emitted, Group, Logprobs, SampleStep, SamplingParams, SeqOutput, SeqStep,
            Step, StepOutput, TokenId,
        },
    },
};

/// What a fake executor is to be like.
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// Its limits; any sizes that are not zero.
    pub limits: Limits,
    /// Chance of a draft to be right, 0 to 1.
    pub right: f64,
    /// Chance that a token depends on the two before it alone, so that the text repeats itself.
    pub repeats: f64,
    /// Another model: other tokens.
    pub model: u64,
    /// How slots are stored. In FP8 they take half the bytes, keep half of a hash, and tokens are
    /// others.
    pub kv: KvDtype,
    /// How long a step takes at least.
    pub step_time: Duration,
    /// What goes wrong, by number of the step from 0.
    pub faults: BTreeMap<u64, Fault>,
    /// What goes wrong in every step that has this token among its inputs.
    pub cursed: Option<(TokenId, Fault)>,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            limits: Limits {
                vocab_size: 1000,
                max_model_len: 4096,
                max_rows: 256,
                max_seqs: 16,
                max_drafts: 8,
                full_block_size: 16,
                full_blocks: 1024,
                sliding_block_size: 16,
                sliding_blocks: 256,
                full_block_bytes: 16 * SLOT_BYTES,
                sliding_block_bytes: 16 * SLOT_BYTES,
                window: 64,
                masked_rows: usize::MAX,
            },
            right: 0.8,
            repeats: 0.0,
            model: 0,
            kv: KvDtype::Bf16,
            step_time: Duration::ZERO,
            faults: BTreeMap::new(),
            cursed: None,
        }
    }
}

/// A way to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The step fails after its rows were written.
    Error,
    /// The executor panics.
    Panic,
    /// The answer does not fit the step.
    Nonsense,
    /// The device is gone, in this step and in every later one.
    Death,
}

/// What a slot holds; `None` is dead: never written, or rejected.
type Slot = Option<Entry>;

/// Stands for the keys and values of a token, which depend on all tokens before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    position: usize,
    token: TokenId,
    /// Hash of the tokens up to this one, and of the model.
    prefix: u64,
}

/// Bytes of a slot, as a snapshot stores it.
pub const SLOT_BYTES: usize = 24;

/// The same, by how slots are stored.
pub fn slot_bytes(kv: KvDtype) -> usize {
    match kv {
        KvDtype::Bf16 | KvDtype::F32 => SLOT_BYTES,
        KvDtype::Fp8 => SLOT_BYTES / 2,
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct FakeExecutor {
    options: FakeOptions,
    full: Vec<Slot>,
    sliding: Vec<Slot>,
    luck: u64,
    steps: u64,
    dead: bool,
}

impl FakeExecutor {
    /// An executor with these options.
    pub fn new(options: FakeOptions) -> Self {
        let limits = &options.limits;
        Self {
            full: vec![None; limits.full_blocks * limits.full_block_size],
            sliding: vec![None; limits.sliding_blocks * limits.sliding_block_size],
            luck: 0x5eed,
            steps: 0,
            dead: false,
            options,
        }
    }

    /// The tokens that a lone, undrafted sequence of this prompt gets, computed without blocks.
    pub fn expected(&self, prompt: &[TokenId], params: &SamplingParams) -> Vec<Emitted> {
        self.expected_within(prompt, params, |_| None)
    }

    /// The same when each token must be in the mask that `masks` makes of the generated ones.
    pub fn expected_within(
        &self,
        prompt: &[TokenId],
        params: &SamplingParams,
        mut masks: impl FnMut(&[Emitted]) -> Option<Mask>,
    ) -> Vec<Emitted> {
        let mut hash = Prefix::new(&self.options, params, prompt.len());
        prompt.iter().for_each(|&token| hash.push(token));
        let mut emitted = Vec::new();
        for generated in 0..params.max_tokens {
            let token = hash.next(params, generated, masks(&emitted).as_ref());
            hash.push(token.id);
            emitted.push(token);
            if emitted
                .last()
                .is_some_and(|last| params.stop_tokens.contains(&last.id))
            {
                break;
            }
        }
        emitted
    }

    /// What a slot keeps of a hash, and so all that later ones are made of.
    fn stored(&self, prefix: u64) -> u64 {
        match self.options.kv {
            KvDtype::Bf16 | KvDtype::F32 => prefix,
            KvDtype::Fp8 => prefix >> 32,
        }
    }

    fn run_sequence(&mut self, rows: &SeqStep) -> Result<SeqOutput, ExecError> {
        let table = Slots::new(&self.options.limits, rows)?;
        // Whatever lies from the first row on belongs to nobody any more.
        table
            .full_from(rows.start)
            .for_each(|slot| self.full[slot] = None);
        table
            .sliding_from(rows.start)
            .for_each(|slot| self.sliding[slot] = None);
        let mut prefix = match rows.start.checked_sub(1) {
            None => self.stored(mix(self.options.model)),
            Some(last) => match self.full[table.full(last)?] {
                Some(entry) if entry.position == last => entry.prefix,
                other => return Err(dead("full", last, other)),
            },
        };
        for (position, &token) in (rows.start..).zip(&rows.tokens) {
            prefix = self.stored(chained(prefix, token));
            let entry = Entry {
                position,
                token,
                prefix,
            };
            self.full[table.full(position)?] = Some(entry);
            self.sliding[table.sliding(position)?] = Some(entry);
        }
        match &rows.sample {
            Some(sample) => self.sample(rows, sample, &table),
            None => self
                .read(rows, &table, rows.tokens.len())
                .map(|_| SeqOutput::default()),
        }
    }

    /// The tokens before the last `unread` rows, read from the cache; the window of the rows too.
    fn read(
        &self,
        rows: &SeqStep,
        table: &Slots<'_>,
        unread: usize,
    ) -> Result<Vec<TokenId>, ExecError> {
        let end = rows.start + rows.tokens.len();
        let mut tokens = Vec::with_capacity(end);
        let mut prefix = self.stored(mix(self.options.model));
        let window_start = (rows.start + 1).saturating_sub(self.options.limits.window);
        for position in 0..end {
            let found = self.full[table.full(position)?];
            let Some(entry) = found.filter(|entry| {
                let prefix = self.stored(chained(prefix, entry.token));
                entry.position == position && entry.prefix == prefix
            }) else {
                return Err(dead("full", position, found));
            };
            prefix = entry.prefix;
            tokens.push(entry.token);
            if position >= window_start {
                let found = self.sliding[table.sliding(position)?];
                if found != Some(entry) {
                    return Err(dead("sliding", position, found));
                }
            }
        }
        tokens.truncate(end - unread);
        Ok(tokens)
    }

    fn sample(
        &mut self,
        rows: &SeqStep,
        sample: &SampleStep,
        table: &Slots<'_>,
    ) -> Result<SeqOutput, ExecError> {
        let params = &*sample.params;
        let known = self.read(rows, table, sample.drafts)?;
        if known.len() != sample.prompt_len + sample.generated as usize {
            return Err(wrong(format!(
                "{} tokens are in the cache, but {} of the prompt and {} generated",
                known.len(),
                sample.prompt_len,
                sample.generated
            )));
        }
        if !sample.masks.is_empty() && sample.masks.len() != sample.drafts + 1 {
            return Err(wrong("a row has no mask".into()));
        }
        if params.reads_history() && sample.history != known {
            return Err(wrong("the history is not what the cache holds".into()));
        }
        let mut hash = Prefix::new(&self.options, params, sample.prompt_len);
        known.iter().for_each(|&token| hash.push(token));
        let drafts = &rows.tokens[rows.tokens.len() - sample.drafts..];
        let mut tokens = Vec::new();
        let mut generated = sample.generated;
        loop {
            let mask = sample.masks.get(tokens.len()).map(|mask| &**mask);
            let token = hash.next(params, generated, mask);
            hash.push(token.id);
            generated += 1;
            let accepted = drafts.get(tokens.len()) == Some(&token.id);
            tokens.push(token);
            if !accepted {
                break;
            }
        }
        let dead_from = known.len() + tokens.len() - 1;
        table
            .full_from(dead_from)
            .for_each(|slot| self.full[slot] = None);
        table
            .sliding_from(dead_from)
            .for_each(|slot| self.sliding[slot] = None);

        let mut next = Vec::with_capacity(sample.next_drafts);
        for _ in 0..sample.next_drafts {
            let right = hash.next(params, generated, None).id;
            let draft = if self.lucky() {
                right
            } else {
                (right + 1) % self.options.limits.vocab_size as TokenId
            };
            hash.push(draft);
            generated += 1;
            next.push(draft);
        }
        Ok(SeqOutput {
            tokens,
            drafts: next,
        })
    }

    /// Differs from run to run of a request on purpose: drafts must not matter.
    fn lucky(&mut self) -> bool {
        self.luck = mix(self.luck.wrapping_add(0x9e37_79b9_7f4a_7c15));
        unit(self.luck) < self.options.right
    }
}

impl Executor for FakeExecutor {
    fn limits(&self) -> &Limits {
        &self.options.limits
    }

    fn run(&mut self, step: &Step) -> Result<StepOutput, ExecError> {
        if self.dead {
            return Err(gone());
        }
        let number = self.steps;
        self.steps += 1;
        if !self.options.step_time.is_zero() {
            std::thread::sleep(self.options.step_time);
        }
        let limits = &self.options.limits;
        if step.rows() > limits.max_rows || step.seqs.len() > limits.max_seqs {
            return Err(wrong(format!(
                "{} rows, {} sequences",
                step.rows(),
                step.seqs.len()
            )));
        }
        check_sharing(step, limits)?;
        let mut output = StepOutput::default();
        for rows in &step.seqs {
            output.seqs.push(self.run_sequence(rows)?);
        }
        let cursed = self
            .options
            .cursed
            .filter(|(token, _)| step.seqs.iter().any(|rows| rows.tokens.contains(token)));
        let fault = cursed
            .map(|(_, fault)| fault)
            .or(self.options.faults.get(&number).copied());
        match fault {
            None => Ok(output),
            Some(Fault::Error) => Err(wrong("a fault was asked for".into())),
            Some(Fault::Death) => {
                self.dead = true;
                Err(gone())
            }
            Some(Fault::Panic) => panic!("a panic was asked for"),
            Some(Fault::Nonsense) => {
                output.seqs.push(SeqOutput::default());
                Ok(output)
            }
        }
    }

    fn save_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        into: &mut Vec<u8>,
    ) -> Result<(), ExecError> {
        let word = self.word();
        for &block in blocks {
            let slots = self.slots_of(group, block);
            let slots = slots.ok_or_else(|| wrong(format!("{block:?} is not there")))?;
            for &slot in slots.iter() {
                put(slot, word, into);
            }
        }
        Ok(())
    }

    fn load_blocks(
        &mut self,
        group: Group,
        blocks: &[BlockId],
        bytes: &[u8],
    ) -> Result<(), ExecError> {
        let word = self.word();
        let mut slots = bytes.chunks_exact(3 * word);
        for &block in blocks {
            let there = self.slots_of(group, block);
            for slot in there.ok_or_else(|| wrong(format!("{block:?} is not there")))? {
                let bytes = slots.next().ok_or_else(|| wrong("too few bytes".into()))?;
                *slot = from_bytes(bytes, word);
            }
        }
        match slots.next() {
            None => Ok(()),
            Some(_) => Err(wrong("too many bytes".into())),
        }
    }
}

impl FakeExecutor {
    /// Bytes of one of the three numbers of a slot.
    fn word(&self) -> usize {
        slot_bytes(self.options.kv) / 3
    }

    fn slots_of(&mut self, group: Group, block: BlockId) -> Option<&mut [Slot]> {
        let (slots, size) = match group {
            Group::Full => (&mut self.full, self.options.limits.full_block_size),
            Group::Sliding => (&mut self.sliding, self.options.limits.sliding_block_size),
        };
        let start = block.0 as usize * size;
        slots.get_mut(start..start + size)
    }
}

/// Appends a slot's three numbers, each in so many bytes.
fn put(slot: Slot, word: usize, into: &mut Vec<u8>) {
    let words = match slot {
        None => [u64::MAX; 3],
        Some(entry) => [entry.position as u64, entry.token.into(), entry.prefix],
    };
    words
        .iter()
        .for_each(|number| into.extend(&number.to_le_bytes()[..word]));
}

fn from_bytes(bytes: &[u8], word: usize) -> Slot {
    let mut words = bytes.chunks_exact(word).map(|bytes| {
        let mut number = [0; 8];
        number[..word].copy_from_slice(bytes);
        u64::from_le_bytes(number)
    });
    let (position, token, prefix) = (words.next()?, words.next()?, words.next()?);
    let none = u64::MAX >> (64 - 8 * word);
    (position != none).then_some(Entry {
        position: position as usize,
        token: token as TokenId,
        prefix,
    })
}

fn wrong(reason: String) -> ExecError {
    ExecError {
        device: "fake",
        reason,
        lost: Lost::Nothing,
    }
}

fn gone() -> ExecError {
    ExecError {
        lost: Lost::Device,
        ..wrong("its end was asked for".into())
    }
}

fn dead(group: &str, position: usize, found: Slot) -> ExecError {
    wrong(format!(
        "position {position} of the {group} group is not there: {found:?}"
    ))
}

/// A block may be in several tables, but only while nobody writes to it.
fn check_sharing(step: &Step, limits: &Limits) -> Result<(), ExecError> {
    let mut readers: [BTreeMap<BlockId, usize>; 2] = Default::default();
    for rows in &step.seqs {
        for (readers, blocks) in readers
            .iter_mut()
            .zip([&rows.tables.full, &rows.tables.sliding])
        {
            for block in blocks {
                *readers.entry(*block).or_default() += 1;
            }
        }
    }
    for rows in &step.seqs {
        let tables = &rows.tables;
        let full = tables.full.iter().skip(rows.start / limits.full_block_size);
        let sliding = (rows.start / limits.sliding_block_size).saturating_sub(tables.sliding_first);
        let sliding = tables.sliding.iter().skip(sliding);
        let full = full.map(|block| (&readers[0], block));
        for (readers, block) in full.chain(sliding.map(|block| (&readers[1], block))) {
            if readers.get(block) != Some(&1) {
                return Err(wrong(format!("{block:?} is written and in two places")));
            }
        }
    }
    Ok(())
}

/// Where a sequence's positions lie.
struct Slots<'a> {
    rows: &'a SeqStep,
    full_block: usize,
    sliding_block: usize,
}

impl<'a> Slots<'a> {
    fn new(limits: &Limits, rows: &'a SeqStep) -> Result<Self, ExecError> {
        let outside =
            |blocks: &[BlockId], there: usize| blocks.iter().any(|block| block.0 as usize >= there);
        if outside(&rows.tables.full, limits.full_blocks)
            || outside(&rows.tables.sliding, limits.sliding_blocks)
        {
            return Err(wrong("a block outside its pool".into()));
        }
        let end = rows.start + rows.tokens.len();
        if end > limits.max_model_len {
            return Err(wrong(format!(
                "{end} tokens are more than {}",
                limits.max_model_len
            )));
        }
        let (full_block, sliding_block) = (limits.full_block_size, limits.sliding_block_size);
        Ok(Self {
            rows,
            full_block,
            sliding_block,
        })
    }

    fn full(&self, position: usize) -> Result<usize, ExecError> {
        let block = self.rows.tables.full.get(position / self.full_block);
        let block = block.ok_or_else(|| wrong(format!("no full block for {position}")))?;
        Ok(block.0 as usize * self.full_block + position % self.full_block)
    }

    fn sliding(&self, position: usize) -> Result<usize, ExecError> {
        let tables = &self.rows.tables;
        let block = (position / self.sliding_block)
            .checked_sub(tables.sliding_first)
            .and_then(|index| tables.sliding.get(index));
        let block = block.ok_or_else(|| wrong(format!("no sliding block for {position}")))?;
        Ok(block.0 as usize * self.sliding_block + position % self.sliding_block)
    }

    /// Slots of all positions from `start` to the end of the table.
    fn full_from(&self, start: usize) -> impl Iterator<Item = usize> {
        let end = self.rows.tables.full.len() * self.full_block;
        (start..end).filter_map(|position| self.full(position).ok())
    }

    fn sliding_from(&self, start: usize) -> impl Iterator<Item = usize> {
        let tables = &self.rows.tables;
        let end = (tables.sliding_first + tables.sliding.len()) * self.sliding_block;
        (start..end).filter_map(|position| self.sliding(position).ok())
    }
}

/// Hash of a request and of its tokens so far.
struct Prefix {
    state: u64,
    /// Of the last two tokens, and how often they alone decide.
    pair: (TokenId, TokenId),
    repeats: f64,
    vocab: u64,
}

impl Prefix {
    fn new(options: &FakeOptions, params: &SamplingParams, prompt_len: usize) -> Self {
        let fp8 = u64::from(options.kv == KvDtype::Fp8);
        let mut state = mix(options.model ^ 0x6a09_e667_f3bc_c908 ^ fp8 << 63);
        if params.temperature > 0.0 {
            state = mix(state ^ params.seed);
        }
        if params.reads_history() {
            state = mix(state ^ prompt_len as u64);
        }
        Self {
            state,
            pair: (0, 0),
            repeats: options.repeats,
            vocab: options.limits.vocab_size as u64,
        }
    }

    fn push(&mut self, token: TokenId) {
        self.state = chained(self.state, token);
        self.pair = (self.pair.1, token);
    }

    /// The next token, given how many were generated: the first candidate that is allowed.
    fn next(&self, params: &SamplingParams, generated: u32, mask: Option<&Mask>) -> Emitted {
        let early = generated < params.min_tokens;
        let allowed = |id: &TokenId| match mask {
            Some(mask) => mask.allows(*id),
            None => !(params.suppressed.contains(id) || early && params.stop_tokens.contains(id)),
        };
        let (before, last) = self.pair;
        let pair = mix((u64::from(before) << 32) | u64::from(last));
        let deciding = match unit(mix(self.state ^ 0x3243_f6a8)) < self.repeats {
            true => pair,
            false => self.state,
        };
        let candidate = |n: u64| (mix(deciding.wrapping_add(n)) % self.vocab) as TokenId;
        let id = (0..64).map(candidate).find(allowed);
        // Every lucky number was forbidden: take the lowest id that is not.
        let id = id
            .or_else(|| (0..self.vocab as TokenId).find(allowed))
            .unwrap_or(0);
        let logprobs = (params.logprobs > 0).then(|| Logprobs {
            chosen: -unit(mix(self.state ^ u64::from(id))) as f32,
            top: (1..params.logprobs)
                .map(|n| (candidate(u64::from(n) - 1), -(n as f32) / 8.0))
                .collect(),
        });
        Emitted { id, logprobs }
    }
}

/// Hash of a prefix with a token more.
fn chained(prefix: u64, token: TokenId) -> u64 {
    mix(prefix ^ mix(u64::from(token) + 1))
}

/// A bijection on 64 bits in which every input bit moves every output bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// A number from 0 to 1, 1 excluded.
fn unit(x: u64) -> f64 {
    (x >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
#[path = "fake_tests.rs"]
mod tests;
