//! Whether an answer arrived: grants are claimed by their delivery, and vanished callers keep nothing (TIC3, TIC4).

use kvgate_core::decision::Scope;
use kvgate_core::policy::Policy;
use kvgate_core::tally::{CancelledHow, ScopeTally};
use kvgate_core::units::Span;
use kvgate_core::view::View;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::app::{Builder, SOON, TestApp};

/// A grace of a second, so that a test sees its end.
async fn app() -> TestApp {
    Builder {
        policy: Policy {
            claim_grace: Span::from_secs(1),
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await
}

fn train(view: &View) -> &ScopeTally {
    view.tally.scope(Scope::Train)
}

/// Sends a request on a connection of its own and leaves it open.
async fn open_call(app: &TestApp, path: &str, body: &serde_json::Value) -> TcpStream {
    let mut stream = app.connect().await;
    let body = body.to_string();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

fn acquire(ticket: &str, tokens: u64) -> serde_json::Value {
    json!({"ticket_id": ticket, "session_id": "s", "reservation_tokens": tokens, "wait_s": 60})
}

/// TIC4, CNT1: an answer that was written whole claims the grant, so it is still held after the grace.
#[tokio::test]
async fn tic4_a_written_answer_claims_the_grant() {
    let app = app().await;
    let mut stream = open_call(&app, "/v1/leases", &acquire("t", 1)).await;
    let mut byte = [0];
    stream.read_exact(&mut byte).await.unwrap();
    app.until(|view| train(view).admit == 1).await;
    drop(stream);
    // Two waiters that stay away are dropped one after the other: more than the grace has passed then.
    for ticket in ["w-1", "w-2"] {
        app.acquire(ticket, 1_000).await;
        app.until(|view| view.waiting == 0).await;
    }
    assert_eq!(app.gate.view().leases, 1);
    assert_eq!(app.get("/v1/tickets/t").await.json()["repeated"], true);
}

/// TIC3, TIC4: a caller that vanishes while it waits is away at once, and dropped after the grace.
#[tokio::test]
async fn tic3_a_vanished_waiter_is_dropped() {
    let app = app().await;
    app.acquire("holder", 1_000).await;
    let stream = open_call(&app, "/v1/leases", &acquire("w", 1)).await;
    app.until(|view| view.waiting == 1).await;
    drop(stream);
    app.until(|view| view.waiting == 0).await;
    let read = app.get("/v1/tickets/w").await.json();
    assert_eq!(
        read,
        json!({"action": "ended", "reason": "dropped", "ticket_id": "w"})
    );
    assert_eq!(train(&app.gate.view()).cancels(CancelledHow::Dropped), 1);
    assert_eq!(app.gate.waiting_calls(), 0);
}

/// TIC3: the same for a call that waits for many tickets.
#[tokio::test]
async fn tic3_a_vanished_wait_leaves_its_tickets() {
    let app = app().await;
    app.acquire("holder", 1_000).await;
    for ticket in ["w-1", "w-2"] {
        app.acquire(ticket, 1).await;
    }
    let stream = open_call(
        &app,
        "/v1/wait",
        &json!({"ticket_ids": ["w-1", "w-2"], "wait_s": 60}),
    )
    .await;
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    drop(stream);
    app.until(|view| view.waiting == 0).await;
    assert_eq!(train(&app.gate.view()).cancels(CancelledHow::Dropped), 2);
}

/// TIC4, Q02: a grant in the instant in which its caller goes is either claimed, or kept for the grace and then taken
/// back; a retry within the grace gets it. Nothing stays reserved, and the line moves on.
#[tokio::test]
async fn tic4_a_grant_to_a_vanishing_caller_is_not_lost() {
    let app = app().await;
    for round in 0..40 {
        let held = app.acquire(&format!("held-{round}"), 1_000).await;
        let lease = format!("/v1/leases/{}", held["lease_id"].as_str().unwrap());
        let ticket = format!("w-{round}");
        let stream = open_call(&app, "/v1/leases", &acquire(&ticket, 1_000)).await;
        app.until(|view| view.waiting == 1).await;
        // The release and the break race; which comes first is left to chance, and every order is right.
        let (release, ()) = tokio::join!(app.delete(&lease), async {
            for _ in 0..round {
                tokio::task::yield_now().await;
            }
            drop(stream);
        });
        assert_eq!(release.json()["outcome"], "released");
        let again = app
            .post("/v1/leases", &acquire(&ticket, 1_000))
            .await
            .json();
        assert_eq!(
            again["action"], "admit",
            "a retry within the grace gets the grant: {again}"
        );
        app.delete(&format!("/v1/tickets/{ticket}")).await;
        assert_eq!(app.gate.view().reserved.get(), 0, "round {round}");
    }
    // And without a retry it goes by itself, without the life of the lease.
    let held = app.acquire("held", 1_000).await;
    let stream = open_call(&app, "/v1/leases", &acquire("w", 1_000)).await;
    app.until(|view| view.waiting == 1).await;
    drop(stream);
    app.delete(&format!(
        "/v1/leases/{}",
        held["lease_id"].as_str().unwrap()
    ))
    .await;
    app.until(|view| view.leases == 0 && view.waiting == 0)
        .await;
    let tally = app.gate.view();
    let gone = train(&tally).cancels(CancelledHow::TakenBack)
        + train(&tally).cancels(CancelledHow::Dropped);
    assert_eq!(gone, 1);
}

/// TIC4: an answer whose reader is gone before it could be written is undelivered, also in a batch.
#[tokio::test]
async fn a_batch_delivers_each_of_its_grants() {
    let app = app().await;
    let batch = json!({"operations": [
        {"op": "acquire", "ticket_id": "a", "session_id": "s", "reservation_tokens": 1},
        {"op": "acquire", "ticket_id": "b", "session_id": "s", "reservation_tokens": 1}
    ]});
    let answer = app.post("/v1/batch", &batch).await;
    assert_eq!(answer.status, 200);
    app.until(|view| train(view).admit == 2).await;
}

/// TIC4: a watch delivers the grants it tells of.
#[tokio::test]
async fn a_wait_delivers_each_of_its_grants() {
    let app = app().await;
    let held = app.acquire("held", 1_000).await;
    app.acquire("w", 1).await;
    let mut stream = open_call(
        &app,
        "/v1/wait",
        &json!({"ticket_ids": ["w"], "wait_s": 60}),
    )
    .await;
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    app.delete(&format!(
        "/v1/leases/{}",
        held["lease_id"].as_str().unwrap()
    ))
    .await;
    let mut head = [0; 12];
    tokio::time::timeout(SOON, stream.read_exact(&mut head))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    app.until(|view| train(view).admit == 2).await;
}

/// Requests that stand behind each other on one connection are answered in order.
#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let app = app().await;
    let mut stream = app.connect().await;
    let one =
        |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n");
    let requests =
        one("/version", "") + &one("/v1/nothing", "") + &one("/healthz", "Connection: close\r\n");
    stream.write_all(requests.as_bytes()).await.unwrap();
    let mut text = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut text))
        .await
        .unwrap()
        .unwrap();
    let statuses: Vec<&str> = text
        .match_indices("HTTP/1.1 ")
        .map(|(at, _)| &text[at + 9..at + 12])
        .collect();
    assert_eq!(statuses, ["200", "404", "200"], "{text}");
}
