//! Session closes of the real binary: a kill in the middle of them, and an orderly stop.

use std::collections::BTreeSet;

use kvgate::demo::{Behaviour, FakeFleet, FleetSpec, RecordedRequest};
use serde_json::{Value, json};

use crate::support::closes::{bodies, soon};
use crate::support::process::Kvgate;

const CLOSE: &str = "/close_session";

fn serve(fleet: &FakeFleet, data: &std::path::Path) -> Kvgate {
    let router = fleet.router_url();
    Kvgate::serve(data, &["--router", &router, "--session-lifecycle"])
}

fn closes(requests: &[RecordedRequest]) -> Vec<RecordedRequest> {
    let closes = requests.iter().filter(|request| request.path == CLOSE);
    closes.cloned().collect()
}

/// The sessions that an engine was told of.
fn told(requests: &[RecordedRequest]) -> BTreeSet<String> {
    let bodies = bodies(&closes(requests));
    let ids = bodies.iter().map(|body| body["session_id"].as_str());
    ids.map(|id| id.unwrap().to_owned()).collect()
}

/// Waits until no close is pending.
async fn settled(gate: &Kvgate) -> Value {
    let settled = async {
        loop {
            let state = gate.get("/v1/state").await;
            if state["closes"]["pending"] == 0 {
                return state;
            }
        }
    };
    soon(settled).await
}

/// DUR1, CLO6, CLO9: kill -9 in the middle of 500 closes on 8 engines: after the start every engine is
/// told of every session, and each close is there once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo6_a_kill_in_the_middle_of_many_closes() {
    let fleet = FakeFleet::start(FleetSpec::uniform(8, 500_000))
        .await
        .unwrap();
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, data.path());
    let sessions: Vec<String> = (0..500).map(|number| format!("s/{number}")).collect();
    let operations: Vec<Value> = sessions
        .iter()
        .map(|session| json!({"op": "close", "session_id": session}))
        .collect();
    let answer = gate
        .post("/v1/batch", &json!({"operations": operations}))
        .await;
    let results = answer.body["results"].as_array().unwrap();
    assert!(results.iter().all(|result| result["status"] == 202));
    // One engine is far behind when the process ends.
    let some = |requests: &[RecordedRequest]| closes(requests).len() >= 100;
    soon(fleet.engine(3).wait_for(some)).await;
    fleet.engine(5).behave(CLOSE, Behaviour::Cut);
    gate.kill();
    fleet.engine(5).behave(CLOSE, Behaviour::Normal);

    let gate = serve(&fleet, data.path());
    let state = settled(&gate).await;
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 0}));
    let expected: BTreeSet<String> = sessions.into_iter().collect();
    for engine in fleet.engines() {
        assert_eq!(told(&engine.requests()), expected, "{}", engine.url());
    }
    let kept = gate.list("/v1/closes").await;
    assert_eq!(kept.len(), 500);
    assert!(kept.iter().all(|close| close["state"] == "done"));
    // CLO9: each close and each of its engines is counted once, over the kill too.
    let metrics = gate.http.get(gate.url("/metrics")).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let counted = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name}"))
            .trim()
            .to_owned()
    };
    assert_eq!(counted("kvgate_session_closes_total"), "500");
    assert_eq!(counted("kvgate_session_close_failures_total"), "0");
    let delivered = "kvgate_session_close_deliveries_total{result=\"delivered\"}";
    assert_eq!(counted(delivered), "4000");
    let asked_of_the_router = fleet.router().requests();
    assert!(
        asked_of_the_router
            .iter()
            .all(|request| request.method == "GET")
    );
}

/// An engine that hangs does not hold up an orderly stop; it is told again after the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo6_an_engine_that_hangs_holds_up_no_stop() {
    let fleet = super::fleet().await;
    fleet.engine(1).behave(CLOSE, Behaviour::Hang);
    let data = tempfile::tempdir().unwrap();
    let gate = serve(&fleet, data.path());
    let answer = gate.post("/v1/sessions/s%2F1/close", &json!({})).await;
    assert_eq!(answer.status, 202, "{}", answer.body);
    let close = answer.body["close_id"].as_str().unwrap().to_owned();
    for engine in fleet.engines() {
        let one = |requests: &[RecordedRequest]| closes(requests).len() == 1;
        soon(engine.wait_for(one)).await;
    }
    assert!(gate.terminate().success());

    fleet.engine(1).behave(CLOSE, Behaviour::Normal);
    let gate = serve(&fleet, data.path());
    settled(&gate).await;
    let close = gate.get(&format!("/v1/closes/{close}")).await;
    assert_eq!(
        (&close["state"], &close["session_id"]),
        (&json!("done"), &json!("s/1"))
    );
    let told = |place: usize| closes(&fleet.requests(place)).len();
    assert_eq!((told(0), told(1)), (1, 2));
}
