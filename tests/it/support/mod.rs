//! What several test modules share.

pub mod app;
pub mod process;
pub mod scrape;
pub mod store;
