//! The operations of the model on a card: parameter blocks and launches, nothing else.

#![allow(unsafe_code, reason = "kernel launches")]

use std::sync::Arc;

use marathon_kernels::abi::{
    ClusterArgs, ExpertNormArgs, NormArgs, RowsArgs, VerifyArgs, WeightForm,
};

use super::{
    buffers::{Buf, Cache, Clusters, by_column, rows_args},
    experts::{ExpertRoom, Experts},
    form::Form,
    groups::Cut,
    launch::{CudaOps, Finish, draft_groups, norm_args},
    rope::Turns,
    weights::{self, Matrix, Norm, Table},
};
use crate::{
    backend::ops::{HeadShape, Ops, Rows},
    model::{
        kv_dtype::KvDtype,
        kv_scales::KvScales,
        plan::{Kind, Moe, Rope},
        weights::{MoeWeights, Weight},
    },
};

impl Ops for CudaOps {
    type Buf = Buf;
    type Matrix = Matrix;
    type Table = Table;
    type Norm = Norm;
    type Rope = Turns;
    type Cache = Cache;
    type Experts = Experts;
    type Clusters = Clusters;

    fn buffer(&mut self, rows: Rows, width: usize) -> Buf {
        let count = self.most(rows);
        Buf::new(&mut self.card, self.form, count, width)
    }

    fn logits_buffer(&mut self, rows: Rows, width: usize) -> Buf {
        let count = self.most(rows);
        Buf::of(&mut self.card, 4, count, width)
    }

    fn matrix(&mut self, parts: &[&Weight]) -> Matrix {
        if let ([only], Some((tied, Some(matrix)))) = (parts, &self.tied)
            && weights::identity(only) == Some(*tied)
        {
            return matrix.clone();
        }
        weights::matrix(&mut self.card, self.form, parts)
    }

    fn gated_matrix(&mut self, gate: &Weight, up: &Weight) -> Matrix {
        weights::gated_matrix(&mut self.card, self.form, gate, up)
    }

    fn gated_room(&mut self, rows: Rows, width: usize) -> Buf {
        // The fast product gates by itself.
        match self.form {
            Form::Bf16 => Buf::new(&mut self.card, self.form, 1, 8),
            Form::F32 => self.buffer(rows, 2 * width),
        }
    }

    fn table(&mut self, weight: &Weight) -> Table {
        let same = weights::identity(weight);
        let tied = self.tied.as_ref().is_some_and(|(p, _)| same == Some(*p));
        if !tied || self.form == Form::F32 {
            return weights::table(&mut self.card, self.form, weight);
        }
        let matrix = weights::matrix(&mut self.card, self.form, &[weight]);
        if matrix.form != WeightForm::Bf16 {
            return weights::table(&mut self.card, self.form, weight);
        }
        self.tied = same.map(|p| (p, Some(matrix.clone())));
        Table::Packed(matrix)
    }

    fn norm_weights(&mut self, weight: &Weight, eps: f32) -> Norm {
        let numbers = weight.to_vec();
        Norm {
            memory: weights::floats(&mut self.card, &numbers),
            width: numbers.len(),
            eps,
        }
    }

    fn rope(&mut self, rope: &Rope, head_dim: usize) -> Turns {
        self.turns(rope, head_dim)
    }

    fn cache(
        &mut self,
        shape: HeadShape,
        values_only: Option<(&Weight, &Rope)>,
        scales: KvScales,
    ) -> Cache {
        let key = values_only.map(|(weight, rope)| {
            let norm = weights::floats(&mut self.card, &weight.to_vec());
            (norm, self.turns(rope, shape.head_dim))
        });
        let blocks = match shape.kind {
            Kind::Full => self.blocks[0],
            Kind::Sliding => self.blocks[1],
        };
        let slot = shape.kv_heads * shape.head_dim * if key.is_some() { 1 } else { 2 };
        let page = self.sizes.page * slot * self.kv.bytes();
        let scales = (self.kv == KvDtype::Fp8).then_some(scales);
        Cache::new(&mut self.card, shape.kind, (blocks, page), key, scales)
    }

