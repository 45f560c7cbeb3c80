//! Zeroed memory on cache-line boundaries, and the activation buffers made of it.

#![allow(unsafe_code, reason = "aligned allocation")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use memmap2::MmapMut;

const LINE: usize = 64;
/// Bytes from which a region is a map of its own.
const LARGE: usize = 4 << 20;

/// Element types for which all-zero bytes are a value and that need no drop.
pub(super) trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}

/// `len` elements, zero at first. Pages that nobody touches cost nothing.
pub(super) struct Region<T: Plain> {
    owner: Owner,
    start: *mut T,
    len: usize,
}

/// What was allocated: the system's zeroed pages come with its own alignment alone.
enum Owner {
    Heap(*mut u8),
    Pages { _map: MmapMut },
}

// SAFETY: it owns its memory and hands out references by the usual rules.
unsafe impl<T: Plain> Send for Region<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Region<T> {}

impl<T: Plain> Region<T> {
    pub(super) fn new(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty.
        let block = unsafe { alloc_zeroed(layout) };
        if block.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: the block is a line longer than the elements.
        let start = unsafe { block.add(block.align_offset(LINE)) };
        Self {
            owner: Owner::Heap(block),
            start: start.cast(),
            len,
        }
    }

    /// For numbers that are all written soon and read by every step: on large pages, where the
    /// system has them, which take less time to get and to find.
    pub(super) fn of_weights(len: usize) -> Self {
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes < LARGE {
            return Self::new(len);
        }
        let Ok(mut map) = MmapMut::map_anon(bytes) else {
            handle_alloc_error(Self::layout(len));
        };
        // Advice may fail without harm.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Self {
            start: map.as_mut_ptr().cast(),
            owner: Owner::Pages { _map: map },
            len,
        }
    }

    fn layout(len: usize) -> Layout {
        let bytes = len.saturating_mul(size_of::<T>()).saturating_add(LINE);
        match Layout::from_size_align(bytes, align_of::<T>()) {
            Ok(layout) => layout,
            // More than the address space holds: report it as memory that is not there.
            Err(_) => handle_alloc_error(Layout::new::<T>()),
        }
    }
}

impl<T: Plain> std::ops::Deref for Region<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements from `start` are ours and initialised.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T: Plain> std::ops::DerefMut for Region<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T: Plain> Drop for Region<T> {
    fn drop(&mut self) {
        if let Owner::Heap(block) = self.owner {
            // SAFETY: allocated in `new` with this very layout.
            unsafe { dealloc(block, Self::layout(self.len)) }
        }
    }
}

/// Activations, `[rows, width]`.
///
/// Rows lie `stride` apart: whole panels of 32 columns, plus a cache line so that equal columns
/// of several rows do not fall into one cache set.
pub(super) struct Buf {
    data: Region<f32>,
    width: usize,
    stride: usize,
}

impl Buf {
    pub(super) fn new(rows: usize, width: usize) -> Self {
        let stride = width.next_multiple_of(32) + 16;
        Self {
            data: Region::new(rows * stride),
            width,
            stride,
        }
    }

    /// Columns.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Distance between rows.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Everything, padding included.
    pub(super) fn data(&self) -> &[f32] {
        &self.data
    }

    /// Everything, padding included.
    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// Row `i`.
    pub(super) fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.stride..i * self.stride + self.width]
    }

    /// Row `i`.
    pub(super) fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.stride..i * self.stride + self.width]
    }
}
