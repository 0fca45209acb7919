//! A model of an engine fleet and its agents, without I/O and without an operating system clock.
//!
//! Promises: one seed decides everything; time moves only when a caller moves it; after every step
//! the tokens of each engine add up to its pool. Left to others: HTTP and real time (the demo room)
//! and every admission decision (the core).
//!
//! With the feature `check` there is also a simulation of the whole gate (`run`): callers,
//! connections, a store that fails and a process that dies, judged after every turn.

#[cfg(feature = "check")]
mod audit;
#[cfg(feature = "check")]
mod callers;
pub mod clock;
#[cfg(feature = "check")]
mod closings;
#[cfg(feature = "check")]
mod dice;
pub mod engine;
#[cfg(feature = "check")]
pub mod faults;
pub mod fleet;
#[cfg(feature = "check")]
mod operators;
#[cfg(feature = "check")]
mod readings;
#[cfg(feature = "check")]
pub mod report;
#[cfg(feature = "check")]
pub mod run;
#[cfg(feature = "check")]
mod shell;
#[cfg(feature = "check")]
mod trackers;
pub mod workload;
