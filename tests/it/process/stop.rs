//! Orderly stops: waiting callers come back to their places.

use serde_json::json;

use super::fleet;
use crate::support::process::Kvgate;

/// TIC2, DUR2: at SIGTERM waiting calls get 503 `draining` and keep their places; the process ends
/// with 0 although calls were open, and the next start has the same line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_answers_waiting_calls_and_keeps_their_places() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let arguments = ["--router", &router, "--program-admission"];
    let gate = Kvgate::serve(data.path(), &arguments);
    assert_eq!(gate.acquire("base", 900_000).await.action(), "admit");
    let waiting = |name: &str| {
        let request = gate.http.post(gate.url("/v1/leases")).json(&json!({
            "ticket_id": name, "session_id": "s", "reservation_tokens": 5, "wait_s": 60,
        }));
        tokio::spawn(request.send())
    };
    // The second is sent when the first stands in line, so that their order is known.
    let mut calls = Vec::new();
    for number in 0..3_u64 {
        calls.push(waiting(&format!("t-{number}")));
        while gate.get("/v1/state").await["queue"]["waiting"] != number + 1 {}
    }
    let address = gate.address();
    let ended = tokio::task::spawn_blocking(move || gate.terminate());
    for call in calls {
        let answer = call.await.unwrap().unwrap();
        assert_eq!(answer.status(), 503);
        assert!(answer.headers().contains_key("retry-after"));
        let problem: serde_json::Value = answer.json().await.unwrap();
        assert_eq!(problem["code"], "draining");
    }
    assert!(ended.await.unwrap().success());
    assert!(
        std::net::TcpStream::connect(address).is_err(),
        "nobody listens any more"
    );

    let gate = Kvgate::serve(data.path(), &arguments);
    let queue = gate.list("/v1/queue").await;
    let line: Vec<&str> = queue
        .iter()
        .map(|row| row["ticket_id"].as_str().unwrap())
        .collect();
    assert_eq!(line, ["t-0", "t-1", "t-2"]);
}

/// The bound address stands in the data directory, one line an address.
#[tokio::test]
async fn the_bound_addresses_are_written_down() {
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(data.path(), &["--listen", "[::1]:0"]);
    let text = std::fs::read_to_string(data.path().join("address")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0], gate.address().to_string());
    assert!(lines[1].starts_with("[::1]:"));
    let second = format!("http://{}/healthz", lines[1]);
    assert_eq!(gate.http.get(second).send().await.unwrap().status(), 200);
}
