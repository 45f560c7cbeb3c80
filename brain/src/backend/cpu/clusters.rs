//! The drafter's head by clusters: only the tokens of the likeliest clusters get logits.

use super::{
    arranged::Arranged,
    matrix::Matrix,
    product::{Mode, row_product},
};
use crate::model::weights::Weight;

/// Rows of a head, cluster by cluster.
pub(super) struct Clusters {
    size: usize,
    top_k: usize,
    head: Matrix,
    ordering: Vec<u32>,
    /// `[rows, top_k * size]`: tokens whose logits the last pass wrote.
    ids: Vec<u32>,
    order: Vec<(f32, usize)>,
    arranged: Arranged,
}

impl Clusters {
    pub(super) fn new(
        head: &Weight,
        ordering: &[u32],
        count: usize,
        top_k: usize,
        rows: usize,
        bf16: bool,
    ) -> Self {
        let size = ordering.len() / count;
        let head = Matrix::of_rows(head, &ordering[..count * size], bf16);
        let mut arranged = Arranged::default();
        arranged.make_room(1, &head);
        Self {
            size,
            top_k,
            head,
            ordering: ordering.to_vec(),
            ids: vec![0; rows * top_k * size],
            order: Vec::with_capacity(count),
            arranged,
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
            let range = place * self.size..(place + 1) * self.size;
            let tokens = cluster * self.size..(cluster + 1) * self.size;
            let (arranged, out) = (&mut self.arranged, &mut out[range.clone()]);
            row_product(mode, h, &self.head, tokens.start, arranged, out);
            ids[range].copy_from_slice(&self.ordering[tokens]);
        }
    }
}
