//! Sessions, their closes, and step reports.

use std::time::Duration;

use kvgate_client::{Action, CloseMode, CloseStatus, Gate};

use crate::fake::{Behaviour, Fake, soon};
use crate::{ask, gate, quick};

fn closes(fake: &Fake) -> Vec<(String, String, String)> {
    fake.look(|book| book.closes.clone())
}

fn close_of(session: &str, mode: &str, reason: &str) -> (String, String, String) {
    (session.to_owned(), mode.to_owned(), reason.to_owned())
}

#[tokio::test]
async fn a_close_says_how_it_stands() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let close = gate.close_session("s/1", CloseMode::Abort).await;
    assert_eq!(close.status, CloseStatus::Delivering);
    assert_eq!(close.close_id.as_deref(), Some("c-1"));
    assert_eq!(close.engines[0].url, "http://engine");
    assert_eq!(closes(&fake), [close_of("s/1", "abort", "terminal")]);
}

#[tokio::test]
async fn the_end_of_a_close_is_waited_for() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let waiting = gate.close_session_within("s", CloseMode::Join, Duration::from_secs(90));
    assert_eq!(waiting.await.status, CloseStatus::Done);
    let paths = fake.look(|book| {
        let paths = book.requests.iter().map(|seen| seen.path.clone());
        paths.collect::<Vec<_>>()
    });
    assert_eq!(
        paths,
        ["/v1/sessions/s/close", "/v1/sessions/s/close?wait_s=60"]
    );
}

#[tokio::test]
async fn a_close_that_is_not_answered_is_tried_again() {
    let fake = Fake::start();
    let gate = Gate::new(quick(&fake)).unwrap();
    for behaviour in [Behaviour::Hang, Behaviour::Problem(503, "recovering")] {
        fake.behave(behaviour);
        let close = soon(gate.close_session("s", CloseMode::Join)).await;
        assert_eq!(
            (close.status, close.close_id),
            (CloseStatus::Unanswered, None)
        );
    }
    fake.behave(Behaviour::Normal);
    fake.until("both arrived", |book| book.closes.len() == 2)
        .await;
    fake.behave(Behaviour::Problem(400, "invalid_id"));
    // Not before the breaker has closed, since it waits for no answer until then.
    let close = gate.close_session("s", CloseMode::Join).await;
    assert_eq!(close.status, CloseStatus::Refused);
}

#[tokio::test]
async fn a_close_whose_future_is_dropped_is_on_its_way() {
    let fake = Fake::start();
    let gate = gate(&fake);
    drop(gate.close_session("s", CloseMode::Join));
    assert!(gate.flush().await);
    assert_eq!(closes(&fake).len(), 1);
}

#[tokio::test]
async fn a_session_closes_at_its_end() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let session = gate.session("s");
    for _ in 0..3 {
        let lease = session.acquire(session.ask(3, 4)).await.unwrap();
        assert_eq!((lease.action(), lease.session_id()), (Action::Admit, "s"));
    }
    let other = session.acquire(ask(1, 1)).await.unwrap();
    assert_eq!(other.session_id(), "s");
    // A lease is joined by the gate, not by the client.
    session.close(CloseMode::Join).await;
    assert_eq!(closes(&fake), [close_of("s", "join", "terminal")]);
}

#[tokio::test]
async fn a_session_that_is_dropped_was_given_up() {
    let fake = Fake::start();
    let gate = gate(&fake);
    drop(gate.session("s"));
    assert!(gate.flush().await);
    assert_eq!(closes(&fake), [close_of("s", "join", "dropped")]);
}

#[tokio::test]
async fn a_session_joins_its_own_bypassed_work() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let session = gate.session("s");
    let mut running = Vec::new();
    for number in 0..3 {
        let ask = ask(number, 1).protected(true);
        running.push(session.acquire(ask).await.unwrap());
    }
    let closing = tokio::spawn(session.close(CloseMode::Join));
    while let Some(lease) = running.pop() {
        // Another call of the same gate shows that the close would have been there.
        gate.close_session("other", CloseMode::Join).await;
        assert!(
            closes(&fake)
                .iter()
                .all(|(session, _, _)| session == "other")
        );
        drop(lease);
    }
    let close = soon(closing).await.unwrap();
    assert_eq!(close.status, CloseStatus::Delivering);
    assert_eq!(closes(&fake).pop(), Some(close_of("s", "join", "terminal")));
}

#[tokio::test]
async fn a_dropped_session_joins_as_well() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let session = gate.session("s");
    let lease = session.acquire(ask(1, 1).protected(true)).await.unwrap();
    drop(session);
    gate.close_session("other", CloseMode::Join).await;
    assert_eq!(closes(&fake).len(), 1);
    drop(lease);
    fake.until("it is closed", |book| book.closes.len() == 2)
        .await;
    assert_eq!(closes(&fake).pop(), Some(close_of("s", "join", "dropped")));
}

#[tokio::test]
async fn a_step_is_reported() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let report = gate.report(Some("exp-7"), 12).await.unwrap();
    assert_eq!((report.run.as_str(), report.step), ("exp-7", Some(12)));
    assert_eq!(report.metrics.get("agentic_kv/admits"), Some(&3.0));
    assert_eq!(report.metrics.len(), 1, "what is no number is left out");
    assert_eq!(report.to.as_deref(), Some("2026-01-01T00:01:00.000Z"));
    let fresh = gate.report(None, 1).await.unwrap().run;
    let peek = gate.peek(None).await.unwrap();
    assert_eq!((peek.run.as_str(), peek.step), (fresh.as_str(), None));
    let asked = fake.look(|book| book.bodies("/v1/steps"));
    assert_eq!(asked[0], serde_json::json!({"run": "exp-7", "step": 12}));
    assert_eq!(asked[1]["run"], fresh.as_str());
    fake.behave(Behaviour::Problem(404, "not_found"));
    assert_eq!(gate.report(None, 2).await, None);
}

#[tokio::test]
async fn a_flush_ends_when_its_time_is_over() {
    let fake = Fake::start();
    let gate = Gate::new(kvgate_client::GateConfig {
        flush: Duration::from_millis(100),
        ..quick(&fake)
    })
    .unwrap();
    fake.behave(Behaviour::Hang);
    drop(gate.close_session("s", CloseMode::Join));
    assert!(!soon(gate.flush()).await);
}
