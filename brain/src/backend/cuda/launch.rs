//! What the operations share: room to work in, and the launches that several use.

#![allow(unsafe_code, reason = "kernel launches")]

use std::sync::Arc;

use marathon_kernels::{
    abi::{
        AttentionArgs, AttentionPlan, DevicePtr, Epilogue, HeadsArgs, LargeLinear, LinearArgs,
        NormArgs, PageForm, RowsArgs, SAMPLE_THREADS, SampleArgs, SmallLinear, sample_chunks,
        sample_room,
    },
    device::DeviceError,
};

use super::{
    buffers::{Buf, Cache, by_column, rows_args},
    card::{Card, Region},
    experts::{ExpertRoom, Experts},
    form::{Form, Numbers},
    groups::{Group, bucket, splits},
    rope::Turns,
    step::{LOGPROB_PITCH, Sizes, StepArena},
    tiles::{MANY_ROWS, tiles_room},
    weights::{self, Matrix, Norm},
};
use crate::{
    backend::ops::{HeadShape, Rows},
    model::{
        kv_dtype::KvDtype,
        plan::{Kind, Rope},
        weights::Weight,
    },
};

/// Memory for partial results of attention, at most.
const PARTIALS: usize = 512 << 20;

/// What becomes of a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum Finish {
    /// It is rounded and stored.
    Store,
    /// Of gate and up in turns, `gelu(gate) * up`; the fast products only.
    Gated,
    /// `gelu` of it, times what lies at this address and pitch; the fast products only.
    GeluMul(DevicePtr, u32),
    /// Logits with their cap, if any.
    Logits(Option<f32>),
}

/// Room to choose tokens in, for rows of one width.
struct SampleRoom {
    work: Region,
    room: Region,
}

/// The card, the step arena, and room that operations share.
pub(super) struct CudaOps {
    pub(super) card: Card,
    pub(super) form: Form,
    pub(super) kv: KvDtype,
    pub(super) sizes: Sizes,
    pub(super) step: StepArena,
    pub(super) blocks: [usize; 2],
    turns: Vec<(Rope, usize, Turns)>,
    /// Partial results of attention, or tiles of keys and values; and maxima and sums of the former.
    pub(super) partial: (Region, Region),
    /// Bytes of the first.
    pub(super) partial_room: usize,
    /// The card has the kernels that take many rows at once.
    pub(super) many_rows: bool,
    partial_splits: [usize; 2],
    /// Rows that a launch of attention takes.
    pub(super) group_rows: usize,
    sample_room: SampleRoom,
    /// What every layer's experts work in.
    pub(super) expert_room: Option<Arc<ExpertRoom>>,
    /// The embedding where it is the head too.
    pub(super) tied: Option<(*const u8, Option<Matrix>)>,
}

// SAFETY: the pointer is compared, never followed.
unsafe impl Send for CudaOps {}

/// What the operations are made for.
pub(super) struct Needs<'a> {
    pub(super) numbers: Numbers,
    pub(super) sizes: Sizes,
    /// Blocks of the pools: full, sliding.
    pub(super) blocks: [usize; 2],
    /// Query heads and the largest head.
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    /// The embedding, if it is the head too.
    pub(super) tied: Option<&'a Weight>,
}

impl CudaOps {
    pub(super) fn new(mut card: Card, needs: &Needs<'_>) -> Result<Self, DeviceError> {
        let sizes = needs.sizes;
        let step = StepArena::new(&mut card, sizes)?;
        let last = sizes.positions;
        let most = [
            bucket(splits(0, last, sizes.window)[0]),
            bucket(sizes.window / 128 + 2),
        ];
        let row = needs.heads * most[0].max(most[1]) * (needs.head_dim + 2) * 4;
        let group_rows = (PARTIALS / row).clamp(9, 64).min(sizes.rows.max(9));
        let slots = group_rows * needs.heads * most[0].max(most[1]);
        // At least the tiles of a head at any length.
        let partial_room = (slots * needs.head_dim * 4).max(tiles_room(last, needs.head_dim));
        let partial = match needs.numbers.form {
            Form::Bf16 => (card.zeros(partial_room), card.zeros(slots * 8)),
            Form::F32 => (card.zeros(0), card.zeros(0)),
        };
        let many_rows = card
            .device()
            .is_some_and(|d| d.kernels().any(|name| name == MANY_ROWS));
        let chunks = sample_chunks(sizes.vocab);
        let sample_room = SampleRoom {
            work: card.zeros(sizes.out_rows * sizes.vocab.next_multiple_of(8) * 4),
            room: card.zeros(sizes.out_rows * sample_room(sizes.vocab, chunks) * 8),
        };
        Ok(Self {
            card,
            form: needs.numbers.form,
            kv: needs.numbers.kv,
            sizes,
            step,
            blocks: needs.blocks,
            turns: Vec::new(),
            partial,
            partial_room,
            many_rows,
            partial_splits: most,
            group_rows,
            sample_room,
            expert_room: None,
            tied: needs.tied.and_then(weights::identity).map(|p| (p, None)),
        })
    }

