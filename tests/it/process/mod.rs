//! The real binary over HTTP: bursts, kill -9, orderly stops, exit codes.

mod access;
mod asking;
mod bench;
mod callers;
mod check;
mod closes;
mod commands;
mod floods;
mod history;
mod kill;
mod listen;
mod order;
mod settings;
mod stop;
mod store;
mod supervised;
mod torture;

pub use callers::Draw;
use kvgate::demo::{FakeFleet, FleetSpec};

/// Two engines of 500,000 tokens: a ceiling of 900,000.
async fn fleet() -> FakeFleet {
    FakeFleet::start(FleetSpec::uniform(2, 500_000))
        .await
        .unwrap()
}
