//! kvgate
fn main() {}
