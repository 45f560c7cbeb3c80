//! What fits: sizes from options, pages from a budget of bytes, a budget from free memory.

use super::{CpuError, CpuOptions, MAX_DRAFTS, kv, rope::RopeTable};
use crate::{
    backend::Limits,
    model::{
        LoadedModel,
        kv_dtype::KvDtype,
        plan::{Kind, Plan, Rope},
    },
};

/// How long the sequences are expected to be that run beside the longest one.
const MODERATE_LENGTH: usize = 4096;

/// The executor's limits under these options.
pub(super) fn limits(
    model: &LoadedModel,
    options: &CpuOptions,
    kv: KvDtype,
) -> Result<Limits, CpuError> {
    let need = Need::new(&model.plan, options, kv)?;
    let (full_blocks, sliding_blocks) = need.blocks(options.kv_memory)?;
    let max_drafts = match &model.drafter {
        None => 0,
        Some(_) => options.max_drafts.min(MAX_DRAFTS),
    };
    Ok(Limits {
        vocab_size: model.plan.vocab,
        max_model_len: need.length,
        max_rows: options.max_rows,
        max_seqs: options.max_seqs,
        max_drafts,
        full_block_size: kv::BLOCK,
        full_blocks,
        sliding_block_size: kv::BLOCK,
        sliding_blocks,
        full_block_bytes: need.full_bytes,
        sliding_block_bytes: need.sliding_bytes,
        window: model.plan.window,
        masked_rows: usize::MAX,
    })
}

/// Bytes for keys and values on a machine with so many bytes free, nothing being packed yet:
/// enough for one sequence of the full length beside `max_seqs` of a moderate one, at most half of
/// what is left beside the weights. An error with the numbers where not even one sequence fits.
pub fn auto_kv_memory(
    model: &LoadedModel,
    options: &CpuOptions,
    free: u64,
) -> Result<usize, CpuError> {
    let kv = super::kv_dtype(model, options)?;
    let need = Need::new(&model.plan, options, kv)?;
    let (weights, tables) = (weight_bytes(model), rope_bytes(model, need.length));
    let left = free.saturating_sub(weights.saturating_add(tables));
    let share = usize::try_from(left / 2).unwrap_or(usize::MAX);
    let wanted = need.wanted();
    if share >= need.least() {
        return Ok(wanted.min(share).max(need.least()));
    }
    let fits = share.saturating_sub(need.window * need.sliding_bytes) / need.full_bytes.max(1);
    let remedy = match fits * kv::BLOCK {
        0 => "free some memory".to_owned(),
        tokens => format!("max-model-len {tokens} would fit"),
    };
    Err(CpuError::Option {
        option: "kv-cache-memory",
        problem: format!(
            "auto: one sequence of {} tokens takes {}, and half of what is free beside the weights \
             is {} ({} free, weights {}, tables of rotary embeddings {}): {remedy}; or give a size",
            need.length,
            mib(need.least() as u64),
            mib(share as u64),
            mib(free),
            mib(weights),
            mib(tables),
        ),
    })
}

/// Bytes that the weights of target and assistant take.
fn weight_bytes(model: &LoadedModel) -> u64 {
    let draft = model.drafter.iter().flat_map(|d| d.weights.all());
    let all = model.weights.all().into_iter().chain(draft);
    all.map(|w| w.stored_bytes() as u64).sum()
}

/// Bytes of the tables of rotary embeddings for sequences of this length, each table once.
fn rope_bytes(model: &LoadedModel, length: usize) -> u64 {
    let draft = model.drafter.iter().map(|d| &d.plan.text);
    let mut tables: Vec<(&Rope, usize)> = Vec::new();
    for plan in std::iter::once(&model.plan).chain(draft) {
        for kind in [Kind::Sliding, Kind::Full] {
            let table = plan.head_dim(kind).map(|dim| (plan.rope(kind), dim));
            tables.extend(table.filter(|table| !tables.contains(table)));
        }
    }
    let bytes = |(rope, dim)| RopeTable::bytes(rope, dim, positions(length));
    tables.into_iter().map(bytes).sum()
}

