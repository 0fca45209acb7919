//! Cases of the queue that are about calls, processes and fleets, and not about time only.

use kvgate::gate::Phase;
use kvgate_core::policy::Policy;
use kvgate_core::units::Span;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::fleet;
use crate::support::app::{Builder, TestApp};
use crate::support::process::Kvgate;

async fn settled(gate: &Kvgate, so: impl Fn(&Value) -> bool) -> Value {
    loop {
        let state = gate.get("/v1/state").await;
        if so(&state) {
            return state;
        }
    }
}

/// Q03, TIC1, DUR2: one ticket acquired three times, once on a connection that broke, twice at once, and
/// again after kill -9: charged once, one lease id, one release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q03_a_retried_acquire_charges_once_over_a_kill() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let arguments = ["--router", &router, "--program-admission"];
    let gate = Kvgate::serve(data.path(), &arguments);
    let mut lost = tokio::net::TcpStream::connect(gate.address())
        .await
        .unwrap();
    let ask = crate::support::app::post_bytes(
        "/v1/leases",
        &json!({"ticket_id": "t1", "session_id": "s", "reservation_tokens": 300_000, "wait_s": 0}),
    );
    lost.write_all(&ask).await.unwrap();
    drop(lost);
    let (b, c) = tokio::join!(gate.acquire("t1", 300_000), gate.acquire("t1", 300_000));
    assert_eq!((b.action(), b.lease()), ("admit", c.lease()));
    let charged = |state: &Value| {
        (
            state["budget"]["reserved"].clone(),
            state["leases"]["count"].clone(),
        )
    };
    assert_eq!(
        charged(&gate.get("/v1/state").await),
        (json!(300_000), json!(1))
    );
    gate.kill();
    let gate = Kvgate::serve(data.path(), &arguments);
    let d = gate.acquire("t1", 300_000).await;
    assert_eq!((d.lease(), &d.body["repeated"]), (b.lease(), &json!(true)));
    assert_eq!(
        charged(&gate.get("/v1/state").await),
        (json!(300_000), json!(1))
    );
    let released = gate
        .post(&format!("/v1/leases/{}/release", d.lease()), &json!({}))
        .await;
    assert_eq!(released.body["outcome"], "released");
    assert_eq!(charged(&gate.get("/v1/state").await), (json!(0), json!(0)));
}

/// Q04, TIC6: three releases at the same time: one does it and nobody gets a 5xx; a lease that expired
/// and an id that nobody knows are told as such.
#[tokio::test]
async fn q04_released_twice_or_after_the_end() {
    let app = TestApp::start().await;
    let held = app.acquire("t1", 300).await;
    let brief = app
        .post(
            "/v1/leases",
            &json!({"ticket_id": "t2", "session_id": "s", "reservation_tokens": 200, "ttl_s": 1}),
        )
        .await
        .json();
    let path = |lease: &Value| format!("/v1/leases/{}", lease["lease_id"].as_str().unwrap());
    let held = path(&held);
    let (first, second, third) =
        tokio::join!(app.delete(&held), app.delete(&held), app.delete(&held));
    let mut outcomes = [first, second, third].map(|answer| answer.json()["outcome"].to_string());
    outcomes.sort();
    assert_eq!(
        outcomes,
        [
            r#""already_released""#,
            r#""already_released""#,
            r#""released""#
        ]
    );
    app.until(|view| view.leases == 0).await;
    app.delete(&path(&brief))
        .await
        .is_problem(410, "lease_expired");
    app.delete("/v1/leases/9-00000000000000aa")
        .await
        .is_problem(404, "lease_not_found");
    assert_eq!(app.gate.view().reserved.get(), 0);
}

/// Q05, DEC1: what exceeds the whole ceiling passes at once with a reason of its own, and nobody behind it waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q05_a_request_larger_than_the_whole_ceiling() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
    let (large, small) = tokio::join!(gate.acquire("t1", 950_000), gate.acquire("t2", 1_000));
    assert_eq!(
        (large.action(), &large.body["reason"]),
        ("bypass", &json!("oversize"))
    );
    assert_eq!(small.action(), "admit");
    let state = gate.get("/v1/state").await;
    assert_eq!(
        (&state["budget"]["reserved"], &state["queue"]["waiting"]),
        (&json!(1_000), &json!(0))
    );
}

