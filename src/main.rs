//! kvgate
fn main(){}
