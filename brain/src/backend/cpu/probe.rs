//! Single operations on made-up numbers, for benches and for comparisons of levels.

use super::{
    CpuError,
    arranged::Arranged,
    attend::{Job, Scratch, attend},
    kv::{BLOCK, CacheLayer},
    matrix::Matrix,
    memory::Buf,
    pool::Pool,
    product::{Mode, product},
    simd::Level,
};
use crate::{
    backend::{Limits, arena::Arena, ops::HeadShape},
    model::{
        checkpoint::Checkpoint,
        kv_dtype::KvDtype,
        kv_scales::KvScales,
        names::Unused,
        plan::Kind,
        weight::{Weight, linear},
    },
    sched::types::{BlockId, BlockTables, SeqId, SeqStep, Step},
};

/// A product of some rows with one matrix.
pub struct ProductProbe {
    pool: Pool,
    mode: Mode,
    matrix: Matrix,
    x: Buf,
    out: Buf,
    arranged: Arranged,
    rows: usize,
}

impl ProductProbe {
    /// Up to `rows` rows against `weight`.
    pub fn new(
        weight: &Weight,
        rows: usize,
        threads: usize,
        level: Level,
    ) -> std::io::Result<Self> {
        let mut x = Buf::new(rows, weight.cols());
        for i in 0..rows {
            for (j, x) in x.row_mut(i).iter_mut().enumerate() {
                *x = ((i * 31 + j * 7) % 64) as f32 / 32.0 - 1.0;
            }
        }
        let pool = Pool::new(threads)?;
        let matrix = Matrix::new(&[weight], true);
        let mut arranged = Arranged::default();
        arranged.make_room(rows, &matrix);
        Ok(Self {
            mode: Mode { level, round: true },
            matrix,
            pool,
            x,
            out: Buf::new(rows, weight.rows()),
            arranged,
            rows,
        })
    }

    /// A number of rows against the matrix `name` of a checkpoint.
    ///
    /// # Errors
    /// The matrix is not there in a form that is served, or there are no threads.
    pub fn of_checkpoint(
        checkpoint: &Checkpoint,
        name: &str,
        shape: [usize; 2],
        rows: usize,
        threads: usize,
    ) -> Result<Self, CpuError> {
        let weight = linear(&mut Unused::new(checkpoint)?, name, shape)?;
        Ok(Self::new(&weight, rows, threads, Level::detect())?)
    }

    /// Computes it.
    pub fn run(&mut self) -> f32 {
        product(
            &self.pool,
            self.mode,
            self.rows,
            &self.x,
            &self.matrix,
            &mut self.arranged,
            &mut self.out,
        );
        self.out.row(self.rows - 1)[0]
    }
}

/// Attention of the newest rows of one sequence.
pub struct AttentionProbe {
    pool: Pool,
    arena: Arena,
    cache: CacheLayer,
    scratch: Vec<Scratch>,
    q: Buf,
    out: Buf,
    heads: usize,
    window: usize,
    level: Level,
}

impl AttentionProbe {
    /// `rows` queries at the end of `context` positions, whose keys and values are zeros.
    pub fn new(
        shape: HeadShape,
        rows: usize,
        context: usize,
        kv: KvDtype,
        threads: usize,
        level: Level,
    ) -> std::io::Result<Self> {
        let blocks = context.div_ceil(BLOCK);
        let mut arena = Arena::default();
        let table: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
        let step = Step {
            seqs: vec![SeqStep {
                seq: SeqId(0),
                tokens: vec![0; rows],
                start: context - rows,
                tables: BlockTables {
                    full: table.clone(),
                    sliding: table,
                    sliding_first: 0,
                },
                sample: None,
            }],
        };
        let window = 512;
        let limits = Limits {
            full_block_bytes: 0,
            sliding_block_bytes: 0,
            vocab_size: 1,
            max_model_len: context,
            max_rows: rows,
            max_seqs: 1,
            max_drafts: 0,
            full_block_size: BLOCK,
            full_blocks: blocks,
            sliding_block_size: BLOCK,
            sliding_blocks: blocks,
            window,
            masked_rows: 0,
        };
        arena.load(&step, &limits).map_err(std::io::Error::other)?;
        let width = shape.heads * shape.head_dim;
        let pool = Pool::new(threads)?;
        Ok(Self {
            arena,
            cache: CacheLayer::new(shape, None, blocks, (kv, KvScales::default()), true),
            scratch: (0..pool.threads())
                .map(|_| Scratch::new(context, shape.head_dim))
                .collect(),
            pool,
            q: Buf::new(rows, width),
            out: Buf::new(rows, width),
            heads: shape.heads,
            window: if shape.kind == Kind::Sliding {
                window
            } else {
                context
            },
            level,
        })
    }

    /// Computes it.
    pub fn run(&mut self) -> f32 {
        let job = Job {
            arena: &self.arena,
            rows: &self.arena.all,
            window: self.window,
            heads: self.heads,
            cache: &self.cache,
            q: &self.q,
            level: self.level,
            round: true,
        };
        attend(&self.pool, &job, &mut self.scratch, &mut self.out);
        self.out.row(0)[0]
    }
}
