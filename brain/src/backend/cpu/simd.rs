//! Sixteen fp32 lanes, four times: AVX-512 with bf16 products, AVX-512, AVX2 with FMA, portable.
//!
//! Kernels are written once over [`Lanes`]. What a lane computes is defined by the kernel, whatever the
//! level: the four give the same bits, but for the one case that is named below.
//!
//! The bf16 product instruction adds two products with a rounding after each, the one in the high
//! halves first: so it is two steps of the very chain that the others compute. It takes subnormals for
//! zero, and so do the others ([`Lanes::weights`]; inputs, keys and values are flushed when they are
//! rounded); a chain whose partial sum lies below 2^-126, and is not zero, is the one case where levels
//! may differ.

#![allow(unsafe_code, reason = "vector kernels")]

use super::decode;

/// Which instructions to use. It changes no bit of a result, unless a sum is as small as this module's
/// text says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust; slow where the target has no fused multiply-add.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// These and the bf16 products.
    Avx512Bf16,
}

impl Level {
    /// The best level this machine has.
    pub fn detect() -> Self {
        Self::all()
            .into_iter()
            .rfind(|l| l.is_available())
            .unwrap_or(Level::Portable)
    }

    /// Every level, slowest first.
    pub fn all() -> [Self; 4] {
        [
            Level::Portable,
            Level::Avx2,
            Level::Avx512,
            Level::Avx512Bf16,
        ]
    }

    /// Whether this machine can run a level.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Level::Portable => true,
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Level::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("fma")
            }
            Level::Avx512Bf16 => {
                Level::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")
            }
        };
        #[cfg(not(target_arch = "x86_64"))]
        return self == Level::Portable;
    }
}

/// Sixteen fp32 numbers.
///
/// Methods that take pointers are unsafe: the pointed-to elements must be there. Alignment is
/// not needed.
pub(super) trait Lanes: Copy {
    /// Whether there are registers for 12 rows of 32 columns; else for 3.
    const WIDE: bool;
    /// Sixteen pairs of bf16 numbers.
    type Words: Copy;

    fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Sixteen pairs: 32 numbers, the first of each pair in the high half of its word.
    unsafe fn words(p: *const u16) -> Self::Words;
    /// One pair, sixteen times.
    unsafe fn spread(p: *const u32) -> Self::Words;
    /// The first number of each pair.
    fn first(words: Self::Words) -> Self;
    /// The second number of each pair.
    fn second(words: Self::Words) -> Self;
    /// `self + first * first`, then `+ second * second`, each rounded once.
    fn dot(self, a: Self::Words, b: Self::Words) -> Self;
    /// `self + a * b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Lane `i` holds number `i`.
    fn to_array(self) -> [f32; 16];

    /// Sixteen pairs of stored bf16 numbers; subnormals, which the product instruction takes for
    /// zero, are zeros.
    unsafe fn weights(p: *const u16) -> Self::Words;
    /// The numbers of 32 E4M3 codes, none of them NaN.
    #[inline(always)]
    unsafe fn e4m3(p: *const u8) -> Self::Words {
        // SAFETY: the caller vouches for 32 codes.
        unsafe { Self::words(decode::e4m3_words(&*p.cast()).as_ptr()) }
    }
    /// 256 codes of E2M1, ready for [`Lanes::e2m1`].
    type Block: Copy;
    unsafe fn block(p: *const u8) -> Self::Block;
    /// Numbers of step `step` of eight, as [`decode::dealt`] deals them out.
    fn e2m1(block: &Self::Block, step: usize) -> Self::Words;
    /// The scales of sixteen blocks of NVFP4.
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 16 codes.
        unsafe { Self::load(decode::scales(&*p.cast()).as_ptr()) }
    }
    /// Puts pairs down as they are loaded.
    unsafe fn put(words: Self::Words, to: *mut u16);
    /// The sums of four times sixteen lanes. Lanes `i` and `i + 8` are added first, of these sums
    /// `i` and `i + 4`, then `i` and `i + 2`, then the last two.
    #[inline(always)]
    fn sums(all: [Self; 4]) -> [f32; 4] {
        all.map(|lanes| {
            let v = lanes.to_array();
            let eight: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
            let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
            (four[0] + four[2]) + (four[1] + four[3])
        })
    }
}

