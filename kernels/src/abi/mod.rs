//! Parameter blocks of the kernels, field for field those of `cuda/include/abi.cuh`, and how each
//! kernel is launched. The compiler of either side asserts the same sizes.

mod attention;
mod experts;
mod linear;
mod rows;
mod sample;
mod tiles;

pub use attention::*;
pub use experts::*;
pub use linear::*;
pub use rows::*;
pub use sample::*;
pub use tiles::*;

/// A device address; 0 is none. 64 bits on every side.
pub type DevicePtr = u64;
