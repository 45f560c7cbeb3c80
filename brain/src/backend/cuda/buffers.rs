//! Memory of the card that operations read and write, and launches over all of its columns.

#![allow(unsafe_code, reason = "kernel launches")]

use marathon_kernels::{
    abi::{DevicePtr, PageForm, RowsArgs},
    device::{Device, DeviceError},
};

use super::{
    card::{Card, Region},
    form::Form,
    rope::Turns,
    staging::Extent,
};
use crate::model::{kv_scales::KvScales, plan::Kind};

/// Activations at a fixed address.
pub(super) struct Buf {
    memory: Region,
    pitch: usize,
    width: usize,
    element: usize,
}

impl Buf {
    pub(super) fn new(card: &mut Card, form: Form, rows: usize, width: usize) -> Self {
        Self::of(card, form.size(), rows, width)
    }

    pub(super) fn of(card: &mut Card, element: usize, rows: usize, width: usize) -> Self {
        let pitch = width.next_multiple_of(8);
        Self {
            memory: card.zeros(rows * pitch * element),
            pitch,
            width,
            element,
        }
    }

    pub(super) fn at(&self) -> DevicePtr {
        self.memory.at
    }

    /// Address of a row's column.
    pub(super) fn place(&self, row: usize, column: usize) -> DevicePtr {
        self.memory.at + ((row * self.pitch + column) * self.element) as u64
    }

    /// Elements from a row to the next.
    pub(super) fn pitch(&self) -> u32 {
        self.pitch as u32
    }

    /// The first rows of a buffer of fp32, once all earlier work is done.
    pub(super) fn download(
        &self,
        device: &Device,
        rows: usize,
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        let bytes = self.memory.bytes(device)?;
        let row = |i: usize| {
            let start = i * self.pitch * 4;
            let row = &bytes[start..start + self.width * 4];
            let numbers = row.chunks_exact(4);
            numbers
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect()
        };
        Ok((0..rows).map(row).collect())
    }

    /// Columns.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// `out = gelu(gate) * up` of columns `[gate | up]` in fp32, `width` each.
    pub(super) fn gate(&self, card: &mut Card, rows: usize, width: usize, out: &Buf) {
        let args = RowsArgs {
            a: self.at(),
            b: self.place(0, width),
            out: out.at(),
            lda: self.pitch(),
            ldb: self.pitch(),
            ldo: out.pitch(),
            ..rows_args(rows, width)
        };
        by_column(card, Form::F32, "gelu_mul", rows, width, &args);
    }
}

pub(super) fn rows_args(rows: usize, width: usize) -> RowsArgs {
    RowsArgs {
        a: 0,
        b: 0,
        out: 0,
        weight: 0,
        index: 0,
        rows: rows as u32,
        width: width as u32,
        lda: 0,
        ldb: 0,
        ldo: 0,
        count: 0,
        scale: 1.0,
        other_scale: 1.0,
        eps: 0.0,
        packed: 0,
    }
}

/// A kernel whose threads have a column or, in bf16, two.
pub(super) fn by_column(
    card: &mut Card,
    form: Form,
    kernel: &str,
    rows: usize,
    width: usize,
    args: &RowsArgs,
) {
    let per_block = match form {
        Form::Bf16 => 256,
        Form::F32 => 128,
    };
    let blocks = [width.div_ceil(per_block), rows, 1];
    // SAFETY: callers give buffers of as many rows and columns.
    unsafe { card.launch(&form.kernel(kernel), blocks, 128, 0, args) };
}

/// A layer of the KV pools.
pub(super) struct Cache {
    pub(super) memory: Region,
    pub(super) kind: Kind,
    /// Bytes of a page.
    page: usize,
    /// Values-only layers: the key norm's weights and the turns.
    pub(super) key: Option<(Region, Turns)>,
    /// Of a cache in FP8.
    pub(super) scales: Option<KvScales>,
}

impl Cache {
    pub(super) fn new(
        card: &mut Card,
        kind: Kind,
        (blocks, page): (usize, usize),
        key: Option<(Region, Turns)>,
        scales: Option<KvScales>,
    ) -> Self {
        Self {
            memory: card.zeros(blocks * page),
            kind,
            page,
            key,
            scales,
        }
    }

    /// What pages hold.
    pub(super) fn form(&self) -> PageForm {
        PageForm {
            values_only: self.key.is_some(),
            fp8: self.scales.is_some(),
        }
    }

    /// Where a block's page of this layer lies.
    pub(super) fn page(&self, block: usize) -> Extent {
        Extent {
            at: self.memory.at + (block * self.page) as u64,
            bytes: self.page,
        }
    }
}

/// Clusters of the drafter's vocabulary, and the tokens chosen in a pass.
pub(super) struct Clusters {
    pub(super) head: Region,
    pub(super) ordering: Region,
    pub(super) best: Region,
    pub(super) ids: Region,
    pub(super) count: usize,
    pub(super) size: usize,
    pub(super) top: usize,
    pub(super) width: usize,
}
