//! The integration tests: one binary, so that it is linked once.

mod fleet_http;
mod readings;
mod tidy;
