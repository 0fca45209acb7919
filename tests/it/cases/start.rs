//! The sequence of a start: what is answered until the store is loaded and the fleet was read (DUR3, D01).

use std::path::Path;
use std::sync::{OnceLock, mpsc};

use kvgate::clock::Clock;
use kvgate::demo::Behaviour;
use kvgate::gate::Phase;
use kvgate::store::{self, FILE_NAME};
use kvgate_core::command::Command;
use serde_json::{Value, json};

use super::{Books, acquire, fleet};
use crate::support::app::{Answer, Builder, TestApp};
use crate::support::process::Kvgate;

const LEASES: u64 = 10_000;
const FINISHED: u64 = 100_000;

/// What a kill -9 leaves of a store with 10,000 leases of 1 token and 100,000 finished tickets.
fn killed_store(directory: &Path) {
    static FILE: OnceLock<Vec<u8>> = OnceLock::new();
    std::fs::write(directory.join(FILE_NAME), FILE.get_or_init(killed_file)).unwrap();
}

/// The file of an open store, as the next start finds it when the process is gone at once.
fn killed_file() -> Vec<u8> {
    let work = tempfile::tempdir().unwrap();
    let mut books = Books::create(work.path(), Clock::start().now());
    let names: Vec<String> = (0..LEASES).map(|number| format!("held-{number}")).collect();
    for some in names.chunks(5_000) {
        books.turn(some.iter().map(|name| acquire(name, 1)).collect());
    }
    let mut number = 0;
    while number < FINISHED {
        let granted = books.turn(
            (0..5_000)
                .map(|n| acquire(&format!("done-{}", number + n), 1))
                .collect(),
        );
        books.turn(granted.into_iter().map(Command::Release).collect());
        number += 5_000;
    }
    std::fs::read(work.path().join(FILE_NAME)).unwrap()
}

fn is_recovering(answer: &Answer) {
    answer.is_problem(503, "recovering");
    assert_eq!(answer.header("retry-after"), Some("1"));
}

/// Every call of the document but those of operation.
async fn everything_else_recovers(app: &TestApp) {
    let document = app.get("/openapi.json").await.json();
    let paths = document["paths"].as_object().unwrap();
    let mut asked = 0;
    for (path, methods) in paths {
        if ["/healthz", "/readyz", "/version", "/openapi.json"].contains(&path.as_str())
            || path.starts_with("/problems/")
        {
            continue;
        }
        let url = app.url(&path.replace("{", "").replace("}", ""));
        for method in methods.as_object().unwrap().keys() {
            if !["get", "post", "delete", "put", "patch"].contains(&method.as_str()) {
                continue;
            }
            let method = method.to_uppercase().parse().unwrap();
            let request = app.client.request(method, &url).json(&json!({}));
            is_recovering(&app.send(request).await);
            asked += 1;
        }
    }
    assert!(asked > 8, "{asked} calls in the document");
    is_recovering(&app.get("/v1/nothing").await);
    let page = app.get("/").await;
    assert_eq!((page.status, page.header("retry-after")), (503, Some("1")));
}

/// D01, DUR3: with the store held back the port answers: alive, not ready, everything else 503 `recovering`
/// at once. Then 10,000 leases and 100,000 finished tickets are there, and still nothing is decided before
/// the first reading round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d01_the_port_answers_while_the_store_is_recovering() {
    let directory = tempfile::tempdir().unwrap();
    killed_store(directory.path());
    let path = directory.path().to_owned();
    let (go, held) = mpsc::channel();
    let engines = vec![("http://engine-1:30000", 1_000_000)];
    let mut app = Builder {
        ready: false,
        engines: engines.clone(),
        ..Builder::default()
    }
    .start_on(move || {
        held.recv().unwrap();
        store::open(&path)
    })
    .await;
    assert_eq!(app.get("/healthz").await.status, 200);
    is_recovering(&app.get("/readyz").await);
    let ask = json!({"ticket_id": "new", "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
    is_recovering(&app.post("/v1/leases", &ask).await);
    everything_else_recovers(&app).await;
    assert_eq!(app.gate.phase(), Phase::Starting);

    go.send(()).unwrap();
    app.until(|view| view.leases == LEASES).await;
    assert_eq!(app.get("/healthz").await.status, 200);
    app.make_ready(&engines).await;
    assert_eq!(app.get("/readyz").await.status, 200);
    assert_eq!(app.post("/v1/leases", &ask).await.json()["action"], "admit");
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["budget"]["reserved"], LEASES + 1);
    assert_eq!(app.acquire("held-77", 1).await["repeated"], true);
    let finished = json!({"ticket_id": "done-77777", "session_id": "s", "reservation_tokens": 1});
    assert_eq!(
        app.post("/v1/leases", &finished).await.json()["reason"],
        "ticket_finished"
    );
    drop(go);
}

/// D01: the real binary on the same store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d01_a_start_after_a_kill_brings_all_back() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    killed_store(data.path());
    let router = fleet.router_url();
    let mut gate = Kvgate::listen(data.path(), &["--router", &router, "--program-admission"]);
    let health = gate.http.get(gate.url("/healthz")).send().await.unwrap();
    assert_eq!(health.status(), 200);
    let ready = gate.wait_for_log("ready");
    assert_eq!(ready["fields"]["leases"], LEASES);
    let state = gate.get("/v1/state").await;
    assert_eq!(state["budget"]["reserved"], LEASES);
    assert_eq!(gate.acquire("held-9999", 1).await.body["repeated"], true);
    assert!(gate.terminate().success());
}

/// DUR3: a router that does not answer: until the first round has ended, or 2 s have passed, every call says
/// `recovering`, then the service is ready, and degraded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur3_a_silent_router_holds_the_start_for_the_first_round_only() {
    let fleet = fleet().await;
    fleet.router().behave("/workers", Behaviour::Hang);
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let mut gate = Kvgate::listen(data.path(), &["--router", &router, "--program-admission"]);
    let mut recovering = 0;
    loop {
        let health = gate.http.get(gate.url("/healthz")).send().await.unwrap();
        assert_eq!(health.status(), 200);
        let ready = gate.http.get(gate.url("/readyz")).send().await.unwrap();
        if ready.status() == 200 {
            break;
        }
        assert_eq!(ready.headers()["retry-after"], "1");
        let problem: Value = ready.json().await.unwrap();
        assert_eq!(problem["code"], "recovering");
        let early = gate.acquire("early", 1).await;
        assert!(
            early.status == 503 && early.body["code"] == "recovering" || early.status == 200,
            "{early:?}"
        );
        recovering += u32::from(early.status == 503);
    }
    assert!(recovering > 0, "it was never seen recovering");
    gate.wait_for_log("ready");
    let answer = gate.acquire("t", 1).await;
    assert_eq!(
        (answer.action(), &answer.body["reason"]),
        ("bypass", &json!("degraded"))
    );
}
