//! The gate in process, over a store that can be held up and can fail.

use std::collections::BTreeSet;
use std::time::Duration;

use kvgate::clock::Clock;
use kvgate::gate::{Gate, GateError, Phase, StoreTrouble, WriterConfig, spawn};
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallId, CallResult, CallWhat, CloseMode, TargetState};
use kvgate_core::command::{Acquire, CloseRequest, Command};
use kvgate_core::decision::{BypassReason, CancelReason, EndHow, Scope, WaitReason};
use kvgate_core::effect::{
    Answer, CancelOutcome, CloseReply, Outcome, ReleaseOutcome, Reply, TicketView,
};
use kvgate_core::ids::{EngineId, LeaseId, SessionId, Term, TicketId};
use kvgate_core::policy::Policy;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::record::Record;
use kvgate_core::ticket::{Sent, Stage};
use kvgate_core::units::{Span, Tokens};

use crate::support::store::{Mood, Switch};

const CEILING: u64 = 900;

fn engine() -> EngineId {
    EngineId::new("http://127.0.0.1:1")
}

/// A gate with a ceiling of 900 tokens.
async fn gate() -> (Gate, Switch) {
    gate_with(Policy::default()).await
}

async fn gate_with(policy: Policy) -> (Gate, Switch) {
    start(Policy {
        max_wait: Span::from_secs(600),
        ..policy
    })
    .await
}

async fn gate_with_wait(max_wait: Span) -> (Gate, Switch) {
    start(Policy {
        max_wait,
        ..Policy::default()
    })
    .await
}

async fn start(policy: Policy) -> (Gate, Switch) {
    let shared = Switch::default();
    let config = WriterConfig {
        policy: Policy {
            program_admission: true,
            ..policy
        },
        reset_settings: false,
        fleet: FleetConfig {
            has_router: false,
            static_engines: BTreeSet::from([engine()]),
        },
        salts: || 42,
        recorder: None,
    };
    let store = shared.clone();
    let (gate, opened) = spawn(config, Clock::start(), move || store.open()).unwrap();
    opened.await.unwrap().unwrap();
    read(&gate).await;
    wait_for(&gate, Phase::Ready).await;
    (gate, shared)
}

async fn wait_for(gate: &Gate, phase: Phase) {
    gate.phases().wait_for(|now| *now == phase).await.unwrap();
}

/// Hands in rounds, as a poller does, until the store is open again and takes one.
async fn reopened(gate: &Gate) {
    // A round that began before the store was open again ends no hold: the next one does.
    while try_read(gate).await.is_err() || gate.phase() != Phase::Ready {}
}

async fn read(gate: &Gate) {
    try_read(gate).await.unwrap();
}

/// One reading round: a capacity of 1,000 tokens.
async fn try_read(gate: &Gate) -> Result<(), GateError> {
    let capacity = Tokens::new(1_000).unwrap();
    let round = Round {
        began_at: gate.line().unwrap().now(),
        router: None,
        readings: vec![(engine(), Ok(Reading::idle(capacity)))],
        start_marks: vec![],
    };
    gate.round(round).await
}

fn ask(ticket: &str, tokens: u64) -> Acquire {
    Acquire {
        ticket: TicketId::new(ticket).unwrap(),
        session: SessionId::new("s").unwrap(),
        sent: Sent::Sum(Tokens::new(tokens).unwrap()),
        scope: Scope::Train,
        protected: false,
        ttl: Span::from_secs(600),
        client: None,
        request_id: None,
        stays: true,
    }
}

/// Acquires and confirms the delivery.
async fn acquire(gate: &Gate, ticket: &str, tokens: u64, wait: Duration) -> Answer {
    let decision = gate.acquire(ask(ticket, tokens), wait).await.unwrap();
    let decision = decision.value.unwrap();
    if let Some(receipt) = decision.receipt {
        receipt.written();
    }
    decision.answer
}

