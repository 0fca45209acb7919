//! The pages on a full gate: 10,000 waiters, 5,000 leases, 200 engines.
//!
//! `cargo bench --bench page`. It tells how long each page takes on a connection of its own and how
//! large it is, and what 50 open tabs cost: time of the writer's thread and of the process, and the
//! latency of acquires with and without them. Load, engines and kvgate share the machine.
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

use axum::{Json, Router, routing};
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use support::{Connection, Server, connect, get, histogram, load_average, millis, post, ticket};

const ENGINES: &str = "--engines";
/// Tokens of each request that fills the gate.
const TOKENS: usize = 1_000;
/// Operations in one batch, and tickets that one caller waits for.
const BATCH: usize = 1_000;
/// The pages of the navigation.
const PAGES: [&str; 8] = [
    "/",
    "/queue",
    "/leases",
    "/engines",
    "/sessions",
    "/decisions",
    "/steps",
    "/settings",
];
/// Looks at each page.
const LOOKS: usize = 20;
/// Longer than a rendered page is kept, so that each look renders it anew.
const BETWEEN_LOOKS: Duration = Duration::from_millis(950);
/// Callers that acquire one after the other, and how long each rests: 200 a second together, as many
/// as a large fleet starts.
const CALLERS: usize = 10;
const REST: Duration = Duration::from_millis(50);
const TABS: usize = 50;
const TAB_EVERY: Duration = Duration::from_secs(1);

struct Size {
    waiters: usize,
    leases: usize,
    engines: usize,
    looks: usize,
    phase: Duration,
    rounds: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = Runtime::new().unwrap();
    if let Some(at) = arguments.iter().position(|argument| argument == ENGINES) {
        let number = |place: usize| arguments[at + place].parse().unwrap();
        return runtime.block_on(engines(number(1), number(2)));
    }
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    let quick = !arguments.iter().any(|argument| argument == "--bench");
    let size = if quick {
        Size {
            waiters: 200,
            leases: 1_000,
            engines: 2,
            looks: 1,
            phase: Duration::from_secs(1),
            rounds: 1,
        }
    } else {
        Size {
            waiters: 10_000,
            leases: 5_000,
            engines: 200,
            looks: LOOKS,
            phase: Duration::from_secs(15),
            rounds: 3,
        }
    };
    runtime.block_on(run(&size));
}

async fn run(size: &Size) {
    let pool = size.leases * TOKENS / size.engines;
    let (_engines, addresses) =
        Server::this_bench(&[ENGINES, &size.engines.to_string(), &pool.to_string()]);
    let engines: Vec<String> = addresses
        .iter()
        .map(|address| format!("http://{address}"))
        .collect();
    let data = tempfile::tempdir_in(".").unwrap();
    let mut arguments = vec![
        "--program-admission",
        "--admission-headroom",
        "1",
        "--admission-max-wait-s",
        "3600",
    ];
    for engine in &engines {
        arguments.extend(["--engine", engine]);
    }
    let gate = Server::kvgate(data.path(), &arguments);
    let _present = fill(&gate, size).await;
    println!("load {}", load_average());
    look_at_pages(&gate, size).await;
    println!();
    open_tabs(&gate, size).await;
}

/// As many leases as fit, and the waiters behind them, whose callers stay while the returned tasks run.
async fn fill(gate: &Server, size: &Size) -> JoinSet<()> {
    let mut connection = connect(gate.address).await;
    let mut present = JoinSet::new();
    let all = size.leases + size.waiters;
    for first in (0..all).step_by(BATCH) {
        let numbers = first..all.min(first + BATCH);
        let tickets: Vec<String> = numbers.clone().map(|_| ticket()).collect();
        let acquire = |(number, ticket): (usize, &String)| {
            json!({
                "op": "acquire", "ticket_id": ticket, "session_id": format!("session-{}", number % 3_000),
                "reservation_tokens": TOKENS, "client": "bench",
            })
        };
        let operations: Vec<Value> = numbers.zip(&tickets).map(acquire).collect();
        let body = json!({"operations": operations});
        post(&mut connection, "/v1/batch", body.to_string()).await;
        if first >= size.leases {
            let mut connection = connect(gate.address).await;
            present.spawn(async move {
                let body = json!({"ticket_ids": tickets, "wait_s": 25}).to_string();
                loop {
                    post(&mut connection, "/v1/wait", body.clone()).await;
                }
            });
        }
    }
    let state = get(&mut connection, "/v1/state").await;
    assert_eq!(state["leases"]["count"], size.leases, "{state}");
    assert_eq!(state["queue"]["waiting"], size.waiters, "{state}");
    present
}

