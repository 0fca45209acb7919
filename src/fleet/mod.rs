//! The fleet as kvgate sees it: which engines there are and what each of them says.
//!
//! `discover` asks the router, `scrape` one engine, `poller` all of them once a round and hands the
//! core one [`kvgate_core::reading::Round`]. `address`, `exposition`, `dialect`, `loads`, `rows` and
//! `server_info` are pure: text in, values out. Nothing here decides; floats end here (CAP2).

pub mod address;
pub mod close_support;
pub mod closer;
pub mod dialect;
pub mod discover;
pub mod exposition;
pub mod fetch;
#[cfg(test)]
mod fuzz;
pub mod loads;
pub mod networks;
pub mod poller;
pub mod rows;
pub mod scrape;
pub mod secret;
pub mod server_info;
