//! Given, command, expect: what `docs/semantics.md` says of the core, rule by rule.
#![cfg(test)]
#![allow(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::wildcard_enum_match_arm,
    missing_docs,
    reason = "a test that overflows or meets an unexpected answer shall fail loudly"
)]

#[path = "../common/mod.rs"]
mod common;

mod capacity;
mod cases;
mod closes;
mod decision;
mod delivery;
mod durable;
mod failing;
mod fleet;
mod ids;
mod leases;
mod measured;
mod reports;
mod sessions;
mod settings;
mod tickets;
mod time;
