//! A gate that restarts while hundreds wait: who had a place keeps it, in the order of before.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kvgate_client::{Action, Ask};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{SOON, Service, work};

const SESSIONS: u64 = 500;
const TURNS: u64 = 3;

/// What became of the turns.
#[derive(Default)]
struct Outcome {
    /// The number of each grant.
    granted: BTreeMap<String, u64>,
    /// Bypasses by reason.
    bypassed: BTreeMap<String, u64>,
}

/// TIC3, DUR2: 40 of 500 run at a time, so hundreds wait when the gate dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_outlive_a_kill() {
    places_outlive(false).await;
}

/// TIC3, DUR2: the same with an orderly stop, which tells waiting calls `draining`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_outlive_an_orderly_restart() {
    places_outlive(true).await;
}

async fn places_outlive(orderly: bool) {
    let mut service = Service::start(4_000).await;
    let client = service.client();
    let outcome = Arc::new(Mutex::new(Outcome::default()));
    let mut sessions = JoinSet::new();
    for number in 0..SESSIONS {
        let (client, outcome) = (client.clone(), Arc::clone(&outcome));
        sessions.spawn(async move {
            for turn in 0..TURNS {
                let ticket = format!("s{number}/{turn}");
                let ask = Ask::reservation(format!("s{number}"), 100).ticket_id(ticket);
                let lease = client.acquire(ask).await.unwrap();
                outcome.lock().unwrap().note(&lease);
                for _ in 0..5 {
                    work().await;
                }
            }
        });
    }
    while outcome.lock().unwrap().granted.len() < 60 {
        tokio::task::yield_now().await;
    }
    let queue = service.gate().list("/v1/queue").await;
    let waiting: Vec<String> = queue
        .iter()
        .map(|row| row["ticket_id"].as_str().unwrap().to_owned())
        .collect();
    if orderly {
        service.terminate().await;
    } else {
        service.kill();
    }
    service.begin().await;
    while let Some(session) = timeout(SOON, sessions.join_next()).await.unwrap() {
        session.unwrap();
    }

    let outcome = std::mem::take(&mut *outcome.lock().unwrap());
    let bypasses: u64 = outcome.bypassed.values().sum();
    assert_eq!(outcome.granted.len() as u64 + bypasses, SESSIONS * TURNS);
    let known = ["unreachable", "breaker", "degraded"];
    assert!(
        outcome
            .bypassed
            .keys()
            .all(|reason| known.contains(&reason.as_str()))
    );
    assert!(waiting.len() > 200, "{} wait", waiting.len());
    let kept: Vec<u64> = waiting
        .iter()
        .filter_map(|ticket| outcome.granted.get(ticket).copied())
        .collect();
    // Some of those in the list may not have heard of their place before the kill.
    assert!(
        kept.len() * 10 >= waiting.len() * 9,
        "{} of {} kept",
        kept.len(),
        waiting.len()
    );
    assert!(kept.is_sorted(), "the order is the one of before");
    service.nothing_is_left().await;
}

impl Outcome {
    fn note(&mut self, lease: &kvgate_client::Lease) {
        match lease.action() {
            Action::Admit => {
                // A lease id begins with the number of its grant.
                let (number, _) = lease.lease_id().unwrap().split_once('-').unwrap();
                let number = number.parse().unwrap();
                self.granted.insert(lease.ticket_id().to_owned(), number);
            }
            Action::Bypass => {
                let reason = lease.reason().to_owned();
                *self.bypassed.entry(reason).or_default() += 1;
            }
        }
    }
}
