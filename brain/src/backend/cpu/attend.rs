//! Attention over the pages, for queries of any rows.
//!
//! A query's arithmetic: each score is one chain over the head's elements; the maximum is exact;
//! weights are summed in sixteen lanes by absolute position, and rounded to bf16 where activations
//! are; each output element is one chain over the visible keys in order. Chains over codes of FP8
//! are over the codes' numbers; the scale of keys multiplies a score, the scale of values a sum (that
//! is, one over the weights' sum before it). None of it knows how many
//! queries are computed together, how the prompt was cut, or which thread works. Slots outside a
//! query's own range never enter a chain, so that what another sequence left in a page cannot be
//! seen.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    codes::{SingleCode, WordCode},
    kv::{BLOCK, CacheLayer, Pages, Stored, value_width},
    memory::Buf,
    mix::Mix,
    pool::{Pool, Shards},
    simd::{Kernel, Lanes, Level, dispatch},
};
use crate::{
    backend::arena::{Arena, RowSet, Span},
    model::plan::Kind,
    sched::math::{exp, round_bf16},
};

/// Queries computed together.
pub(super) const GROUP: usize = 4;
/// Pages whose scores are computed together.
const TILES: usize = 4;
/// Multiply-adds below which threads are not worth waking.
const SMALL: usize = 32 * 1024;