fn lease(answer: &Answer) -> LeaseId {
    match answer.outcome {
        Outcome::Admit { lease, .. } => lease,
        _ => panic!("{answer:?}"),
    }
}

const LONG: Duration = Duration::from_secs(60);

/// Waits until that many stand in line.
async fn line_of(gate: &Gate, count: u64) {
    let mut views = gate.views();
    views.wait_for(|view| view.waiting == count).await.unwrap();
}

/// DUR1: no answer leaves before what it promises is on disk; what queued up meanwhile is the next
/// turn, in one transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_wait_for_their_commit_and_what_queues_up_is_one_turn() {
    let (gate, store) = gate().await;
    store.set(Mood::Holding);
    let before = store.commits(0).len();
    let first = tokio::spawn({
        let gate = gate.clone();
        async move { acquire(&gate, "first", 1, LONG).await }
    });
    let more: Vec<_> = (0..50)
        .map(|number| {
            let gate = gate.clone();
            tokio::spawn(async move { acquire(&gate, &format!("t-{number}"), 1, LONG).await })
        })
        .collect();
    // The view is published before answers are, and only after the commit.
    tokio::task::yield_now().await;
    assert!(!first.is_finished() && more.iter().all(|call| !call.is_finished()));
    assert_eq!(gate.view().leases, 0);
    store.set(Mood::Good);
    lease(&first.await.unwrap());
    for call in more {
        lease(&call.await.unwrap());
    }
    let held = |record: &&Record| matches!(record, Record::Ticket(ticket) if matches!(ticket.stage, Stage::Held(_)));
    let commits = store.commits(before);
    let grants: Vec<usize> = commits
        .iter()
        .map(|records| records.iter().filter(held).count())
        .filter(|count| *count > 0)
        .collect();
    assert_eq!(grants.iter().sum::<usize>(), 51);
    assert!(grants.len() < 51, "grants share transactions: {grants:?}");
}

/// Calls alone, pair after pair, until the turn of a release was done by the caller's own thread. Gives the number of
/// the next ticket.
async fn alone(gate: &Gate, store: &Switch, from: u64) -> u64 {
    for number in from.. {
        // On one core the writer's thread would else never come to its sleep between two calls.
        std::thread::yield_now();
        read(gate).await;
        std::thread::yield_now();
        let ticket = format!("alone-{number}");
        let held = lease(&acquire(gate, &ticket, 1, LONG).await);
        assert_eq!(gate.view().leases, 1, "readers see it before the caller");
        std::thread::yield_now();
        let released = gate.release(held).await.unwrap();
        assert_eq!(released.value, Ok(ReleaseOutcome::Released));
        assert_eq!(gate.view().leases, 0);
        if !store.by_writer() {
            return number + 1;
        }
    }
    unreachable!("numbers have no end")
}

/// Who is alone does its own turns, and whoever comes then finds the writer's thread at its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_is_alone_does_its_turns() {
    let (gate, store) = gate().await;
    alone(&gate, &store, 0).await;
    let holder = lease(&acquire(&gate, "holder", CEILING, LONG).await);
    let waiter = tokio::spawn({
        let gate = gate.clone();
        async move { acquire(&gate, "waiter", CEILING, LONG).await }
    });
    line_of(&gate, 1).await;
    gate.release(holder).await.unwrap().value.unwrap();
    lease(&waiter.await.unwrap());
    gate.stop().await;
    let late = gate.acquire(ask("late", 1), LONG).await;
    assert_eq!(late.unwrap_err(), GateError::Draining);
}

