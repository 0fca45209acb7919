//! Cases of worker lists, with the lists of the cases in front of engines that answer.

use kvgate::demo::{Behaviour, FakeFleet, FleetSpec, RouterKind};
use serde_json::{Value, json};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use super::fleet;
use crate::support::app::SOON;
use crate::support::process::Kvgate;

/// The list of a case, with the addresses of this fleet in place of those that stand in it.
fn list(fleet: &FakeFleet, file: &str) -> String {
    let path = format!("{}/tests/fixtures/cases/{file}", env!("CARGO_MANIFEST_DIR"));
    let mut text = std::fs::read_to_string(path).unwrap();
    for place in 0..fleet.engines().len() {
        let written = format!("127.0.0.1:{}", 18_101 + place);
        let url = fleet.engine_url(place);
        text = text.replace(&written, url.strip_prefix("http://").unwrap());
    }
    text
}

fn lists(fleet: &FakeFleet, text: String) {
    fleet
        .router()
        .behave("/workers", Behaviour::Raw(text.into_bytes()));
}

fn serve(fleet: &FakeFleet, data: &tempfile::TempDir, more: &[&str]) -> Kvgate {
    let router = fleet.router_url();
    let mut arguments = vec![
        "--router",
        &router,
        "--program-admission",
        "--session-lifecycle",
        "--poll-interval-s",
        "0.2",
    ];
    arguments.extend(more);
    Kvgate::serve(data.path(), &arguments)
}

/// The state, as soon as it is so.
async fn state(gate: &Kvgate, so: impl Fn(&Value) -> bool) -> Value {
    let seen = async {
        loop {
            let state = gate.get("/v1/state").await;
            if so(&state) {
                return state;
            }
        }
    };
    tokio::time::timeout(SOON, seen).await.unwrap()
}

/// Waits until the router was asked for its list twice more: what it says now is known then.
async fn two_rounds(fleet: &FakeFleet) {
    let before = fleet.router().requests().len();
    let asked = fleet.router().wait_for(|seen| seen.len() >= before + 2);
    tokio::time::timeout(SOON, asked).await.unwrap();
}

/// Closes a session everywhere; how the engines ended.
async fn closed(gate: &Kvgate, session: &str) -> Value {
    let path = format!("/v1/sessions/{session}/close?wait_s=30");
    let close = gate.post(&path, &json!({})).await.body;
    assert_eq!(close["state"], "done", "{close}");
    close["counts"].clone()
}

/// The bodies of the closes that an engine got.
fn closes(fleet: &FakeFleet, place: usize) -> Vec<Value> {
    let requests = fleet.requests(place);
    let closes = requests
        .iter()
        .filter(|request| request.path == "/close_session");
    closes
        .map(|request| serde_json::from_slice(&request.body).unwrap())
        .collect()
}

/// W01, CAP7: the list is empty for longer than the staleness limit: leases stay charged, requests bypass, and members
/// and epoch are those before and after it. The ceiling is never 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w01_the_router_list_is_empty_for_a_moment() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, &data, &["--stale-after-s", "1"]);
    for ticket in ["t1", "t2"] {
        assert_eq!(gate.acquire(ticket, 200_000).await.action(), "admit");
    }
    let before = state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
    fleet.router().set_rows(Vec::new());
    let during = state(&gate, |state| {
        assert_ne!(state["budget"]["ceiling"], 0, "{state}");
        assert_eq!(state["budget"]["reserved"], 400_000, "{state}");
        state["degraded"] == true
    })
    .await;
    assert_eq!(
        (&during["degraded_reason"], &during["epoch"]),
        (&json!("router_unreachable"), &before["epoch"])
    );
    let answer = gate.acquire("t3", 1_000).await;
    assert_eq!(
        (answer.action(), &answer.body["reason"]),
        ("bypass", &json!("degraded"))
    );
    let engines = gate.get("/v1/engines").await;
    assert_eq!(engines["items"].as_array().unwrap().len(), 2);
    assert_eq!(closed(&gate, "other").await["delivered"], 2);
    fleet.router().unset_rows();
    let after = state(&gate, |state| state["degraded"] == false).await;
    assert_eq!(
        (&after["budget"]["reserved"], &after["epoch"]),
        (&json!(400_000), &before["epoch"])
    );
    state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
}

