//! Stored codes to numbers that steps take: bf16 or fp32. Every step is exact.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{decode, form::MOST_BYTES, matrix::Codes, simd::Lanes};

/// Codes of a stretch of a row.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    pub(super) codes: Codes,
    pub(super) bytes: &'a [u8],
}

/// Does something with each so many bytes, the last filled up with zeros. A closure would not do: it
/// need not be compiled for the vector instructions around it.
macro_rules! each {
    ($all:expr, $count:expr, |$i:ident, $bytes:ident| $what:expr) => {{
        let (units, rest) = $all.as_chunks::<{ $count }>();
        for ($i, $bytes) in units.iter().enumerate() {
            $what
        }
        if !rest.is_empty() {
            let mut room = [0; $count];
            room[..rest.len()].copy_from_slice(rest);
            let ($i, $bytes) = (units.len(), &room);
            $what
        }
    }};
}

impl Stretch<'_> {
    /// The numbers as bf16, one after the other, or dealt out where they are E2M1.
    ///
    /// # Safety
    /// There is room for them, rounded up to whole units, behind `to`.
    #[inline(always)]
    pub(super) unsafe fn put_words<V: Lanes>(&self, to: *mut u16) {
        match self.codes {
            Codes::E4m3 => each!(self.bytes, 32, |i, codes| {
                // SAFETY: 32 codes are a unit.
                unsafe { V::put(V::e4m3(codes.as_ptr()), to.add(32 * i)) };
            }),
            Codes::E2m1 => each!(self.bytes, MOST_BYTES, |i, codes| {
                // SAFETY: 256 codes are a unit.
                let block = unsafe { V::block(codes.as_ptr()) };
                for step in 0..8 {
                    // SAFETY: as above.
                    unsafe { V::put(V::e2m1(&block, step), to.add(256 * i + 32 * step)) };
                }
            }),
            Codes::Int4 => each!(self.bytes, 16, |i, codes| {
                let words = decode::int4_words(codes);
                // SAFETY: 32 codes are a unit.
                unsafe { to.cast::<[u16; 32]>().add(i).write_unaligned(words) };
            }),
            Codes::Bf16 | Codes::F16 | Codes::F32 => each!(self.bytes, 64, |i, numbers| {
                // SAFETY: 32 numbers are a unit.
                unsafe { V::put(V::weights(numbers.as_ptr().cast()), to.add(32 * i)) };
            }),
        }
    }

    /// The numbers as fp32, one after the other.
    ///
    /// # Safety
    /// There is room for them, rounded up to 32, behind `to`.
    #[inline(always)]
    pub(super) unsafe fn put_singles(&self, to: *mut f32) {
        match self.codes {
            Codes::F32 => each!(self.bytes, 64, |i, bytes| {
                let mut numbers = [0.0; 16];
                for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *number = f32::from_le_bytes(*bytes);
                }
                // SAFETY: the caller's word.
                unsafe { put(to, i, numbers) };
            }),
            Codes::Bf16 => each!(self.bytes, 32, |i, bytes| {
                let mut numbers = [0.0; 16];
                for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *number = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
                // SAFETY: the caller's word.
                unsafe { put(to, i, numbers) };
            }),
            Codes::F16 => each!(self.bytes, 32, |i, bytes| {
                let mut numbers = [0.0; 16];
                for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *number = decode::fp16(u16::from_le_bytes(*bytes));
                }
                // SAFETY: the caller's word.
                unsafe { put(to, i, numbers) };
            }),
            Codes::E4m3 => each!(self.bytes, 16, |i, codes| {
                let mut numbers = [0.0; 16];
                for (number, code) in numbers.iter_mut().zip(codes) {
                    *number = decode::e4m3(*code);
                }
                // SAFETY: the caller's word.
                unsafe { put(to, i, numbers) };
            }),
            Codes::E2m1 => each!(self.bytes, 8, |i, codes| {
                let numbers = halves(codes, decode::e2m1);
                // SAFETY: the caller's word.
                unsafe { put(to, i, numbers) };
            }),
            Codes::Int4 => each!(self.bytes, 8, |i, codes| {
                let numbers = halves(codes, |code| code as f32 - 8.0);
                // SAFETY: the caller's word.
                unsafe { put(to, i, numbers) };
            }),
        }
    }
}

/// # Safety
/// There is room for sixteen numbers, `i` times as many behind `to`.
#[inline(always)]
unsafe fn put(to: *mut f32, i: usize, numbers: [f32; 16]) {
    // SAFETY: the caller's word.
    unsafe { to.cast::<[f32; 16]>().add(i).write_unaligned(numbers) };
}

/// The numbers of codes of four bits, the low four of a byte first.
#[inline(always)]
fn halves(codes: &[u8; 8], number: impl Fn(u32) -> f32) -> [f32; 16] {
    let mut numbers = [0.0; 16];
    for (pair, codes) in numbers.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [number(u32::from(codes & 15)), number(u32::from(codes >> 4))];
    }
    numbers
}
