//! What kvgate decides, as a deterministic state machine.
#![no_std]

extern crate alloc;

pub mod ids;
pub mod policy;
pub mod reading;
pub mod units;
