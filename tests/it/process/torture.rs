//! kill -9 under everything that callers do, and while the process starts.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{Timestamp, ToSpan};

use super::callers::{Caller, Cut, Draw, Fact, Load, Told, run, serve_all};
use super::fleet;
use crate::support::process::Kvgate;

const CALLERS: u64 = 12;
const ROUNDS: u64 = 20;
/// Every so many rounds the process is also killed while it starts.
const START_KILLS_EVERY: u64 = 4;

/// Everything that must stay true over all rounds.
#[derive(Default)]
struct Seen {
    /// What each number was told for: a decision is told to all who wait for its ticket.
    seqs: BTreeMap<u64, String>,
    /// Ticket by lease id.
    leases: BTreeMap<String, String>,
    /// Highest number that was told in rounds that are over.
    highest: u64,
    /// The youngest place in line that was granted.
    granted: u64,
    /// Leases that were given back.
    ended: BTreeSet<String>,
    /// Enqueue and issue number of leases that were waited for.
    order: BTreeMap<u64, u64>,
    /// How often each kind of fact was told, and each kind of cut was settled.
    kinds: BTreeMap<String, usize>,
}

/// DUR1, DUR2, DUR6, ID2, TIC1, LEA4: acquires that are granted at once or wait, grants by releases,
/// renewals, cancels, repeats, batches and waits for many tickets run until the process is killed at
/// a random answer, or while it starts. After each start every acknowledged promise holds, and what
/// the kill cut off is settled by asking again. `KVGATE_TORTURE_ROUNDS` is the number of kills under
/// load, `KVGATE_TORTURE_SEED` draws another run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_acknowledged_promise_survives_any_kill() {
    let rounds = number("KVGATE_TORTURE_ROUNDS", ROUNDS);
    let seed = number("KVGATE_TORTURE_SEED", 1);
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
        // A machine that is busy with other tests must not make the fleet look stale.
        "--stale-after-s",
        "30",
    ];
    let mut draw = Draw(seed);
    let mut seen = Seen::default();
    let mut starts_cut = 0;
    let mut gate = Kvgate::serve(data.path(), &arguments);
    let mut callers: Vec<Caller> = (0..CALLERS)
        .map(|number| Caller::new(number, Load::Whole, seed, &gate))
        .collect();
    let epoch = gate.get("/v1/state").await["epoch"].as_u64().unwrap();
    for round in 0..rounds {
        let enough = usize::try_from(30 + draw.below(300)).unwrap();
        run(gate, &mut callers, enough, |gate| {
            gate.kill();
            None
        })
        .await;
        seen.take_in(&mut callers);
        if round % START_KILLS_EVERY == 0 {
            for _ in 0..=draw.below(3) {
                let ready = kill_while_starting(&mut draw, data.path(), &arguments).await;
                starts_cut += usize::from(!ready);
            }
        }
        gate = Kvgate::serve(data.path(), &arguments);
        serve_all(&gate, &mut callers);
        check(&gate, &mut callers, &mut seen, epoch).await;
    }
    assert!(gate.terminate().success());
    let gate = Kvgate::serve(data.path(), &arguments);
    serve_all(&gate, &mut callers);
    check(&gate, &mut callers, &mut seen, epoch).await;
    let issues: Vec<u64> = seen.order.values().copied().collect();
    assert!(issues.is_sorted(), "a waiter was overtaken (DEC2)");
    println!(
        "{rounds} kills under load and {starts_cut} of starts that were not ready; {} leases, {} of them waited for; told \
         and settled: {:?}",
        seen.leases.len(),
        seen.order.len(),
        seen.kinds
    );
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Killed at some point between binding the port and being ready, or a little later: true then.
async fn kill_while_starting(draw: &mut Draw, data: &std::path::Path, arguments: &[&str]) -> bool {
    let gate = Kvgate::listen(data, arguments);
    let mut is_ready = false;
    for _ in 0..draw.below(30) {
        // Each of these takes a part of a millisecond; what it says depends on how far the start is.
        let ready = gate.http.get(gate.url("/readyz")).send().await.unwrap();
        assert!(matches!(ready.status().as_u16(), 200 | 503));
        is_ready = ready.status().is_success();
    }
    gate.kill();
    is_ready
}

impl Seen {
    /// Numbers and leases of the round that is over.
    fn take_in(&mut self, callers: &mut [Caller]) {
        let before = self.highest;
        for caller in callers {
            for call in std::mem::take(&mut caller.calls) {
                for (seq, fact) in call.facts {
                    let what = about(&fact);
                    self.count(what.split(" of ").next().unwrap());
                    if let Fact::Admitted { ticket, lease } = &fact {
                        self.lease(
                            ticket,
                            lease,
                            caller.entries.get(ticket).and_then(|e| e.enqueued),
                        );
                    }
                    let Some(seq) = seq else { continue };
                    assert!(
                        seq > before,
                        "{seq} was told after a restart that followed {before} (DUR6)"
                    );
                    if let Some(other) = self.seqs.insert(seq, what.clone()) {
                        assert_eq!(other, what, "{seq} was told for two changes (DUR6)");
                    }
                    self.highest = self.highest.max(seq);
                }
            }
            for entry in caller.entries.values() {
                if let Told::Released(lease) = &entry.told {
                    self.ended.insert(lease.clone());
                }
            }
        }
    }

