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

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::routing::post;
use axum::{Json, Router};
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use kvgate::demo::{FakeFleet, FleetSpec};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

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
    let gate = Server::kvgate(data.path(), &fleet.engine_url(0));
    let bare = Server::bare();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let disk = disk(data.path(), Duration::from_secs_f64(seconds));
    println!(
        "load {}",
        load.split(' ').take(3).collect::<Vec<_>>().join(" ")
    );
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
        let millis = |quantile| nanos.value_at_quantile(quantile) as f64 / 1e6;
        Self {
            rate: count as f64 / seconds,
            p50: millis(0.5),
            p99: millis(0.99),
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

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 60_000_000_000, 3).unwrap()
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

type Connection = SendRequest<Full<Bytes>>;

async fn connect(address: SocketAddr) -> Connection {
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

async fn call(connection: &mut Connection, path: &str, body: String) -> Value {
    connection.ready().await.unwrap();
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header("host", "127.0.0.1")
        .header("content-type", "application/json")
        .body(Full::from(body))
        .unwrap();
    let answer = connection.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap()
}

/// Tickets are never used again: not in this run, nor in one before it.
fn ticket() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("bench-ticket-{:023}", NEXT.fetch_add(1, Ordering::Relaxed))
}

async fn acquire(connection: &mut Connection) -> String {
    let body = json!({
        "ticket_id": ticket(), "session_id": "session-000000001", "prompt_tokens": 18_432,
        "max_new_tokens": 4_096, "scope": "train", "protected": false, "wait_s": 25,
        "ttl_s": 600, "request_id": "rid-0123456789", "client": "rollout-3",
    });
    let answer = call(connection, "/v1/leases", body.to_string()).await;
    assert_eq!(answer["action"], "admit", "{answer}");
    answer["lease_id"].as_str().unwrap().to_owned()
}

async fn release(connection: &mut Connection, lease: &str) {
    let path = format!("/v1/leases/{lease}/release");
    let answer = call(connection, &path, "{}".to_owned()).await;
    assert_eq!(answer["outcome"], "released");
}

/// A server in a process of its own.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn kvgate(data: &Path, engine: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvgate"))
            .args(["serve", "--listen", "127.0.0.1:0", "--program-admission"])
            .args(["--log-format", "json", "--engine", engine, "--data"])
            .arg(data)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut address = None;
        for line in lines.by_ref() {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let fields = &line["fields"];
            if fields["message"] == "listening" {
                address = Some(fields["address"].as_str().unwrap().parse().unwrap());
            }
            if fields["message"] == "ready" {
                break;
            }
        }
        std::thread::spawn(move || lines.for_each(drop));
        let address = address.expect("kvgate listens before it is ready");
        Self { child, address }
    }

    fn bare() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(BARE)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line.trim().parse().unwrap();
        Self { child, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
        .route("/v1/leases", post(acquire))
        .route("/v1/leases/{id}/release", post(release));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    axum::serve(listener, router).await.unwrap();
}
