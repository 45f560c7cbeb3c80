//! Weights to panels, in the form they are stored in.

use super::{
    coded::{Coded, Scales},
    expand::Code,
    memory::Region,
    panel::{Form, Matrix, PANEL, Packed, Part, narrow, word_place},
};
use crate::model::{
    checkpoint::Dtype,
    weight::{Form as Stored, Fp8Scale, Nvfp4, Weight},
};

/// Row `.1` of a weight.
type Row<'a> = (&'a Weight, usize);

impl Matrix {
    /// Packs matrices of the same input width, stacked. `bf16`: inputs are bf16 numbers.
    pub(super) fn pack(parts: &[&Weight], bf16: bool) -> Self {
        let rows: Vec<Row<'_>> = parts
            .iter()
            .flat_map(|w| (0..w.rows()).map(move |r| (*w, r)))
            .collect();
        Self::pack_rows(&rows, bf16)
    }

    /// Packs chosen rows of matrices.
    pub(super) fn pack_rows(rows: &[Row<'_>], bf16: bool) -> Self {
        let inputs = rows.first().map_or(0, |(w, _)| w.cols());
        let runs: Vec<&[Row<'_>]> = rows
            .chunk_by(|a, b| Kind::of(a.0, bf16) == Kind::of(b.0, bf16))
            .collect();
        let alone = runs.len() == 1;
        let mut first = 0;
        let parts = runs.into_iter().map(|run| {
            let kind = Kind::of(run[0].0, bf16);
            let part = Part {
                first,
                outputs: run.len(),
                inputs,
                packed: pack(kind, run, inputs, alone),
                words: bf16 && kind.in_bf16(),
            };
            first += run.len();
            part
        });
        let parts = parts.collect();
        Self {
            outputs: rows.len(),
            inputs,
            parts,
        }
    }
}

/// Rows of one kind are packed together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Words,
    Singles,
    Halves { fp16: bool },
    Fp8 { group: usize, narrow: bool },
    Nvfp4,
    Int4 { group: usize, narrow: bool },
}

impl Kind {
    fn of(weight: &Weight, bf16: bool) -> Self {
        match weight {
            Weight::Float(_) => match weight.form() {
                Stored::Bf16 if bf16 => Kind::Words,
                Stored::Bf16 => Kind::Halves { fp16: false },
                Stored::F16 => Kind::Halves { fp16: true },
                _ => Kind::Singles,
            },
            Weight::Fp8(w) => Kind::Fp8 {
                group: w.group(),
                narrow: matches!(w.scale(), Fp8Scale::Block(t) if t.dtype() == Dtype::BF16),
            },
            Weight::Nvfp4(_) => Kind::Nvfp4,
            Weight::Int4(w) => Kind::Int4 {
                group: w.group(),
                narrow: w.scales().dtype() == Dtype::BF16,
            },
        }
    }