    fn experts_weights(&mut self, weights: &MoeWeights, moe: &Moe, eps: f32) -> Experts {
        let (form, rows) = (self.form, self.sizes.rows);
        let hidden = weights.router.cols();
        let room = match &self.expert_room {
            Some(room) => room.clone(),
            None => {
                let room = Arc::new(ExpertRoom::new(&mut self.card, form, moe, hidden, rows));
                self.expert_room.insert(room).clone()
            }
        };
        Experts::new(&mut self.card, form, weights, moe, eps, room)
    }

    fn clusters(
        &mut self,
        head: &Weight,
        ordering: &[u32],
        count: usize,
        top_k: usize,
    ) -> Clusters {
        let (size, rows) = (ordering.len() / count, self.sizes.seqs);
        Clusters {
            head: weights::reordered(&mut self.card, self.form, head, ordering),
            ordering: weights::words(&mut self.card, ordering),
            best: self.card.zeros(rows * top_k * 4),
            ids: self.card.zeros(rows * top_k * size * 4),
            count,
            size,
            top: top_k,
            width: head.cols(),
        }
    }

    fn embed(&mut self, rows: Rows, table: &Table, scale: f32, out: &mut Buf) {
        let (count, index) = (self.count(rows), self.step.rows(rows).token);
        let (a, width, packed) = table.place();
        let args = RowsArgs {
            a,
            out: out.at(),
            index,
            lda: width as u32,
            ldo: out.pitch(),
            scale,
            packed: u32::from(packed),
            ..rows_args(count, width)
        };
        by_column(&mut self.card, self.form, "embed", count, width, &args);
    }

    fn layer_inputs(
        &mut self,
        rows: Rows,
        table: &Table,
        table_scale: f32,
        context: &Buf,
        context_scale: f32,
        norm: &Norm,
        out: &mut Buf,
    ) {
        let (count, index) = (self.count(rows), self.step.rows(rows).token);
        let (a, width, _) = table.place();
        let layers = width / norm.width;
        let args = RowsArgs {
            a,
            b: context.at(),
            out: out.at(),
            weight: norm.memory.at,
            index,
            lda: width as u32,
            ldb: context.pitch(),
            ldo: out.pitch(),
            count: layers as u32,
            scale: table_scale,
            other_scale: context_scale,
            eps: norm.eps,
            ..rows_args(count, norm.width)
        };
        let kernel = self.form.kernel("layer_inputs");
        // SAFETY: both buffers have a row per row of the step, the table one per token.
        unsafe { self.card.launch(&kernel, [layers, count, 1], 32, 0, &args) };
    }

    fn norm(&mut self, rows: Rows, x: &Buf, norm: &Norm, out: &mut Buf) {
        let args = NormArgs {
            x: x.at(),
            ldx: x.pitch(),
            weight: norm.memory.at,
            eps: norm.eps,
            out: out.at(),
            ldo: out.pitch(),
            ..norm_args(norm.width)
        };
        self.norms(rows, "norm_rows", &args);
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
        let args = NormArgs {
            x: x.at(),
            ldx: x.pitch(),
            branch: branch.at(),
            ldb: branch.pitch(),
            weight: post.memory.at,
            eps: post.eps,
            other: next.map_or(0, |n| n.memory.at),
            other_eps: next.map_or(0.0, |n| n.eps),
            out: out.at(),
            ldo: out.pitch(),
            scale,
            ..norm_args(post.width)
        };
        self.norms(rows, "add_norm", &args);
    }

    fn linear(&mut self, rows: Rows, x: &Buf, matrix: &Matrix, out: &mut Buf) {
        self.product(self.count(rows), x, matrix, out, Finish::Store);
    }

    fn query(&mut self, rows: Rows, shape: HeadShape, q: &mut Buf, norm: &Norm, rope: &Turns) {
        self.heads(rows, shape, q, norm, None, rope, None);
    }

    fn query_and_store(
        &mut self,
        rows: Rows,
        shape: HeadShape,
        qkv: &mut Buf,
        q_norm: &Norm,
        k_norm: &Norm,
        rope: &Turns,
        cache: &Cache,
    ) {
        self.heads(rows, shape, qkv, q_norm, Some(k_norm), rope, Some(cache));
    }