/// DUR4: the store fails in a turn that a caller does, and the writer's thread opens it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur4_a_store_that_fails_under_a_caller_is_opened_again() {
    let (gate, store) = gate().await;
    let mut opened = store.opened();
    let mut next = 0;
    loop {
        next = alone(&gate, &store, next).await;
        store.set(Mood::Failing);
        // What was cancelled in an earlier attempt is cancelled: that would need no commit.
        let lost = TicketId::new(&format!("lost-{next}")).unwrap();
        unavailable(gate.cancel(lost).await);
        let by_writer = store.by_writer();
        assert_eq!(gate.phase(), Phase::Unavailable);
        store.set(Mood::Good);
        reopened(&gate).await;
        assert!(store.opened() > opened);
        opened = store.opened();
        if !by_writer {
            return;
        }
    }
}

/// A fault of ours ends the writer, in a turn that a caller does as in one of its own thread: nobody waits for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_panics_leaves_nobody_waiting() {
    let (mut in_a_call, mut in_the_thread) = (false, false);
    while !(in_a_call && in_the_thread) {
        let (gate, store) = gate().await;
        lease(&acquire(&gate, "holder", CEILING, LONG).await);
        let waiter = tokio::spawn({
            let gate = gate.clone();
            async move { gate.acquire(ask("waiter", CEILING), LONG).await }
        });
        line_of(&gate, 1).await;
        for number in 0.. {
            if in_the_thread && store.by_writer() {
                std::thread::yield_now();
                let nobody = TicketId::new(&format!("nobody-{number}"));
                gate.cancel(nobody.unwrap()).await.unwrap();
            } else {
                break;
            }
        }
        store.set(Mood::Panicking);
        let caller = tokio::spawn({
            let gate = gate.clone();
            async move { gate.cancel(TicketId::new("nobody").unwrap()).await }
        });
        let ended = caller.await.unwrap();
        assert_eq!(ended.unwrap_err(), GateError::Draining);
        in_the_thread |= store.by_writer();
        in_a_call |= !store.by_writer();
        let waited = waiter.await.unwrap();
        assert_eq!(waited.unwrap_err(), GateError::Draining);
        let later = gate.acquire(ask("later", 1), LONG).await;
        assert_eq!(later.unwrap_err(), GateError::Draining);
    }
}

/// DEC2: a release and the grants it causes are one transaction.
#[tokio::test]
async fn a_release_and_the_grants_it_causes_are_one_commit() {
    let (gate, store) = gate().await;
    let held = lease(&acquire(&gate, "a", CEILING, LONG).await);
    let waiting: Vec<_> = (0..3)
        .map(|number| {
            let gate = gate.clone();
            tokio::spawn(async move { acquire(&gate, &format!("w-{number}"), 300, LONG).await })
        })
        .collect();
    line_of(&gate, 3).await;
    let before = store.commits(0).len();
    let released = gate.release(held).await.unwrap();
    assert_eq!(released.value, Ok(ReleaseOutcome::Released));
    for call in waiting {
        assert!(!call.await.unwrap().repeated);
    }
    let commits = store.commits(before);
    let first = commits.first().unwrap();
    let rows = first
        .iter()
        .filter(|record| matches!(record, Record::Ticket(_)));
    assert_eq!(rows.count(), 4, "one release and three grants");
}

/// TIC2: a call ends by itself with the ticket's place, which is kept; asking again keeps it.
#[tokio::test]
async fn a_waiting_call_ends_with_its_place() {
    let (gate, _store) = gate().await;
    let held = lease(&acquire(&gate, "a", CEILING, LONG).await);
    let place = async |ticket, wait| match acquire(&gate, ticket, 10, wait).await.outcome {
        Outcome::Wait(status) => (status.position, status.reason),
        other => panic!("{other:?}"),
    };
    let short = Duration::from_millis(1);
    assert_eq!(place("b", short).await, (1, WaitReason::CapacityExhausted));
    assert_eq!(
        place("c", Duration::ZERO).await,
        (2, WaitReason::BehindOlder)
    );
    assert_eq!(
        place("b", Duration::ZERO).await,
        (1, WaitReason::CapacityExhausted)
    );
    assert_eq!(gate.view().waiting, 2);
    gate.release(held).await.unwrap().value.unwrap();
    let answer = acquire(&gate, "b", 10, LONG).await;
    assert!(!answer.repeated, "its first delivery (TIC4)");
    assert!(acquire(&gate, "b", 10, LONG).await.repeated);
}