    fn count(&mut self, kind: &str) {
        *self.kinds.entry(kind.to_owned()).or_default() += 1;
    }

    fn lease(&mut self, ticket: &str, lease: &str, enqueued: Option<u64>) {
        let holder = self.leases.entry(lease.to_owned());
        let holder = holder.or_insert_with(|| ticket.to_owned());
        assert_eq!(*holder, ticket, "{lease} was given to two tickets (ID2)");
        if let Some(enqueued) = enqueued {
            self.granted = self.granted.max(enqueued);
            self.order.insert(enqueued, issue(lease));
        }
    }
}

fn issue(lease: &str) -> u64 {
    lease.split_once('-').unwrap().0.parse().unwrap()
}

/// What a change is about: the same for all who are told of it.
fn about(fact: &Fact) -> String {
    match fact {
        Fact::Admitted { ticket, .. } => format!("grant of {ticket}"),
        Fact::Waits { ticket, .. } => format!("place of {ticket}"),
        Fact::Renewed { ticket } => format!("renewal of {ticket}"),
        Fact::Released { ticket } => format!("release of {ticket}"),
        Fact::Withdrawn { ticket } => format!("withdrawal of {ticket}"),
        Fact::TakenBack { ticket } => format!("cancel of {ticket}"),
        Fact::Ended { ticket } => format!("earlier end of {ticket}"),
        Fact::State { .. } => "state".to_owned(),
    }
}

/// What stands in the lists of a gate that was just started.
struct Listed {
    /// Lease id and tokens by ticket.
    held: BTreeMap<String, (String, u64)>,
    /// Tickets in line, with their tokens.
    line: Vec<(String, u64)>,
}

impl Listed {
    fn has(&self, ticket: &str) -> bool {
        self.held.contains_key(ticket) || self.line.iter().any(|(other, _)| other == ticket)
    }
}

/// Reads all lists as of one state, and checks the sums.
async fn read(gate: &Kvgate, epoch: u64) -> Listed {
    loop {
        let before = gate.get("/v1/state").await;
        let leases = gate.list("/v1/leases").await;
        let queue = gate.list("/v1/queue").await;
        let after = gate.get("/v1/state").await;
        // A short lease may end in between.
        if before["leases"]["count"] != after["leases"]["count"]
            || before["budget"]["reserved"] != after["budget"]["reserved"]
            || before["queue"]["waiting"] != after["queue"]["waiting"]
        {
            continue;
        }
        assert_eq!(after["epoch"], epoch);
        let mut held = BTreeMap::new();
        let mut reserved = 0;
        for lease in &leases {
            let ticket = lease["ticket_id"].as_str().unwrap().to_owned();
            let id = lease["lease_id"].as_str().unwrap().to_owned();
            let tokens = lease["reservation_tokens"].as_u64().unwrap();
            reserved += tokens;
            let second = held.insert(ticket, (id, tokens));
            assert_eq!(second, None, "a ticket is charged twice");
        }
        let line: Vec<(String, u64)> = queue
            .iter()
            .map(|row| {
                let ticket = row["ticket_id"].as_str().unwrap().to_owned();
                (ticket, row["reservation_tokens"].as_u64().unwrap())
            })
            .collect();
        let names: BTreeSet<&String> = line.iter().map(|(ticket, _)| ticket).collect();
        assert_eq!(names.len(), line.len(), "a ticket stands in line twice");
        assert!(names.iter().all(|ticket| !held.contains_key(*ticket)));
        let budget = &after["budget"];
        assert_eq!(budget["reserved"], reserved, "reserved is the sum");
        assert_eq!(after["leases"]["count"], held.len());
        assert_eq!(after["queue"]["waiting"], line.len());
        let ceiling = budget["ceiling"].as_u64().unwrap();
        assert!(reserved <= ceiling, "{reserved} of {ceiling}");
        if let Some((head, tokens)) = line.first() {
            assert!(
                reserved + tokens > ceiling,
                "{head} waits for {tokens} beside {reserved} of {ceiling}: it fits"
            );
        }
        return Listed { held, line };
    }
}

