//! The drafter's head by clusters: only the tokens of the likeliest clusters get logits.

use super::{
    panel::{Matrix, PANEL},
    pool::Pool,
    product::{Mode, row_product},
};
use crate::model::weights::Weight;

/// Rows of a head, cluster by cluster, each cluster in panels of its own.
pub(super) struct Clusters {
    size: usize,
    top_k: usize,
    panels: usize,
    head: Matrix,
    ordering: Vec<u32>,
    /// `[rows, top_k * size]`: tokens whose logits the last pass wrote.
    ids: Vec<u32>,
    order: Vec<(f32, usize)>,
    room: Vec<f32>,
    words: Vec<u32>,
}

impl Clusters {
    pub(super) fn new(
        pool: &Pool,
        head: &Weight,
        ordering: &[u32],
        count: usize,
        top_k: usize,
        rows: usize,
        bf16: bool,
    ) -> Self {
        let size = ordering.len() / count;
        let panels = size.div_ceil(PANEL);
        let mut packed = Vec::with_capacity(count * panels * PANEL);
        for cluster in ordering.chunks_exact(size) {
            // A cluster's last panel is filled up with its first token again; nobody reads those.
            let padded = (0..panels * PANEL).map(|i| cluster[if i < size { i } else { 0 }]);
            packed.extend(padded.map(|token| (head, token as usize)));
        }
        let packed = Matrix::pack_rows(pool, &packed, bf16);
        head.release();
        Self {
            size,
            top_k,
            panels,
            head: packed,
            ordering: ordering.to_vec(),
            ids: vec![0; rows * top_k * size],
            order: Vec::with_capacity(count),
            room: vec![0.0; panels * PANEL],
            words: vec![0; head.cols().div_ceil(2)],
        }
    }

    /// Tokens of row `i`, in the order of its logits.
    pub(super) fn ids(&self, i: usize) -> &[u32] {
        let width = self.top_k * self.size;
        &self.ids[i * width..(i + 1) * width]
    }

    /// Logits of the tokens of the `top_k` best clusters: by score, then by number.
    pub(super) fn logits(
        &mut self,
        mode: Mode,
        row: usize,
        scores: &[f32],
        h: &[f32],
        out: &mut [f32],
    ) {
        self.order.clear();
        self.order
            .extend(scores.iter().enumerate().map(|(c, s)| (*s, c)));
        let better = |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if self.top_k < self.order.len() {
            self.order.select_nth_unstable_by(self.top_k - 1, better);
            self.order.truncate(self.top_k);
        }
        self.order.sort_unstable_by(better);
        let width = self.top_k * self.size;
        let ids = &mut self.ids[row * width..(row + 1) * width];
        for (place, (_, cluster)) in self.order.iter().enumerate() {
            let first = cluster * self.panels;
            row_product(mode, h, &self.head, first, &mut self.words, &mut self.room);
            let range = place * self.size..(place + 1) * self.size;
            out[range.clone()].copy_from_slice(&self.room[..self.size]);
            let tokens = cluster * self.size..(cluster + 1) * self.size;
            ids[range].copy_from_slice(&self.ordering[tokens]);
        }
    }
}
