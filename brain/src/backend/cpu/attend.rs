//! Attention over the pages, for queries of any rows.
//!
//! A query's arithmetic: each score is one chain over the head's elements; the maximum is exact;
//! weights are summed in sixteen lanes by absolute position; each output element is one chain over
//! the visible keys in order. None of it knows how many queries are computed together, how the
//! prompt was cut, or which thread works. Slots outside a query's own range never enter a chain,
//! so that what another sequence left in a page cannot be seen.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    kv::{BLOCK, CacheLayer, Pages, value_width},
    memory::Buf,
    pool::{Pool, Shards},
    product::{Form, pair_place},
    simd::{Kernel, Lanes, Level, dispatch},
};
use crate::{
    backend::arena::{Arena, RowSet, Span},
    model::plan::Kind,
    sched::math::{exp, round_bf16},
};

/// Queries computed together.
const GROUP: usize = 4;
/// Scores below which threads are not worth waking.
const SMALL: usize = 24 * 1024;

/// One thread's room for scores and for keys formed from values.
#[derive(Default)]
pub(super) struct Scratch {
    scores: Vec<f32>,
    keys: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(positions: usize, head_dim: usize) -> Self {
        Self {
            scores: vec![0.0; GROUP * positions.next_multiple_of(BLOCK)],
            keys: vec![0.0; head_dim * BLOCK],
        }
    }
}

/// What attention is computed on.
pub(super) struct Job<'a> {
    pub(super) arena: &'a Arena,
    pub(super) rows: &'a RowSet,
    pub(super) window: usize,
    /// Query heads of a row; `cache.shape` has the rest.
    pub(super) heads: usize,
    pub(super) cache: &'a CacheLayer,
    pub(super) q: &'a Buf,
    pub(super) level: Level,
    /// Round outputs (and keys formed from values) to bf16.
    pub(super) round: bool,
}

/// Attends; `out` gets `heads * head_dim` columns.
pub(super) fn attend(pool: &Pool, job: &Job<'_>, scratch: &mut [Scratch], out: &mut Buf) {
    let shape = job.cache.shape;
    let width = job.heads * shape.head_dim;
    assert!(width <= job.q.width() && width <= out.width());
    assert!(pool.threads() <= scratch.len());
    let per_row = job.heads / shape.kv_heads;
    let vectors: usize = job
        .rows
        .spans
        .iter()
        .map(|s| s.count * per_row * shape.kv_heads)
        .sum();
    let keys = |s: &Span| job.rows.rows[s.start + s.count - 1].end;
    let longest = job.rows.spans.iter().map(keys).max().unwrap_or(0);
    let seen = if shape.kind == Kind::Sliding {
        longest.min(job.window)
    } else {
        longest
    };
    let small = vectors * seen * shape.head_dim <= SMALL;
    // Fewer queries at a time when there would be too little to share.
    let group = match vectors / (2 * pool.threads()) {
        _ if small => GROUP,
        0 | 1 => 1,
        2 | 3 => 2,
        _ => GROUP,
    };
    let pieces = |s: &Span| (s.count * per_row).div_ceil(group) * shape.kv_heads;
    let total: usize = job.rows.spans.iter().map(pieces).sum();
    let stride = out.stride();
    let shards = Shards::new(out.data_mut());
    let rooms = Shards::new(scratch);
    let work = |chunk: usize, thread: usize| {
        let mut left = chunk;
        for span in &job.rows.spans {
            if left >= pieces(span) {
                left -= pieces(span);
                continue;
            }
            // SAFETY: a thread runs one chunk at a time, and has this place to itself.
            let room = &mut unsafe { rooms.slice(thread, 1) }[0];
            let head = left % shape.kv_heads;
            let first = left / shape.kv_heads * group;
            let count = group.min(span.count * per_row - first);
            let piece = Piece {
                job,
                span,
                head,
                first,
                count,
                room,
                out: &shards,
                stride,
            };
            dispatch(job.level, piece);
            return;
        }
    };
    if small {
        (0..total).for_each(|i| work(i, 0));
    } else {
        pool.run(total, &work);
    }
}

