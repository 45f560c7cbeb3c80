//! The operations of the model on a CPU.

#![allow(
    unsafe_code,
    reason = "rows of one buffer are written by several threads"
)]

use std::sync::Arc;

use super::{
    arranged::Arranged,
    attend::{Job, Scratch as AttendScratch, attend},
    clusters::Clusters,
    elementwise::{
        AddNormRow, CapRow, LayerInputRow, Norm, NormRow, ScaleRow, StoreRow, TurnHeads,
    },
    experts::Experts,
    kv::{BLOCK, CacheLayer, KeyMaker},
    matrix::Matrix,
    memory::Buf,
    pool::{Pool, Shards},
    product::{Mode, product},
    rope::RopeTable,
    simd::{Level, dispatch},
};
use crate::{
    backend::{
        arena::Arena,
        ops::{HeadShape, Ops, Rows},
    },
    model::{
        kv_dtype::KvDtype,
        kv_scales::KvScales,
        plan::{Kind, Moe, Rope},
        weights::{MoeWeights, Weight},
    },
    sched::{
        sampling::{self, Context},
        types::{Emitted, TokenId},
    },
};

/// Numbers of a row below which rows are not worth sharing among threads, times rows.
const SMALL: usize = 32 * 1024;

/// Fixed sizes of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) out_rows: usize,
    pub(super) seqs: usize,
    pub(super) positions: usize,
    pub(super) full_blocks: usize,
    pub(super) sliding_blocks: usize,
    pub(super) window: usize,
}

/// Threads, pools and the step arena.
pub(super) struct CpuOps {
    pub(super) pool: Pool,
    pub(super) mode: Mode,
    kv: KvDtype,
    pub(super) sizes: Sizes,
    pub(super) arena: Arena,
    caches: Vec<CacheLayer>,
    ropes: Vec<(Rope, usize, Arc<RopeTable>)>,
    attend_scratch: Vec<AttendScratch>,
    sampling_scratch: Vec<sampling::Scratch>,
    drafted: Vec<TokenId>,
    arranged: Arranged,
}

/// A layer of the pools.
pub(super) struct CacheId(usize);

impl CpuOps {
    /// `bf16`: what activations are; `kv`: what keys and values are stored as.
    pub(super) fn new(
        pool: Pool,
        level: Level,
        (bf16, kv): (bool, KvDtype),
        sizes: Sizes,
        head_dim: usize,
    ) -> Self {
        let threads = pool.threads();
        let scratch = || AttendScratch::new(sizes.positions, head_dim);
        Self {
            pool,
            mode: Mode { level, round: bf16 },
            kv,
            sizes,
            arena: Arena::default(),
            caches: Vec::new(),
            ropes: Vec::new(),
            attend_scratch: (0..threads).map(|_| scratch()).collect(),
            sampling_scratch: (0..threads).map(|_| sampling::Scratch::default()).collect(),
            drafted: Vec::with_capacity(sizes.seqs),
            arranged: Arranged::default(),
        }
    }

    pub(super) fn poison_pages(&mut self) {
        self.caches.iter_mut().for_each(CacheLayer::poison);
    }

    /// The layers whose pages are in the pool of a kind.
    pub(super) fn layers_of(&mut self, kind: Kind) -> impl Iterator<Item = &mut CacheLayer> {
        self.caches
            .iter_mut()
            .filter(move |cache| cache.shape.kind == kind)
    }

    pub(super) fn count(&self, rows: Rows) -> usize {
        self.arena.set(rows).rows.len()
    }

