//! Floods at the real binary: it goes on serving, and its memory has a bound.
//!
//! Figures of memory are bounds with room, not what it takes: a debug build of a busy machine.

use std::io::Write;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use axum::routing::any;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::fleet;
use crate::support::app::{SOON, parse_raw};
use crate::support::process::Kvgate;

const MIB: u64 = 1 << 20;

/// Twenty clients take and give back leases, each so many times.
async fn clients(gate: &Kvgate, rounds: usize) {
    let mut clients = JoinSet::new();
    for client in 0..20 {
        let (http, url) = (gate.http.clone(), gate.url("/v1/leases"));
        clients.spawn(async move {
            for round in 0..rounds {
                let ticket = format!("{client}-{round}-{:x}", getrandom::u64().unwrap());
                let ask = json!({"ticket_id": ticket, "session_id": "s", "reservation_tokens": 1});
                let answer = http.post(&url).json(&ask).send().await.unwrap();
                assert_eq!(answer.status(), 200);
                let admit: Value = answer.json().await.unwrap();
                assert_eq!(admit["action"], "admit", "{admit}");
                let lease = format!("{url}/{}", admit["lease_id"].as_str().unwrap());
                assert_eq!(http.delete(lease).send().await.unwrap().status(), 200);
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
}

async fn gate_with_fleet(more: &[&str]) -> (kvgate::demo::FakeFleet, tempfile::TempDir, Kvgate) {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let arguments = [&["--router", &router, "--program-admission"], more].concat();
    let gate = Kvgate::serve(data.path(), &arguments);
    (fleet, data, gate)
}

/// 5,000 connections that say nothing, or sent one request and stay: clients are served, each of the
/// connections still is, and none costs more than some kilobytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_thousand_idle_connections() {
    const IDLE: u64 = 5_000;
    rlimit::increase_nofile_limit(IDLE * 2).unwrap();
    let (_fleet, _data, gate) = gate_with_fleet(&[]).await;
    clients(&gate, 5).await;
    let (before, _) = gate.memory();
    let get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut idle = Vec::new();
    for number in 0..IDLE {
        let mut stream = TcpStream::connect(gate.address()).await.unwrap();
        if number % 2 == 0 {
            stream.write_all(get).await.unwrap();
        }
        idle.push(stream);
    }
    clients(&gate, 20).await;
    let (after, _) = gate.memory();
    assert!(
        after < before + IDLE * (48 << 10),
        "{before} bytes before, {after} after"
    );
    let last = idle.len() - 2;
    let mut answer = vec![0; 12];
    idle[last].read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 200");
    drop(idle);
    clients(&gate, 5).await;
}

/// Where few files may be open, an operator is told; connections that take all they can leave enough
/// for the engines and for callers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn few_file_descriptors_are_told_and_shared() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve_under(
        &["prlimit", "--nofile=128:128"],
        data.path(),
        &["--router", &router, "--program-admission"],
    );
    let state = gate.get("/v1/state").await;
    let notices = state["notices"].as_array().unwrap();
    let notice = notices
        .iter()
        .find(|notice| notice["code"] == "few_file_descriptors")
        .unwrap_or_else(|| panic!("{state}"));
    let text = notice["text"].as_str().unwrap();
    for figure in ["128 files", "96 connections", "65536", "LimitNOFILE"] {
        assert!(text.contains(figure), "{figure}: {text}");
    }
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(TcpStream::connect(gate.address()).await.unwrap());
    }
    clients(&gate, 3).await;
    // Each reading opens what it needs: an engine that cut its connections is read again.
    let asked = fleet.engine(0).requests().len();
    fleet
        .engine(0)
        .wait_for(|requests| requests.len() > asked + 4)
        .await;
    assert_eq!(gate.get("/v1/state").await["degraded"], false);
}

/// Senders of large bodies that stall, and readers that take nothing, fill no more than their bounds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_senders_and_readers_fill_no_memory() {
    let (_fleet, _data, gate) = gate_with_fleet(&[]).await;
    clients(&gate, 2).await;
    let (before, _) = gate.memory();
    let body = vec![b' '; (4 << 20) - 1];
    let mut senders = Vec::new();
    for _ in 0..100 {
        let mut stream = TcpStream::connect(gate.address()).await.unwrap();
        let head = "POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4194304\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&body).await.unwrap();
        senders.push(stream);
    }
    // One for whom there is no room is told when it has sent all.
    senders[99].write_all(b" ").await.unwrap();
    let mut refused = vec![0; 12];
    senders[99].read_exact(&mut refused).await.unwrap();
    assert_eq!(refused, b"HTTP/1.1 503");
    let mut readers = Vec::new();
    for _ in 0..100 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4_096).unwrap();
        let mut stream = socket.connect(gate.address()).await.unwrap();
        let flood = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
        stream.write_all(&flood).await.unwrap();
        readers.push(stream);
    }
    clients(&gate, 5).await;
    let (_, most) = gate.memory();
    // The room for bodies, twice where a buffer is about to grow, and the answers.
    assert!(
        most < before + 400 * MIB,
        "{before} bytes before, {most} at most"
    );
}

/// A gzip of a gibibyte of spaces, of about a mebibyte.
fn bomb() -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    let spaces = vec![b' '; MIB as usize];
    for _ in 0..1_024 {
        gzip.write_all(&spaces).unwrap();
    }
    gzip.finish().unwrap()
}

