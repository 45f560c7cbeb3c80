//! Sixteen fp32 lanes, three times: AVX-512, AVX2 with FMA, portable.
//!
//! Kernels are written once over [`Lanes`] and vectorise over *outputs*, so that an output's own
//! chain of fused multiply-adds is the same whatever the level: the three give the same bits.

#![allow(unsafe_code, reason = "vector kernels")]

/// Which instructions to use. It cannot change a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust; slow where the target has no fused multiply-add.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// The best level this machine has.
    pub fn detect() -> Self {
        [Level::Avx512, Level::Avx2]
            .into_iter()
            .find(|l| l.is_available())
            .unwrap_or(Level::Portable)
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
    /// Rows that a register block of 32 columns can hold.
    const MAX_ROWS: usize;

    fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// 16 bf16 numbers.
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// 32 bf16 numbers in pairs: the first of each pair, the second of each.
    unsafe fn load_pairs(p: *const u16) -> (Self, Self);
    /// `self + a * b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Lane `i` holds number `i`.
    fn to_array(self) -> [f32; 16];
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
        Level::Avx512 => return unsafe { x86::run_avx512(kernel) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { x86::run_avx2(kernel) },
        Level::Portable => {}
    }
    let _ = level;
    kernel.run::<Portable>();
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
    const MAX_ROWS: usize = 2;

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
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller vouches for 16 elements.
        let bits = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        Self::from_fn(|i| f32::from_bits(u32::from(bits[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const u16) -> (Self, Self) {
        // SAFETY: the caller vouches for 32 elements.
        let bits = unsafe { p.cast::<[u16; 32]>().read_unaligned() };
        let widen =
            |odd: usize| Self::from_fn(|i| f32::from_bits(u32::from(bits[2 * i + odd]) << 16));
        (widen(0), widen(1))
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

    use super::{Kernel, Lanes};

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

    impl Lanes for Avx512 {
        const MAX_ROWS: usize = 12;

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
        unsafe fn load_bf16(p: *const u16) -> Self {
            unsafe {
                let half = _mm256_loadu_si256(p.cast());
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(
                    _mm512_cvtepu16_epi32(half),
                )))
            }
        }
        #[inline(always)]
        unsafe fn load_pairs(p: *const u16) -> (Self, Self) {
            unsafe {
                let pairs = _mm512_loadu_si512(p.cast());
                let first = _mm512_slli_epi32::<16>(pairs);
                let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32 as i32));
                (
                    Self(_mm512_castsi512_ps(first)),
                    Self(_mm512_castsi512_ps(second)),
                )
            }
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
    }

    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256, __m256);

    impl Lanes for Avx2 {
        const MAX_ROWS: usize = 3;

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
        unsafe fn load_bf16(p: *const u16) -> Self {
            unsafe {
                let widen = |p: *const u16| {
                    let eight = _mm_loadu_si128(p.cast());
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight)))
                };
                Self(widen(p), widen(p.add(8)))
            }
        }
        #[inline(always)]
        unsafe fn load_pairs(p: *const u16) -> (Self, Self) {
            unsafe {
                let mask = _mm256_set1_epi32(0xffff_0000u32 as i32);
                let split = |p: *const u16| {
                    let pairs = _mm256_loadu_si256(p.cast());
                    (
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
                        _mm256_castsi256_ps(_mm256_and_si256(pairs, mask)),
                    )
                };
                let (low, high) = (split(p), split(p.add(16)));
                (Self(low.0, high.0), Self(low.1, high.1))
            }
        }
        #[inline(always)]
        fn fma(self, a: Self, b: Self) -> Self {
            unsafe {
                Self(
                    _mm256_fmadd_ps(a.0, b.0, self.0),
                    _mm256_fmadd_ps(a.1, b.1, self.1),
                )
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
        fn to_array(self) -> [f32; 16] {
            let mut out = [0.0; 16];
            unsafe { self.store(out.as_mut_ptr()) };
            out
        }
    }
}
