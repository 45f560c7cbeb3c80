//! The forms of the inputs, and the inputs that the targets begin with.

pub mod checkpoint;
pub mod seeds;
pub mod turn;
