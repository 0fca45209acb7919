//! A failing store, a full disk and a stuck writer as callers and probes see them (DUR3, DUR4).

use std::time::Duration;

use kvgate::gate::Phase;
use kvgate::http::Limits;
use kvgate_core::units::Span;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::support::app::{Builder, SOON, TestApp};
use crate::support::store::{Mood, Switch};

const ENGINES: &[(&str, u64)] = &[("http://engine-1:30000", 1_000)];

async fn start(builder: Builder) -> (TestApp, Switch) {
    let store = Switch::default();
    let open = store.clone();
    (builder.start_on(move || open.open()).await, store)
}

fn bypasses(body: &Value) {
    assert_eq!(
        (&body["action"], &body["reason"]),
        (&json!("bypass"), &json!("store_unavailable")),
        "{body}"
    );
}

/// `store.state`, and the codes of the notices.
async fn shown(app: &TestApp) -> (String, Vec<String>) {
    let state = app.get("/v1/state").await.json();
    let codes = state["notices"].as_array().unwrap().iter().map(|notice| {
        assert!(!notice["text"].as_str().unwrap().is_empty());
        assert!(notice["since"].as_str().unwrap().ends_with('Z'));
        notice["code"].as_str().unwrap().to_owned()
    });
    let codes = codes.collect();
    (state["store"]["state"].as_str().unwrap().to_owned(), codes)
}

/// DUR4: acquires bypass, other writes are 503 with `Retry-After`, the state shows the last good
/// commit and says what is wrong; releases are applied on recovery.
#[tokio::test]
async fn dur4_a_failed_store_over_http() {
    let (app, store) = start(Builder::default()).await;
    let held = app.acquire("held", 100).await;
    let lease = held["lease_id"].as_str().unwrap().to_owned();
    let kept = app.acquire("kept", 50).await;
    let kept = kept["lease_id"].as_str().unwrap().to_owned();
    assert_eq!(shown(&app).await, ("ok".to_owned(), vec![]));

    store.set(Mood::Failing);
    bypasses(&app.acquire("new", 10).await);
    bypasses(&app.acquire("held", 100).await);
    let down = app.get("/readyz").await;
    down.is_problem(503, "recovering");
    for refused in [
        app.delete(&format!("/v1/leases/{lease}")).await,
        app.delete("/v1/tickets/never-seen").await,
        app.post(&format!("/v1/leases/{kept}/renew"), &json!({"ttl_s": 60}))
            .await,
        app.get(&format!("/v1/leases/{kept}")).await,
        app.get("/v1/tickets/kept").await,
        app.get("/v1/leases").await,
        app.get("/v1/queue").await,
        app.get("/v1/epochs").await,
        app.post("/v1/wait", &json!({"ticket_ids": ["kept"], "wait_s": 0}))
            .await,
    ] {
        refused.is_problem(503, "store_unavailable");
    }
    let operations = json!({"operations": [
        {"op": "acquire", "ticket_id": "b", "session_id": "s", "reservation_tokens": 1},
        {"op": "release", "lease_id": lease},
    ]});
    let results = app.post("/v1/batch", &operations).await.json();
    bypasses(&results["results"][0]["body"]);
    assert_eq!(results["results"][1]["status"], 503);

    let brings = json!({"ticket_id": "n", "session_id": "s", "reservation_tokens": 1, "wait_s": 0,
        "local_bypasses": {"unreachable": 3}});
    bypasses(&app.post("/v1/leases", &brings).await.json());

    let (state, codes) = shown(&app).await;
    assert_eq!(
        (state.as_str(), codes),
        ("unavailable", vec!["store_unavailable".to_owned()])
    );
    assert_eq!(app.get("/v1/state").await.json()["budget"]["reserved"], 150);
    assert_eq!(app.get("/v1/engines").await.status, 200);
    assert_eq!(app.get("/healthz").await.json()["status"], "recovering");

    store.set(Mood::Good);
    recovered(&app).await;
    assert_eq!(shown(&app).await, ("ok".to_owned(), vec![]));
    assert_eq!(app.get("/v1/state").await.json()["budget"]["reserved"], 50);
    let again = app.delete(&format!("/v1/leases/{lease}")).await;
    assert_eq!(again.json()["outcome"], "already_released");
    let again = app.delete("/v1/tickets/never-seen").await;
    assert_eq!(again.json()["outcome"], "already_finished");
    let read = app.get(&format!("/v1/leases/{kept}")).await.json();
    assert_eq!(read["ttl_s"], 600.0, "the renewal is not applied later");
    assert_eq!(app.acquire("new", 10).await["action"], "admit");
    let counted = app.gate.view().tally.local_bypasses;
    assert_eq!(
        counted.iter().sum::<u64>(),
        3,
        "what a bypassed call brought"
    );
}