/// W02, CAP1, CLO4: rows for the DP ranks of one engine are one engine, which gets one close and one reading a round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w02_worker_urls_with_a_dp_rank_suffix() {
    let fleet = fleet().await;
    lists(&fleet, list(&fleet, "W02-workers.json"));
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, &data, &[]);
    let state = state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
    assert_eq!(state["budget"]["capacity"], 1_000_000);
    let engines = gate.get("/v1/engines").await;
    let urls: Vec<&str> = engines["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["url"].as_str().unwrap())
        .collect();
    let mut own = [fleet.engine_url(0), fleet.engine_url(1)];
    own.sort();
    assert_eq!(urls, own);
    assert_eq!(closed(&gate, "s1").await["delivered"], 2);
    for place in [0, 1] {
        assert_eq!(closes(&fleet, place), [json!({"session_id": "s1"})]);
    }
}

/// W03, CAP1, CAP8: one engine in several spellings is one engine; another order and spelling is no other fleet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w03_the_same_engine_written_in_several_ways() {
    let fleet = fleet().await;
    lists(&fleet, list(&fleet, "W03-workers-1.json"));
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, &data, &[]);
    let before = state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
    lists(&fleet, list(&fleet, "W03-workers-2.json"));
    two_rounds(&fleet).await;
    let after = state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
    assert_eq!(after["epoch"], before["epoch"]);
    let engines = gate.get("/v1/engines").await;
    assert_eq!(engines["items"].as_array().unwrap().len(), 2, "{engines}");
    for place in [0, 1] {
        for request in fleet.requests(place) {
            assert!(!request.path.starts_with("//"), "{request:?}");
        }
    }
}

/// W04, CAP1: an IPv6 address without brackets is named with the reason and not guessed; one with brackets works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w04_an_ipv6_worker_url_without_brackets() {
    let fleet = fleet().await;
    let case: Value = serde_json::from_str(&list(&fleet, "W04-workers.json")).unwrap();
    let mut rows = case["workers"].as_array().unwrap().clone();
    let mut ceiling = 450_000;
    match TcpListener::bind("[::1]:0").await {
        Ok(listener) => {
            let port = listener.local_addr().unwrap().port();
            rows.push(json!({"id": "w-6", "url": format!("http://[::1]:{port}")}));
            ceiling = 900_000;
            let to = fleet.engine_url(1).replace("http://", "");
            tokio::spawn(async move {
                while let Ok((mut from, _)) = listener.accept().await {
                    let to = to.clone();
                    tokio::spawn(async move {
                        let mut to = TcpStream::connect(to).await.unwrap();
                        // Either side may end it.
                        let _ = copy_bidirectional(&mut from, &mut to).await;
                    });
                }
            });
        }
        Err(error) => eprintln!("NOT RUN with brackets: there is no IPv6 here: {error}"),
    }
    let written = json!({"workers": rows}).to_string();
    lists(&fleet, written);
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, &data, &[]);
    state(&gate, |state| state["budget"]["ceiling"] == ceiling).await;
    let engines = gate.get("/v1/engines").await;
    assert_eq!(
        engines["router"]["bad_entries"],
        json!([{"entry": "http://2001:db8::5:30000", "reason": "not a valid address"}])
    );
    let delivered = closed(&gate, "s1").await["delivered"].clone();
    assert_eq!(delivered, ceiling / 450_000);
}

