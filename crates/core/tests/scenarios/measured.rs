//! What readers measure: sums of each scope, events of a turn, and counters that never go back.

use kvgate_core::command::Command;
use kvgate_core::decision::{BypassReason, Scope};
use kvgate_core::effect::{Answer, Outcome, TicketView};
use kvgate_core::event::{Event, QueueEnd};
use kvgate_core::ids::LeaseId;
use kvgate_core::tally::LeaseEnd;
use kvgate_core::units::Span;
use kvgate_core::view::Load;

use crate::common::*;

/// The events of one committed turn.
fn events(gate: &mut Gate, commands: Vec<Command>) -> Vec<Event> {
    gate.turn(commands);
    std::mem::take(&mut gate.events)
}

/// The lease of a ticket, read without side effects.
fn lease_of(gate: &mut Gate, name: &str) -> LeaseId {
    match gate.read(name) {
        Some(TicketView::Answer(Answer {
            outcome: Outcome::Admit { lease, .. },
            ..
        })) => lease,
        other => panic!("{name} holds no lease: {other:?}"),
    }
}

fn eval(name: &str, reservation: u64) -> kvgate_core::command::Acquire {
    let mut ask = acquire(name, reservation);
    ask.scope = Scope::Eval;
    ask
}

/// CNT1: leases, waiters and their tokens are known by scope without a look at the rows.
#[test]
fn loads_are_kept_by_scope() {
    let mut gate = Gate::new();
    let first = gate.hold("train", 500_000);
    gate.hold_as(eval("eval", 400_000));
    gate.park("behind", 300_000);
    gate.ask_as(eval("further", 20));
    gate.ask_as(eval("last", 30));
    let load = |leases, waiting, waiting_tokens| Load {
        leases,
        waiting,
        waiting_tokens: tokens(waiting_tokens),
    };
    assert_eq!(gate.view().load(Scope::Train), load(1, 1, 300_000));
    assert_eq!(gate.view().load(Scope::Eval), load(1, 2, 50));
    gate.restart(1_000);
    assert_eq!(gate.view().load(Scope::Eval), load(1, 2, 50));
    gate.release(first).unwrap();
    gate.cancel("last");
    assert_eq!(gate.view().load(Scope::Train), load(1, 0, 0));
    assert_eq!(gate.view().load(Scope::Eval), load(2, 0, 0));
}

/// CNT1, LEA1: a turn tells what was asked for, how long tickets stood in line and how leases ended.
#[test]
fn a_turn_tells_what_is_measured() {
    let mut gate = Gate::new();
    let told = events(&mut gate, vec![Command::Acquire(acquire("a", 900_000))]);
    let asked = |scope, reservation| Event::Asked {
        scope,
        reservation: tokens(reservation),
    };
    assert_eq!(told, [asked(Scope::Train, 900_000)]);
    let lease = lease_of(&mut gate, "a");
    gate.deliver("a", Some(lease));
    let told = events(&mut gate, vec![Command::Acquire(eval("b", 7))]);
    assert_eq!(told, [asked(Scope::Eval, 7)]);
    let told = events(&mut gate, vec![Command::Acquire(eval("b", 7))]);
    assert_eq!(told, [], "a repeat is not asked anew");
    gate.park("c", 8);
    gate.run(2_000);
    gate.events.clear();
    let told = events(&mut gate, vec![Command::Cancel(ticket("c"))]);
    let waited = |outcome, ms| Event::LeftQueue {
        outcome,
        waited: Span::from_millis(ms),
    };
    assert_eq!(told, [waited(QueueEnd::Cancelled, 2_000)]);
    let told = events(&mut gate, vec![Command::Release(lease)]);
    let ended = |how, ms| Event::LeaseEnded {
        how,
        held: Span::from_millis(ms),
    };
    assert_eq!(told, [ended(LeaseEnd::Released, 2_000)]);
    let lease = lease_of(&mut gate, "b");
    gate.jump(500);
    gate.deliver("b", Some(lease));
    let told = std::mem::take(&mut gate.events);
    assert_eq!(
        told,
        [waited(QueueEnd::Admit, 2_000)],
        "counted at delivery, with the time that it stood in line"
    );
}

/// LEA1: an expiry is told once, by name.
#[test]
fn lea1_an_expiry_is_told_once() {
    let mut gate = Gate::new();
    let mut brief = acquire("t", 100);
    brief.ttl = Span::from_secs(5);
    let lease = gate.hold_as(brief);
    gate.run(20_000);
    let expired: Vec<Event> = std::mem::take(&mut gate.events)
        .into_iter()
        .filter(|event| matches!(event, Event::Expired { .. }))
        .collect();
    let expected = Event::Expired {
        lease,
        ticket: ticket("t"),
        session: Some(session("s")),
        reservation: tokens(100),
    };
    assert_eq!(expired, [expected]);
}

/// DUR2: a counter that a reader saw never goes back, after a kill neither: an immediate bypass is
/// shown once it is stored, a grant on its way once it is claimed.
#[test]
fn dur2_counters_of_readers_never_go_back() {
    let mut gate = Gate::new();
    let count = |gate: &Gate| {
        let tally = gate.view().durable_tally;
        let train = tally.scope(Scope::Train);
        (train.admit, train.bypasses(BypassReason::Oversize))
    };
    gate.ask("huge", 2_000_000);
    assert_eq!(gate.bypasses(BypassReason::Oversize), 1);
    assert_eq!(count(&gate), (0, 0), "a kill would forget it");
    gate.unread_for(1_000);
    assert_eq!(count(&gate), (0, 1), "stored within a second");
    gate.ask("on its way", 100);
    assert_eq!(count(&gate), (0, 1), "it may be taken back yet");
    let shown = count(&gate);
    gate.restart(0);
    assert!(count(&gate) >= shown);
    assert_eq!(count(&gate), (1, 1), "every lease counts as claimed");
}
