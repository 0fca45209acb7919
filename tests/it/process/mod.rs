//! The real binary over HTTP: bursts, kill -9, orderly stops, exit codes.

mod access;
mod burst;
mod callers;
mod closes;
mod commands;
mod full_disk;
mod history;
mod kill;
mod order;
mod settings;
mod stop;
mod store;
mod torture;

pub use callers::Draw;
use kvgate::demo::{FakeFleet, FleetSpec};

/// Two engines of 500,000 tokens: a ceiling of 900,000.
async fn fleet() -> FakeFleet {
    FakeFleet::start(FleetSpec::uniform(2, 500_000))
        .await
        .unwrap()
}
