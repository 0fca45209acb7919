//! The integration tests: one binary, so that it is linked once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail the test; clippy.toml allows it in test functions only"
)]

mod api_backup;
mod api_bad_input;
mod api_closes;
mod api_contract;
mod api_delivery;
mod api_failing;
mod api_reports;
mod api_rights;
mod api_security;
mod api_settings;
mod bounds;
mod cases;
mod client;
mod closer;
mod deploy;
mod durable;
mod fleet_http;
mod gate;
mod metrics;
mod packaging;
mod page;
mod page_actions;
mod page_fleet;
mod page_lists;
mod problems;
mod process;
mod readings;
mod real_engine;
mod real_routers;
mod replay;
mod session_kv;
mod store;
mod support;
mod tidy;
mod tls;
mod transport;