/// A GET as a browser makes it: status, headers, bytes.
async fn browse(
    connection: &mut Connection,
    path: &str,
    headers: &[(&str, &str)],
) -> (u16, HeaderMap, Bytes) {
    connection.ready().await.unwrap();
    let mut request = Request::builder().uri(path).header("host", "127.0.0.1");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::default()).unwrap();
    let answer = connection.send_request(request).await.unwrap();
    let (head, body) = answer.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (head.status.as_u16(), head.headers, bytes)
}

async fn look_at_pages(gate: &Server, size: &Size) {
    println!("| page | first whole answer p50 / max ms | KiB | KiB compressed |");
    println!("|---|---|---|---|");
    for page in PAGES {
        let mut nanos = histogram();
        let mut bytes = 0;
        let mut compressed = 0;
        let mut status = 0;
        for _ in 0..size.looks {
            tokio::time::sleep(BETWEEN_LOOKS).await;
            let began = Instant::now();
            // With the connection: what a person waits for.
            let mut connection = connect(gate.address).await;
            let answer = browse(&mut connection, page, &[]).await;
            nanos.saturating_record(began.elapsed().as_nanos() as u64);
            status = answer.0;
            bytes = answer.2.len();
            let gzip = [("accept-encoding", "gzip")];
            compressed = browse(&mut connection, page, &gzip).await.2.len();
        }
        if status != 200 {
            println!("| {page} | status {status} | | |");
            continue;
        }
        println!(
            "| {page} | {:.1} / {:.1} | {:.1} | {:.1} |",
            millis(&nanos, 0.5),
            millis(&nanos, 1.0),
            bytes as f64 / 1024.0,
            compressed as f64 / 1024.0
        );
    }
}

/// What a phase showed.
struct Phase {
    acquires: Histogram<u64>,
    /// Processor time of the writer's thread and of the process, as shares of one processor.
    writer: f64,
    process: f64,
}

async fn open_tabs(gate: &Server, size: &Size) {
    println!(
        "{CALLERS} callers, {} of {} s with and without {TABS} tabs",
        size.rounds,
        size.phase.as_secs()
    );
    println!(
        "| tabs | acquire p50 / p99 ms | writer, % of a processor | process, % | answers to tabs a second, KiB each |"
    );
    println!("|---|---|---|---|---|");
    for _ in 0..size.rounds {
        let calm = phase(gate, size).await;
        told(0, &calm, "");
        let over = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicU64::new(0));
        let bytes = Arc::new(AtomicU64::new(0));
        let mut tabs = JoinSet::new();
        for number in 0..TABS {
            let (over, answers, bytes) =
                (Arc::clone(&over), Arc::clone(&answers), Arc::clone(&bytes));
            let mut connection = connect(gate.address).await;
            tabs.spawn(async move {
                // Tabs were opened at all times.
                tokio::time::sleep(TAB_EVERY * number as u32 / TABS as u32).await;
                let mut parts = String::new();
                while !over.load(Ordering::Relaxed) {
                    let headers = [("accept-encoding", "gzip"), ("kvgate-parts", &parts)];
                    let (status, headers, body) = browse(&mut connection, "/", &headers).await;
                    assert!(matches!(status, 200 | 204), "{status}");
                    headers["kvgate-parts"]
                        .to_str()
                        .unwrap()
                        .clone_into(&mut parts);
                    answers.fetch_add(1, Ordering::Relaxed);
                    bytes.fetch_add(body.len() as u64, Ordering::Relaxed);
                    tokio::time::sleep(TAB_EVERY).await;
                }
            });
        }
        let busy = phase(gate, size).await;
        over.store(true, Ordering::Relaxed);
        while let Some(done) = tabs.join_next().await {
            done.unwrap();
        }
        let answers = answers.load(Ordering::Relaxed) as f64;
        let kib = bytes.load(Ordering::Relaxed) as f64 / answers.max(1.0) / 1024.0;
        let a_second = answers / size.phase.as_secs_f64();
        told(TABS, &busy, &format!("{a_second:.0}, {kib:.1}"));
    }
}

