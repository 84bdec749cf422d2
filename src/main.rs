//! The `regent` binary.

fn main() {}
