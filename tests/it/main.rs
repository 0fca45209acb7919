//! The integration tests: one binary, so that it is linked once.

mod api_bad_input;
mod api_contract;
mod api_delivery;
mod api_security;
mod support;
mod tidy;
