//! What several test modules share.

pub mod app;
pub mod child;
pub mod closes;
pub mod process;
pub mod scrape;
pub mod store;
pub mod tls;