/// What is there now against what was told.
async fn check(gate: &Kvgate, callers: &mut [Caller], seen: &mut Seen, epoch: u64) {
    let listed = read(gate, epoch).await;
    let mut known = BTreeSet::new();
    let mut places = BTreeMap::new();
    for caller in callers.iter() {
        for (ticket, entry) in &caller.entries {
            known.insert(ticket.clone());
            let held = listed.held.get(ticket);
            if let Some((_, tokens)) = held {
                assert_eq!(*tokens, entry.tokens, "{ticket}");
            }
            if let Some(enqueued) = entry.enqueued {
                places.insert(ticket.clone(), enqueued);
            }
            let there = held.is_some() || listed.has(ticket);
            match (&entry.told, entry.cut) {
                // It may be gone, but not before the end that was told.
                (Told::Held(lease), None) if entry.mortal => {
                    let end: Timestamp = entry.ends.as_ref().unwrap().parse().unwrap();
                    match held {
                        Some((id, _)) => assert_eq!(id, lease, "{ticket}"),
                        None => assert!(
                            Timestamp::now() + 1.second() >= end,
                            "{ticket} expired before {end} (LEA1)"
                        ),
                    }
                }
                _ if entry.mortal => {}
                (Told::Held(lease), None) => {
                    let held = held.map(|(id, _)| id);
                    assert_eq!(held, Some(lease), "the lease of {ticket} is lost");
                }
                // Given back or not; but never another lease.
                (Told::Held(lease), Some(_)) => {
                    assert!(held.is_none_or(|(id, _)| id == lease), "{ticket}");
                    assert!(!listed.line.iter().any(|(other, _)| other == ticket));
                }
                (Told::Waiting, None) => assert!(there, "the place of {ticket} is lost"),
                (Told::Released(_) | Told::Cancelled, _) => {
                    assert!(!there, "{ticket} had ended and is there again");
                }
                (Told::Waiting | Told::Nothing, _) => {}
            }
        }
    }
    for caller in callers.iter_mut() {
        let batch = std::mem::take(&mut caller.batch);
        let happened = batch.iter().map(|ticket| {
            let acquired = caller.entries[ticket].cut == Some(Cut::Acquire);
            listed.has(ticket) == acquired
        });
        let happened: BTreeSet<bool> = happened.collect();
        assert!(
            happened.len() < 2,
            "a part of a batch is there: {batch:?} (DUR1)"
        );
        if batch.len() > 1 {
            seen.count(&format!(
                "batch cut, {}",
                if happened.contains(&true) {
                    "there"
                } else {
                    "not there"
                }
            ));
        }
    }
    for (ticket, (lease, _)) in &listed.held {
        assert!(
            known.contains(ticket),
            "{ticket} holds {lease}, which nobody asked for"
        );
        assert!(!seen.ended.contains(lease), "{lease} was given back");
        seen.lease(ticket, lease, places.get(ticket).copied());
    }
    // The line: in the order in which the places were told, behind all who were granted.
    let line: Vec<u64> = listed
        .line
        .iter()
        .filter_map(|(ticket, _)| places.get(ticket).copied())
        .collect();
    assert!(line.is_sorted(), "the line is another: {line:?}");
    if let Some(first) = line.first() {
        assert!(
            *first > seen.granted,
            "the waiter of {first} was overtaken by that of {}",
            seen.granted
        );
    }
    settle(callers, &listed, seen).await;
}

/// Asks again for what the kill cut off, and forgets what nobody asks about any more.
async fn settle(callers: &mut [Caller], listed: &Listed, seen: &mut Seen) {
    for caller in callers.iter_mut() {
        let tickets: Vec<String> = caller.entries.keys().cloned().collect();
        for ticket in tickets {
            let entry = caller.entries[&ticket].clone();
            let there = listed.has(&ticket);
            if entry.mortal {
                if !there {
                    caller.entries.remove(&ticket);
                }
                continue;
            }
            let Some(cut) = entry.cut else { continue };
            seen.count(&format!(
                "{cut:?} cut, {}",
                if there { "there" } else { "not there" }
            ));
            let settled = match (cut, &entry.told) {
                (Cut::Acquire, _) => {
                    let answer = caller.acquire(&ticket, 0.0).await;
                    answer.map(|answer| {
                        if let Some((lease, _)) = listed.held.get(&ticket) {
                            assert_eq!(answer.lease(), *lease, "{ticket}: not the same lease");
                            assert_eq!(answer.seq, None);
                        }
                    })
                }
                (Cut::Release, Told::Held(lease)) => {
                    let outcome = caller.release(&ticket, lease).await;
                    outcome.map(|outcome| {
                        let expected = if there {
                            "released"
                        } else {
                            "already_released"
                        };
                        assert_eq!(outcome, expected, "{ticket}");
                    })
                }
                (Cut::Cancel, _) => {
                    let outcome = caller.cancel(&ticket).await;
                    outcome.map(|outcome| {
                        assert_eq!(outcome == "already_finished", !there, "{ticket}: {outcome}");
                    })
                }
                (Cut::Release, told) => panic!("{ticket}: a release of {told:?}"),
            };
            assert!(settled.is_ok(), "the process went away by itself");
        }
        caller.prune();
    }
    // No round has taken these in yet; their numbers count like all others.
    seen.take_in(callers);
}
