//! Attention of a prompt's many rows by tiles: parameter block and launch plan.

use std::mem::{offset_of, size_of};

use super::{AttentionArgs, DevicePtr, PageForm, TILE_KEYS};

/// A split begins with a tile whose number is a multiple of this: rings have as many slots.
const ALIGNED: usize = 4;
/// Query vectors of a block, or of the blocks of a cluster.
const VECTORS: usize = 64;

/// Attention of many rows of one sequence. The bits are those of the unit `attention`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TileArgs {
    /// As for the unit `attention`; `spans`, `partial` and `weight` are not read.
    pub attention: AttentionArgs,
    /// bf16 `[heads of this launch][tile_count][2][32 keys * head_dim]`: keys and values as the
    /// matrix unit reads them.
    pub tiles: DevicePtr,
    /// First row, of those that `ends`, `q` and `out` have.
    pub first_row: u32,
    /// Rows: consecutive positions of one sequence.
    pub rows: u32,
    /// The sequence, in the table.
    pub sequence: u32,
    /// First head of keys and values of this launch.
    pub first_head: u32,
    /// First tile of 32 positions that a row sees, or one of the three before it.
    pub first_tile: u32,
    /// Tiles from there to the last that a row sees.
    pub tile_count: u32,
}

const _: () = assert!(size_of::<TileArgs>() == 168 && offset_of!(TileArgs, tiles) == 136);

/// How attention by tiles is launched. Nothing here changes a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TilePlan {
    head_dim: usize,
    form: PageForm,
    kv_heads: usize,
    /// Heads of keys and values that one launch takes.
    heads_at_once: usize,
    first_tile: usize,
    tiles: usize,
    /// Blocks of query vectors of a head.
    blocks: usize,
}

impl TilePlan {
    /// Threads of a block that brings tiles into form.
    pub const PREPARE_THREADS: u32 = 256;
    /// Threads of a block that attends.
    pub const THREADS: u32 = 512;

    /// A plan for `rows` rows that see the keys `keys`, with `room` bytes for tiles; `None` where
    /// no kernel has such heads or the room does not hold one head's tiles.
    pub fn plan(
        head_dim: usize,
        [heads, kv_heads]: [usize; 2],
        rows: usize,
        keys: std::ops::Range<usize>,
        form: PageForm,
        room: usize,
    ) -> Option<Self> {
        if !(head_dim == 512 || head_dim == 256 && !form.values_only) || keys.is_empty() {
            return None;
        }
        let first_tile = keys.start / TILE_KEYS / ALIGNED * ALIGNED;
        let tiles = keys.end.div_ceil(TILE_KEYS) - first_tile;
        let heads_at_once = kv_heads.min(room / (tiles * TILE_KEYS * head_dim * 2 * 2));
        (heads_at_once > 0).then_some(Self {
            head_dim,
            form,
            kv_heads,
            heads_at_once,
            first_tile,
            tiles,
            blocks: (rows * heads / kv_heads).div_ceil(VECTORS) * (head_dim / 256),
        })
    }

    /// Bytes of room that are used.
    pub fn room(&self) -> usize {
        self.heads_at_once * self.tiles * TILE_KEYS * self.head_dim * 2 * 2
    }

    /// Blocks that attend at the same time if the card holds as many.
    pub fn parallel(&self) -> usize {
        self.blocks * self.heads_at_once
    }

    /// The parameter blocks of the launches, one after the other, with their numbers of heads.
    pub fn launches(
        &self,
        attention: AttentionArgs,
        tiles: DevicePtr,
        [first_row, rows, sequence]: [usize; 3],
    ) -> impl Iterator<Item = (TileArgs, usize)> + use<> {
        let plan = *self;
        (0..plan.kv_heads)
            .step_by(plan.heads_at_once)
            .map(move |first_head| {
                let args = TileArgs {
                    attention,
                    tiles,
                    first_row: first_row as u32,
                    rows: rows as u32,
                    sequence: sequence as u32,
                    first_head: first_head as u32,
                    first_tile: plan.first_tile as u32,
                    tile_count: plan.tiles as u32,
                };
                (args, plan.heads_at_once.min(plan.kv_heads - first_head))
            })
    }

    /// Grid of the kernel that brings the tiles of `heads` heads into form.
    pub fn prepare_grid(&self, heads: usize) -> [u32; 3] {
        [self.tiles as u32, heads as u32, 1]
    }

    /// Grid of the kernel that attends, for `heads` heads.
    pub fn grid(&self, heads: usize) -> [u32; 3] {
        [self.blocks as u32, heads as u32, 1]
    }

    /// Dynamic shared memory of a block that attends, bytes.
    pub fn shared(&self) -> usize {
        // Mirrors the layout in attention_tiles.cu.
        let (side, slots) = (TILE_KEYS * self.head_dim * 2, 1024 / self.head_dim);
        VECTORS * self.head_dim * 2
            + slots * side
            + 4 * TILE_KEYS * 512
            + 4 * 128 * 48
            + 128 * 8
            + 256
    }

    /// Name of the kernel that brings tiles into form.
    pub fn prepare_kernel(&self) -> String {
        format!("prepare_tiles_{}d{}", self.form.name(), self.head_dim)
    }

    /// Name of the kernel that attends. Cards without wgmma have none.
    pub fn kernel(&self) -> String {
        format!("attention_tiles_d{}", self.head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(
        dim: usize,
        rows: usize,
        keys: std::ops::Range<usize>,
        room: usize,
    ) -> Option<TilePlan> {
        TilePlan::plan(dim, [32, 4], rows, keys, PageForm::default(), room)
    }

    #[test]
    fn launches_cover_all_heads_within_the_room() {
        let per_head = 32 * 1024 * 2048;
        for room in [per_head, 3 * per_head, 9 * per_head] {
            let plan = plan(512, 100, 31..1024 * 32, room).expect("fits");
            assert!(plan.room() <= room);
            let args = AttentionArgs::default();
            let launches: Vec<_> = plan.launches(args, 0, [7, 100, 2]).collect();
            let mut next = 0;
            for (args, heads) in launches {
                assert_eq!(args.first_head as usize, next);
                assert_eq!((args.first_tile, args.tile_count), (0, 1024));
                next += heads;
            }
            assert_eq!(next, 4);
        }
        assert_eq!(plan(512, 100, 31..1024 * 32, per_head - 1), None);
    }

    #[test]
    fn heads_without_a_kernel_have_no_plan() {
        assert_eq!(plan(128, 100, 0..64, 1 << 30), None);
        assert_eq!(plan(512, 100, 64..64, 1 << 30), None);
        let values_only = PageForm {
            values_only: true,
            fp8: false,
        };
        assert_eq!(
            TilePlan::plan(256, [8, 1], 64, 0..64, values_only, 1 << 30),
            None
        );
    }

    #[test]
    fn blocks_fit_a_multiprocessor() {
        for dim in [256, 512] {
            let plan = plan(dim, 64, 0..64, 1 << 30).expect("fits");
            assert!(plan.shared() <= 227 * 1024);
            assert_eq!(plan.grid(4), [(8 * dim / 256) as u32, 4, 1]);
        }
    }
}
