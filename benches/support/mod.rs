//! What the benches share: servers in processes of their own, and plain HTTP connections to them.
#![allow(dead_code, unused_imports, reason = "each bench uses a part of it")]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

pub use kvgate::load::{histogram, millis};

/// A server in a process of its own. Killed when dropped.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    /// Time from its start to its word `ready`; of kvgate only.
    pub ready: Duration,
}

impl Server {
    /// The binary, or the one that `KVGATE_BIN` names, on a port of its own, ready.
    pub fn kvgate(data: &Path, arguments: &[&str]) -> Self {
        let began = Instant::now();
        let program = std::env::var_os("KVGATE_BIN");
        let program = program.unwrap_or_else(|| env!("CARGO_BIN_EXE_kvgate").into());
        let mut child = Command::new(program)
            .args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json"])
            .args(arguments)
            .arg("--data")
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
        let ready = began.elapsed();
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            address: address.expect("kvgate listens before it is ready"),
            ready,
        }
    }

    /// This very bench with other arguments, which prints the addresses that it serves, one a line,
    /// and an empty line after the last.
    pub fn this_bench(arguments: &[&str]) -> (Self, Vec<SocketAddr>) {
        let began = Instant::now();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let addresses: Vec<SocketAddr> = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap)
            .take_while(|line| !line.is_empty())
            .map(|line| line.parse().unwrap())
            .collect();
        let server = Self {
            child,
            address: addresses[0],
            ready: began.elapsed(),
        };
        (server, addresses)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL: no chance to write anything more.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub type Connection = SendRequest<Full<Bytes>>;

pub async fn connect(address: SocketAddr) -> Connection {
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Posts a body; any 2xx will do.
pub async fn post(connection: &mut Connection, path: &str, body: String) -> Value {
    let answer = send(connection, Method::POST, path, body).await;
    serde_json::from_slice(&answer).unwrap()
}

pub async fn get(connection: &mut Connection, path: &str) -> Value {
    serde_json::from_slice(&get_text(connection, path).await).unwrap()
}

pub async fn get_text(connection: &mut Connection, path: &str) -> Bytes {
    send(connection, Method::GET, path, String::new()).await
}

async fn send(connection: &mut Connection, method: Method, path: &str, body: String) -> Bytes {
    let (status, body) = call(connection, method, path, body).await;
    assert!(status.is_success(), "{path}: {status} {body:?}");
    body
}

/// Any call, and whatever is answered.
pub async fn call(
    connection: &mut Connection,
    method: Method,
    path: &str,
    body: String,
) -> (StatusCode, Bytes) {
    connection.ready().await.unwrap();
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "127.0.0.1")
        .header("content-type", "application/json")
        .body(Full::from(body))
        .unwrap();
    let answer = connection.send_request(request).await.unwrap();
    let status = answer.status();
    (
        status,
        answer.into_body().collect().await.unwrap().to_bytes(),
    )
}

/// Tickets are never used again: not in this run, nor in one before it.
pub fn ticket() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("bench-ticket-{:023}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The machine's load, which every figure is to be read with.
pub fn load_average() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').take(3).collect::<Vec<_>>().join(" ")
}