    /// Calls `f` with each of the first `rows` rows of the buffers, on several threads if rows are
    /// many or wide: `width` numbers or as much work.
    pub(super) fn each_row<const N: usize>(
        &self,
        rows: usize,
        width: usize,
        buffers: [&mut Buf; N],
        f: impl Fn(usize, [&mut [f32]; N]) + Sync,
    ) {
        let places = buffers.map(|buffer| {
            let (stride, width) = (buffer.stride(), buffer.width());
            let data = buffer.data_mut();
            assert!(rows * stride <= data.len(), "a step of more rows than fit");
            (Shards::new(data), stride, width)
        });
        self.each(rows, width, |i| {
            let row = places.each_ref().map(|(data, stride, width)| {
                // SAFETY: the row is in its buffer, which is borrowed for the whole call, and `each`
                // calls with every number once.
                unsafe { data.slice(i * stride, *width) }
            });
            f(i, row);
        });
    }

    /// Calls `f` with every number below `rows` once.
    fn each(&self, rows: usize, width: usize, f: impl Fn(usize) + Sync) {
        let threads = self.pool.threads();
        if threads == 1 || rows < 2 || rows * width <= SMALL {
            (0..rows).for_each(f);
            return;
        }
        let per_chunk = rows.div_ceil(4 * threads);
        self.pool.run(rows.div_ceil(per_chunk), &|chunk, _| {
            let start = chunk * per_chunk;
            (start..rows.min(start + per_chunk)).for_each(&f);
        });
    }
}

impl Ops for CpuOps {
    type Buf = Buf;
    type Matrix = Matrix;
    type Table = Weight;
    type Norm = Norm;
    type Rope = Arc<RopeTable>;
    type Cache = CacheId;
    type Experts = Experts;
    type Clusters = Clusters;

    fn buffer(&mut self, rows: Rows, width: usize) -> Buf {
        let count = match rows {
            Rows::All => self.sizes.rows,
            Rows::Out => self.sizes.out_rows,
            Rows::Draft => self.sizes.seqs,
        };
        Buf::new(count, width)
    }

    fn matrix(&mut self, parts: &[&Weight]) -> Matrix {
        let matrix = Matrix::new(parts, self.mode.round);
        self.arranged.make_room(self.sizes.rows, &matrix);
        matrix
    }

    fn gated_matrix(&mut self, gate: &Weight, up: &Weight) -> Matrix {
        self.matrix(&[gate, up])
    }

    fn gated_room(&mut self, rows: Rows, width: usize) -> Buf {
        self.buffer(rows, 2 * width)
    }

    fn table(&mut self, weight: &Weight) -> Weight {
        weight.clone()
    }

    fn norm_weights(&mut self, weight: &Weight, eps: f32) -> Norm {
        Norm {
            weight: weight.to_vec(),
            eps,
        }
    }

    fn rope(&mut self, rope: &Rope, head_dim: usize) -> Arc<RopeTable> {
        if let Some((_, _, table)) = self
            .ropes
            .iter()
            .find(|(r, d, _)| r == rope && *d == head_dim)
        {
            return table.clone();
        }
        let (positions, threads) = (self.sizes.positions, self.pool.threads());
        let table = Arc::new(RopeTable::new(rope, head_dim, positions, threads));
        self.ropes.push((*rope, head_dim, table.clone()));
        table
    }

    fn cache(
        &mut self,
        shape: HeadShape,
        values_only: Option<(&Weight, &Rope)>,
        scales: KvScales,
    ) -> CacheId {
        let key_maker = values_only.map(|(weight, rope)| KeyMaker {
            weight: weight.to_vec(),
            rope: self.rope(rope, shape.head_dim),
        });
        let blocks = match shape.kind {
            Kind::Full => self.sizes.full_blocks,
            Kind::Sliding => self.sizes.sliding_blocks,
        };
        let form = (self.kv, scales);
        let layer = CacheLayer::new(shape, key_maker, blocks, form, self.mode.round);
        self.caches.push(layer);
        CacheId(self.caches.len() - 1)
    }

    fn experts_weights(&mut self, weights: &MoeWeights, moe: &Moe, eps: f32) -> Experts {
        Experts::new(weights, moe, eps, self.sizes.rows, self.mode.round)
    }

