//! The `brain` program.

fn main() {}
