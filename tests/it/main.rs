//! The integration tests: one binary, so that it is linked once.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on must fail loudly, in its helpers too"
)]

mod api_bad_input;
mod api_contract;
mod api_delivery;
mod api_security;
mod support;
mod tidy;