/// TIC4: an answer that was not written whole leaves its grant to the claim grace, then it is taken
/// back and counts as cancelled, not as an admit (CNT1).
#[tokio::test]
async fn a_grant_that_was_not_delivered_is_taken_back() {
    let (gate, _store) = gate_with(Policy {
        claim_grace: Span::from_secs(1),
        ..Policy::default()
    })
    .await;
    let decision = gate
        .acquire(ask("a", 1), LONG)
        .await
        .unwrap()
        .value
        .unwrap();
    drop(decision.receipt);
    let mut views = gate.views();
    views.wait_for(|view| view.leases == 0).await.unwrap();
    let tally = gate.view().tally.clone();
    let train = tally.scope(Scope::Train);
    assert_eq!((train.admit, train.cancelled.iter().sum::<u64>()), (0, 1));
}

/// TIC3: a caller that goes away while it waits leaves its place to the claim grace.
#[tokio::test]
async fn a_dropped_call_leaves_its_place_to_the_grace() {
    let (gate, _store) = gate_with(Policy {
        claim_grace: Span::from_secs(1),
        ..Policy::default()
    })
    .await;
    lease(&acquire(&gate, "a", CEILING, LONG).await);
    let call = tokio::spawn({
        let gate = gate.clone();
        async move { acquire(&gate, "b", 1, LONG).await }
    });
    line_of(&gate, 1).await;
    assert_eq!(gate.waiting_calls(), 1);
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    line_of(&gate, 0).await;
    assert_eq!(gate.waiting_calls(), 0);
}

/// One call waits for many tickets and ends with all that are decided, in the order asked.
#[tokio::test]
async fn a_watch_ends_with_all_that_is_decided() {
    let (gate, _store) = gate().await;
    let held = lease(&acquire(&gate, "a", CEILING, LONG).await);
    for number in 0..4 {
        acquire(&gate, &format!("w-{number}"), 400, Duration::ZERO).await;
    }
    let names = ["w-3", "w-1", "w-0", "w-2"].map(|name| TicketId::new(name).unwrap());
    let watch = tokio::spawn({
        let gate = gate.clone();
        let names = names.to_vec();
        async move { gate.watch(names, LONG).await.unwrap() }
    });
    // The watch stands when the writer has taken it; then the release decides two.
    while gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    gate.release(held).await.unwrap().value.unwrap();
    let decided = watch.await.unwrap();
    let told: Vec<&str> = decided.iter().map(|(ticket, _)| ticket.as_str()).collect();
    assert_eq!(told, ["w-1", "w-0"]);
    for (_, decision) in decided {
        let decision = decision.unwrap();
        assert!(!decision.answer.repeated);
        decision.receipt.unwrap().written();
    }
    let unknown = gate
        .watch(vec![TicketId::new("nobody").unwrap()], LONG)
        .await
        .unwrap();
    assert!(matches!(unknown.as_slice(), [(_, None)]), "at once");
    let none = gate
        .watch(names[..1].to_vec(), Duration::from_millis(1))
        .await
        .unwrap();
    assert!(none.is_empty());
}

/// A waiter that is cancelled hears it on its open call.
#[tokio::test]
async fn a_cancel_ends_the_open_call() {
    let (gate, _store) = gate().await;
    lease(&acquire(&gate, "a", CEILING, LONG).await);
    let call = tokio::spawn({
        let gate = gate.clone();
        async move { acquire(&gate, "b", 1, LONG).await }
    });
    line_of(&gate, 1).await;
    gate.cancel(TicketId::new("b").unwrap()).await.unwrap();
    assert_eq!(
        call.await.unwrap().outcome,
        Outcome::Cancelled(CancelReason::Cancelled)
    );
}

