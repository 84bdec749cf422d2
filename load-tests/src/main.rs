//! The `regent-load` binary.

fn main() {}
