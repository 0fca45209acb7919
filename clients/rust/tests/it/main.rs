//! The client against a scripted gate: what it asks, and what it does without an answer. Tests against the real binary
//! are in the service's `tests/it/client`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail the test; clippy.toml allows it in test functions only"
)]

mod fake;
mod leases;
mod sessions;
mod trouble;
mod waiting;

use std::time::Duration;

use kvgate_client::{Ask, Gate, GateConfig, Lease};

use fake::Fake;

/// More than all that the scripted gate has.
const ALL: u64 = 1_000_000;

/// A client of the scripted gate, as the tests need it: nothing of this process's environment.
fn config(fake: &Fake) -> GateConfig {
    GateConfig {
        token: None,
        token_file: None,
        ..GateConfig::at(fake.url())
    }
}

fn gate(fake: &Fake) -> Gate {
    Gate::new(config(fake)).unwrap()
}

/// Short times, for tests of what happens at their end.
fn quick(fake: &Fake) -> GateConfig {
    GateConfig {
        call_timeout: Duration::from_millis(300),
        window: Duration::from_millis(300),
        ..config(fake)
    }
}

/// All of the gate's capacity.
async fn hold_all(gate: &Gate) -> Lease {
    let ask = Ask::reservation("holder", ALL).ticket_id("holder");
    gate.acquire(ask).await.unwrap()
}

/// Ask number `number`, of a session of its own.
fn ask(number: usize, tokens: u64) -> Ask {
    Ask::reservation(format!("s{number}"), tokens).ticket_id(format!("t{number}"))
}
