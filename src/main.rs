//! kvgate

fn main() {}
