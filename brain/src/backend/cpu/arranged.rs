//! Rows of a product in the orders and forms that weights want them in.

#![allow(unsafe_code, reason = "rows are written by several threads")]

use super::{
    decode::{DEAL, dealt},
    matrix::{Arrangement, Matrix},
    memory::{Plain, Region},
    panel::narrow,
    pool::Shards,
    simd::{Kernel, Lanes, Level, dispatch},
};

/// Rows, made anew for each product. Behind the last input stand zeros, as many as a unit of weights
/// may go on.
#[derive(Default)]
pub(super) struct Arranged {
    pairs: Room<u16>,
    dealt: Room<u16>,
    singles: Room<f32>,
}

/// Rows of `stride` numbers each.
struct Room<T: Plain> {
    rows: usize,
    stride: usize,
    data: Region<T>,
}

impl<T: Plain> Default for Room<T> {
    fn default() -> Self {
        Self {
            rows: 0,
            stride: 0,
            data: Region::new(0),
        }
    }
}

impl<T: Plain> Room<T> {
    fn grow(&mut self, rows: usize, inputs: usize) {
        // As for other buffers: rows must not all start in one cache set.
        let stride = inputs.next_multiple_of(DEAL) + 32;
        if rows > self.rows || stride > self.stride {
            let (rows, stride) = (rows.max(self.rows), stride.max(self.stride));
            let data = Region::new(rows * stride);
            *self = Self { rows, stride, data };
        }
    }

    fn fits(&self, rows: usize, inputs: usize) -> bool {
        rows <= self.rows && inputs.next_multiple_of(DEAL) <= self.stride
    }

    fn rows(&mut self, wanted: bool) -> Option<Rows<T>> {
        wanted.then(|| Rows {
            stride: self.stride,
            data: Shards::new(&mut self.data),
        })
    }
}

struct Rows<T> {
    stride: usize,
    data: Shards<T>,
}

/// Writes the rows of one product.
pub(super) struct Writer {
    level: Level,
    inputs: usize,
    pairs: Option<Rows<u16>>,
    dealt: Option<Rows<u16>>,
    singles: Option<Rows<f32>>,
}

impl Arranged {
    /// Makes room for so many rows of a matrix' inputs.
    pub(super) fn make_room(&mut self, rows: usize, matrix: &Matrix) {
        let inputs = matrix.inputs();
        if matrix.wants(Arrangement::Pairs) {
            self.pairs.grow(rows, inputs);
        }
        if matrix.wants(Arrangement::Dealt) {
            self.dealt.grow(rows, inputs);
        }
        if matrix.wants(Arrangement::Singles) {
            self.singles.grow(rows, inputs);
        }
    }

    /// The way to write so many rows of a matrix' inputs, for which there must be room.
    pub(super) fn writer(&mut self, level: Level, rows: usize, matrix: &Matrix) -> Writer {
        let inputs = matrix.inputs();
        let wants = Arrangement::ALL.map(|a| matrix.wants(a));
        let [pairs, dealt, singles] = wants;
        assert!(!pairs || self.pairs.fits(rows, inputs));
        assert!(!dealt || self.dealt.fits(rows, inputs));
        assert!(!singles || self.singles.fits(rows, inputs));
        Writer {
            level,
            inputs,
            pairs: self.pairs.rows(pairs),
            dealt: self.dealt.rows(dealt),
            singles: self.singles.rows(singles),
        }
    }

    /// bf16 rows, and the distance between them.
    pub(super) fn words(&self, arrangement: Arrangement) -> (&[u16], usize) {
        let room = match arrangement {
            Arrangement::Dealt => &self.dealt,
            Arrangement::Pairs | Arrangement::Singles => &self.pairs,
        };
        (&room.data, room.stride)
    }

    /// fp32 rows, and the distance between them.
    pub(super) fn singles(&self) -> (&[f32], usize) {
        (&self.singles.data, self.singles.stride)
    }
}

impl Writer {
    /// Writes row `i`.
    ///
    /// # Safety
    /// There is room for such a row, and nobody else writes or reads it meanwhile.
    pub(super) unsafe fn put(&self, i: usize, x: &[f32]) {
        let (x, length) = (&x[..self.inputs], self.inputs.next_multiple_of(DEAL));
        if let Some(rows) = &self.pairs {
            // SAFETY: the caller's word; a row is at least so long.
            let to = unsafe { rows.data.slice(i * rows.stride, length) };
            dispatch(self.level, Pairs { x, to });
        }
        if let Some(rows) = &self.dealt {
            // SAFETY: as above.
            let to = unsafe { rows.data.slice(i * rows.stride, length) };
            dispatch(self.level, Dealt { x, to });
        }
        if let Some(rows) = &self.singles {
            // SAFETY: as above.
            let to = unsafe { rows.data.slice(i * rows.stride, length) };
            to[..x.len()].copy_from_slice(x);
            to[x.len()..].fill(0.0);
        }
    }
}

struct Pairs<'a> {
    x: &'a [f32],
    to: &'a mut [u16],
}

impl Kernel for Pairs<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let (words, rest) = self.to.split_at_mut(self.x.len());
        for (word, x) in words.iter_mut().zip(self.x) {
            *word = narrow(*x);
        }
        rest.fill(0);
    }
}

struct Dealt<'a> {
    x: &'a [f32],
    to: &'a mut [u16],
}

/// Where input `k` of those that are dealt out together goes.
const PLACES: [u8; DEAL] = {
    let mut places = [0; DEAL];
    let mut k = 0;
    while k < DEAL {
        places[k] = dealt(k) as u8;
        k += 1;
    }
    places
};

impl Kernel for Dealt<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (x, to) in self.x.chunks(DEAL).zip(self.to.chunks_exact_mut(DEAL)) {
            let mut words = [0; DEAL];
            for (word, x) in words.iter_mut().zip(x) {
                *word = narrow(*x);
            }
            for (word, place) in words.iter().zip(PLACES) {
                to[usize::from(place)] = *word;
            }
        }
    }
}