/// A kernel: code over any lanes.
pub(super) trait Kernel {
    fn run<V: Lanes>(self);
}

/// Runs a kernel at a level, which must be available.
pub(super) fn dispatch<K: Kernel>(level: Level, kernel: K) {
    #[cfg(target_arch = "x86_64")]
    match level {
        // SAFETY: executors are made only for available levels.
        Level::Avx512Bf16 => return unsafe { x86::run_avx512_bf16(kernel) },
        // SAFETY: as above.
        Level::Avx512 => return unsafe { x86::run_avx512(kernel) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::run_avx2(kernel) },
        Level::Portable => {}
    }
    let _ = level;
    kernel.run::<Portable>();
}

/// Words of two bf16 numbers each, the first high.
#[inline(always)]
fn joined(first: [f32; 16], second: [f32; 16]) -> [u32; 16] {
    std::array::from_fn(|i| first[i].to_bits() & 0xffff_0000 | second[i].to_bits() >> 16)
}

#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 16]);

impl Portable {
    #[inline(always)]
    fn from_fn(f: impl FnMut(usize) -> f32) -> Self {
        Self(std::array::from_fn(f))
    }
}

impl Lanes for Portable {
    const WIDE: bool = false;
    type Words = (Self, Self);

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 16])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller vouches for 16 elements.
        Self(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn words(p: *const u16) -> Self::Words {
        // SAFETY: the caller vouches for 32 elements.
        let words = unsafe { p.cast::<[[u16; 2]; 16]>().read_unaligned() };
        let widen =
            |half: usize| Self::from_fn(|i| f32::from_bits(u32::from(words[i][half]) << 16));
        // Little-endian: the high half comes second.
        (widen(1), widen(0))
    }
    #[inline(always)]
    unsafe fn weights(p: *const u16) -> Self::Words {
        // SAFETY: the caller's word.
        let (first, second) = unsafe { Self::words(p) };
        let flushed = |v: Self| {
            Self::from_fn(|i| match v.0[i].to_bits() & 0x7f80_0000 {
                0 => 0.0,
                _ => v.0[i],
            })
        };
        (flushed(first), flushed(second))
    }
    type Block = [u8; decode::DEAL / 2];
    #[inline(always)]
    unsafe fn block(p: *const u8) -> Self::Block {
        // SAFETY: the caller vouches for 256 codes.
        unsafe { *p.cast() }
    }
    #[inline(always)]
    fn e2m1(block: &Self::Block, step: usize) -> Self::Words {
        // SAFETY: these are 32 numbers.
        unsafe { Self::words(decode::e2m1_words(block, step).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn put(words: Self::Words, to: *mut u16) {
        // SAFETY: the caller vouches for room for 32 numbers.
        unsafe {
            to.cast::<[u32; 16]>()
                .write_unaligned(joined(words.0.0, words.1.0))
        };
    }
    #[inline(always)]
    unsafe fn spread(p: *const u32) -> Self::Words {
        // SAFETY: the caller vouches for one element.
        let word = unsafe { p.read_unaligned() };
        (
            Self::splat(f32::from_bits(word & 0xffff_0000)),
            Self::splat(f32::from_bits(word << 16)),
        )
    }
    #[inline(always)]
    fn first(words: Self::Words) -> Self {
        words.0
    }
    #[inline(always)]
    fn second(words: Self::Words) -> Self {
        words.1
    }
    #[inline(always)]
    fn dot(self, a: Self::Words, b: Self::Words) -> Self {
        self.fma(a.0, b.0).fma(a.1, b.1)
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        Self::from_fn(|i| a.0[i].mul_add(b.0[i], self.0[i]))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self::from_fn(|i| self.0[i] * other.0[i])
    }
    #[inline(always)]
    fn to_array(self) -> [f32; 16] {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Kernel, Lanes, decode};

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
    pub(super) fn run_avx512_bf16<K: Kernel>(kernel: K) {
        kernel.run::<Avx512Bf16>();
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn run_avx512<K: Kernel>(kernel: K) {
        kernel.run::<Avx512>();
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn run_avx2<K: Kernel>(kernel: K) {
        kernel.run::<Avx2>();
    }

    // SAFETY of every block below: the types are private to `dispatch`, which runs a kernel over
    // them only inside a function with the instructions enabled; pointers are the callers' word.

    #[derive(Clone, Copy)]
    pub(super) struct Avx512(__m512);

    /// First and second numbers of sixteen pairs.
    #[inline(always)]
    fn split_512(words: __m512i) -> (Avx512, Avx512) {
        unsafe {
            let first = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000u32 as i32));
            let second = _mm512_slli_epi32::<16>(words);
            (
                Avx512(_mm512_castsi512_ps(first)),
                Avx512(_mm512_castsi512_ps(second)),
            )
        }
    }

    /// Subnormals as zeros.
    #[inline(always)]
    fn flushed_512(x: Avx512) -> Avx512 {
        unsafe {
            let exponent = _mm512_set1_epi32(0x7f80_0000);
            let some = _mm512_test_epi32_mask(_mm512_castps_si512(x.0), exponent);
            Avx512(_mm512_maskz_mov_ps(some, x.0))
        }
    }

    /// See [`Lanes::sums`].
    #[inline(always)]
    fn sums_512([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        unsafe {
            let halves = |a, b| {
                let low = _mm512_shuffle_f32x4::<0x44>(a, b);
                _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xee>(a, b))
            };
            let (ab, cd) = (halves(a, b), halves(c, d));
            let low = _mm512_shuffle_f32x4::<0x88>(ab, cd);
            let four = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            let two = _mm512_add_ps(four, _mm512_permute_ps::<0x4e>(four));
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0xb1>(two));
            let mut sums = [0.0; 4];
            _mm512_mask_compressstoreu_ps(sums.as_mut_ptr().cast(), 0x1111, one);
            sums
        }
    }

    impl Lanes for Avx512 {
        const WIDE: bool = true;
        type Words = (Self, Self);

        #[inline(always)]
        fn splat(x: f32) -> Self {
            Self(unsafe { _mm512_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Self(unsafe { _mm512_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn words(p: *const u16) -> Self::Words {
            split_512(unsafe { _mm512_loadu_si512(p.cast()) })
        }
        #[inline(always)]
        unsafe fn spread(p: *const u32) -> Self::Words {
            split_512(unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) })
        }
        #[inline(always)]
        fn first(words: Self::Words) -> Self {
            words.0
        }
        #[inline(always)]
        fn second(words: Self::Words) -> Self {
            words.1
        }
        #[inline(always)]
        fn dot(self, a: Self::Words, b: Self::Words) -> Self {
            self.fma(a.0, b.0).fma(a.1, b.1)
        }
        #[inline(always)]
        fn fma(self, a: Self, b: Self) -> Self {
            Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn to_array(self) -> [f32; 16] {
            let mut out = [0.0; 16];
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) };
            out
        }

        #[inline(always)]
        unsafe fn weights(p: *const u16) -> Self::Words {
            let (first, second) = unsafe { Self::words(p) };
            (flushed_512(first), flushed_512(second))
        }
        #[inline(always)]
        unsafe fn e4m3(p: *const u8) -> Self::Words {
            split_512(unsafe { decode::avx512::e4m3(p) })
        }
        type Block = decode::avx512::Block;
        #[inline(always)]
        unsafe fn block(p: *const u8) -> Self::Block {
            unsafe { decode::avx512::block(p) }
        }
        #[inline(always)]
        fn e2m1(block: &Self::Block, step: usize) -> Self::Words {
            split_512(unsafe { decode::avx512::e2m1(block, step) })
        }
        #[inline(always)]
        unsafe fn scales(p: *const u8) -> Self {
            Self(unsafe { decode::avx512::scales(p) })
        }
        #[inline(always)]
        unsafe fn put(words: Self::Words, to: *mut u16) {
            let first = unsafe { _mm512_castps_si512(words.0.0) };
            let second = unsafe { _mm512_castps_si512(words.1.0) };
            unsafe {
                let word = _mm512_or_si512(first, _mm512_srli_epi32::<16>(second));
                _mm512_storeu_si512(to.cast(), word);
            }
        }
        #[inline(always)]
        fn sums(all: [Self; 4]) -> [f32; 4] {
            sums_512(all.map(|lanes| lanes.0))
        }
    }

    #[derive(Clone, Copy)]
    pub(super) struct Avx512Bf16(__m512);

    impl Lanes for Avx512Bf16 {
        const WIDE: bool = true;
        type Words = __m512i;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            Self(Avx512::splat(x).0)
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Self(unsafe { Avx512::load(p) }.0)
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { Avx512(self.0).store(p) }
        }
        #[inline(always)]
        unsafe fn words(p: *const u16) -> Self::Words {
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn spread(p: *const u32) -> Self::Words {
            unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        fn first(words: Self::Words) -> Self {
            Self(split_512(words).0.0)
        }
        #[inline(always)]
        fn second(words: Self::Words) -> Self {
            Self(split_512(words).1.0)
        }
        #[inline(always)]
        fn dot(self, a: Self::Words, b: Self::Words) -> Self {
            unsafe {
                let [a, b] = [a, b].map(|w| std::mem::transmute::<__m512i, __m512bh>(w));
                Self(_mm512_dpbf16_ps(self.0, a, b))
            }
        }
        #[inline(always)]
        fn fma(self, a: Self, b: Self) -> Self {
            Self(Avx512(self.0).fma(Avx512(a.0), Avx512(b.0)).0)
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Self(Avx512(self.0).mul(Avx512(other.0)).0)
        }
        #[inline(always)]
        fn to_array(self) -> [f32; 16] {
            Avx512(self.0).to_array()
        }

        #[inline(always)]
        unsafe fn weights(p: *const u16) -> Self::Words {
            unsafe { Self::words(p) }
        }
        #[inline(always)]
        unsafe fn e4m3(p: *const u8) -> Self::Words {
            unsafe { decode::avx512::e4m3(p) }
        }
        type Block = decode::avx512::Block;
        #[inline(always)]
        unsafe fn block(p: *const u8) -> Self::Block {
            unsafe { decode::avx512::block(p) }
        }
        #[inline(always)]
        fn e2m1(block: &Self::Block, step: usize) -> Self::Words {
            unsafe { decode::avx512::e2m1(block, step) }
        }
        #[inline(always)]
        unsafe fn scales(p: *const u8) -> Self {
            Self(unsafe { decode::avx512::scales(p) })
        }
        #[inline(always)]
        unsafe fn put(words: Self::Words, to: *mut u16) {
            unsafe { _mm512_storeu_si512(to.cast(), words) }
        }
        #[inline(always)]
        fn sums(all: [Self; 4]) -> [f32; 4] {
            sums_512(all.map(|lanes| lanes.0))
        }
    }

    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256, __m256);

    /// First and second numbers of eight pairs.
    #[inline(always)]
    fn split_256(words: __m256i) -> (__m256, __m256) {
        unsafe {
            let first = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000u32 as i32));
            let second = _mm256_slli_epi32::<16>(words);
            (_mm256_castsi256_ps(first), _mm256_castsi256_ps(second))
        }
    }

    /// Subnormals as zeros.
    #[inline(always)]
    fn flushed_256(x: Avx2) -> Avx2 {
        let flushed = |x: __m256| unsafe {
            let exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f80_0000));
            let zero = _mm256_castps_si256(_mm256_and_ps(x, exponent));
            let zero = _mm256_cmpeq_epi32(zero, _mm256_setzero_si256());
            _mm256_andnot_ps(_mm256_castsi256_ps(zero), x)
        };
        Avx2(flushed(x.0), flushed(x.1))
    }

    impl Lanes for Avx2 {
        const WIDE: bool = false;
        type Words = (Self, Self);

        #[inline(always)]
        fn splat(x: f32) -> Self {
            unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn words(p: *const u16) -> Self::Words {
            unsafe {
                let low = split_256(_mm256_loadu_si256(p.cast()));
                let high = split_256(_mm256_loadu_si256(p.add(16).cast()));
                (Self(low.0, high.0), Self(low.1, high.1))
            }
        }
        #[inline(always)]
        unsafe fn weights(p: *const u16) -> Self::Words {
            let (first, second) = unsafe { Self::words(p) };
            (flushed_256(first), flushed_256(second))
        }
        type Block = [u8; decode::DEAL / 2];
        #[inline(always)]
        unsafe fn block(p: *const u8) -> Self::Block {
            unsafe { *p.cast() }
        }
        #[inline(always)]
        fn e2m1(block: &Self::Block, step: usize) -> Self::Words {
            unsafe { Self::words(decode::e2m1_words(block, step).as_ptr()) }
        }
        #[inline(always)]
        unsafe fn put(words: Self::Words, to: *mut u16) {
            let all = super::joined(words.0.to_array(), words.1.to_array());
            unsafe { to.cast::<[u32; 16]>().write_unaligned(all) };
        }
        #[inline(always)]
        unsafe fn spread(p: *const u32) -> Self::Words {
            unsafe {
                let both = split_256(_mm256_set1_epi32(p.cast::<i32>().read_unaligned()));
                (Self(both.0, both.0), Self(both.1, both.1))
            }
        }
        #[inline(always)]
        fn first(words: Self::Words) -> Self {
            words.0
        }
        #[inline(always)]
        fn second(words: Self::Words) -> Self {
            words.1
        }
        #[inline(always)]
        fn dot(self, a: Self::Words, b: Self::Words) -> Self {
            self.fma(a.0, b.0).fma(a.1, b.1)
        }
        #[inline(always)]
        fn fma(self, a: Self, b: Self) -> Self {
            unsafe {
                let low = _mm256_fmadd_ps(a.0, b.0, self.0);
                Self(low, _mm256_fmadd_ps(a.1, b.1, self.1))
            }
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            unsafe {
                Self(
                    _mm256_mul_ps(self.0, other.0),
                    _mm256_mul_ps(self.1, other.1),
                )
            }
        }
        #[inline(always)]
        fn sums(all: [Self; 4]) -> [f32; 4] {
            let four = |x: Self| unsafe {
                let eight = _mm256_add_ps(x.0, x.1);
                _mm_add_ps(
                    _mm256_castps256_ps128(eight),
                    _mm256_extractf128_ps::<1>(eight),
                )
            };
            let [a, b, c, d] = all.map(four);
            unsafe {
                // Sums `i` and `i + 2` of two each.
                let two = |a, b| _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
                let sums = _mm_hadd_ps(two(a, b), two(c, d));
                let mut out = [0.0; 4];
                _mm_storeu_ps(out.as_mut_ptr(), sums);
                out
            }
        }
        #[inline(always)]
        fn to_array(self) -> [f32; 16] {
            let mut out = [0.0; 16];
            unsafe { self.store(out.as_mut_ptr()) };
            out
        }
    }
}
