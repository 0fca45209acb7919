//! A burst between two readings: the ledger bounds it, not the gauges.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::fleet;
use crate::support::process::Kvgate;

const TOKENS: u64 = 5_000;
const CEILING: u64 = 900_000;
const CALLERS: usize = 2_000;
const FIT: usize = 180;

/// Q09, DEC1, DEC2, TIC2, CNT1: 2,000 acquires of 5,000 tokens at once on a ceiling of 900,000: exactly
/// 180 are admitted, 1,820 wait in the order of their arrival; as leases are released all are
/// granted in that order, none twice, and `reserved` is never above the ceiling.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q09_a_burst_between_two_readings() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(
        data.path(),
        &[
            "--router",
            &fleet.router_url(),
            "--program-admission",
            "--admission-max-wait-s",
            "600",
            "--claim-grace-s",
            "60",
        ],
    );
    let names: Vec<String> = (0..CALLERS).map(|number| format!("t-{number}")).collect();
    let answers = join_all(names.iter().map(|name| gate.acquire(name, TOKENS))).await;

    let mut held = Vec::new();
    let mut enqueued = Vec::new();
    for (name, answer) in names.iter().zip(&answers) {
        match answer.action() {
            "admit" => held.push(answer.lease()),
            "wait" => enqueued.push((answer.seq.unwrap(), name.clone())),
            other => panic!("{other}: {answer:?}"),
        }
    }
    assert_eq!((held.len(), enqueued.len()), (FIT, CALLERS - FIT));
    let seqs: BTreeSet<u64> = answers.iter().map(|answer| answer.seq.unwrap()).collect();
    assert_eq!(
        seqs.len(),
        CALLERS,
        "each change has a number of its own (DUR6)"
    );
    enqueued.sort();
    let line: Vec<String> = enqueued.into_iter().map(|(_, name)| name).collect();
    let queue = gate.list("/v1/queue").await;
    let listed: Vec<&str> = queue
        .iter()
        .map(|row| row["ticket_id"].as_str().unwrap())
        .collect();
    assert_eq!(listed, line, "they wait in the order of their arrival");
    check_budget(&gate, FIT).await;

    let mut leases: BTreeSet<String> = held.iter().cloned().collect();
    let mut waiting = line.as_slice();
    while !waiting.is_empty() {
        let some = waiting.len().min(FIT);
        let (next, rest) = waiting.split_at(some);
        let released = join_all(held.iter().take(some).map(|lease| {
            let path = format!("/v1/leases/{lease}/release");
            let gate = &gate;
            async move { gate.post(&path, &json!({})).await }
        }))
        .await;
        assert!(
            released
                .iter()
                .all(|answer| answer.body["outcome"] == "released")
        );
        let granted = granted(&gate, next).await;
        for lease in &granted {
            assert!(leases.insert(lease.clone()), "{lease} was granted twice");
        }
        let queue = gate.list("/v1/queue").await;
        let listed: Vec<&str> = queue
            .iter()
            .map(|row| row["ticket_id"].as_str().unwrap())
            .collect();
        assert_eq!(listed, rest, "nobody was passed over");
        held = held.split_off(some);
        held.extend(granted);
        check_budget(&gate, held.len()).await;
        waiting = rest;
    }
    assert_eq!(leases.len(), CALLERS);
}

/// Leases of tickets that must be granted by now, asked for by one call that waits for many.
async fn granted(gate: &Kvgate, tickets: &[String]) -> Vec<String> {
    let answer = gate
        .post("/v1/wait", &json!({"ticket_ids": tickets, "wait_s": 25}))
        .await;
    assert_eq!(answer.status, 200);
    let results = answer.body["results"].as_array().unwrap();
    assert_eq!(results.len(), tickets.len(), "all of them were granted");
    let lease = |result: &Value| {
        assert_eq!(result["action"], "admit");
        assert_eq!(
            result["repeated"], false,
            "the first delivery of a kept grant (TIC4)"
        );
        result["lease_id"].as_str().unwrap().to_owned()
    };
    results.iter().map(lease).collect()
}

async fn check_budget(gate: &Kvgate, held: usize) {
    let state = gate.get("/v1/state").await;
    let budget = &state["budget"];
    assert_eq!(budget["ceiling"], CEILING);
    assert_eq!(budget["reserved"], held as u64 * TOKENS);
    assert!(budget["reserved"].as_u64().unwrap() <= CEILING);
    assert_eq!(budget["available"], CEILING - held as u64 * TOKENS);
    assert_eq!(state["leases"]["count"], held);
}
