//! kvgate: durable program-aware admission and session KV lifecycle for SGLang fleets.
//!
//! `docs/ARCHITECTURE.md` has the map of the rooms and the walks through them.

pub mod clock;
pub mod gate;
pub mod http;
pub mod store;
