//! What a scrape of `/metrics` costs: its time and size with 100,000 leases and 50,000 waiters beside an
//! empty gate, and what two readers, ten times a second each, do to callers that acquire.
//!
//! `cargo bench --bench metrics`. Readers, callers and kvgate share the machine.
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

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvgate::demo::{FakeFleet, FleetSpec};
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use support::{
    Connection, Server, connect, get_text, histogram, load_average, millis, post, ticket,
};

/// Operations of one batch.
const BATCH: usize = 1_000;
/// Callers that acquire and release without a rest.
const CALLERS: usize = 16;
/// Rest of a reader after each scrape: Prometheus comes every few seconds, these come ten times a second.
const REST: Duration = Duration::from_millis(100);

fn main() {
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let (leases, waiters, scrapes, seconds) = if quick {
        (1_000, 1_000, 5, 0.2)
    } else {
        (100_000, 50_000, 500, 3.0)
    };
    Runtime::new()
        .unwrap()
        .block_on(run(leases, waiters, scrapes, seconds));
}

async fn run(leases: usize, waiters: usize, scrapes: usize, seconds: f64) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let fleet = FakeFleet::start(FleetSpec::uniform(8, leases as u64))
        .await
        .unwrap();
    let data = tempfile::tempdir_in(".").unwrap();
    let router = fleet.router_url();
    let gate = Server::kvgate(
        data.path(),
        &[
            "--program-admission",
            "--router",
            &router,
            "--admission-headroom",
            "1",
            "--admission-max-wait-s",
            "3600",
            "--claim-grace-s",
            "60",
        ],
    );
    println!("load {}", load_average());
    let mut connection = connect(gate.address).await;
    let (times, bytes) = scrape(&mut connection, scrapes).await;
    line("empty", &times, bytes);
    let calm = acquires(gate.address, seconds).await;
    let read = with_readers(gate.address, seconds).await;
    println!(
        "{CALLERS} callers: {:.0} pairs/s, p50 {:.2} ms, p99 {:.2} ms; with two readers: {:.0} pairs/s, p50 {:.2} ms, p99 {:.2} ms",
        calm.len() as f64 / seconds,
        millis(&calm, 0.5),
        millis(&calm, 0.99),
        read.len() as f64 / seconds,
        millis(&read, 0.5),
        millis(&read, 0.99),
    );
    fill(&mut connection, leases, 8).await;
    fill(&mut connection, waiters, 8).await;
    let (times, bytes) = scrape(&mut connection, scrapes).await;
    line(
        &format!("{leases} leases, {waiters} waiters"),
        &times,
        bytes,
    );
    println!("load {}", load_average());
}

fn line(what: &str, times: &Histogram<u64>, bytes: usize) {
    println!(
        "{what}: a scrape takes {:.2} ms, p99 {:.2} ms, longest {:.2} ms; {bytes} bytes",
        millis(times, 0.5),
        millis(times, 0.99),
        millis(times, 1.0),
    );
}

async fn fill(connection: &mut Connection, count: usize, tokens: u64) {
    for _ in 0..count / BATCH {
        let acquire = |_| {
            json!({
                "op": "acquire", "ticket_id": ticket(), "session_id": "s",
                "reservation_tokens": tokens, "ttl_s": 3600,
            })
        };
        let operations: Vec<_> = (0..BATCH).map(acquire).collect();
        let batch = json!({ "operations": operations }).to_string();
        post(connection, "/v1/batch", batch).await;
    }
}

async fn scrape(connection: &mut Connection, times: usize) -> (Histogram<u64>, usize) {
    let mut taken = histogram();
    let mut bytes = 0;
    for _ in 0..times {
        let began = Instant::now();
        bytes = get_text(connection, "/metrics").await.len();
        taken.saturating_record(nanos(began));
    }
    (taken, bytes)
}

fn nanos(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap()
}

/// Times of acquires while nobody reads.
async fn acquires(address: SocketAddr, seconds: f64) -> Histogram<u64> {
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        callers.spawn(async move {
            let mut connection = connect(address).await;
            let mut taken = histogram();
            let until = Instant::now() + Duration::from_secs_f64(seconds);
            while Instant::now() < until {
                let ask =
                    json!({"ticket_id": ticket(), "session_id": "s", "reservation_tokens": 1});
                let began = Instant::now();
                let answer = post(&mut connection, "/v1/leases", ask.to_string()).await;
                taken.saturating_record(nanos(began));
                let lease = answer["lease_id"].as_str().unwrap();
                post(
                    &mut connection,
                    &format!("/v1/leases/{lease}/release"),
                    String::new(),
                )
                .await;
            }
            taken
        });
    }
    let mut all = histogram();
    while let Some(taken) = callers.join_next().await {
        all.add(taken.unwrap()).unwrap();
    }
    all
}

async fn with_readers(address: SocketAddr, seconds: f64) -> Histogram<u64> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut readers = JoinSet::new();
    for _ in 0..2 {
        let stop = Arc::clone(&stop);
        readers.spawn(async move {
            let mut connection = connect(address).await;
            while !stop.load(Ordering::Relaxed) {
                get_text(&mut connection, "/metrics").await;
                tokio::time::sleep(REST).await;
            }
        });
    }
    let taken = acquires(address, seconds).await;
    stop.store(true, Ordering::Relaxed);
    readers.join_all().await;
    taken
}
