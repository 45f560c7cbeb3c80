//! Compute kernels for the GPU.