/// Up to [`GROUP`] queries of one sequence and one KV head.
struct Piece<'a> {
    job: &'a Job<'a>,
    span: &'a Span,
    head: usize,
    first: usize,
    count: usize,
    room: &'a mut Scratch,
    out: &'a Shards<f32>,
    stride: usize,
}

/// A query: where it is, and which keys it sees.
#[derive(Clone, Copy)]
struct Query {
    row: usize,
    column: usize,
    start: usize,
    end: usize,
}

impl Kernel for Piece<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let job = self.job;
        match &job.cache.pages {
            Pages::Bf16(data) => self.run_form::<V, u16>(data),
            Pages::F32(data) => self.run_form::<V, f32>(data),
        }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn query(&self, i: usize) -> Query {
        let shape = &self.job.cache.shape;
        let per_row = self.job.heads / shape.kv_heads;
        let vector = self.first + i;
        let row = self.span.start + vector / per_row;
        let end = self.job.rows.rows[row].end;
        let start = match shape.kind {
            Kind::Full => 0,
            Kind::Sliding => end.saturating_sub(self.job.window),
        };
        let head = self.head * per_row + vector % per_row;
        Query {
            row,
            column: head * shape.head_dim,
            start,
            end,
        }
    }

    #[inline(always)]
    fn run_form<V: Lanes, F: Form + Element>(self, data: &[F]) {
        let mut queries = [self.query(0); GROUP];
        for (i, q) in queries.iter_mut().enumerate().take(self.count) {
            *q = self.query(i);
        }
        let Self {
            job,
            span,
            head,
            count,
            room,
            out,
            stride,
            ..
        } = self;
        let queries = &queries[..count];
        let dim = job.cache.shape.head_dim;
        let first = queries.iter().map(|q| q.start).min().unwrap_or(0) / BLOCK;
        let last = queries
            .iter()
            .map(|q| q.end)
            .max()
            .unwrap_or(0)
            .div_ceil(BLOCK);
        let length = (last - first) * BLOCK;
        let Scratch { scores, keys } = room;
        let scores = &mut scores[..count * length];
        let kind = job.cache.shape.kind;
        for number in first..last {
            let block = job.arena.block(kind, span.seq, number);
            let (k, v) = job.cache.tiles(block, head);
            let at = (number - first) * BLOCK;
            if let Some(maker) = &job.cache.key_maker {
                let tile = &data[v..v + BLOCK * value_width(dim)];
                form_keys(tile, dim, number * BLOCK, maker, job.round, keys);
                score::<V, f32>(job.q, queries, keys, dim, &mut scores[at..], length);
            } else {
                let tile = &data[k..k + dim * BLOCK];
                score::<V, F>(job.q, queries, tile, dim, &mut scores[at..], length);
            }
        }
        let mut inverse = [0.0; GROUP];
        for (i, q) in queries.iter().enumerate() {
            let scores = &mut scores[i * length..(i + 1) * length];
            let range = q.start - first * BLOCK..q.end - first * BLOCK;
            inverse[i] = 1.0 / soften(scores, range);
        }
        let tile = |number: usize| {
            let block = job.arena.block(kind, span.seq, number);
            data[job.cache.tiles(block, head).1..].as_ptr()
        };
        let mix = Mix {
            queries,
            scores,
            length,
            first,
            dim,
            inverse,
            out,
            stride,
            round: job.round,
        };
        let mut d = 0;
        while d < value_width(dim) {
            let vectors = (value_width(dim) - d) / 16;
            // SAFETY: every page holds whole value tiles, and the outputs of these queries are
            // written by this piece alone.
            d += 16 * unsafe { mix.columns::<V, F>(&tile, d, vectors) };
        }
    }
}

/// Stored elements that can be read one by one and sixteen at a time.
pub(super) trait Element: Copy {
    /// As fp32.
    fn wide(self) -> f32;
    /// # Safety
    /// 16 elements lie behind `p`.
    unsafe fn load<V: Lanes>(p: *const Self) -> V;
    /// Where slot `j` of a key tile lies among its 32.
    fn place(j: usize) -> usize;
}

impl Element for u16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's word.
        unsafe { V::load_bf16(p) }
    }
    #[inline(always)]
    fn place(j: usize) -> usize {
        pair_place(j)
    }
}