/// DUR1: a failed commit is answered as unknown; the gate opens the store again by itself, and what
/// it holds then is what a restart would find.
#[tokio::test]
async fn a_failed_commit_reloads_from_the_store() {
    for failing in [Mood::Failing, Mood::FailingAfterwards] {
        let (gate, store) = gate().await;
        let kept = lease(&acquire(&gate, "kept", 100, LONG).await);
        store.set(failing);
        let failed = gate.acquire(ask("lost", 200), LONG).await;
        assert_eq!(failed.unwrap_err(), GateError::StoreUnavailable);
        assert_eq!(gate.phase(), Phase::Unavailable);
        let failed = gate.release(kept).await;
        assert_eq!(failed.unwrap_err(), GateError::StoreUnavailable);
        assert_eq!(
            gate.view().reserved.get(),
            100,
            "reads show the last good state"
        );
        store.set(Mood::Good);
        reopened(&gate).await;
        let expected = match failing {
            Mood::FailingAfterwards => 200,
            _ => 0,
        };
        assert_eq!(gate.view().reserved.get(), expected);
        assert_eq!(
            gate.release(kept).await.unwrap().value,
            Ok(ReleaseOutcome::AlreadyReleased)
        );
        assert!(store.opened() >= 2);
    }
}

/// Callers that wait while the store fails keep their calls and their places.
#[tokio::test]
async fn waiting_calls_outlive_a_failed_store() {
    let (gate, store) = gate().await;
    let held = lease(&acquire(&gate, "a", CEILING, LONG).await);
    let call = tokio::spawn({
        let gate = gate.clone();
        async move { acquire(&gate, "b", 1, LONG).await }
    });
    line_of(&gate, 1).await;
    store.set(Mood::Failing);
    let cancel = gate.cancel(TicketId::new("x").unwrap()).await;
    assert_eq!(cancel.unwrap_err(), GateError::StoreUnavailable);
    store.set(Mood::Good);
    reopened(&gate).await;
    gate.release(held).await.unwrap().value.unwrap();
    assert!(!call.await.unwrap().repeated);
}

/// An orderly stop refuses who waits, and keeps places and counters.
#[tokio::test]
async fn a_drain_refuses_waiting_calls_and_keeps_their_places() {
    let (gate, store) = gate().await;
    lease(&acquire(&gate, "a", CEILING, LONG).await);
    let call = tokio::spawn({
        let gate = gate.clone();
        async move { gate.acquire(ask("b", 1), LONG).await.map(|_| ()) }
    });
    line_of(&gate, 1).await;
    gate.begin_drain();
    assert_eq!(call.await.unwrap(), Err(GateError::Draining));
    assert!(
        gate.read_ticket(TicketId::new("b").unwrap())
            .await
            .unwrap()
            .is_some()
    );
    gate.stop().await;
    let image = store.image();
    let waiting = image
        .tickets
        .iter()
        .filter(|t| matches!(t.stage, Stage::Waiting { .. }));
    assert_eq!(waiting.count(), 1);
    assert_eq!(image.tally.scope(Scope::Train).admit, 1);
    assert_eq!(
        gate.release(LeaseId::parse("1-000000000000002a").unwrap())
            .await
            .unwrap_err(),
        GateError::Draining
    );
}

/// A batch is one turn, answered together and in order; a bypass costs no commit.
#[tokio::test]
async fn a_batch_is_one_turn() {
    let (gate, store) = gate().await;
    let commands = (0..100)
        .map(|number| Command::Acquire(ask(&format!("t-{number}"), 100)))
        .map(|mut command| {
            if let Command::Acquire(acquire) = &mut command {
                acquire.stays = false;
            }
            command
        })
        .collect();
    let before = store.commits(0).len();
    let replies = gate.batch(commands).await.unwrap();
    assert_eq!(replies.len(), 100);
    let seqs: BTreeSet<_> = replies
        .iter()
        .map(|reply| reply.as_ref().unwrap().0)
        .collect();
    assert_eq!(seqs.len(), 100, "a number for each");
    assert_eq!(store.commits(before).len(), 1);
    let mut protected = ask("p", 1);
    protected.protected = true;
    let answer = gate.acquire(protected, LONG).await.unwrap();
    assert!(answer.seq.is_none());
    assert_eq!(
        answer.value.unwrap().answer.outcome,
        Outcome::Bypass(BypassReason::Protected)
    );
}

