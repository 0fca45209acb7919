//! What the tests of the service share.

pub mod app;
pub mod store;