/// Q06, DEC4: an engine leaves while 800,000 are reserved of what is now 450,000: nothing is cancelled,
/// `available` is 0, the utilisation is shown as it is, and the ledger drains by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q06_the_ceiling_falls_below_what_is_reserved() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(
        data.path(),
        &[
            "--router",
            &router,
            "--program-admission",
            "--admission-max-wait-s",
            "600",
        ],
    );
    let mut leases = Vec::new();
    for ticket in ["t1", "t2", "t3", "t4"] {
        leases.push(gate.acquire(ticket, 200_000).await.lease());
    }
    fleet.router().set_rows(vec![kvgate::demo::WorkerRow::new(
        "engine-a",
        &fleet.engine_url(0),
    )]);
    let state = settled(&gate, |state| state["budget"]["ceiling"] == 450_000).await;
    let budget = &state["budget"];
    assert_eq!(
        (&budget["reserved"], &budget["available"]),
        (&json!(800_000), &json!(0))
    );
    let shown = budget["reserved_utilization"].as_f64().unwrap();
    assert!((shown - 800.0 / 450.0).abs() < 1e-6, "{shown}");
    assert_eq!(state["leases"]["count"], 4);
    let t5 = gate.http.post(gate.url("/v1/leases")).json(&json!({
        "ticket_id": "t5", "session_id": "s", "reservation_tokens": 100_000, "wait_s": 60,
    }));
    let t5 = tokio::spawn(t5.send());
    settled(&gate, |state| state["queue"]["waiting"] == 1).await;
    for lease in &leases[..2] {
        gate.post(&format!("/v1/leases/{lease}/release"), &json!({}))
            .await;
        assert_eq!(gate.get("/v1/state").await["queue"]["waiting"], 1);
    }
    gate.post(&format!("/v1/leases/{}/release", leases[2]), &json!({}))
        .await;
    let t5: Value = t5.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(t5["action"], "admit");
    let state = gate.get("/v1/state").await;
    assert_eq!(state["budget"]["reserved"], 300_000);
}

/// Q07, TIC2: wait calls end by themselves with position, reason and when to ask again; the ticket keeps its place
/// over many of them, is counted once and is told its whole time.
#[tokio::test]
async fn q07_a_wait_goes_on_over_many_calls() {
    let app = Builder {
        policy: Policy {
            max_wait: Span::from_secs(120),
            claim_grace: Span::from_secs(60),
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    let held = app.acquire("t1", 800).await;
    let ask =
        json!({"ticket_id": "t2", "session_id": "s", "reservation_tokens": 300, "wait_s": 0.05});
    for call in 0..4 {
        let answer = app.post("/v1/leases", &ask).await;
        assert_eq!((answer.status, answer.seq().is_some()), (202, call == 0));
        let wait = answer.json();
        assert_eq!(
            (&wait["position"], &wait["reason"]),
            (&json!(1), &json!("capacity_exhausted"))
        );
        assert!(wait["bypass_in_s"].as_f64().unwrap() <= 120.0, "{wait}");
        app.acquire(&format!("behind-{call}"), 300).await;
    }
    let before = app.gate.view().now;
    app.delete(&format!(
        "/v1/leases/{}",
        held["lease_id"].as_str().unwrap()
    ))
    .await;
    let granted = app.post("/v1/leases", &ask).await.json();
    assert_eq!(granted["action"], "admit");
    assert!(granted["waited_s"].as_f64().unwrap() >= 0.15, "{granted}");
    assert!(app.gate.view().now >= before);
    let tally = app.gate.view().tally.clone();
    let train = tally.scope(kvgate_core::decision::Scope::Train);
    assert_eq!(train.wait.iter().sum::<u64>(), 5, "one for each ticket");
    assert_eq!(app.gate.phase(), Phase::Ready);
}
