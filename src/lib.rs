//! kvgate
pub mod demo;
