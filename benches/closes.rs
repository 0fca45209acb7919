//! A step's end: thousands of sessions closed at once on many engines, beside callers that acquire.
//!
//! `cargo bench --bench closes`. It measures how long until every engine has every close, what that
//! does to the latency of acquires at a steady rate, and how many store transactions it takes. The
//! engines are bare handlers in a process of their own that answer after 5 ms. Load, engines and
//! kvgate share the machine.
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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Json, Router, routing};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use support::{
    Connection, Server, connect, get, get_text, histogram, load_average, millis, post, ticket,
};

const ENGINES: &str = "--engines";
/// How long an engine takes for a close.
const ENGINE_TIME: Duration = Duration::from_millis(5);
/// Callers that acquire and release one after the other, and how long each rests in between: about
/// 1,000 pairs a second together.
const CALLERS: usize = 32;
const REST: Duration = Duration::from_millis(32);
/// Connections that send the closes.
const CLOSERS: usize = 32;

struct Size {
    sessions: usize,
    engines: usize,
    rounds: usize,
    calm: Duration,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = Runtime::new().unwrap();
    if let Some(at) = arguments.iter().position(|argument| argument == ENGINES) {
        return runtime.block_on(engines(arguments[at + 1].parse().unwrap()));
    }
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    let quick = !arguments.iter().any(|argument| argument == "--bench");
    let size = if quick {
        Size {
            sessions: 50,
            engines: 2,
            rounds: 1,
            calm: Duration::from_millis(200),
        }
    } else {
        Size {
            sessions: 5_000,
            engines: 16,
            rounds: 5,
            calm: Duration::from_secs(10),
        }
    };
    runtime.block_on(run(&size));
}

/// What one round showed.
struct Round {
    asked_s: f64,
    delivered_s: f64,
    /// Store transactions a second.
    calm_commits: f64,
    commits: f64,
    calm: Histogram<u64>,
    closing: Histogram<u64>,
}

async fn run(size: &Size) {
    let (_engines, addresses) = Server::this_bench(&[ENGINES, &size.engines.to_string()]);
    let engines: Vec<String> = addresses
        .iter()
        .map(|address| format!("http://{address}"))
        .collect();
    let data = tempfile::tempdir_in(".").unwrap();
    let mut arguments = vec!["--program-admission", "--session-lifecycle"];
    for engine in &engines {
        arguments.extend(["--engine", engine]);
    }
    let gate = Server::kvgate(data.path(), &arguments);
    println!("load {}", load_average());
    println!(
        "{} sessions on {} engines of {} ms, {CALLERS} callers; calm for {} s before each round",
        size.sessions,
        size.engines,
        ENGINE_TIME.as_millis(),
        size.calm.as_secs()
    );
    println!(
        "| round | closes asked in s | all delivered after s | calls/s | store transactions/s calm, while closing | acquire p50 / p99 ms calm | p50 / p99 ms while closing | p99 ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut ratios = Vec::new();
    for round in 0..size.rounds {
        let figures = one_round(&gate, size, round).await;
        let calls = (size.sessions * size.engines) as f64;
        let ratio = millis(&figures.closing, 0.99) / millis(&figures.calm, 0.99);
        ratios.push(ratio);
        println!(
            "| {} | {:.2} | {:.1} | {:.0} | {:.0}, {:.0} | {:.2} / {:.2} | {:.2} / {:.2} | {ratio:.2} |",
            round + 1,
            figures.asked_s,
            figures.delivered_s,
            calls / figures.delivered_s,
            figures.calm_commits,
            figures.commits,
            millis(&figures.calm, 0.5),
            millis(&figures.calm, 0.99),
            millis(&figures.closing, 0.5),
            millis(&figures.closing, 0.99),
        );
    }
    ratios.sort_by(f64::total_cmp);
    println!("median p99 ratio {:.2}", ratios[ratios.len() / 2]);
}

async fn one_round(gate: &Server, size: &Size, round: usize) -> Round {
    let first = commits(gate).await;
    let (calm, ()) = steady_load(gate, tokio::time::sleep(size.calm)).await;
    let before = commits(gate).await;
    let (closing, (asked_s, delivered_s)) = steady_load(gate, close_all(gate, size, round)).await;
    Round {
        asked_s,
        delivered_s,
        calm_commits: (before - first) / size.calm.as_secs_f64(),
        commits: (commits(gate).await - before) / delivered_s,
        calm,
        closing,
    }
}

/// Acquires and releases at a steady rate while `work` lasts.
async fn steady_load<T>(gate: &Server, work: impl Future<Output = T>) -> (Histogram<u64>, T) {
    let over = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let mut connection = connect(gate.address).await;
        let over = Arc::clone(&over);
        callers.spawn(async move {
            let mut nanos = histogram();
            while !over.load(Ordering::Relaxed) {
                let one = Instant::now();
                let lease = acquire(&mut connection).await;
                nanos.saturating_record(one.elapsed().as_nanos() as u64);
                let path = format!("/v1/leases/{lease}/release");
                post(&mut connection, &path, "{}".to_owned()).await;
                tokio::time::sleep(REST).await;
            }
            nanos
        });
    }
    let done = work.await;
    over.store(true, Ordering::Relaxed);
    let mut all = histogram();
    while let Some(nanos) = callers.join_next().await {
        all.add(nanos.unwrap()).unwrap();
    }
    (all, done)
}