impl Element for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's word.
        unsafe { V::load(p) }
    }
    #[inline(always)]
    fn place(j: usize) -> usize {
        j
    }
}

/// Keys of a page from its values: `turn(weight * value)`, as an fp32 key tile.
#[inline(always)]
fn form_keys<F: Element>(
    tile: &[F],
    dim: usize,
    position: usize,
    maker: &super::kv::KeyMaker,
    round: bool,
    keys: &mut [f32],
) {
    let mut key = [0.0; 1024];
    let key = &mut key[..dim];
    for slot in 0..BLOCK {
        let values = &tile[slot * value_width(dim)..];
        for ((k, v), w) in key.iter_mut().zip(values).zip(&maker.weight) {
            *k = v.wide() * w;
        }
        maker.rope.turn(position + slot, key);
        for (d, k) in key.iter().enumerate() {
            keys[d * BLOCK + <f32 as Element>::place(slot)] =
                if round { round_bf16(*k) } else { *k };
        }
    }
}

/// Scores of one page: `scores[i * length + slot]`.
#[inline(always)]
fn score<V: Lanes, F: Form>(
    q: &Buf,
    queries: &[Query],
    tile: &[F],
    dim: usize,
    scores: &mut [f32],
    length: usize,
) {
    assert!(tile.len() >= dim * BLOCK && scores.len() >= (queries.len() - 1) * length + BLOCK);
    let at = |i: usize| {
        let query = queries[i];
        q.row(query.row)[query.column..query.column + dim].as_ptr()
    };
    // SAFETY: the tile holds 32 elements for each of `dim`, the queries `dim` elements, the
    // scores 32 at each multiple of `length`.
    unsafe {
        if queries.len() == GROUP {
            let q = [at(0), at(1), at(2), at(3)];
            if V::MAX_ROWS >= GROUP {
                chains::<V, F, 4>(q, tile.as_ptr(), dim, scores.as_mut_ptr(), length);
            } else {
                let (low, high) = ([q[0], q[1]], [q[2], q[3]]);
                chains::<V, F, 2>(low, tile.as_ptr(), dim, scores.as_mut_ptr(), length);
                let rest = scores.as_mut_ptr().add(2 * length);
                chains::<V, F, 2>(high, tile.as_ptr(), dim, rest, length);
            }
            return;
        }
        for i in 0..queries.len() {
            let to = scores.as_mut_ptr().add(i * length);
            chains::<V, F, 1>([at(i)], tile.as_ptr(), dim, to, length);
        }
    }
}

/// # Safety
/// As [`score`] says.
#[inline(always)]
unsafe fn chains<V: Lanes, F: Form, const N: usize>(
    q: [*const f32; N],
    tile: *const F,
    dim: usize,
    scores: *mut f32,
    length: usize,
) {
    let mut acc = [(V::splat(0.0), V::splat(0.0)); N];
    for d in 0..dim {
        // SAFETY: the caller's word.
        let (low, high) = unsafe { F::load::<V>(tile.add(d * BLOCK)) };
        for (a, q) in acc.iter_mut().zip(&q) {
            // SAFETY: the caller's word.
            let value = V::splat(unsafe { *q.add(d) });
            a.0 = a.0.fma(value, low);
            a.1 = a.1.fma(value, high);
        }
    }
    for (i, a) in acc.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe {
            a.0.store(scores.add(i * length));
            a.1.store(scores.add(i * length + 16));
        }
    }
}

/// Scores to unscaled weights; slots outside `range` get weight zero. Returns the weights' sum.
#[inline(always)]
fn soften(scores: &mut [f32], range: std::ops::Range<usize>) -> f32 {
    scores[..range.start].fill(f32::NEG_INFINITY);
    scores[range.end..].fill(f32::NEG_INFINITY);
    let mut most = [f32::NEG_INFINITY; 16];
    for chunk in scores.chunks_exact(16) {
        for (m, s) in most.iter_mut().zip(chunk) {
            *m = if *s > *m { *s } else { *m };
        }
    }
    let most = most
        .iter()
        .fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
    let mut sums = [0.0f32; 16];
    for chunk in scores.chunks_exact_mut(16) {
        for (sum, s) in sums.iter_mut().zip(chunk) {
            *s = exp(*s - most);
            *sum += *s;
        }
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}

/// Sums of values by weight.
struct Mix<'a> {
    queries: &'a [Query],
    scores: &'a [f32],
    length: usize,
    first: usize,
    dim: usize,
    inverse: [f32; GROUP],
    out: &'a Shards<f32>,
    stride: usize,
    round: bool,
}

