//! Time to ready after kill -9 with a full store: 100,000 leases and 50,000 waiting tickets.
//!
//! `cargo bench --bench restart`. The time runs from the start of the process to its word `ready`,
//! so it holds the opening of the store with its repair, the load and the first reading round. The
//! goal is 3 s. Afterwards all leases and places must be there.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a program that prints its measurements and stops at what should not happen"
)]

mod support;

use std::time::{Duration, Instant};

use kvgate::demo::{FakeFleet, FleetSpec};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use support::{Connection, Server, connect, get, load_average, post};

const LEASES: u64 = 100_000;
const WAITERS: u64 = 50_000;
const TOKENS: u64 = 9;
/// Operations of one batch.
const BATCH: u64 = 1_000;
const GOAL: Duration = Duration::from_secs(3);

fn main() {
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let (leases, waiters, starts) = if quick {
        (1_000, 1_000, 1)
    } else {
        (LEASES, WAITERS, 7)
    };
    rustls::crypto::ring::default_provider()
        .install_default()
        .unwrap();
    Runtime::new()
        .unwrap()
        .block_on(run(leases, waiters, starts));
}

async fn run(leases: u64, waiters: u64, starts: usize) {
    // The ceiling is 90 % of this pool: exactly the leases.
    let fleet = FakeFleet::start(FleetSpec::uniform(1, leases * TOKENS / 9 * 10))
        .await
        .unwrap();
    let data = tempfile::tempdir_in(".").unwrap();
    let engine = fleet.engine_url(0);
    let arguments = [
        "--program-admission",
        "--admission-max-wait-s",
        "3600",
        "--claim-grace-s",
        "60",
        "--engine",
        &engine,
    ];
    let mut server = Server::kvgate(data.path(), &arguments);
    let empty = server.ready;
    let mut connection = connect(server.address).await;
    let began = Instant::now();
    for first in (0..leases + waiters).step_by(usize::try_from(BATCH).unwrap()) {
        let action = if first < leases { "admit" } else { "wait" };
        fill(&mut connection, first, action).await;
    }
    println!(
        "load {}; an empty store was ready after {:.3} s; filled with {leases} leases and {waiters} waiting tickets in {:.1} s",
        load_average(),
        empty.as_secs_f64(),
        began.elapsed().as_secs_f64()
    );
    let mut times = Vec::new();
    for _ in 0..starts {
        server.kill();
        let size = std::fs::read_dir(data.path())
            .unwrap()
            .filter_map(|entry| entry.unwrap().metadata().ok())
            .map(|file| file.len())
            .max();
        server = Server::kvgate(data.path(), &arguments);
        let ready = server.ready;
        let mut connection = connect(server.address).await;
        let state = get(&mut connection, "/v1/state").await;
        assert_eq!(state["leases"]["count"], leases);
        assert_eq!(state["queue"]["waiting"], waiters);
        assert_eq!(state["budget"]["reserved"], leases * TOKENS);
        println!(
            "kill -9, then ready after {:.3} s (file {:.1} MiB)",
            ready.as_secs_f64(),
            size.unwrap_or(0) as f64 / f64::from(1 << 20)
        );
        times.push(ready);
    }
    times.sort();
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "median {:.3} s, worst {:.3} s of {starts} starts; goal {:.0} s: {}",
        median.as_secs_f64(),
        worst.as_secs_f64(),
        GOAL.as_secs_f64(),
        if worst <= GOAL { "met" } else { "missed" }
    );
}

/// One batch of new tickets that must all be told `action`.
async fn fill(connection: &mut Connection, first: u64, action: &str) {
    let operations: Vec<Value> = (first..first + BATCH)
        .map(|number| {
            json!({
                "op": "acquire", "ticket_id": format!("run-1/step-12/ticket-{number:08}"),
                "session_id": format!("session-{:06}", number / 8),
                "reservation_tokens": TOKENS, "request_id": format!("rid-{number:012}"),
                "client": "rollout-3", "ttl_s": 3_600,
            })
        })
        .collect();
    let body = json!({"operations": operations});
    let answer = post(connection, "/v1/batch", body.to_string()).await;
    for result in answer["results"].as_array().unwrap() {
        assert_eq!(result["body"]["action"], action, "{result}");
    }
}