    fn attention(&mut self, rows: Rows, shape: HeadShape, q: &Buf, cache: &Cache, out: &mut Buf) {
        debug_assert_eq!(shape.kind, cache.kind);
        let cut = match rows {
            Rows::All => self.step.shape.all.clone(),
            Rows::Out => self.step.shape.out.clone(),
            Rows::Draft => Cut {
                groups: draft_groups(
                    self.count(rows),
                    self.group_rows,
                    self.step.shape.draft_splits,
                ),
                runs: Vec::new(),
            },
        };
        let args = self.attention_args(rows, shape, q, cache, out);
        let form = cache.form();
        let done: Vec<bool> = cut
            .runs
            .iter()
            .map(|run| self.attend_run(run, shape, &args, form))
            .collect();
        for group in &cut.groups {
            if !group.run.is_some_and(|run| done[run]) {
                self.attend(group, shape, &args, form);
            }
        }
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
        let count = self.count(rows);
        match self.form {
            Form::Bf16 => self.product(count, x, matrix, out, Finish::Gated),
            Form::F32 => {
                self.product(count, x, matrix, room, Finish::Store);
                room.gate(&mut self.card, count, width, out);
            }
        }
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
        let (count, inputs_at) = (self.count(rows), inputs.place(0, layer * width));
        if self.form == Form::Bf16 {
            let finish = Finish::GeluMul(inputs_at, inputs.pitch());
            self.product(count, x, matrix, gate, finish);
            return;
        }
        self.product(count, x, matrix, gate, Finish::Store);
        let args = RowsArgs {
            a: gate.at(),
            b: inputs_at,
            out: gate.at(),
            lda: gate.pitch(),
            ldb: inputs.pitch(),
            ldo: gate.pitch(),
            ..rows_args(count, width)
        };
        by_column(&mut self.card, Form::F32, "gelu_mul", count, width, &args);
    }

    fn add_norm_for_experts(
        &mut self,
        rows: Rows,
        x: &mut Buf,
        branch: &Buf,
        post: &Norm,
        next: &Norm,
        out: &mut Buf,
        experts: &mut Experts,
        expert_norm: &Norm,
        expert_in: &mut Buf,
    ) {
        let count = self.count(rows);
        if self.form == Form::F32 {
            self.add_norm(rows, x, branch, post, 1.0, Some(next), out);
            self.norm(rows, x, expert_norm, expert_in);
            experts.plain_input(&mut self.card, count, x);
            return;
        }
        let args = ExpertNormArgs {
            x: x.at(),
            ldx: x.pitch(),
            branch: branch.at(),
            ldb: branch.pitch(),
            post: post.memory.at,
            next: next.memory.at,
            out: out.at(),
            ldo: out.pitch(),
            expert_norm: expert_norm.memory.at,
            expert_in: expert_in.at(),
            lde: expert_in.pitch(),
            width: post.width as u32,
            eps: post.eps,
            ..experts.router_args()
        };
        debug_assert_eq!([next.eps, expert_norm.eps], [post.eps; 2]);
        let threads = NormArgs::threads(post.width);
        let blocks = [count, 1, 1];
        // SAFETY: buffers of as many rows as a step can have.
        unsafe {
            self.card
                .launch("add_norm_for_experts", blocks, threads, 0, &args);
        }
        // Which experts a row uses is found out while the dense block runs.
        self.card.fork();
        self.route(count, experts);
        self.card.back();
    }

    fn experts(
        &mut self,
        rows: Rows,
        _: &Buf,
        expert_in: &Buf,
        experts: &mut Experts,
        expert_out: &mut Buf,
    ) {
        let count = self.count(rows);
        match self.form {
            Form::Bf16 => {
                self.card.join();
                experts.products(&mut self.card, count, expert_in);
            }
            Form::F32 => {
                self.route(count, experts);
                experts.plain_products(&mut self.card, count, expert_in, expert_out);
            }
        }
    }