    fn clusters(
        &mut self,
        head: &Weight,
        ordering: &[u32],
        count: usize,
        top_k: usize,
    ) -> Clusters {
        Clusters::new(
            head,
            ordering,
            count,
            top_k,
            self.sizes.seqs,
            self.mode.round,
        )
    }

    fn embed(&mut self, rows: Rows, table: &Weight, scale: f32, out: &mut Buf) {
        let set = self.arena.set(rows);
        let (mode, width) = (self.mode, out.width());
        self.each_row(set.rows.len(), width, [out], |i, [out]| {
            let out = &mut out[..table.cols()];
            table.read_row(set.rows[i].token as usize, out);
            dispatch(
                mode.level,
                ScaleRow {
                    scale,
                    round: mode.round,
                    out,
                },
            );
        });
    }

    fn layer_inputs(
        &mut self,
        rows: Rows,
        table: &Weight,
        table_scale: f32,
        context: &Buf,
        context_scale: f32,
        norm: &Norm,
        out: &mut Buf,
    ) {
        let set = self.arena.set(rows);
        let (mode, width) = (self.mode, out.width());
        self.each_row(set.rows.len(), width, [out], |i, [out]| {
            let out = &mut out[..table.cols()];
            table.read_row(set.rows[i].token as usize, out);
            let kernel = LayerInputRow {
                context: context.row(i),
                context_scale,
                norm,
                identity_scale: table_scale,
                round: mode.round,
                out,
            };
            dispatch(mode.level, kernel);
        });
    }

    fn norm(&mut self, rows: Rows, x: &Buf, norm: &Norm, out: &mut Buf) {
        let (mode, width) = (self.mode, norm.weight.len());
        self.each_row(self.count(rows), width, [out], |i, [out]| {
            let (x, out) = (&x.row(i)[..width], &mut out[..width]);
            dispatch(
                mode.level,
                NormRow {
                    x,
                    norm,
                    round: mode.round,
                    out,
                },
            );
        });
    }

    fn add_norm(
        &mut self,
        rows: Rows,
        x: &mut Buf,
        branch: &Buf,
        post: &Norm,
        scale: f32,
        next: Option<&Norm>,
        out: &mut Buf,
    ) {
        let width = post.weight.len();
        let mode = self.mode;
        self.each_row(self.count(rows), 2 * width, [x, out], |i, [x, out]| {
            let kernel = AddNormRow {
                x: &mut x[..width],
                branch: &branch.row(i)[..width],
                post,
                scale,
                next,
                round: mode.round,
                out: &mut out[..width],
            };
            dispatch(mode.level, kernel);
        });
    }

    fn linear(&mut self, rows: Rows, x: &Buf, matrix: &Matrix, out: &mut Buf) {
        let count = self.count(rows);
        product(
            &self.pool,
            self.mode,
            count,
            x,
            matrix,
            &mut self.arranged,
            out,
        );
    }

    fn query(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        q: &mut Buf,
        norm: &Norm,
        rope: &Arc<RopeTable>,
    ) {
        let set = self.arena.set(rows);
        let width = shape.heads * shape.head_dim;
        let mode = self.mode;
        self.each_row(set.rows.len(), width, [q], |i, [q]| {
            let (heads, position) = (&mut q[..width], set.rows[i].position);
            let round = mode.round;
            dispatch(
                mode.level,
                TurnHeads {
                    heads,
                    norm,
                    rope,
                    position,
                    round,
                },
            );
        });
    }