/// Positions of sequences of this length: a draft's row stands one behind the last.
pub(super) fn positions(length: usize) -> usize {
    length + 1
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Pages that sequences need, and their sizes.
struct Need {
    /// Prompt and answer together at most.
    length: usize,
    /// Sequences at a time.
    seqs: usize,
    /// Pages of the sliding group that one sequence works in.
    window: usize,
    /// Pages of the full group that the longest sequence fills.
    whole: usize,
    sliding_bytes: usize,
    full_bytes: usize,
}

impl Need {
    fn new(plan: &Plan, options: &CpuOptions, kv: KvDtype) -> Result<Self, CpuError> {
        let bad = |option: &'static str, problem: String| CpuError::Option { option, problem };
        if options.max_seqs == 0 || options.max_seqs > 4096 {
            return Err(bad(
                "max-num-seqs",
                format!("{} is not in 1..=4096", options.max_seqs),
            ));
        }
        let fewest = MAX_DRAFTS + 1;
        if options.max_rows < fewest || options.max_rows > 1 << 16 {
            let problem = format!("{} is not in {fewest}..=65536", options.max_rows);
            return Err(bad("max-num-batched-tokens", problem));
        }
        let length = match options.max_model_len {
            0 => plan.max_positions,
            n if n <= plan.max_positions => n,
            n => {
                let problem = format!(
                    "{n} is more than the {} the model knows",
                    plan.max_positions
                );
                return Err(bad("max-model-len", problem));
            }
        };
        let element = kv.bytes();
        let whole = length.div_ceil(kv::BLOCK);
        let window = (plan.window + options.max_rows + MAX_DRAFTS).div_ceil(kv::BLOCK) + 2;
        Ok(Self {
            length,
            seqs: options.max_seqs,
            window: window.min(whole + 1),
            whole,
            sliding_bytes: kv::block_bytes(plan, Kind::Sliding, element),
            full_bytes: kv::block_bytes(plan, Kind::Full, element),
        })
    }

    /// A window for every sequence and as many kept ones besides.
    fn sliding_wanted(&self) -> usize {
        2 * self.seqs * self.window
    }

    /// Bytes that one sequence of the full length takes.
    fn least(&self) -> usize {
        let sliding = self.window.saturating_mul(self.sliding_bytes);
        self.whole
            .saturating_mul(self.full_bytes)
            .saturating_add(sliding)
    }

    /// Bytes with which all sequences run, one of them as long as can be.
    fn wanted(&self) -> usize {
        let moderate = self.seqs * self.whole.min(MODERATE_LENGTH.div_ceil(kv::BLOCK));
        let full = (self.whole + moderate).saturating_mul(self.full_bytes);
        full.saturating_add(self.sliding_wanted().saturating_mul(self.sliding_bytes))
    }

    /// Pages of the two groups, full first, that fit a budget.
    ///
    /// Sliding pages get at most half of it, and leave room for one sequence of the full length.
    /// The rest is full pages, never more than all sequences could fill twice.
    fn blocks(&self, budget: usize) -> Result<(usize, usize), CpuError> {
        if budget < self.least() {
            return Err(CpuError::Option {
                option: "kv-cache-memory",
                problem: format!(
                    "{budget} bytes do not hold one sequence of {} tokens, which takes {}; \
                     raise it or lower max-model-len",
                    self.length,
                    self.least()
                ),
            });
        }
        let beside_one = budget - self.whole * self.full_bytes;
        let affordable = beside_one.min(budget / 2) / self.sliding_bytes.max(1);
        let sliding = self.sliding_wanted().min(affordable).max(self.window);
        let left = budget - sliding * self.sliding_bytes;
        let most = 2 * self.seqs * self.whole;
        let full = (left / self.full_bytes.max(1)).min(most);
        Ok((full, sliding))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LoadOptions, drafter_of, load};

    fn golden(name: &str) -> LoadedModel {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/goldens/");
        let dir = std::path::Path::new(dir).join(name);
        let drafter = drafter_of(&dir);
        load(&dir, &LoadOptions { drafter }).unwrap()
    }

    fn options() -> CpuOptions {
        CpuOptions {
            threads: 1,
            ..CpuOptions::default()
        }
    }

    /// Bytes that are taken whatever sequences run.
    fn beside(model: &LoadedModel, need: &Need) -> u64 {
        weight_bytes(model) + rope_bytes(model, need.length)
    }

    #[test]
    fn tables_of_rotary_embeddings_count_each_once() {
        let model = golden("31b");
        let length = model.plan.max_positions;
        let plan = &model.plan;
        let table = |kind| {
            let dim = plan.head_dim(kind).unwrap();
            RopeTable::bytes(plan.rope(kind), dim, length + 1)
        };
        // Its drafter turns as it does.
        assert!(model.drafter.is_some());
        let both = table(Kind::Sliding) + table(Kind::Full);
        assert_eq!(rope_bytes(&model, length), both);
        assert!(both > 0);
    }

    #[test]
    fn auto_grows_with_length_and_sequences_up_to_its_share() {
        let model = golden("31b");
        let auto = |o: &CpuOptions| auto_kv_memory(&model, o, 64 << 30).unwrap();
        let all = auto(&options());
        let shorter = auto(&CpuOptions {
            max_model_len: 64,
            ..options()
        });
        let fewer = auto(&CpuOptions {
            max_seqs: 1,
            ..options()
        });
        assert!(shorter < all && fewer < all, "{shorter} {fewer} {all}");
        // Everything that can run at once does, one of it at full length.
        let limits = limits(
            &model,
            &CpuOptions {
                kv_memory: all,
                ..options()
            },
            KvDtype::F32,
        )
        .unwrap();
        assert!(limits.full_blocks >= limits.max_model_len.div_ceil(limits.full_block_size));
        let need = Need::new(&model.plan, &options(), KvDtype::F32).unwrap();
        let (least, beside) = (need.least(), beside(&model, &need));
        let tight = auto_kv_memory(&model, &options(), beside + 2 * least as u64 + 1000).unwrap();
        assert_eq!(tight, least + 500);
    }

    #[test]
    fn too_little_memory_is_refused_with_a_length_that_fits() {
        let model = golden("31b");
        let need = Need::new(&model.plan, &options(), KvDtype::F32).unwrap();
        let free = beside(&model, &need) + 2 * need.least() as u64 - 2;
        let message = auto_kv_memory(&model, &options(), free)
            .unwrap_err()
            .to_string();
        for part in [
            "kv-cache-memory: auto: one sequence of 128 tokens",
            "free beside the weights",
        ] {
            assert!(message.contains(part), "{message}");
        }
        let fits = message.split("max-model-len ").nth(1).unwrap();
        let length: usize = fits.split(' ').next().unwrap().parse().unwrap();
        let shorter = CpuOptions {
            max_model_len: length,
            ..options()
        };
        auto_kv_memory(&model, &shorter, free).unwrap();
        let none = auto_kv_memory(&model, &options(), 0)
            .unwrap_err()
            .to_string();
        assert!(none.contains("free some memory"), "{none}");
    }

    #[test]
    fn the_stated_least_is_enough_and_one_byte_less_is_not() {
        let model = golden("e4b");
        let need = Need::new(&model.plan, &options(), KvDtype::F32).unwrap();
        let with = |kv_memory| {
            let options = CpuOptions {
                kv_memory,
                ..options()
            };
            limits(&model, &options, KvDtype::F32)
        };
        let limits = with(need.least()).unwrap();
        assert_eq!(
            (limits.full_blocks, limits.sliding_blocks),
            (need.whole, need.window)
        );
        let message = with(need.least() - 1).unwrap_err().to_string();
        assert!(message.contains(&need.least().to_string()), "{message}");
    }
}