/// W05, CAP3, CLO4: engines that were never seen healthy do not count, in either spelling of the field; closes go there
/// all the same, and one that hangs there holds up nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w05_an_unhealthy_worker_stays_in_the_list() {
    let fleet = FakeFleet::start(FleetSpec::uniform(3, 500_000))
        .await
        .unwrap();
    lists(&fleet, list(&fleet, "W05-workers.json"));
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, &data, &[]);
    let state = state(&gate, |state| state["budget"]["ceiling"] != 0).await;
    assert_eq!(state["budget"]["ceiling"], 450_000);
    let engines = gate.get("/v1/engines").await;
    for place in 0..3 {
        let url = fleet.engine_url(place);
        let rows = engines["items"].as_array().unwrap();
        let row = rows.iter().find(|row| row["url"] == *url).unwrap();
        let well = place == 0;
        assert_eq!(
            (&row["healthy"], &row["counted"], &row["capacity"]),
            (&json!(well), &json!(well), &json!(500_000))
        );
    }
    fleet.engine(1).behave("/close_session", Behaviour::Hang);
    let close = gate.post("/v1/sessions/s1/close", &json!({})).await.body;
    let path = format!("/v1/closes/{}", close["close_id"].as_str().unwrap());
    let two = async { while gate.get(&path).await["counts"]["delivered"] != 2 {} };
    tokio::time::timeout(SOON, two).await.unwrap();
    for place in [0, 2] {
        assert_eq!(closes(&fleet, place), [json!({"session_id": "s1"})]);
    }
}

/// W06, CAP1, CAP7: a router with the old list only is read from it; one that asks for a key is told as such and not
/// taken for an old one, and the key that is configured is shown nowhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w06_an_old_router_and_a_router_with_a_key() {
    let old = fleet().await;
    old.router().set_kind(RouterKind::ListWorkersOnly);
    let text = list(&old, "W06-list_workers.json");
    old.router()
        .behave("/list_workers", Behaviour::Raw(text.into_bytes()));
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&old, &data, &[]);
    state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
    drop(gate);

    let locked = fleet().await;
    for path in ["/workers", "/list_workers"] {
        locked
            .router()
            .behave(path, Behaviour::Status(401, String::new()));
    }
    let data = tempfile::tempdir().unwrap();
    let key = data.path().join("key");
    std::fs::write(&key, "a-key-of-the-router\n").unwrap();
    let key = key.to_str().unwrap();
    let mut gate = serve(&locked, &data, &["--router-key-file", key]);
    let seen = state(&gate, |state| state["degraded"] == true).await;
    let engines = gate.get("/v1/engines").await;
    let error = &engines["router"]["last_error"];
    assert_eq!(*error, "router asks for a key (401)");
    let asked = locked.router().requests();
    assert!(asked.iter().all(|request| request.path == "/workers"));
    let bearer = Some("Bearer a-key-of-the-router");
    assert!(
        asked
            .iter()
            .all(|request| request.authorization.as_deref() == bearer)
    );
    gate.wait_for_log("the router gives no list");
    let log = gate.log_text();
    assert!(log.contains("router asks for a key (401)"), "{log}");
    let shown = format!("{log}{seen}{engines}");
    assert!(!shown.contains("a-key-of-the-router"), "{shown}");
}

/// W07, CAP4, CAP8: an engine that was away for longer than the staleness limit and comes back smaller, with counters
/// that began again, is a new one: its old capacity counts no more, and the epoch moves once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w07_an_engine_comes_back_on_the_same_address() {
    let fleet = fleet().await;
    let says = |place: usize, file: &str| {
        let engine = fleet.engine(place);
        engine.behave("/v1/loads", Behaviour::Status(404, String::new()));
        engine.behave("/server_info", Behaviour::Status(404, String::new()));
        engine.behave("/metrics", Behaviour::Raw(list(&fleet, file).into_bytes()));
    };
    says(0, "W07-a.txt");
    says(1, "W07-b1.txt");
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, &data, &["--stale-after-s", "1"]);
    let before = state(&gate, |state| state["budget"]["ceiling"] == 900_000).await;
    fleet.engine(1).behave("/metrics", Behaviour::Cut);
    let away = state(&gate, |state| state["budget"]["ceiling"] == 450_000).await;
    assert_eq!(away["epoch"], before["epoch"], "away alone is none");
    says(1, "W07-b2.txt");
    let epoch = before["epoch"].as_u64().unwrap() + 1;
    let back = state(&gate, |state| {
        state["budget"]["ceiling"] == 720_000 && state["epoch"] == epoch
    })
    .await;
    assert_eq!(back["degraded"], false);
    two_rounds(&fleet).await;
    assert_eq!(gate.get("/v1/state").await["epoch"], epoch, "once");
    let epochs = gate.get("/v1/epochs").await;
    assert_eq!(epochs["items"][0]["engine"], *fleet.engine_url(1));
}