    fn query_and_store(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        qkv: &mut Buf,
        q_norm: &Norm,
        k_norm: &Norm,
        rope: &Arc<RopeTable>,
        cache: &CacheId,
    ) {
        self.query(rows, shape, qkv, q_norm, rope);
        let q_width = shape.heads * shape.head_dim;
        let writer = self.caches[cache.0].writer();
        let (set, mode) = (self.arena.set(rows), self.mode);
        self.each_row(set.rows.len(), 2 * q_width, [qkv], |i, [qkv]| {
            let row = &set.rows[i];
            let kernel = StoreRow {
                keys_and_values: &mut qkv[q_width..],
                norm: k_norm,
                rope,
                position: row.position,
                block: self.arena.block(shape.kind, row.seq, row.position / BLOCK),
                slot: row.position % BLOCK,
                round: mode.round,
                cache: &writer,
            };
            dispatch(mode.level, kernel);
        });
    }

    fn attention(&mut self, rows: Rows, shape: HeadShape, q: &Buf, cache: &CacheId, out: &mut Buf) {
        let mut scratch = std::mem::take(&mut self.attend_scratch);
        let job = Job {
            arena: &self.arena,
            rows: self.arena.set(rows),
            window: self.sizes.window,
            heads: shape.heads,
            cache: &self.caches[cache.0],
            q,
            level: self.mode.level,
            round: self.mode.round,
        };
        attend(&self.pool, &job, &mut scratch, out);
        self.attend_scratch = scratch;
    }

    fn gated_linear(
        &mut self,
        rows: Rows,
        x: &Buf,
        matrix: &Matrix,
        width: usize,
        room: &mut Buf,
        out: &mut Buf,
    ) {
        self.linear(rows, x, matrix, room);
        self.gated_act(rows, room, width, out);
    }

    fn gated_inputs(
        &mut self,
        rows: Rows,
        x: &Buf,
        matrix: &Matrix,
        inputs: &Buf,
        layer: usize,
        width: usize,
        gate: &mut Buf,
    ) {
        self.linear(rows, x, matrix, gate);
        self.layer_gate(rows, gate, inputs, layer, width);
    }

    fn add_norm_for_experts(
        &mut self,
        rows: Rows,
        x: &mut Buf,
        branch: &Buf,
        post: &Norm,
        next: &Norm,
        out: &mut Buf,
        _: &mut Experts,
        expert_norm: &Norm,
        expert_in: &mut Buf,
    ) {
        self.add_norm(rows, x, branch, post, 1.0, Some(next), out);
        self.norm(rows, x, expert_norm, expert_in);
    }

    fn experts(
        &mut self,
        rows: Rows,
        x: &Buf,
        expert_in: &Buf,
        experts: &mut Experts,
        expert_out: &mut Buf,
    ) {
        let count = self.count(rows);
        experts.run(&self.pool, self.mode, count, x, expert_in, expert_out);
    }

    fn join_experts(
        &mut self,
        rows: Rows,
        x: &mut Buf,
        branch: &mut Buf,
        dense_norm: &Norm,
        _: &Experts,
        expert_out: &mut Buf,
        expert_norm: &Norm,
        post: &Norm,
        scale: f32,
        next: Option<&Norm>,
        out: &mut Buf,
    ) {
        self.sum_norms(rows, branch, dense_norm, expert_out, expert_norm);
        self.add_norm(rows, x, branch, post, scale, next, out);
    }

    fn gather(&mut self, all: &Buf, width: usize, out: &mut Buf) {
        for (i, &from) in self.arena.out_source.iter().enumerate() {
            out.row_mut(i)[..width].copy_from_slice(&all.row(from)[..width]);
        }
    }

    fn logits(
        &mut self,
        rows: Rows,
        h: &Buf,
        matrix: &Matrix,
        softcap: Option<f32>,
        out: &mut Buf,
    ) {
        let count = self.count(rows);
        product(
            &self.pool,
            self.mode,
            count,
            h,
            matrix,
            &mut self.arranged,
            out,
        );
        if let Some(cap) = softcap {
            let (level, width) = (self.mode.level, matrix.outputs());
            self.each_row(count, 8 * width, [out], |_, [out]| {
                let out = &mut out[..width];
                dispatch(level, CapRow { cap, out });
            });
        }
    }

