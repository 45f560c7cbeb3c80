//! The `pilot` program.

fn main() {}