/// Fails the store under a turn that changes nothing that a test looks at.
async fn fail(gate: &Gate, store: &Switch) {
    store.set(Mood::Failing);
    let failed = gate.cancel(TicketId::new("failing").unwrap()).await;
    assert_eq!(failed.unwrap_err(), GateError::StoreUnavailable);
}

fn unavailable<T: std::fmt::Debug>(answer: Result<T, GateError>) {
    assert_eq!(answer.unwrap_err(), GateError::StoreUnavailable);
}

/// DUR4: releases and cancels of the failed turn and of the outage are applied on recovery, before
/// anything that comes later; renewals are not.
#[tokio::test]
async fn dur4_releases_and_cancels_are_applied_on_recovery() {
    for failing in [Mood::Failing, Mood::FailingAfterwards] {
        let (gate, store) = gate().await;
        let mut leases = Vec::new();
        for name in ["a", "b", "c", "d"] {
            leases.push(lease(&acquire(&gate, name, 100, LONG).await));
        }
        let &[a, b, c, d] = leases.as_slice() else {
            panic!("four leases");
        };
        acquire(&gate, "waits", 800, Duration::ZERO).await;
        let ends = gate.read_lease(d).await.unwrap().value.unwrap();
        store.set(failing);
        let batch = vec![
            Command::Release(a),
            Command::Acquire(Acquire {
                stays: false,
                ..ask("new", 1)
            }),
        ];
        for reply in gate.batch(batch).await.unwrap() {
            unavailable(reply);
        }
        unavailable(gate.release(b).await);
        unavailable(gate.cancel(TicketId::new("c").unwrap()).await);
        unavailable(gate.cancel(TicketId::new("waits").unwrap()).await);
        unavailable(gate.cancel(TicketId::new("later").unwrap()).await);
        unavailable(gate.renew(d, Some(Span::from_secs(7_200))).await);
        unavailable(gate.read_lease(d).await);
        store.set(Mood::Good);
        // The first call that is answered after the recovery finds them applied.
        let again = loop {
            match gate.release(b).await {
                Ok(answered) => break answered,
                Err(error) => assert_eq!(error, GateError::StoreUnavailable),
            }
        };
        assert_eq!(again.value, Ok(ReleaseOutcome::AlreadyReleased));
        for gone in [a, c] {
            let answered = gate.release(gone).await.unwrap();
            assert_eq!(answered.value, Ok(ReleaseOutcome::AlreadyReleased));
        }
        for finished in ["a", "c", "waits", "later"] {
            let answered = gate.cancel(TicketId::new(finished).unwrap()).await.unwrap();
            assert_eq!(answered.value, CancelOutcome::AlreadyFinished, "{finished}");
        }
        reopened(&gate).await;
        assert_eq!(gate.view().waiting, 0);
        let after = gate.read_lease(d).await.unwrap().value.unwrap();
        assert_eq!(after.lease.ttl, ends.lease.ttl);
        assert_eq!(after.lease.ends_at, ends.lease.ends_at);
        let late = acquire(&gate, "later", 1, LONG).await;
        assert_eq!(
            late.outcome,
            Outcome::Cancelled(CancelReason::TicketFinished),
            "the marker of an unknown ticket stands (TIC5)"
        );
    }
}