    fn sample_and_verify(&mut self, logits: &Buf) {
        let Self {
            pool,
            arena,
            sampling_scratch,
            ..
        } = self;
        let Arena {
            seqs,
            out,
            out_source,
            all,
            ..
        } = arena;
        let count = seqs.len();
        let (seqs, rooms) = (Shards::new(seqs), Shards::new(sampling_scratch));
        pool.run(count, &|i, thread| {
            // SAFETY: chunk `i` alone touches sequence `i`; a thread runs one chunk at a time.
            let seq = &mut unsafe { seqs.slice(i, 1) }[0];
            // SAFETY: as above.
            let scratch = &mut unsafe { rooms.slice(thread, 1) }[0];
            let Some(params) = seq.params.clone() else {
                return;
            };
            for (j, row) in seq.out.clone().enumerate() {
                let context = Context {
                    params: &params,
                    position: out.rows[row].position as u64 + 1,
                    generated: seq.generated + j as u32,
                    history: &seq.history,
                    prompt_len: seq.prompt_len,
                    mask: seq.masks.get(j).map(|mask| &**mask),
                };
                let logits = logits.row(row);
                let id = sampling::choose(logits, &context, scratch);
                let logprobs = (params.logprobs > 0)
                    .then(|| sampling::logprobs(logits, id, params.logprobs, scratch));
                seq.emitted.push(Emitted { id, logprobs });
                if params.reads_history() {
                    seq.history.push(id);
                }
                let next = all.rows.get(out_source[row] + 1).map(|r| r.token);
                if row + 1 == seq.out.end || next != Some(id) {
                    break;
                }
            }
        });
        self.arena.begin_drafts();
    }

    fn draft_begin(&mut self, hidden: &Buf, width: usize, state: &mut Buf) {
        for (i, d) in self.arena.drafting.iter().enumerate() {
            state.row_mut(i)[..width].copy_from_slice(&hidden.row(d.hidden)[..width]);
        }
    }

    fn draft_input(
        &mut self,
        table: &Weight,
        scale: f32,
        state: &Buf,
        width: usize,
        out: &mut Buf,
    ) {
        let mode = self.mode;
        for (i, row) in self.arena.draft.rows.iter().enumerate() {
            let (token, hidden) = out.row_mut(i)[..2 * width].split_at_mut(width);
            table.read_row(row.token as usize, token);
            dispatch(
                mode.level,
                ScaleRow {
                    scale,
                    round: mode.round,
                    out: token,
                },
            );
            hidden.copy_from_slice(&state.row(i)[..width]);
        }
    }

    fn cluster_logits(&mut self, scores: &Buf, h: &Buf, clusters: &mut Clusters, out: &mut Buf) {
        for i in 0..self.count(Rows::Draft) {
            clusters.logits(self.mode, i, scores.row(i), h.row(i), out.row_mut(i));
        }
    }

    fn draft_sample(&mut self, logits: &Buf, clusters: Option<&Clusters>) {
        self.drafted.clear();
        let scratch = &mut self.sampling_scratch[0];
        for (i, row) in self.arena.draft.rows.iter().enumerate() {
            let seq = &mut self.arena.seqs[row.seq];
            let Some(params) = seq.params.clone() else {
                continue;
            };
            let context = Context {
                params: &params,
                position: (row.position + 1 + seq.drafts.len()) as u64,
                generated: seq.generated + (seq.emitted.len() + seq.drafts.len()) as u32,
                history: &seq.history,
                prompt_len: seq.prompt_len,
                mask: None,
            };
            let id = match clusters {
                None => sampling::choose(logits.row(i), &context, scratch),
                Some(c) => sampling::choose_among(logits.row(i), c.ids(i), &context, scratch),
            };
            if params.reads_history() {
                seq.history.push(id);
            }
            self.drafted.push(id);
        }
        let Self { arena, drafted, .. } = self;
        arena.drafted(drafted);
    }
}
