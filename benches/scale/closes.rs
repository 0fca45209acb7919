//! A step's end: thousands of sessions closed at once on 16 engines, beside callers at a steady rate.
//! The engines are bare handlers in a process of their own that answer after 5 ms.

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::{Json, Router, routing};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Arguments;
use crate::callers::{STEADY, Seen};
use crate::report::{Figure, Report, median, round};
use crate::rig::{COMMITS, figure};
use crate::support::{Server, connect, get, post};

const ENGINES: usize = 16;
/// How long an engine takes for a close.
const ENGINE_TIME: Duration = Duration::from_millis(5);
/// Connections that send the closes.
const CLOSERS: usize = 32;
const ROUNDS: usize = 3;
/// Callers are looked at for so long before each round.
const CALM: Duration = Duration::from_secs(2);
/// Time between two looks whether all is done.
const LOOK: Duration = Duration::from_millis(20);

/// What one round showed.
struct Done {
    asked_s: f64,
    delivered_s: f64,
    /// Store transactions a second.
    calm_commits: f64,
    commits: f64,
    calm: Seen,
    meanwhile: Seen,
}

impl Done {
    fn ratio(&self) -> f64 {
        self.meanwhile.ms(0.99) / self.calm.ms(0.99)
    }
}

pub async fn run(arguments: &Arguments, report: &Report) {
    let rounds = if arguments.bench { ROUNDS } else { 1 };
    let (_engines, addresses) = Server::this_bench(&["--serve-engines", &ENGINES.to_string()]);
    let engines: Vec<String> = addresses
        .iter()
        .map(|address| format!("http://{address}"))
        .collect();
    report.table(
        &format!("sessions closed at once on {ENGINES} engines of 5 ms, beside 1,000 pairs/s; medians of {rounds} rounds"),
        &[
            "sessions",
            "closes asked in s",
            "all delivered after s",
            "calls/s",
            "store transactions/s before, meanwhile",
            "acquire p50 / p99 ms before",
            "p50 / p99 ms meanwhile",
            "p99 ratio",
        ],
    );
    let mut curve = Vec::new();
    let mut last = None;
    for sessions in arguments.sizes(&[500, 5_000], &[50]) {
        let data = tempfile::tempdir_in(".").unwrap();
        let mut flags = vec!["--program-admission", "--session-lifecycle"];
        for engine in &engines {
            flags.extend(["--engine", engine]);
        }
        let gate = Server::kvgate(data.path(), &flags);
        let mut seen = Vec::new();
        for number in 0..rounds {
            seen.push(one_round(&gate, sessions, number).await);
        }
        let of = |part: fn(&Done) -> f64| median(seen.iter().map(part));
        let (delivered_s, ratio) = (of(|done| done.delivered_s), of(Done::ratio));
        let calls_per_s = (sessions * ENGINES) as f64 / delivered_s;
        let p99_ms = of(|done| done.meanwhile.ms(0.99));
        report.row(&[
            sessions.to_string(),
            format!("{:.2}", of(|done| done.asked_s)),
            format!("{delivered_s:.1}"),
            format!("{calls_per_s:.0}"),
            format!(
                "{:.0}, {:.0}",
                of(|done| done.calm_commits),
                of(|done| done.commits)
            ),
            format!(
                "{:.2} / {:.2}",
                of(|done| done.calm.ms(0.5)),
                of(|done| done.calm.ms(0.99))
            ),
            format!("{:.2} / {p99_ms:.2}", of(|done| done.meanwhile.ms(0.5))),
            format!("{ratio:.2}"),
        ]);
        curve.push(json!({
            "sessions": sessions, "engines": ENGINES, "delivered_s": round(delivered_s),
            "calls_per_s": round(calls_per_s), "commits_per_s": round(of(|done| done.commits)),
            "acquire_ms_before": {"p99": round(of(|done| done.calm.ms(0.99)))},
            "acquire_ms": {"p99": round(p99_ms)}, "p99_ratio": round(ratio),
        }));
        last = Some((sessions, delivered_s, ratio));
    }
    let (sessions, delivered_s, ratio) = last.expect("one size at least");
    let what = format!("{sessions} closes on {ENGINES} engines");
    report.figure(Figure {
        name: format!("{what}: all delivered"),
        value: delivered_s,
        unit: "s",
        bound: None,
        detail: json!({ "curve": curve }),
    });
    report.figure(Figure {
        name: format!("{what}: acquire p99 meanwhile against before"),
        value: ratio,
        unit: "times",
        bound: None,
        detail: json!({ "curve": curve }),
    });
}

async fn one_round(gate: &Server, sessions: usize, round: usize) -> Done {
    let first = figure(gate, COMMITS).await;
    let (calm, ()) = STEADY.beside(gate.address, tokio::time::sleep(CALM)).await;
    let before = figure(gate, COMMITS).await;
    let (meanwhile, (asked_s, delivered_s)) = STEADY
        .beside(gate.address, close_all(gate, sessions, round))
        .await;
    Done {
        asked_s,
        delivered_s,
        calm_commits: (before - first) / CALM.as_secs_f64(),
        commits: (figure(gate, COMMITS).await - before) / delivered_s,
        calm,
        meanwhile,
    }
}

/// Closes every session, and waits until no close is open. Seconds until all were asked for, and
/// until all were done.
async fn close_all(gate: &Server, sessions: usize, round: usize) -> (f64, f64) {
    let began = Instant::now();
    let mut closers = JoinSet::new();
    for first in 0..CLOSERS {
        let mut connection = connect(gate.address).await;
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
        tokio::time::sleep(LOOK).await;
    }
}

/// Engines that give a capacity, and answer each close after a while.
pub async fn serve_engines(count: usize) {
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
        let close = async |Json(body): Json<Value>| {
            assert!(body["session_id"].is_string());
            tokio::time::sleep(ENGINE_TIME).await;
            StatusCode::OK
        };
        let router = Router::new()
            .route("/v1/loads", routing::get(loads))
            .route("/close_session", routing::post(close));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        servers.spawn(async move { axum::serve(listener, router).await.unwrap() });
    }
    println!();
    while servers.join_next().await.is_some() {}
}
