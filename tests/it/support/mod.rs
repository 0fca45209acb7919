//! What several test modules share.

pub mod app;
pub mod process;
pub mod store;
