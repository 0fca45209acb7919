//! Acquire and release over HTTP on the real binary: pairs per second and latency by connections.
//!
//! `cargo bench --bench http`. Beside each figure of kvgate stand, from the same run, the disk's own
//! sync rate and a bare axum handler that reads and writes the same two bodies, so that ratios can
//! be quoted. Closed loop, no hold time, client and server on the same machine.
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

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::{Json, Router, routing};
use hdrhistogram::Histogram;
use kvgate::demo::{FakeFleet, FleetSpec};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use support::{Connection, Server, connect, histogram, load_average, millis, post, ticket};

const CONNECTIONS: [usize; 5] = [1, 16, 64, 256, 1_024];
const BARE: &str = "--bare";
const SECONDS: f64 = 2.0;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = Runtime::new().unwrap();
    if arguments.iter().any(|argument| argument == BARE) {
        return runtime.block_on(bare_handler());
    }
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    let quick = !arguments.iter().any(|argument| argument == "--bench");
    let (connections, rounds, seconds): (&[usize], usize, f64) = if quick {
        (&[1, 16], 1, 0.2)
    } else {
        (&CONNECTIONS, 5, SECONDS)
    };
    runtime.block_on(run(connections, rounds, seconds));
}

async fn run(connections: &[usize], rounds: usize, seconds: f64) {
    let _ = rustls_provider();
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1 << 40))
        .await
        .unwrap();
    let data = tempfile::tempdir_in(".").unwrap();
    let engine = fleet.engine_url(0);
    let gate = Server::kvgate(data.path(), &["--program-admission", "--engine", &engine]);
    let (bare, _) = Server::this_bench(&[BARE]);
    let disk = disk(data.path(), Duration::from_secs_f64(seconds));
    println!("load {}", load_average());
    println!(
        "disk: {:.0} syncs/s of 4 KiB appended, p50 {:.2} ms, p99 {:.2} ms{}",
        disk.rate,
        disk.p50,
        disk.p99,
        if disk.p50 < 1.0 { "" } else { "  (noisy)" }
    );
    println!("medians of {rounds} interleaved rounds of {seconds} s");
    println!(
        "| connections | kvgate pairs/s | acquire p50 / p99 ms | calls per sync of the disk | bare axum pairs/s | p50 / p99 ms | kvgate / bare |"
    );
    println!("|---|---|---|---|---|---|---|");
    for &count in connections {
        let mut figures: [Vec<Figure>; 2] = Default::default();
        for _ in 0..rounds {
            for (figures, server) in figures.iter_mut().zip([&gate, &bare]) {
                figures.push(load_run(server.address, count, seconds).await);
            }
        }
        let [gate, bare] = figures.map(median);
        println!(
            "| {count} | {:.0} | {:.2} / {:.2} | {:.1} | {:.0} | {:.2} / {:.2} | {:.2} |",
            gate.rate,
            gate.p50,
            gate.p99,
            gate.rate * 2.0 / disk.rate,
            bare.rate,
            bare.p50,
            bare.p99,
            gate.rate / bare.rate
        );
    }
}

fn rustls_provider() -> Result<(), impl Sized> {
    rustls::crypto::ring::default_provider().install_default()
}

/// Rate per second, and milliseconds.
#[derive(Clone, Copy, Debug)]
struct Figure {
    rate: f64,
    p50: f64,
    p99: f64,
}

impl Figure {
    fn new(count: u64, seconds: f64, nanos: &Histogram<u64>) -> Self {
        Self {
            rate: count as f64 / seconds,
            p50: millis(nanos, 0.5),
            p99: millis(nanos, 0.99),
        }
    }
}

fn median(figures: Vec<Figure>) -> Figure {
    let middle = |part: fn(&Figure) -> f64| {
        let mut values: Vec<f64> = figures.iter().map(part).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Figure {
        rate: middle(|figure| figure.rate),
        p50: middle(|figure| figure.p50),
        p99: middle(|figure| figure.p99),
    }
}

/// What the disk does by itself: 4 KiB appended and synced, over and over.
fn disk(directory: &Path, time: Duration) -> Figure {
    let mut file = File::create(directory.join("sync")).unwrap();
    let mut nanos = histogram();
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < time {
        let one = Instant::now();
        file.write_all(&[7; 4_096]).unwrap();
        file.sync_data().unwrap();
        nanos.saturating_record(one.elapsed().as_nanos() as u64);
        count += 1;
    }
    Figure::new(count, began.elapsed().as_secs_f64(), &nanos)
}

/// `count` connections, each with one pair after the other, for `seconds`.
async fn load_run(address: SocketAddr, count: usize, seconds: f64) -> Figure {
    let mut connections = Vec::new();
    for _ in 0..count {
        connections.push(connect(address).await);
    }
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(seconds);
    let mut workers = JoinSet::new();
    for mut connection in connections {
        workers.spawn(async move {
            let mut nanos = histogram();
            let mut pairs = 0;
            while Instant::now() < end {
                let one = Instant::now();
                let lease = acquire(&mut connection).await;
                nanos.saturating_record(one.elapsed().as_nanos() as u64);
                release(&mut connection, &lease).await;
                pairs += 1;
            }
            (pairs, nanos)
        });
    }
    let mut all = histogram();
    let mut pairs = 0;
    while let Some(done) = workers.join_next().await {
        let (own, nanos) = done.unwrap();
        pairs += own;
        all.add(&nanos).unwrap();
    }
    Figure::new(pairs, began.elapsed().as_secs_f64(), &all)
}

async fn acquire(connection: &mut Connection) -> String {
    let body = json!({
        "ticket_id": ticket(), "session_id": "session-000000001", "prompt_tokens": 18_432,
        "max_new_tokens": 4_096, "scope": "train", "protected": false, "wait_s": 25,
        "ttl_s": 600, "request_id": "rid-0123456789", "client": "rollout-3",
    });
    let answer = post(connection, "/v1/leases", body.to_string()).await;
    assert_eq!(answer["action"], "admit", "{answer}");
    answer["lease_id"].as_str().unwrap().to_owned()
}

async fn release(connection: &mut Connection, lease: &str) {
    let path = format!("/v1/leases/{lease}/release");
    let answer = post(connection, &path, "{}".to_owned()).await;
    assert_eq!(answer["outcome"], "released");
}

/// Reads the same bodies and writes answers of the same size, and nothing else.
async fn bare_handler() {
    let acquire = async |Json(asked): Json<Value>| {
        Json(json!({
            "action": "admit", "reason": "capacity_available", "ticket_id": asked["ticket_id"],
            "session_id": asked["session_id"], "lease_id": "1-0123456789abcdef",
            "reservation_tokens": 22_528, "epoch": 1, "ttl_s": 600.0,
            "expires_at": "2026-01-01T00:00:00.000Z", "expires_in_s": 600.0, "waited_s": 0.0,
            "repeated": false, "session_reopened": false,
        }))
    };
    let release = async |Json(_): Json<Value>| Json(json!({"outcome": "released"}));
    let router = Router::new()
        .route("/v1/leases", routing::post(acquire))
        .route("/v1/leases/{id}/release", routing::post(release));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}\n", listener.local_addr().unwrap());
    axum::serve(listener, router).await.unwrap();
}