async fn acquire(connection: &mut Connection) -> String {
    let ticket = ticket();
    let body = json!({
        "ticket_id": ticket, "session_id": format!("of-{ticket}"), "prompt_tokens": 18_432,
        "max_new_tokens": 4_096, "request_id": ticket,
    });
    let answer = post(connection, "/v1/leases", body.to_string()).await;
    answer["lease_id"].as_str().unwrap().to_owned()
}

/// Closes every session, and waits until no close is open. Seconds until all were asked for, and
/// until all were done.
async fn close_all(gate: &Server, size: &Size, round: usize) -> (f64, f64) {
    let began = Instant::now();
    let mut closers = JoinSet::new();
    for first in 0..CLOSERS {
        let mut connection = connect(gate.address).await;
        let sessions = size.sessions;
        closers.spawn(async move {
            for session in (first..sessions).step_by(CLOSERS) {
                let path = format!("/v1/sessions/round-{round}-{session}/close");
                let answer = post(&mut connection, &path, "{}".to_owned()).await;
                assert!(answer["close_id"].is_string(), "{answer}");
            }
        });
    }
    while let Some(done) = closers.join_next().await {
        done.unwrap();
    }
    let asked_s = began.elapsed().as_secs_f64();
    let mut connection = connect(gate.address).await;
    loop {
        let state = get(&mut connection, "/v1/state").await;
        assert_eq!(state["closes"]["failed"], 0, "{state}");
        if state["closes"]["pending"] == 0 {
            return (asked_s, began.elapsed().as_secs_f64());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Store transactions so far.
async fn commits(gate: &Server) -> f64 {
    let mut connection = connect(gate.address).await;
    let text = get_text(&mut connection, "/metrics").await;
    String::from_utf8_lossy(&text)
        .lines()
        .find_map(|line| line.strip_prefix("kvgate_store_commit_seconds_count "))
        .expect("the store counts its commits")
        .parse()
        .unwrap()
}

/// Engines that give a capacity, and answer each close after a while.
async fn engines(count: usize) {
    let closes = Arc::new(AtomicU64::new(0));
    let mut servers = JoinSet::new();
    for _ in 0..count {
        let loads = async || {
            Json(json!({
                "timestamp": "2026-01-01T00:00:00Z", "version": "0.5.15.post1",
                "loads": [{
                    "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0,
                    "num_used_tokens": 0, "max_total_num_tokens": 1_u64 << 40, "token_usage": 0.0,
                }],
            }))
        };
        let close = async |State(closes): State<Arc<AtomicU64>>, Json(body): Json<Value>| {
            assert!(body["session_id"].is_string());
            tokio::time::sleep(ENGINE_TIME).await;
            closes.fetch_add(1, Ordering::Relaxed);
            StatusCode::OK
        };
        let router = Router::new()
            .route("/v1/loads", routing::get(loads))
            .route("/close_session", routing::post(close))
            .with_state(Arc::clone(&closes));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        servers.spawn(async move { axum::serve(listener, router).await.unwrap() });
    }
    println!();
    while servers.join_next().await.is_some() {}
}