/// What a fake of bombs was asked.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<String>>>);

impl Asked {
    fn has(&self, path: &str) -> bool {
        self.count(path) > 0
    }

    fn count(&self, path: &str) -> usize {
        let asked = self.0.lock().unwrap();
        asked.iter().filter(|asked| *asked == path).count()
    }
}

/// Answers every path but those named with a bomb.
async fn bombing(but: &'static [(&'static str, u16, &'static str)]) -> (String, Asked) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Asked::default();
    let book = asked.clone();
    let bomb = axum::body::Bytes::from(bomb());
    let answer = move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        book.0.lock().unwrap().push(path.clone());
        let plain = but.iter().find(|(known, ..)| *known == path);
        let response = Response::builder();
        let response = match plain {
            Some((_, status, text)) => response.status(*status).body(Body::from(*text)),
            None => response
                .header("content-encoding", "gzip")
                .body(Body::from(bomb.clone())),
        };
        std::future::ready(response.unwrap())
    };
    let app = Router::new().fallback(any(answer));
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, asked)
}

/// Waits for what a fake is asked.
async fn until(what: impl Fn() -> bool) {
    let seen = async {
        while !what() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, seen)
        .await
        .expect("it was never asked");
}

/// Waits until a value of the API is what it should be.
async fn reads(gate: &Kvgate, path: &str, pointer: &str, wanted: Value) {
    let read = async { while gate.get(path).await.pointer(pointer) != Some(&wanted) {} };
    tokio::time::timeout(SOON, read)
        .await
        .unwrap_or_else(|_| panic!("{path}{pointer} was never {wanted}"));
}

/// X04: an engine that answers each kind of call with a compressed bomb: both readings, the
/// description, the close and the abort. None is unpacked beyond its bound, the good engine counts, and
/// callers are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_of_an_engine_are_given_up() {
    let good = fleet().await;
    let (engine, asked) = bombing(&[]).await;
    let data = tempfile::tempdir().unwrap();
    let arguments = [
        ["--engine", &engine],
        ["--engine", &good.engine_url(0)],
        ["--close-attempts", "2"],
        ["--stale-after-s", "60"],
    ];
    let features = ["--program-admission", "--session-lifecycle"];
    let arguments = [arguments.as_flattened(), &features].concat();
    let gate = Kvgate::serve(data.path(), &arguments);
    reads(&gate, "/v1/state", "/budget/capacity", json!(500_000)).await;
    clients(&gate, 2).await;
    let (before, _) = gate.memory();
    let ask = json!({"ticket_id": "t", "session_id": "closing", "reservation_tokens": 1, "request_id": "r"});
    let lease = gate.post("/v1/leases", &ask).await.lease();
    let close = gate
        .post("/v1/sessions/closing/close", &json!({"mode": "abort"}))
        .await;
    assert_eq!(close.status, 202, "{:?}", close.body);
    for path in ["/v1/loads", "/metrics", "/server_info", "/abort_request"] {
        until(|| asked.has(path)).await;
    }
    gate.delete(&format!("/v1/leases/{lease}")).await;
    let close = format!("/v1/closes/{}", close.body["close_id"].as_str().unwrap());
    reads(&gate, &close, "/state", json!("done")).await;
    assert!(asked.has("/close_session"));
    let ended = gate.get(&close).await;
    assert_eq!(ended["counts"]["failed"], 1, "{ended}");
    clients(&gate, 5).await;
    let (_, most) = gate.memory();
    assert!(
        most < before + 250 * MIB,
        "{before} bytes before, {most} at most"
    );
}

/// X04: a router whose lists are compressed bombs, the new one and the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_of_a_router_are_given_up() {
    for (but, list) in [
        ([].as_slice(), "/workers"),
        (&[("/workers", 404, "")], "/list_workers"),
    ] {
        let (router, asked) = bombing(but).await;
        let data = tempfile::tempdir().unwrap();
        let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
        until(|| asked.count(list) > 2).await;
        let bypass = gate.acquire("t", 1).await;
        assert_eq!(
            (bypass.action(), &bypass.body["reason"]),
            ("bypass", &json!("degraded"))
        );
        let (now, most) = gate.memory();
        assert!(most < 300 * MIB, "{now} bytes, {most} at most");
    }
}

/// A flood of requests in one piece is answered one by one, in its order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_requests_in_one_piece() {
    let (_fleet, _data, gate) = gate_with_fleet(&[]).await;
    let (before, _) = gate.memory();
    let mut stream = TcpStream::connect(gate.address()).await.unwrap();
    let (mut from, mut to) = stream.split();
    let one = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let last = "GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let flood = format!("{}{last}", one.repeat(19_999));
    let mut answers = Vec::new();
    let (sent, read) = tokio::join!(
        to.write_all(flood.as_bytes()),
        from.read_to_end(&mut answers)
    );
    sent.unwrap();
    read.unwrap();
    let text = String::from_utf8(answers).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 20_000);
    let (after, _) = gate.memory();
    assert!(
        after < before + 64 * MIB,
        "{before} bytes before, {after} after"
    );
    let end = text.rfind("HTTP/1.1 200 OK").unwrap();
    assert_eq!(parse_raw(&text.as_bytes()[end..]).json()["name"], "kvgate");
}
