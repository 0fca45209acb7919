//! A process that stands still for a while: what its callers sent meanwhile is in time (TIM3).

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::fleet;
use crate::support::app::{SOON, parse_raw, post_bytes};
use crate::support::process::Kvgate;

const KEPT: usize = 200;

/// TIM3, LEA1, TIC3: stopped with SIGSTOP until every lease and the grace of a waiter are over, with renewals and
/// the waiter's next call in the sockets: after SIGCONT those leases and that place are kept, and only
/// the leases whose holders kept silent expire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tim3_what_was_sent_while_the_process_stood_still_is_in_time() {
    let fleet = fleet().await;
    let router = fleet.router_url();
    let (data, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--claim-grace-s",
        "2",
    ];
    let gate = Kvgate::serve(data.path(), &arguments);
    let clock = Kvgate::serve(other.path(), &arguments);
    // Connected before, as callers with a pool are.
    let mut callers = Vec::new();
    for _ in 0..=KEPT {
        callers.push(TcpStream::connect(gate.address()).await.unwrap());
    }
    let operation = |name: String, tokens: u64, ttl_s: u64| json!({"op": "acquire", "ticket_id": name, "session_id": "s", "reservation_tokens": tokens, "ttl_s": ttl_s});
    let mut operations: Vec<Value> = (0..KEPT)
        .map(|number| operation(format!("kept-{number}"), 10, 2))
        .collect();
    operations.extend((0..20).map(|number| operation(format!("silent-{number}"), 10, 2)));
    operations.push(operation("full".to_owned(), 897_800, 600));
    operations.push(operation("waits".to_owned(), 100_000, 600));
    let granted = gate
        .post("/v1/batch", &json!({"operations": operations}))
        .await;
    gate.stand_still();

    let results = granted.body["results"].as_array().unwrap();
    assert_eq!(results[KEPT + 21]["body"]["action"], "wait", "{results:?}");
    for (caller, result) in callers.iter_mut().take(KEPT).zip(results) {
        let lease = result["body"]["lease_id"].as_str().unwrap();
        let renewal = post_bytes(&format!("/v1/leases/{lease}/renew"), &json!({"ttl_s": 600}));
        caller.write_all(&renewal).await.unwrap();
    }
    let waits = json!({"ticket_id": "waits", "session_id": "s", "reservation_tokens": 100_000, "wait_s": 0});
    callers[KEPT]
        .write_all(&post_bytes("/v1/leases", &waits))
        .await
        .unwrap();

    // A lease of the other process that was granted later, and lives longer, has ended.
    let brief =
        json!({"ticket_id": "brief", "session_id": "s", "reservation_tokens": 900_000, "ttl_s": 3});
    assert_eq!(clock.post("/v1/leases", &brief).await.action(), "admit");
    let next = json!({"ticket_id": "next", "session_id": "s", "reservation_tokens": 900_000, "wait_s": 60});
    assert_eq!(clock.post("/v1/leases", &next).await.action(), "admit");

    gate.signal("CONT");
    let mut answers = Vec::new();
    for caller in &mut callers {
        let mut bytes = Vec::new();
        tokio::time::timeout(SOON, caller.read_to_end(&mut bytes))
            .await
            .expect("no answer after the stop")
            .unwrap();
        answers.push(parse_raw(&bytes));
    }
    let place = answers.pop().unwrap();
    let late: Vec<&str> = answers
        .iter()
        .filter(|answer| answer.status != 200)
        .map(|answer| answer.text.as_str())
        .collect();
    assert!(
        late.is_empty(),
        "{} of {KEPT} were told that they are late: {late:?}",
        late.len()
    );
    assert_eq!(
        (place.status, place.seq()),
        (202, None),
        "the old place: {}",
        place.text
    );
    let waited = place.json()["age_s"].as_f64().unwrap();
    assert!(waited >= 3.0, "time went on meanwhile (TIM2): {waited}");

    // Who kept silent is judged when the hold is over.
    loop {
        let held = gate.list("/v1/leases").await;
        let silent = held
            .iter()
            .filter(|lease| lease["ticket_id"].as_str().unwrap().starts_with("silent-"));
        if silent.count() == 0 {
            assert_eq!(held.len(), KEPT + 1);
            break;
        }
    }
}
