//! A model of an engine fleet and its agents, without I/O and without an operating system clock.
//!
//! Promises: one seed decides everything; time moves only when a caller moves it; after every step
//! the tokens of each engine add up to its pool. Left to others: HTTP and real time (the demo room)
//! and every admission decision (the core).

pub mod clock;
pub mod engine;
pub mod fleet;
pub mod workload;
