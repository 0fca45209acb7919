//! kvgate: durable program-aware admission and session KV lifecycle for SGLang fleets.
//!
//! `docs/ARCHITECTURE.md` has the map of the rooms and the walks through them.

pub mod access;
pub mod boot;
pub mod check;
pub mod cli;
pub mod clock;
pub mod config;
pub mod demo;
pub mod fleet;
#[cfg(test)]
mod fuzz;
pub mod gate;
pub mod history;
pub mod http;
pub mod load;
pub mod store;
pub mod supervisor;
pub mod support;
pub mod telemetry;
pub mod web;
pub mod words;