fn told(tabs: usize, phase: &Phase, answers: &str) {
    println!(
        "| {tabs} | {:.2} / {:.2} | {:.1} | {:.1} | {answers} |",
        millis(&phase.acquires, 0.5),
        millis(&phase.acquires, 0.99),
        phase.writer * 100.0,
        phase.process * 100.0,
    );
}

/// Callers get in line and leave it again, at a steady rate.
async fn phase(gate: &Server, size: &Size) -> Phase {
    let over = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let mut connection = connect(gate.address).await;
        let over = Arc::clone(&over);
        callers.spawn(async move {
            let mut nanos = histogram();
            while !over.load(Ordering::Relaxed) {
                let ticket = ticket();
                let body = json!({
                    "ticket_id": ticket, "session_id": format!("of-{ticket}"),
                    "reservation_tokens": TOKENS, "wait_s": 0,
                });
                let one = Instant::now();
                let answer = post(&mut connection, "/v1/leases", body.to_string()).await;
                nanos.saturating_record(one.elapsed().as_nanos() as u64);
                assert_eq!(answer["action"], "wait", "{answer}");
                let cancel = Request::delete(format!("/v1/tickets/{ticket}"))
                    .header("host", "127.0.0.1")
                    .body(Full::default())
                    .unwrap();
                connection.ready().await.unwrap();
                let answer = connection.send_request(cancel).await.unwrap();
                assert!(answer.status().is_success());
                answer.into_body().collect().await.unwrap();
                tokio::time::sleep(REST).await;
            }
            nanos
        });
    }
    let began = Instant::now();
    let [writer, process] = processor_times(gate);
    tokio::time::sleep(size.phase).await;
    let [writer_then, process_then] = processor_times(gate);
    let took = began.elapsed().as_secs_f64();
    over.store(true, Ordering::Relaxed);
    let mut acquires = histogram();
    while let Some(nanos) = callers.join_next().await {
        acquires.add(nanos.unwrap()).unwrap();
    }
    Phase {
        acquires,
        writer: (writer_then - writer) / took,
        process: (process_then - process) / took,
    }
}

/// Seconds that the writer's thread and all threads of the service have run.
fn processor_times(gate: &Server) -> [f64; 2] {
    let mut times = [0.0, 0.0];
    let tasks = std::fs::read_dir(format!("/proc/{}/task", gate.pid())).unwrap();
    for task in tasks {
        let task = task.unwrap().path();
        // A thread may end while it is looked at.
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        let nanos = read("schedstat");
        let nanos = nanos.split(' ').next().unwrap_or_default();
        let seconds = nanos.parse().unwrap_or(0.0) / 1e9;
        times[1] += seconds;
        if read("comm").trim() == "kvgate-writer" {
            times[0] += seconds;
        }
    }
    times
}

/// Engines that are half full and work.
async fn engines(count: usize, pool: usize) {
    let mut servers = JoinSet::new();
    for _ in 0..count {
        let loads = async move || {
            Json(json!({
                "timestamp": "2026-01-01T00:00:00Z", "version": "0.5.15.post1",
                "loads": [{
                    "dp_rank": 0, "num_running_reqs": 8, "num_waiting_reqs": 0,
                    "num_used_tokens": pool / 2, "max_total_num_tokens": pool, "token_usage": 0.5,
                }],
            }))
        };
        let router = Router::new().route("/v1/loads", routing::get(loads));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        servers.spawn(async move { axum::serve(listener, router).await.unwrap() });
    }
    println!();
    while servers.join_next().await.is_some() {}
}
