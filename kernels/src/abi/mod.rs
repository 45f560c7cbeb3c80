//! Parameter blocks of the kernels, field for field those of `cuda/include/abi.cuh`, and how each
//! kernel is launched. The compiler of either side asserts the same sizes.

mod attention;
mod linear;
mod rows;

pub use attention::*;
pub use linear::*;
pub use rows::*;

/// A device address; 0 is none. 64 bits on every side.
pub type DevicePtr = u64;
