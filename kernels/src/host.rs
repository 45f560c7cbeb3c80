//! Host memory that the card reads and writes by itself, and copies that nobody waits for.

#![allow(unsafe_code, reason = "driver calls")]

use std::{
    ffi::c_void,
    ops::{Deref, DerefMut, Range},
    time::{Duration, Instant},
};

use cudarc::driver::sys::{self, CUresult};

use crate::{
    abi::DevicePtr,
    device::{Device, DeviceError},
};

/// How long a wait is a busy one.
const SHORT: Duration = Duration::from_millis(50);

/// Page-locked words, zero at first.
pub struct Pinned {
    start: *mut u32,
    len: usize,
}

// SAFETY: it owns its memory and hands out references by the usual rules.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `len` words. The device must be bound to the calling thread.
    pub fn new(len: usize) -> Result<Self, DeviceError> {
        let mut start: *mut c_void = std::ptr::null_mut();
        let bytes = len.max(1) * size_of::<u32>();
        // SAFETY: writes one address.
        unsafe { sys::cuMemHostAlloc(&mut start, bytes, 0) }
            .result()
            .map_err(|error| DeviceError::Driver {
                doing: format!("taking {bytes} bytes of page-locked memory"),
                error,
            })?;
        let start = start.cast::<u32>();
        // SAFETY: the driver gave at least `len` words.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { start, len })
    }

    /// The words as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the same memory; bytes need no alignment and may have any value.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len * size_of::<u32>()) }
    }

    /// The words as bytes, to be filled.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len * size_of::<u32>()) }
    }
}

impl Deref for Pinned {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        // SAFETY: `len` words from `start` are ours and initialised.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: taken in `new`. A failure means that the context is gone, and the memory with it.
        let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}

impl Device {
    /// Copies words to an address behind all earlier work, and waits for nothing.
    ///
    /// # Safety
    /// The address has room for them, and they stay as they are until the copy is over.
    pub unsafe fn send(
        &self,
        to: DevicePtr,
        words: &Pinned,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        let from = &words[range];
        // SAFETY: the caller's word.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                to,
                from.as_ptr().cast(),
                size_of_val(from),
                self.stream().cu_stream(),
            )
        }
        .result()
        .map_err(|error| DeviceError::Driver {
            doing: "copying to the card".into(),
            error,
        })
    }

    /// Copies words from an address once all earlier work is done, and waits for nothing.
    ///
    /// # Safety
    /// The address holds as many, and nobody reads or writes `words` until the copy is over.
    pub unsafe fn fetch(
        &self,
        words: &mut Pinned,
        range: Range<usize>,
        from: DevicePtr,
    ) -> Result<(), DeviceError> {
        let to = &mut words[range];
        // SAFETY: the caller's word.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                to.as_mut_ptr().cast(),
                from,
                size_of_val(to),
                self.stream().cu_stream(),
            )
        }
        .result()
        .map_err(|error| DeviceError::Driver {
            doing: "copying from the card".into(),
            error,
        })
    }

    /// Waits for all work, but not for ever; false when the time is over and it is still at work.
    pub fn wait_within(&self, limit: Duration) -> Result<bool, DeviceError> {
        let begin = Instant::now();
        loop {
            // SAFETY: a live stream.
            match unsafe { sys::cuStreamQuery(self.stream().cu_stream()) } {
                CUresult::CUDA_ERROR_NOT_READY => {}
                other => {
                    return other
                        .result()
                        .map(|()| true)
                        .map_err(|error| DeviceError::Driver {
                            doing: "waiting for the card".into(),
                            error,
                        });
                }
            }
            let spent = begin.elapsed();
            if spent > limit {
                return Ok(false);
            }
            // Steps of a token take milliseconds; who waits longer is in no hurry.
            match spent < SHORT {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(200)),
            }
        }
    }

    /// Free and all memory of the card, in bytes.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }
            .result()
            .map_err(|error| DeviceError::Driver {
                doing: "asking for the card's memory".into(),
                error,
            })?;
        Ok((free, total))
    }

    /// Compute capability: major, minor.
    pub fn capability(&self) -> Result<(i32, i32), DeviceError> {
        self.context()
            .compute_capability()
            .map_err(|error| DeviceError::Driver {
                doing: "asking for the capability".into(),
                error,
            })
    }
}
