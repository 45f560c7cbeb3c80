//! A place in the order of a card's work that the host can wait for.

#![allow(unsafe_code, reason = "driver calls")]

use cudarc::driver::{
    CudaStream, DriverError,
    sys::{self, CUevent_flags, CUevent_wait_flags},
};

use crate::device::{Device, DeviceError};

/// A place in the order of a device's work.
pub struct Mark(sys::CUevent);

// SAFETY: a handle of the driver, which takes it from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

fn doing(what: &str) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Driver {
        doing: what.to_owned(),
        error,
    }
}

impl Mark {
    /// A mark that nothing is waited for at. The device must be bound to the calling thread.
    pub fn new() -> Result<Self, DeviceError> {
        let mut event = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle.
        unsafe { sys::cuEventCreate(&mut event, flags) }
            .result()
            .map_err(doing("making a mark"))?;
        Ok(Self(event))
    }

    /// Waits for all work that was in front of it when it was last set.
    pub fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: a live handle.
        unsafe { sys::cuEventSynchronize(self.0) }
            .result()
            .map_err(doing("waiting for a copy"))
    }
}

impl Mark {
    /// Lets work of `later` from now on wait for the work of `earlier` so far.
    pub(crate) fn order(
        &self,
        earlier: &CudaStream,
        later: &CudaStream,
    ) -> Result<(), DeviceError> {
        // SAFETY: live handles.
        unsafe {
            sys::cuEventRecord(self.0, earlier.cu_stream())
                .result()
                .and_then(|()| {
                    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
                    sys::cuStreamWaitEvent(later.cu_stream(), self.0, flags).result()
                })
        }
        .map_err(doing("ordering two streams"))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made in `new`. A failure means that the context is gone, and the mark with it.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

impl Device {
    /// Sets a mark behind all work so far.
    pub fn set(&self, mark: &Mark) -> Result<(), DeviceError> {
        // SAFETY: live handles.
        unsafe { sys::cuEventRecord(mark.0, self.stream().cu_stream()) }
            .result()
            .map_err(doing("setting a mark"))
    }
}