/// One thread's room.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scores, then weights: `[GROUP, positions]`.
    scores: Vec<f32>,
    /// Weights as pairs.
    pairs: Vec<u32>,
    /// Queries as pairs: `[GROUP, head_dim / 2]`.
    queries: Vec<u32>,
    /// Keys formed from values: `[TILES, head_dim, BLOCK]`.
    pub(super) keys_bf16: Vec<u16>,
    /// Likewise.
    pub(super) keys_f32: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(positions: usize, head_dim: usize) -> Self {
        let positions = positions.next_multiple_of(BLOCK);
        Self {
            scores: vec![0.0; GROUP * positions],
            pairs: vec![0; GROUP * positions / 2],
            queries: vec![0; GROUP * head_dim.div_ceil(2)],
            keys_bf16: vec![0; TILES * head_dim * BLOCK],
            keys_f32: vec![0.0; TILES * head_dim * BLOCK],
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
    /// Activations are bf16.
    pub(super) round: bool,
}

/// Attends; `out` gets `heads * head_dim` columns.
pub(super) fn attend(pool: &Pool, job: &Job<'_>, scratch: &mut [Scratch], out: &mut Buf) {
    let shape = job.cache.shape;
    let width = job.heads * shape.head_dim;
    assert!(width <= job.q.width() && width <= out.width());
    assert!(pool.threads() <= scratch.len());
    let per_row = job.heads / shape.kv_heads;
    let vectors: usize = job.rows.spans.iter().map(|s| s.count * job.heads).sum();
    let keys = |s: &Span| job.rows.rows[s.start + s.count - 1].end;
    let longest = job.rows.spans.iter().map(keys).max().unwrap_or(0);
    let seen = if shape.kind == Kind::Sliding {
        longest.min(job.window)
    } else {
        longest
    };
    let small = 2 * vectors * seen * shape.head_dim <= SMALL;
    // Fewer queries at a time when there would be too little to share.
    let pieces = |s: &Span, group: usize| (s.count * per_row).div_ceil(group) * shape.kv_heads;
    let total = |group: usize| {
        job.rows
            .spans
            .iter()
            .map(|s| pieces(s, group))
            .sum::<usize>()
    };
    let wanted = if small { 1 } else { pool.threads() };
    let group = [GROUP, 2]
        .into_iter()
        .find(|g| total(*g) >= wanted)
        .unwrap_or(1);
    let stride = out.stride();
    let shards = Shards::new(out.data_mut());
    let rooms = Shards::new(scratch);
    let work = |chunk: usize, thread: usize| {
        let mut left = chunk;
        for span in &job.rows.spans {
            if left >= pieces(span, group) {
                left -= pieces(span, group);
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
        (0..total(group)).for_each(|i| work(i, 0));
    } else {
        pool.run(total(group), &work);
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
pub(super) struct Query {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Kernel for Piece<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let job = self.job;
        match &job.cache.pages {
            Pages::Bf16(data) => self.run_form::<V, u16>(data),
            Pages::F32(data) => self.run_form::<V, f32>(data),
            Pages::Fp8Words(data) => self.run_form::<V, WordCode>(data),
            Pages::Fp8Singles(data) => self.run_form::<V, SingleCode>(data),
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
    fn run_form<V: Lanes, F: Stored>(self, data: &[F]) {
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
        let kind = job.cache.shape.kind;
        let tiles = |number| {
            job.cache
                .tiles(job.arena.block(kind, span.seq, number), head)
        };

        let mut inputs: [&[F::Input]; GROUP] = [&[]; GROUP];
        let rooms = room.queries.chunks_exact_mut(dim.div_ceil(2));
        for ((input, words), q) in inputs.iter_mut().zip(rooms).zip(queries) {
            *input = F::inputs(&job.q.row(q.row)[q.column..q.column + dim], words);
        }
        let scores = &mut room.scores[..count * length];
        let formed = F::keys(&mut room.keys_bf16, &mut room.keys_f32);
        for number in (first..last).step_by(TILES) {
            let pages = number..last.min(number + TILES);
            let scores = &mut scores[(number - first) * BLOCK..];
            let inputs = &inputs[..count];
            score_pages::<V, F>(job, data, &tiles, pages, inputs, formed, scores, length);
        }
        let scale = job.cache.score_scale();
        if scale != 1.0 {
            scores.iter_mut().for_each(|score| *score *= scale);
        }

        let mut inverse = [0.0; GROUP];
        let mut weights: [&[F::Input]; GROUP] = [&[]; GROUP];
        let parts = scores.chunks_exact_mut(length);
        let rooms = room.pairs.chunks_exact_mut(length / 2);
        for (i, (scores, words)) in parts.zip(rooms).enumerate() {
            let q = &queries[i];
            let range = q.start - first * BLOCK..q.end - first * BLOCK;
            inverse[i] = job.cache.scales.value / soften(scores, range, job.round);
            weights[i] = F::inputs(scores, words);
        }
        let page = |number: usize| data[tiles(number).1..].as_ptr();
        let mix = Mix {
            queries,
            weights,
            first: first * BLOCK,
            dim,
            inverse,
            out,
            stride,
            round: job.round,
        };
        mix.run::<V>(&page);
    }
}

/// Scores of up to [`TILES`] pages, whose keys are stored, or are formed first, in `formed`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "a part of a kernel")]
fn score_pages<V: Lanes, F: Stored>(
    job: &Job<'_>,
    data: &[F],
    tiles: &impl Fn(usize) -> (usize, usize),
    numbers: std::ops::Range<usize>,
    inputs: &[&[F::Input]],
    formed: &mut [F::Formed],
    scores: &mut [f32],
    length: usize,
) {
    let dim = job.cache.shape.head_dim;
    let count = numbers.len();
    let Some(maker) = &job.cache.key_maker else {
        let mut pages = [std::ptr::null(); TILES];
        for (page, number) in pages.iter_mut().zip(numbers) {
            let (k, _) = tiles(number);
            *page = data[k..k + dim * BLOCK].as_ptr();
        }
        return score::<V, F>(inputs, &pages[..count], dim, scores, length);
    };
    let mut pages = [std::ptr::null(); TILES];
    for (i, (page, number)) in pages.iter_mut().zip(numbers).enumerate() {
        let (_, v) = tiles(number);
        let key = &mut formed[i * dim * BLOCK..(i + 1) * dim * BLOCK];
        let values = &data[v..v + BLOCK * value_width(dim)];
        form_keys(values, dim, number * BLOCK, maker, job.round, key);
        *page = key.as_ptr();
    }
    score::<V, F::Formed>(inputs, &pages[..count], dim, scores, length);
}

/// Keys of a page from its values: `turn(weight * value)`, as a key tile.
#[inline(always)]
fn form_keys<F: Stored>(
    values: &[F],
    dim: usize,
    position: usize,
    maker: &super::kv::KeyMaker,
    round: bool,
    keys: &mut [F::Formed],
) {
    let mut key = [0.0; crate::model::config::MAX_HEAD];
    let key = &mut key[..dim];
    for slot in 0..BLOCK {
        for (d, (k, w)) in key.iter_mut().zip(&maker.weight).enumerate() {
            *k = values[F::value_place(slot, d, value_width(dim))].wide() * w;
        }
        maker.rope.turn(position + slot, key);
        for (d, k) in key.iter().enumerate() {
            let k = if round { round_bf16(*k) } else { *k };
            keys[F::key_place(d, slot)] = F::Formed::stored(k, 1.0);
        }
    }
}

/// Scores of some pages that follow each other: `scores[i * length + slot]`.
#[inline(always)]
fn score<V: Lanes, F: Stored>(
    queries: &[&[F::Input]],
    pages: &[*const F],
    dim: usize,
    scores: &mut [f32],
    length: usize,
) {
    let steps = dim / F::STEP;
    assert!(queries.iter().all(|q| q.len() >= steps));
    assert!(scores.len() >= (queries.len() - 1) * length + pages.len() * BLOCK);
    let mut i = 0;
    while i < queries.len() {
        let together = match queries.len() - i {
            4.. if V::WIDE => 4,
            2.. => 2,
            _ => 1,
        };
        let mut page = 0;
        while page < pages.len() {
            let to = scores[i * length + page * BLOCK..].as_mut_ptr();
            let q = &queries[i..i + together];
            let p = &pages[page..];
            // SAFETY: each page holds 32 elements for each of `dim`, the queries all steps, the
            // scores whole pages at each multiple of `length`.
            page += unsafe {
                match (together, p.len()) {
                    (4, _) => chains::<V, F, 4, 1>(q, p, steps, to, length),
                    (2, 2..) if V::WIDE => chains::<V, F, 2, 2>(q, p, steps, to, length),
                    (2, _) => chains::<V, F, 2, 1>(q, p, steps, to, length),
                    (_, 4..) if V::WIDE => chains::<V, F, 1, 4>(q, p, steps, to, length),
                    (_, 2..) if V::WIDE => chains::<V, F, 1, 2>(q, p, steps, to, length),
                    _ => chains::<V, F, 1, 1>(q, p, steps, to, length),
                }
            };
        }
        i += together;
    }
}

/// `N` queries against `T` pages; returns `T`.
///
/// # Safety
/// As [`score`] says.
#[inline(always)]
unsafe fn chains<V: Lanes, F: Stored, const N: usize, const T: usize>(
    queries: &[&[F::Input]],
    pages: &[*const F],
    steps: usize,
    scores: *mut f32,
    length: usize,
) -> usize {
    let queries: [*const F::Input; N] = std::array::from_fn(|i| queries[i].as_ptr());
    let pages: [*const F; T] = std::array::from_fn(|i| pages[i]);
    let mut acc = [[(V::splat(0.0), V::splat(0.0)); T]; N];
    for k in 0..steps {
        // SAFETY: the caller's word.
        let keys: [_; T] =
            std::array::from_fn(|t| unsafe { F::weights::<V>(pages[t].add(k * BLOCK * F::STEP)) });
        for (acc, q) in acc.iter_mut().zip(&queries) {
            // SAFETY: the caller's word.
            let x = unsafe { F::spread::<V>(q.add(k)) };
            for (a, key) in acc.iter_mut().zip(&keys) {
                a.0 = F::step(a.0, x, key.0);
                a.1 = F::step(a.1, x, key.1);
            }
        }
    }
    for (n, acc) in acc.iter().enumerate() {
        for (t, a) in acc.iter().enumerate() {
            // SAFETY: the caller's word.
            unsafe {
                a.0.store(scores.add(n * length + t * BLOCK));
                a.1.store(scores.add(n * length + t * BLOCK + 16));
            }
        }
    }
    T
}

/// Scores to weights that are not scaled yet; slots outside `range` get weight zero. Returns the
/// weights' sum, taken before they are rounded.
#[inline(always)]
fn soften(scores: &mut [f32], range: std::ops::Range<usize>, round: bool) -> f32 {
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
            let weight = exp(*s - most);
            *sum += weight;
            *s = if round { round_bf16(weight) } else { weight };
        }
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}