/// DUR4: a waiting call gets its answer at `wait_s` or at `max_wait`, and its place stays on disk.
#[tokio::test]
async fn dur4_waiting_calls_end_in_an_outage_and_keep_their_places() {
    for (wait, max_wait) in [
        (Duration::from_secs(2), Span::from_secs(600)),
        (LONG, Span::from_millis(50)),
    ] {
        let (gate, store) = gate_with_wait(max_wait).await;
        lease(&acquire(&gate, "a", CEILING, LONG).await);
        // The place is the last thing that is written.
        store.set(Mood::LastGood);
        let call = tokio::spawn({
            let gate = gate.clone();
            async move { gate.acquire(ask("b", 1), wait).await }
        });
        line_of(&gate, 1).await;
        if wait < LONG {
            unavailable(gate.cancel(TicketId::new("failing").unwrap()).await);
        }
        unavailable(call.await.unwrap());
        let image = store.image();
        let waits = |ticket: &&kvgate_core::ticket::Ticket| {
            ticket.id.as_str() == "b" && matches!(ticket.stage, Stage::Waiting { .. })
        };
        assert_eq!(image.tickets.iter().filter(waits).count(), 1);
        assert_eq!(gate.phase(), Phase::Unavailable);
    }
}

/// DUR4, TIC4: a grant that turns out to be on disk although its caller was told to bypass ends
/// after the claim grace and counts as cancelled (CNT1); one that was told stays. Who asks again in
/// time gets it, for the first time.
#[tokio::test]
async fn dur4_a_grant_that_nobody_was_told_ends_after_the_grace() {
    let (gate, store) = gate_with(Policy {
        claim_grace: Span::from_secs(2),
        ..Policy::default()
    })
    .await;
    let told = lease(&acquire(&gate, "told", 100, LONG).await);
    let on_its_way = gate.acquire(ask("on-its-way", 100), LONG).await.unwrap();
    store.set(Mood::FailingAfterwards);
    let batch = ["lost", "asks-again"].map(|name| {
        Command::Acquire(Acquire {
            stays: false,
            ..ask(name, 100)
        })
    });
    for reply in gate.batch(batch.to_vec()).await.unwrap() {
        unavailable(reply);
    }
    // An answer that left before the failure arrives during the outage.
    on_its_way.value.unwrap().receipt.unwrap().written();
    store.set(Mood::Good);
    reopened(&gate).await;
    assert_eq!(gate.view().leases, 4);
    let again = acquire(&gate, "asks-again", 100, LONG).await;
    assert!(!again.repeated, "its first delivery");
    let mut views = gate.views();
    views.wait_for(|view| view.leases < 4).await.unwrap();
    assert_eq!(gate.view().leases, 3);
    let lost = gate.read_ticket(TicketId::new("lost").unwrap()).await;
    assert_eq!(
        lost.unwrap(),
        Some(TicketView::Ended(EndHow::TakenBack)),
        "it is the lost one that ended"
    );
    let tally = gate.view().tally.clone();
    let train = tally.scope(Scope::Train);
    assert_eq!((train.admit, train.cancelled.iter().sum::<u64>()), (3, 1));
    assert_eq!(
        gate.release(told).await.unwrap().value,
        Ok(ReleaseOutcome::Released)
    );
}

