//! What several test modules share.

pub mod app;
pub mod child;
pub mod closes;
pub mod process;
pub mod store;