/// Hands in rounds, as a poller does, until one is taken.
async fn recovered(app: &TestApp) {
    let taken = async {
        while app.try_feed(ENGINES).await.is_err() {
            tokio::task::yield_now().await;
        }
        let mut phases = app.gate.phases();
        phases
            .wait_for(|phase| *phase == Phase::Ready)
            .await
            .unwrap();
    };
    tokio::time::timeout(SOON, taken).await.unwrap();
}

/// DUR4: with little room left the state says so, new acquires bypass, and releases go on.
#[tokio::test]
async fn dur4_little_room_over_http() {
    let (app, store) = start(Builder::default()).await;
    let held = app.acquire("held", 100).await;
    store.set_low_space(true);
    bypasses(&app.acquire("new", 10).await);
    assert_eq!(
        shown(&app).await,
        ("low_space".to_owned(), vec!["low_space".to_owned()])
    );
    assert_eq!(app.get("/readyz").await.status, 200);
    let lease = held["lease_id"].as_str().unwrap();
    assert_eq!(app.get(&format!("/v1/leases/{lease}")).await.status, 200);
    let released = app.delete(&format!("/v1/leases/{lease}")).await;
    assert_eq!(released.json()["outcome"], "released");
    store.set_low_space(false);
    assert_eq!(app.acquire("new", 10).await["action"], "admit");
    assert_eq!(shown(&app).await, ("ok".to_owned(), vec![]));
}

/// DUR3: the process is not healthy when the writer makes no progress for longer than the bound; a
/// writer that is held up for less, or that recovers, is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur3_a_stuck_writer_is_not_healthy() {
    for (stuck_after, healthy) in [(Span::ZERO, false), (kvgate::http::STUCK_AFTER, true)] {
        let builder = Builder {
            stuck_after,
            ..Builder::default()
        };
        let (app, store) = start(builder).await;
        store.set(Mood::Holding);
        let call = tokio::spawn({
            let gate = app.gate.clone();
            async move {
                let ticket = kvgate_core::ids::TicketId::new("t").unwrap();
                gate.cancel(ticket).await.map(|_| ())
            }
        });
        store.wait_until_held();
        if healthy {
            assert_eq!(app.get("/healthz").await.json()["status"], "ok");
        } else {
            // A millisecond without progress is enough here.
            let stuck = async {
                while app.get("/healthz").await.status == 200 {}
                app.get("/healthz").await
            };
            let stuck = tokio::time::timeout(SOON, stuck).await.unwrap();
            stuck.is_problem(503, "store_unavailable");
        }
        store.set(Mood::Failing);
        call.await.unwrap().unwrap_err();
        let recovering = app.get("/healthz").await;
        assert_eq!(recovering.json()["status"], "recovering");
    }
    assert_eq!(
        Duration::from_secs(30).as_millis(),
        u128::from(kvgate::http::STUCK_AFTER.millis())
    );
}

/// A commit that does not return, on the thread that reads the call that it is for, does not hold up the end of the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_does_not_return_does_not_hold_up_the_stop() {
    loop {
        let limits = Limits {
            stop_within: Duration::from_millis(100),
            ..Limits::default()
        };
        let (mut app, store) = start(Builder {
            limits,
            ..Builder::default()
        })
        .await;
        // Who is alone for a while does its turns.
        for number in 0.. {
            std::thread::yield_now();
            app.delete(&format!("/v1/tickets/alone-{number}")).await;
            if !store.by_writer() {
                break;
            }
        }
        store.set(Mood::Holding);
        let mut call = app.connect().await;
        let host = app.address;
        let request = format!("DELETE /v1/tickets/held HTTP/1.1\r\nhost: {host}\r\n\r\n");
        call.write_all(request.as_bytes()).await.unwrap();
        store.wait_until_held();
        let by_writer = store.by_writer();
        app.stop.cancel();
        let server = app.server.take().unwrap();
        let stopped = tokio::time::timeout(SOON, server).await;
        store.set(Mood::Good);
        stopped.expect("the server did not stop").unwrap();
        if !by_writer {
            return;
        }
    }
}
