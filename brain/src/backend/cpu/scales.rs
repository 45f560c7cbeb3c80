//! Scales of groups of weights, as lanes that a group's sums are multiplied by.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{claim::STRIP, matrix::Part, simd::Lanes, tile::Scales};

/// Scales of NVFP4 as they are stored.
pub(super) struct BlockScales {
    pub(super) starts: [*const u8; STRIP],
    pub(super) blocks: usize,
}

impl Scales for BlockScales {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, output: usize, group: usize) -> V {
        let left = self.blocks - 16 * group;
        // SAFETY: the caller's word; of the last group there may be fewer.
        unsafe {
            let start = self.starts[output].add(16 * group);
            if left >= 16 {
                return V::scales(start);
            }
            let mut sixteen = [0; 16];
            sixteen[..left].copy_from_slice(std::slice::from_raw_parts(start, left));
            V::scales(sixteen.as_ptr())
        }
    }
}

/// Scales of groups as they are stored.
pub(super) struct GroupScales<'a> {
    pub(super) part: &'a Part,
    pub(super) first: usize,
    pub(super) outputs: usize,
}

impl Scales for GroupScales<'_> {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, output: usize, group: usize) -> V {
        V::splat(
            self.part
                .scale(self.first + output.min(self.outputs - 1), group),
        )
    }
}

/// Lanes of scales, `[outputs, groups, 16]`.
pub(super) struct Table {
    pub(super) scales: *const f32,
    pub(super) groups: usize,
}

impl Scales for Table {
    #[inline(always)]
    unsafe fn of<V: Lanes>(&self, output: usize, group: usize) -> V {
        // SAFETY: the caller's word.
        unsafe { V::load(self.scales.add((output * self.groups + group) * 16)) }
    }
}
