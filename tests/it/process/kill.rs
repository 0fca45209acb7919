//! kill -9 at any time: what was answered is there after the next start, in the same order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::task::JoinSet;

use super::fleet;
use crate::support::process::{Answer, Kvgate};

const ROUNDS: u64 = 8;
const WORKERS: u64 = 16;
/// Answers after which a round's process is killed, under load.
const ANSWERS: usize = 150;

/// What the clients were told, and what they asked without being answered.
#[derive(Default)]
struct Log {
    /// Lease by ticket.
    held: BTreeMap<String, (String, u64)>,
    /// Number of the enqueue by ticket.
    waiting: BTreeMap<String, u64>,
    /// Tickets whose last request got no answer: it may have happened or not.
    unknown: BTreeSet<String>,
    answers: usize,
    seq: u64,
    /// Every number that was ever told.
    seqs: BTreeSet<u64>,
    lease_ids: BTreeSet<String>,
}

impl Log {
    fn answered(&mut self, answer: &Answer) {
        self.answers += 1;
        if let Some(seq) = answer.seq {
            assert!(self.seqs.insert(seq), "{seq} was told twice (DUR6)");
            self.seq = self.seq.max(seq);
        }
    }
}

type Shared = Arc<Mutex<Log>>;

/// A request that may be cut by the kill.
async fn ask(request: reqwest::RequestBuilder) -> Option<Answer> {
    let answer = request.send().await.ok()?;
    let seq = answer.headers().get("kvgate-seq");
    let seq = seq.map(|seq| seq.to_str().unwrap().parse().unwrap());
    let status = answer.status().as_u16();
    let body = answer.json().await.ok()?;
    Some(Answer { status, seq, body })
}

/// DUR1, DUR2, DUR6, ID2: under load, kill -9 and a new start give the same reserved total, queue
/// order, lease ids and epoch, checked against what the clients were told. Numbers of changes and
/// lease ids never repeat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_loses_nothing_that_was_answered() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--admission-max-wait-s",
        "3600",
        "--claim-grace-s",
        "60",
        "--lease-ttl-s",
        "3600",
    ];
    let log = Shared::default();
    let mut gate = Kvgate::serve(data.path(), &arguments);
    // A lease that stays, and a head that never fits beside it: from here on nothing is granted by
    // the queue, so that what must be there after a kill is known exactly.
    for (ticket, tokens) in [("base", 100_000), ("small-0", 10), ("small-1", 10)] {
        let answer = gate.acquire(ticket, tokens).await;
        let mut log = log.lock().unwrap();
        log.answered(&answer);
        log.lease_ids.insert(answer.lease());
        log.held.insert(ticket.into(), (answer.lease(), tokens));
    }
    for number in 0..400 {
        let ticket = format!("held-{number}");
        let answer = gate.acquire(&ticket, 1_000 + number).await;
        let mut log = log.lock().unwrap();
        log.answered(&answer);
        assert!(log.lease_ids.insert(answer.lease()), "a lease id repeats");
        log.held.insert(ticket, (answer.lease(), 1_000 + number));
    }
    let head = gate.acquire("head", 890_000).await;
    assert_eq!(head.action(), "wait");
    log.lock().unwrap().answered(&head);
    log.lock()
        .unwrap()
        .waiting
        .insert("head".into(), head.seq.unwrap());
    let epoch = gate.get("/v1/state").await["epoch"].as_u64().unwrap();

    for round in 0..ROUNDS {
        load_until_killed(gate, &log, round).await;
        gate = Kvgate::serve(data.path(), &arguments);
        check(&gate, &log, epoch).await;
    }
    assert!(gate.terminate().success());
    // An orderly stop keeps the same.
    let gate = Kvgate::serve(data.path(), &arguments);
    check(&gate, &log, epoch).await;
}

async fn load_until_killed(gate: Kvgate, log: &Shared, round: u64) {
    log.lock().unwrap().answers = 0;
    let (enough, mut reached) = tokio::sync::mpsc::channel(1);
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let http = gate.http.clone();
        let base = gate.url("/v1");
        let log = Arc::clone(log);
        let enough = enough.clone();
        workers.spawn(async move {
            for step in 0.. {
                if !one_request(&http, &base, &log, round, worker, step).await {
                    return;
                }
                if log.lock().unwrap().answers >= ANSWERS + usize::try_from(round * 37).unwrap() {
                    // One word is enough.
                    let _ = enough.try_send(());
                }
            }
        });
    }
    reached.recv().await.unwrap();
    gate.kill();
    while let Some(done) = workers.join_next().await {
        done.unwrap();
    }
}