    pub(super) fn count(&self, rows: Rows) -> usize {
        self.step.count(rows)
    }

    pub(super) fn turns(&mut self, rope: &Rope, head_dim: usize) -> Turns {
        let known = self
            .turns
            .iter()
            .find(|(r, d, _)| r == rope && *d == head_dim);
        if let Some((_, _, turns)) = known {
            return turns.clone();
        }
        let turns = Turns::new(&mut self.card, rope, head_dim, self.sizes.positions);
        self.turns.push((*rope, head_dim, turns.clone()));
        turns
    }

    pub(super) fn product(
        &mut self,
        m: usize,
        x: &Buf,
        matrix: &Matrix,
        out: &Buf,
        finish: Finish,
    ) {
        if m == 0 {
            return;
        }
        let (n, k) = (matrix.n, matrix.k);
        let [weight, block_scale, row_scale] = matrix.at();
        debug_assert!(k <= x.width());
        let (epilogue, z, ldz) = match finish {
            Finish::Store => (Epilogue::Store, 0, 0),
            Finish::Gated => (Epilogue::Gated, 0, 0),
            Finish::GeluMul(z, pitch) => (Epilogue::GeluMul, z, pitch),
            Finish::Logits(_) => (Epilogue::Logits, 0, 0),
        };
        let mut args = LinearArgs {
            weight,
            block_scale,
            row_scale,
            x: x.at(),
            y: out.at(),
            z,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            ldx: x.pitch(),
            ldy: out.pitch(),
            ldz,
            epilogue: epilogue as u32,
            softcap: match finish {
                Finish::Logits(cap) => cap.unwrap_or(0.0),
                _ => 0.0,
            },
            chunk: 0,
            depth: 0,
        };
        // SAFETY (of each launch): x and out were made for as many rows as there can be, with
        // columns for k and n.
        if self.form == Form::F32 {
            unsafe {
                self.card
                    .launch("plain_linear", [n.div_ceil(8), m, 1], 256, 0, &args);
            }
            return;
        }
        let form = matrix.form;
        let shape = self.card.shape();
        if m > SmallLinear::most_rows(shape.shared_per_sm) {
            let plan = LargeLinear::plan(form, m, n, shape.sms, shape.shared_per_sm);
            args.depth = plan.depth;
            let blocks = [plan.grid as usize, 1, 1];
            let kernel = LargeLinear::kernel(form);
            unsafe {
                self.card
                    .launch(&kernel, blocks, plan.block, plan.shared, &args);
            }
            return;
        }
        let plan = SmallLinear::plan(form, m, n, k, shape.clusters, shape.shared_per_sm);
        (args.chunk, args.depth) = (plan.chunk, plan.depth);
        let blocks = [plan.grid as usize, 1, 1];
        unsafe {
            self.card
                .launch(&plan.kernel(form), blocks, plan.block, plan.shared, &args);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one kernel for both operations")]
    pub(super) fn heads(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        qkv: &Buf,
        q_norm: &Norm,
        k_norm: Option<&Norm>,
        turns: &Turns,
        cache: Option<&Cache>,
    ) {
        let count = self.count(rows);
        let at = self.step.rows(rows);
        let (table, table_first) = self.step.tables(shape.kind);
        let from_values = cache.is_some_and(|c| c.key.is_some());
        let scales = cache.and_then(|c| c.scales);
        let args = HeadsArgs {
            qkv: qkv.at(),
            q_norm: q_norm.memory.at,
            k_norm: k_norm.map_or(0, |k| k.memory.at),
            turns: turns.at(),
            positions: at.position,
            row_seq: at.seq,
            kv: cache.map_or(0, |c| c.memory.at),
            table,
            table_first,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            ld: qkv.pitch(),
            pairs: turns.pairs(),
            page: self.sizes.page as u32,
            table_pitch: self.sizes.table(shape.kind) as u32,
            from_values: u32::from(from_values),
            eps: q_norm.eps,
            key_scale: scales.map_or(0.0, |s| s.key),
            value_scale: scales.map_or(0.0, |s| s.value),
        };
        let units = shape.heads + if k_norm.is_some() { shape.kv_heads } else { 0 };
        let kernel = self.form.kernel(&format!("heads_d{}", shape.head_dim));
        let (per_block, threads) = match self.form {
            Form::Bf16 => (4, 128),
            Form::F32 => (1, 32),
        };
        let blocks = [units.div_ceil(per_block), count, 1];
        // SAFETY: the rows' positions and tables were checked; qkv holds all heads.
        unsafe { self.card.launch(&kernel, blocks, threads, 0, &args) };
    }

    /// What attention over a layer's pages reads and writes, for all rows.
    pub(super) fn attention_args(
        &self,
        rows: Rows,
        shape: HeadShape,
        q: &Buf,
        cache: &Cache,
        out: &Buf,
    ) -> AttentionArgs {
        let at = self.step.rows(rows);
        let (table, table_first) = self.step.tables(shape.kind);
        let form = cache.form();
        let scales = cache.scales.unwrap_or_default();
        AttentionArgs {
            q: q.at(),
            kv: cache.memory.at,
            table,
            table_first,
            spans: at.spans,
            ends: at.end,
            partial: self.partial.0.at,
            weight: self.partial.1.at,
            out: out.at(),
            k_norm: cache.key.as_ref().map_or(0, |(norm, _)| norm.at),
            turns: cache.key.as_ref().map_or(0, |(_, turns)| turns.at()),
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            page: self.sizes.page as u32,
            window: match shape.kind {
                Kind::Full => 0,
                Kind::Sliding => self.sizes.window as u32,
            },
            ldq: q.pitch(),
            ldo: out.pitch(),
            splits: self.partial_splits[which(shape.kind)] as u32,
            table_pitch: self.sizes.table(shape.kind) as u32,
            pairs: cache.key.as_ref().map_or(0, |(_, turns)| turns.pairs()),
            score_scale: match form.values_only {
                true => scales.value,
                false => scales.key,
            },
            value_scale: scales.value,
            codes: u32::from(form.fp8),
        }
    }

    /// The rows of a group.
    pub(super) fn attend(
        &mut self,
        group: &Group,
        shape: HeadShape,
        all: &AttentionArgs,
        form: PageForm,
    ) {
        // The kernel's rows are counted from the group's first.
        let args = AttentionArgs {
            spans: all.spans + 16 * group.first_span as u64,
            ..*all
        };
        if self.form == Form::F32 {
            let values = if form.values_only { "values_" } else { "" };
            let kernel = format!("plain_attention_{values}d{}", shape.head_dim);
            let blocks = [shape.heads, group.height, group.spans];
            // SAFETY: the rows' ends and tables were checked.
            unsafe { self.card.launch(&kernel, blocks, 32, 0, &args) };
            return;
        }
        let plan = AttentionPlan::plan(
            shape.head_dim,
            shape.heads,
            shape.kv_heads,
            group.height,
            group.spans,
            group.splits[which(shape.kind)],
            form,
        );
        // Partial results lie by row: a group's own are moved to the front.
        let slots = group.first_row as u64 * u64::from(args.heads) * u64::from(args.splits);
        let args = AttentionArgs {
            partial: args.partial.wrapping_sub(slots * shape.head_dim as u64 * 4),
            weight: args.weight.wrapping_sub(slots * 8),
            ..args
        };
        let merged = AttentionArgs {
            partial: all.partial,
            weight: all.weight,
            ends: all.ends + 4 * group.first_row as u64,
            out: all.out + 2 * group.first_row as u64 * u64::from(all.ldo),
            ..args
        };
        let blocks = plan.grid.map(|b| b as usize);
        let merge = [group.rows, shape.heads, 1];
        let threads = shape.head_dim as u32 / 2;
        // SAFETY: as above; partial results have room for a group's rows and all splits.
        unsafe {
            let kernel = plan.kernel();
            self.card
                .launch(&kernel, blocks, plan.threads, plan.shared, &args);
            self.card
                .launch("attention_merge", merge, threads, 0, &merged);
        }
    }

    /// Chooses a token for every row; `ids` names the columns where they are not all tokens.
    pub(super) fn choose(&mut self, rows: Rows, logits: &Buf, width: usize, ids: DevicePtr) {
        let count = self.count(rows);
        if count == 0 {
            return;
        }
        let (at, to) = (self.step.rows(rows), self.step.sampling(rows));
        let chunks = sample_chunks(width);
        let args = SampleArgs {
            logits: logits.at(),
            work: self.sample_room.work.at,
            ids,
            params: to.params,
            row_seq: at.seq,
            positions: at.position,
            before: to.before,
            recent: to.recent,
            recent_at: to.recent_at,
            lists: to.lists,
            room: self.sample_room.room.at,
            token: to.token,
            drafts: to.drafts,
            logprobs: to.logprobs,
            width: width as u32,
            ld: logits.pitch(),
            offset: match rows {
                Rows::Draft => self.step.drafted as u32,
                _ => 0,
            },
            chunks: chunks as u32,
            logprob_pitch: LOGPROB_PITCH as u32,
            pad: 0,
        };
        let t = SAMPLE_THREADS;
        let (edits, logprobs) = (self.step.shape.edits, self.step.shape.logprobs);
        // SAFETY: the room was made for rows of the whole vocabulary, and there are no more
        // drafting rows than emitting ones.
        unsafe {
            if edits {
                self.card
                    .launch("sample_edit", [count, 1, 1], t.edit, 0, &args);
            }
            let shared = [chunks, count, 1];
            self.card.launch("sample_scan", shared, t.scan, 0, &args);
            self.card.launch("sample_gather", shared, t.scan, 0, &args);
            self.card
                .launch("sample_pick", [count, 1, 1], t.pick, 0, &args);
            if logprobs && rows == Rows::Out {
                self.card
                    .launch("sample_logprobs", [count, 1, 1], t.pick, 0, &args);
            }
        }
    }
}

impl CudaOps {
    pub(super) fn most(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.sizes.rows,
            Rows::Out => self.sizes.out_rows,
            Rows::Draft => self.sizes.seqs,
        }
    }

    pub(super) fn norms(&mut self, rows: Rows, kernel: &str, args: &NormArgs) {
        let count = self.count(rows);
        let threads = match self.form {
            Form::Bf16 => NormArgs::threads(args.width as usize),
            Form::F32 => 32,
        };
        let kernel = self.form.kernel(kernel);
        // SAFETY: buffers of as many rows as a step can have.
        unsafe { self.card.launch(&kernel, [count, 1, 1], threads, 0, args) };
    }

    /// Chooses every row's experts by what the router reads.
    pub(super) fn route(&mut self, rows: usize, experts: &Experts) {
        let (input, scores) = (experts.router_input(), experts.scores());
        self.product(rows, input, &experts.router, scores, Finish::Store);
        experts.route(&mut self.card, self.form, rows);
    }

    /// `a = norm_a(a) + norm_b(b)` in fp32.
    pub(super) fn sum_norms(&mut self, rows: Rows, a: &Buf, norm_a: &Norm, b: &Buf, norm_b: &Norm) {
        let args = NormArgs {
            x: a.at(),
            ldx: a.pitch(),
            branch: b.at(),
            ldb: b.pitch(),
            weight: norm_b.memory.at,
            eps: norm_b.eps,
            other: norm_a.memory.at,
            other_eps: norm_a.eps,
            ..norm_args(norm_a.width)
        };
        self.norms(rows, "sum_norms", &args);
    }

    /// Rows of a buffer by their numbers, into the columns from `column` on.
    pub(super) fn take_rows(
        &mut self,
        rows: Rows,
        from: &Buf,
        index: DevicePtr,
        width: usize,
        out: &Buf,
        column: usize,
    ) {
        let count = self.count(rows);
        let args = RowsArgs {
            a: from.at(),
            out: out.place(0, column),
            index,
            lda: from.pitch(),
            ldo: out.pitch(),
            ..rows_args(count, width)
        };
        by_column(&mut self.card, self.form, "gather", count, width, &args);
    }
}

pub(super) fn norm_args(width: usize) -> NormArgs {
    NormArgs {
        x: 0,
        branch: 0,
        weight: 0,
        other: 0,
        out: 0,
        width: width as u32,
        ldx: 0,
        ldb: 0,
        ldo: 0,
        eps: 0.0,
        other_eps: 0.0,
        scale: 1.0,
        pad: 0,
    }
}

/// The place of a kind of layer where there is one for either.
pub(super) fn which(kind: Kind) -> usize {
    match kind {
        Kind::Full => 0,
        Kind::Sliding => 1,
    }
}

/// Drafting rows are spans of their own.
pub(super) fn draft_groups(rows: usize, most: usize, splits: [usize; 2]) -> Vec<Group> {
    (0..rows)
        .step_by(most)
        .map(|first| {
            let count = most.min(rows - first);
            Group {
                first_row: first,
                rows: count,
                first_span: first,
                spans: count,
                height: 1,
                splits,
                run: None,
            }
        })
        .collect()
}
