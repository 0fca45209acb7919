//! kvgate

pub mod fleet;