    /// Whether every number without its scale is a bf16 one.
    fn in_bf16(self) -> bool {
        !matches!(self, Kind::Singles | Kind::Halves { .. })
    }
}

/// Packs rows of one kind; those of a matrix of its own as plain numbers, if that is what they are.
fn pack(kind: Kind, rows: &[Row<'_>], inputs: usize, alone: bool) -> Packed {
    let code = match kind {
        Kind::Words => Code::Words(words(rows, inputs)),
        Kind::Singles => Code::Singles(singles(rows, inputs)),
        Kind::Halves { fp16 } => Code::Halves {
            codes: halves(rows, inputs),
            fp16,
        },
        Kind::Fp8 { .. } => Code::Fp8(fp8(rows, inputs)),
        Kind::Nvfp4 => nvfp4(rows, inputs),
        Kind::Int4 { .. } => Code::Int4(pairs(rows, inputs, |w, row| match w {
            Weight::Int4(w) => row_of(w.codes(), row, w.row_bytes()),
            _ => &[],
        })),
    };
    let code = match code {
        Code::Words(data) if alone => return Packed::Bf16(data),
        Code::Singles(data) if alone => return Packed::F32(data),
        code => code,
    };
    let (group, narrow) = match kind {
        Kind::Fp8 { group, narrow } | Kind::Int4 { group, narrow } => (group, narrow),
        _ => (inputs, false),
    };
    // An odd group would share a word with the next; only one that is a whole row may be odd.
    let group = group.min(inputs).max(1);
    Packed::Coded(Coded {
        outputs: rows.len(),
        inputs,
        group,
        code,
        scales: scales(rows, inputs.div_ceil(group).max(1), narrow),
    })
}

fn row_of(bytes: &[u8], row: usize, length: usize) -> &[u8] {
    &bytes[row * length..(row + 1) * length]
}

fn panels(rows: &[Row<'_>]) -> usize {
    rows.len().div_ceil(PANEL)
}

fn words(rows: &[Row<'_>], inputs: usize) -> Region<u16> {
    let step = u16::STEP * PANEL * inputs.div_ceil(u16::STEP);
    let mut data = Region::<u16>::new(panels(rows) * step);
    let mut row = vec![0.0; inputs];
    for (i, (w, r)) in rows.iter().enumerate() {
        w.read_row(*r, &mut row);
        let panel = &mut data[i / PANEL * step..];
        for (k, x) in row.iter().enumerate() {
            panel[word_place(k, i % PANEL)] = narrow(*x);
        }
    }
    data
}

fn singles(rows: &[Row<'_>], inputs: usize) -> Region<f32> {
    let step = PANEL * inputs;
    let mut data = Region::<f32>::new(panels(rows) * step);
    let mut row = vec![0.0; inputs];
    for (i, (w, r)) in rows.iter().enumerate() {
        w.read_row(*r, &mut row);
        let panel = &mut data[i / PANEL * step..];
        for (k, x) in row.iter().enumerate() {
            panel[k * PANEL + i % PANEL] = *x;
        }
    }
    data
}

fn halves(rows: &[Row<'_>], inputs: usize) -> Region<u16> {
    let step = PANEL * inputs;
    let mut data = Region::<u16>::new(panels(rows) * step);
    for (i, (w, r)) in rows.iter().enumerate() {
        let Weight::Float(tensor) = w else {
            continue;
        };
        let bytes = row_of(tensor.bytes(), *r, 2 * inputs);
        let panel = &mut data[i / PANEL * step..];
        for (k, b) in bytes.chunks_exact(2).enumerate() {
            panel[k * PANEL + i % PANEL] = u16::from_le_bytes([b[0], b[1]]);
        }
    }
    data
}

fn fp8(rows: &[Row<'_>], inputs: usize) -> Region<u8> {
    let step = PANEL * inputs;
    let mut data = Region::<u8>::new(panels(rows) * step);
    for (i, (w, r)) in rows.iter().enumerate() {
        let Weight::Fp8(w) = w else {
            continue;
        };
        let panel = &mut data[i / PANEL * step..];
        for (k, code) in row_of(w.codes(), *r, inputs).iter().enumerate() {
            panel[k * PANEL + i % PANEL] = *code;
        }
    }
    data
}

/// Bytes of two codes: `[panel, pair, 32]`.
fn pairs<'a>(
    rows: &[Row<'a>],
    inputs: usize,
    codes: impl Fn(&'a Weight, usize) -> &'a [u8],
) -> Region<u8> {
    let count = inputs.div_ceil(2);
    let mut data = Region::<u8>::new(panels(rows) * count * PANEL);
    for (i, (w, r)) in rows.iter().enumerate() {
        let panel = &mut data[i / PANEL * count * PANEL..];
        for (pair, code) in codes(w, *r).iter().take(count).enumerate() {
            panel[pair * PANEL + i % PANEL] = *code;
        }
    }
    data
}

fn nvfp4(rows: &[Row<'_>], inputs: usize) -> Code {
    let codes = pairs(rows, inputs, |w, row| match w {
        Weight::Nvfp4(w) => row_of(w.codes(), row, inputs / 2),
        _ => &[],
    });
    let blocks = inputs.div_ceil(Nvfp4::BLOCK);
    let mut scales = Region::<u8>::new(panels(rows) * blocks * PANEL);
    for (i, (w, r)) in rows.iter().enumerate() {
        let Weight::Nvfp4(w) = w else {
            continue;
        };
        let panel = &mut scales[i / PANEL * blocks * PANEL..];
        for (block, scale) in row_of(w.scales(), *r, blocks).iter().enumerate() {
            panel[block * PANEL + i % PANEL] = *scale;
        }
    }
    Code::Nvfp4 { codes, scales }
}

/// What multiplies the sum of a group of a row.
fn scale_of(weight: &Weight, row: usize, group: usize) -> f32 {
    match weight {
        Weight::Float(_) => 1.0,
        Weight::Fp8(w) => w.scale_of(row, group),
        Weight::Nvfp4(w) => w.global(),
        Weight::Int4(w) => w.scale_of(row, group),
    }
}

fn scales(rows: &[Row<'_>], groups: usize, narrow: bool) -> Scales {
    let count = panels(rows) * groups * PANEL;
    let places = rows.iter().enumerate().flat_map(|(i, (w, r))| {
        (0..groups).map(move |g| {
            let place = (i / PANEL * groups + g) * PANEL + i % PANEL;
            (place, scale_of(w, *r, g))
        })
    });
    if narrow {
        let mut all = Region::<u16>::new(count);
        // They were bf16 in the file: nothing is lost.
        places.for_each(|(place, scale)| all[place] = (scale.to_bits() >> 16) as u16);
        return Scales::Bf16(all);
    }
    let mut all = Region::<f32>::new(count);
    places.for_each(|(place, scale)| all[place] = scale);
    Scales::F32(all)
}