impl Mix<'_> {
    /// Some vectors of columns from `d` on; returns how many.
    ///
    /// # Safety
    /// Tiles hold 32 rows of whole vectors; nobody else writes these queries' outputs.
    #[inline(always)]
    unsafe fn columns<V: Lanes, F: Element>(
        &self,
        tile: &impl Fn(usize) -> *const F,
        d: usize,
        vectors: usize,
    ) -> usize {
        macro_rules! mix {
            ($n:literal, $c:literal) => {{
                let mut i = 0;
                while i + $n <= self.queries.len() {
                    // SAFETY: the caller's word.
                    unsafe { self.some::<V, F, $n, $c>(tile, d, i) };
                    i += $n;
                }
                while i < self.queries.len() {
                    // SAFETY: the caller's word.
                    unsafe { self.some::<V, F, 1, $c>(tile, d, i) };
                    i += 1;
                }
                $c
            }};
        }
        if V::MAX_ROWS >= 12 {
            match (self.queries.len(), vectors) {
                (4, 4..) => mix!(4, 4),
                (_, 8..) => mix!(2, 8),
                (_, 4..) => mix!(2, 4),
                _ => mix!(4, 1),
            }
        } else {
            match vectors {
                2.. => mix!(2, 2),
                _ => mix!(2, 1),
            }
        }
    }

    /// `N` queries from number `i` on, `C` vectors of columns from `d` on.
    #[inline(always)]
    unsafe fn some<V: Lanes, F: Element, const N: usize, const C: usize>(
        &self,
        tile: &impl Fn(usize) -> *const F,
        d: usize,
        i: usize,
    ) {
        let width = value_width(self.dim);
        let queries = &self.queries[i..i + N];
        let start = queries.iter().map(|q| q.start).min().unwrap_or(0);
        let end = queries.iter().map(|q| q.end).max().unwrap_or(0);
        let shared_start = queries.iter().map(|q| q.start).max().unwrap_or(0);
        let shared_end = queries.iter().map(|q| q.end).min().unwrap_or(0);
        let mut acc = [[V::splat(0.0); C]; N];
        let base = self.first * BLOCK;
        let mut position = start;
        while position < end {
            let number = position / BLOCK;
            let page = tile(number);
            let stop = end.min((number + 1) * BLOCK);
            while position < stop {
                let mut values = [V::splat(0.0); C];
                for (c, value) in values.iter_mut().enumerate() {
                    // SAFETY: the slot is in the page, the vector in the row.
                    *value = unsafe { F::load(page.add(position % BLOCK * width + d + 16 * c)) };
                }
                let shared = position >= shared_start && position < shared_end;
                for (n, (acc, q)) in acc.iter_mut().zip(queries).enumerate() {
                    if shared || (position >= q.start && position < q.end) {
                        let weight = self.scores[(i + n) * self.length + position - base];
                        let weight = V::splat(weight);
                        for (a, value) in acc.iter_mut().zip(&values) {
                            *a = a.fma(weight, *value);
                        }
                    }
                }
                position += 1;
            }
        }
        for (n, (acc, q)) in acc.iter().zip(queries).enumerate() {
            let scale = V::splat(self.inverse[i + n]);
            for (c, a) in acc.iter().enumerate() {
                let numbers = a.mul(scale).to_array();
                let column = d + 16 * c;
                let count = 16.min(self.dim - column.min(self.dim));
                // SAFETY: the caller's word.
                let to = unsafe {
                    self.out
                        .slice(q.row * self.stride + q.column + column, count)
                };
                for (to, x) in to.iter_mut().zip(numbers) {
                    *to = if self.round { round_bf16(x) } else { x };
                }
            }
        }
    }
}