    fn join_experts(
        &mut self,
        rows: Rows,
        x: &mut Buf,
        branch: &mut Buf,
        dense_norm: &Norm,
        experts: &Experts,
        expert_out: &mut Buf,
        expert_norm: &Norm,
        post: &Norm,
        scale: f32,
        next: Option<&Norm>,
        out: &mut Buf,
    ) {
        let count = self.count(rows);
        if self.form == Form::F32 {
            self.sum_norms(rows, branch, dense_norm, expert_out, expert_norm);
            self.add_norm(rows, x, branch, post, scale, next, out);
            return;
        }
        let args = ExpertNormArgs {
            x: x.at(),
            ldx: x.pitch(),
            branch: branch.at(),
            ldb: branch.pitch(),
            post: post.memory.at,
            next: next.map_or(0, |n| n.memory.at),
            out: out.at(),
            ldo: out.pitch(),
            expert_norm: expert_norm.memory.at,
            dense_norm: dense_norm.memory.at,
            width: post.width as u32,
            eps: post.eps,
            scale,
            ..experts.result_args()
        };
        debug_assert_eq!([dense_norm.eps, expert_norm.eps], [post.eps; 2]);
        let threads = NormArgs::threads(post.width);
        // SAFETY: buffers of as many rows as a step can have.
        unsafe {
            self.card
                .launch("join_experts", [count, 1, 1], threads, 0, &args);
        }
    }

    fn gather(&mut self, all: &Buf, width: usize, out: &mut Buf) {
        let index = self.step.out_source();
        self.take_rows(Rows::Out, all, index, width, out, 0);
    }

    fn logits(
        &mut self,
        rows: Rows,
        h: &Buf,
        matrix: &Matrix,
        softcap: Option<f32>,
        out: &mut Buf,
    ) {
        self.product(self.count(rows), h, matrix, out, Finish::Logits(softcap));
    }

    fn sample_and_verify(&mut self, logits: &Buf) {
        self.choose(Rows::Out, logits, self.sizes.vocab, 0);
        let (first, count, recent) = self.step.emitting();
        let (out, draft) = (self.step.rows(Rows::Out), self.step.rows(Rows::Draft));
        let args = VerifyArgs {
            token: self.step.sampling(Rows::Out).token,
            input: self.step.rows(Rows::All).token,
            out_source: self.step.out_source(),
            positions: out.position,
            out_first: first,
            out_count: count,
            recent,
            draft_seq: draft.seq,
            hidden: self.step.hidden(),
            draft_token: draft.token,
            draft_position: draft.position,
            before: self.step.sampling(Rows::Draft).before,
            seqs: self.step.shape.seqs as u32,
            draft_rows: self.count(Rows::Draft) as u32,
        };
        if args.draft_rows > 0 {
            // SAFETY: all of it is in the step arena.
            unsafe { self.card.launch("verify", [1, 1, 1], 256, 0, &args) };
        }
    }

    fn draft_begin(&mut self, hidden: &Buf, width: usize, state: &mut Buf) {
        let index = self.step.hidden();
        self.take_rows(Rows::Draft, hidden, index, width, state, 0);
    }

    fn draft_input(&mut self, table: &Table, scale: f32, state: &Buf, width: usize, out: &mut Buf) {
        self.embed(Rows::Draft, table, scale, out);
        let index = self.step.numbers();
        self.take_rows(Rows::Draft, state, index, width, out, width);
    }

    fn cluster_logits(&mut self, scores: &Buf, h: &Buf, clusters: &mut Clusters, out: &mut Buf) {
        let rows = self.count(Rows::Draft);
        let c = clusters;
        let args = ClusterArgs {
            scores: scores.at(),
            h: h.at(),
            head: c.head.at,
            ordering: c.ordering.at,
            best: c.best.at,
            ids: c.ids.at,
            logits: out.at(),
            count: c.count as u32,
            size: c.size as u32,
            top: c.top as u32,
            width: c.width as u32,
            ld_scores: scores.pitch(),
            ldh: h.pitch(),
            ld: out.pitch(),
            pad: 0,
        };
        let tokens = c.top * c.size;
        let (pick, logits) = (
            self.form.kernel("cluster_pick"),
            self.form.kernel("cluster_logits"),
        );
        // SAFETY: the clusters' room is for as many rows as can draft.
        unsafe {
            self.card
                .launch(&pick, [c.count.div_ceil(128), rows, 1], 128, 0, &args);
            self.card
                .launch(&logits, [tokens.div_ceil(8), rows, 1], 256, 0, &args);
        }
    }

    fn draft_sample(&mut self, logits: &Buf, clusters: Option<&Clusters>) {
        match clusters {
            None => self.choose(Rows::Draft, logits, self.sizes.vocab, 0),
            Some(c) => self.choose(Rows::Draft, logits, c.top * c.size, c.ids.at),
        }
        self.step.drafted += 1;
    }
}
