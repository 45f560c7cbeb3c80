//! The forms of the inputs, shared by the targets and the program that makes their seeds.

pub mod checkpoint;
pub mod turn;