/// False when the process is gone.
async fn one_request(
    http: &reqwest::Client,
    base: &str,
    log: &Shared,
    round: u64,
    worker: u64,
    step: u64,
) -> bool {
    let mine = format!("w{worker}-{round}-");
    match step % 4 {
        // Cancel a waiter of mine.
        3 => {
            let ticket = {
                let mut log = log.lock().unwrap();
                let waiting = log
                    .waiting
                    .keys()
                    .find(|name| name.starts_with(&mine))
                    .cloned();
                let Some(ticket) = waiting else { return true };
                log.waiting.remove(&ticket);
                log.unknown.insert(ticket.clone());
                ticket
            };
            let Some(answer) = ask(http.delete(format!("{base}/tickets/{ticket}"))).await else {
                return false;
            };
            let mut log = log.lock().unwrap();
            log.unknown.remove(&ticket);
            log.answered(&answer);
            assert_eq!(answer.body["outcome"], "withdrawn");
        }
        // Release one of the held leases.
        2 => {
            let found = {
                let mut log = log.lock().unwrap();
                let name = log
                    .held
                    .keys()
                    .find(|name| name.starts_with("held-"))
                    .cloned();
                let Some(name) = name else { return true };
                log.unknown.insert(name.clone());
                log.held.remove(&name).map(|lease| (name, lease))
            };
            let Some((name, (lease, _))) = found else {
                return true;
            };
            let Some(answer) = ask(http.post(format!("{base}/leases/{lease}/release"))).await
            else {
                return false;
            };
            let mut log = log.lock().unwrap();
            log.unknown.remove(&name);
            log.answered(&answer);
            assert_eq!(answer.body["outcome"], "released");
        }
        // Join the queue.
        _ => {
            let ticket = format!("{mine}{step}");
            log.lock().unwrap().unknown.insert(ticket.clone());
            let body = json!({
                "ticket_id": ticket, "session_id": "s", "reservation_tokens": step, "wait_s": 0,
            });
            let Some(answer) = ask(http.post(format!("{base}/leases")).json(&body)).await else {
                return false;
            };
            let mut log = log.lock().unwrap();
            log.unknown.remove(&ticket);
            log.answered(&answer);
            assert_eq!(answer.action(), "wait", "{answer:?}");
            log.waiting.insert(ticket, answer.seq.unwrap());
        }
    }
    true
}

/// What is there now against what was told; requests without an answer may have happened or not,
/// and from here on what they left counts as told.
async fn check(gate: &Kvgate, log: &Shared, epoch: u64) {
    for ticket in compare(gate, log, epoch).await {
        let answer = gate.delete(&format!("/v1/tickets/{ticket}")).await;
        assert_eq!(answer.body["outcome"], "withdrawn");
        log.lock().unwrap().answered(&answer);
    }
}

/// Gives back the waiters whose place nobody was told.
async fn compare(gate: &Kvgate, log: &Shared, epoch: u64) -> Vec<String> {
    let state = gate.get("/v1/state").await;
    let leases = gate.list("/v1/leases").await;
    let queue = gate.list("/v1/queue").await;
    let mut log = log.lock().unwrap();
    let log = &mut *log;

    assert_eq!(state["epoch"], epoch);
    let mut reserved = 0;
    let mut held = BTreeMap::new();
    for lease in &leases {
        let ticket = lease["ticket_id"].as_str().unwrap().to_owned();
        let tokens = lease["reservation_tokens"].as_u64().unwrap();
        let id = lease["lease_id"].as_str().unwrap().to_owned();
        reserved += tokens;
        assert!(
            log.unknown.contains(&ticket) || log.held.get(&ticket) == Some(&(id.clone(), tokens)),
            "{ticket} holds {id}, which nobody was told"
        );
        held.insert(ticket, (id, tokens));
    }
    for (ticket, lease) in &log.held {
        assert_eq!(
            held.get(ticket),
            Some(lease),
            "the lease of {ticket} is lost"
        );
    }
    assert_eq!(
        state["budget"]["reserved"], reserved,
        "reserved is the sum of the leases"
    );

    let line: Vec<String> = queue
        .iter()
        .map(|row| row["ticket_id"].as_str().unwrap().to_owned())
        .collect();
    let mut told: Vec<(u64, String)> = log
        .waiting
        .iter()
        .map(|(ticket, seq)| (*seq, ticket.clone()))
        .collect();
    told.sort();
    let told: Vec<String> = told.into_iter().map(|(_, ticket)| ticket).collect();
    let known: Vec<String> = line
        .iter()
        .filter(|ticket| !log.unknown.contains(*ticket))
        .cloned()
        .collect();
    assert_eq!(known, told, "the line is another");
    assert_eq!(line.first().map(String::as_str), Some("head"));

    // What the cut requests left is known now; waiters among it go, since nobody was told their place.
    let mut unsure = Vec::new();
    for ticket in std::mem::take(&mut log.unknown) {
        if let Some(lease) = held.get(&ticket) {
            log.held.insert(ticket, lease.clone());
        } else if line.contains(&ticket) {
            unsure.push(ticket);
        }
    }
    unsure
}
