//! Launches recorded once and replayed as a whole.

#![allow(unsafe_code, reason = "a handle of the driver changes threads")]

use cudarc::driver::{
    CudaGraph, DriverError,
    sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode},
};

use crate::device::{Device, DeviceError};

/// Recorded launches, with the parameter blocks that they had.
pub struct Graph(CudaGraph);

// SAFETY: a handle of the driver, used by one thread at a time.
unsafe impl Send for Graph {}

fn doing(what: &'static str) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Driver {
        doing: what.to_owned(),
        error,
    }
}

impl Graph {
    /// Records what `work` launches, without running it; `None` if it launches nothing.
    pub fn record(
        device: &Device,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Option<Self>, DeviceError> {
        let stream = device.stream();
        stream
            .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(doing("recording a graph"))?;
        let done = work();
        let graph = stream
            .end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY)
            .map_err(doing("making a graph"));
        done?;
        Ok(graph?.map(Self))
    }

    /// Runs it behind all earlier work.
    pub fn launch(&self) -> Result<(), DeviceError> {
        self.0.launch().map_err(doing("launching a graph"))
    }
}