/// DUR4: with little room left new acquires bypass, in a batch too, and everything else goes on.
#[tokio::test]
async fn dur4_with_little_room_left_only_new_acquires_bypass() {
    let (gate, store) = gate().await;
    let held = lease(&acquire(&gate, "a", CEILING, LONG).await);
    acquire(&gate, "waits", 1, Duration::ZERO).await;
    assert_eq!(gate.store_trouble(), StoreTrouble::default());
    store.set_low_space(true);
    unavailable(gate.acquire(ask("new", 1), LONG).await);
    let since = gate.store_trouble().low_space.unwrap();
    let new = Acquire {
        stays: false,
        ..ask("new", 1)
    };
    let replies = gate
        .batch(vec![
            Command::Acquire(new.clone()),
            Command::Renew {
                lease: held,
                ttl: None,
            },
            Command::Acquire(Acquire {
                ticket: TicketId::new("a").unwrap(),
                sent: Sent::Sum(Tokens::new(CEILING).unwrap()),
                ..new
            }),
            Command::Release(held),
        ])
        .await
        .unwrap();
    let mut replies = replies.into_iter();
    unavailable(replies.next().unwrap());
    assert!(matches!(
        replies.next().unwrap().unwrap().1,
        Reply::Lease(Ok(_))
    ));
    let (_, Reply::Acquire(Ok(repeat))) = replies.next().unwrap().unwrap() else {
        panic!("a repeat is answered");
    };
    assert_eq!((lease(&repeat), repeat.repeated), (held, true));
    assert!(matches!(
        replies.next().unwrap().unwrap().1,
        Reply::Release(Ok(ReleaseOutcome::Released))
    ));
    lease(&acquire(&gate, "waits", 1, LONG).await);
    assert_eq!(
        gate.store_trouble().low_space,
        Some(since),
        "since the first"
    );
    assert_eq!(gate.phase(), Phase::Ready);
    store.set_low_space(false);
    lease(&acquire(&gate, "new", 1, LONG).await);
    assert_eq!(gate.store_trouble(), StoreTrouble::default());
}

/// DUR4: recovery is not over before the fleet was read anew; until then new acquires bypass for the
/// store's sake.
#[tokio::test]
async fn dur4_recovery_ends_with_a_reading() {
    let (gate, store) = gate().await;
    fail(&gate, &store).await;
    let mut views = gate.views();
    views.mark_unchanged();
    store.set(Mood::Good);
    views.changed().await.unwrap();
    unavailable(gate.acquire(ask("early", 1), LONG).await);
    assert!(gate.store_trouble().unavailable.is_some());
    reopened(&gate).await;
    assert_eq!(gate.store_trouble(), StoreTrouble::default());
    lease(&acquire(&gate, "early", 1, LONG).await);
}

/// DUR1, CLO2: calls to engines come out when their close is durable, and not before; whoever waits for
/// the close is told when their outcomes are.
#[tokio::test]
async fn dur1_calls_come_out_after_their_commit() {
    let (gate, store) = gate_with(Policy {
        session_lifecycle: true,
        ..Policy::default()
    })
    .await;
    let mut calls = gate.take_calls().unwrap();
    assert!(gate.take_calls().is_none(), "one makes the calls");
    store.set(Mood::Holding);
    let request = CloseRequest {
        session: SessionId::new("s").unwrap(),
        mode: CloseMode::Join,
        reason: None,
    };
    let closing = tokio::spawn({
        let gate = gate.clone();
        async move { gate.close_session(request).await }
    });
    let held = store.clone();
    tokio::task::spawn_blocking(move || held.wait_until_held())
        .await
        .unwrap();
    assert!(calls.try_recv().is_err());
    store.set(Mood::Good);
    let CloseReply::Taken(close) = closing.await.unwrap().unwrap().value else {
        panic!("not taken")
    };
    let call = calls.recv().await.unwrap();
    assert_eq!(call.engine, engine());
    assert_eq!(call.what, CallWhat::Close(close.session.clone()));

    let done = gate.close_done(close.id, Duration::from_secs(60));
    let answered = CallResult::Status {
        code: 200,
        text: None,
    };
    let (done, ()) = tokio::join!(done, async {
        // One that this writer never made changes nothing.
        let foreign = CallId {
            term: Term(call.id.term.0 + 7),
            ..call.id
        };
        gate.called(vec![(foreign, answered.clone())]);
        let unmoved = gate.read_close(close.id).await.unwrap().unwrap();
        assert_eq!(unmoved.targets, close.targets);
        gate.called(vec![(call.id, answered.clone())]);
    });
    assert_eq!(done.unwrap().count(TargetState::Delivered), 1);
}
