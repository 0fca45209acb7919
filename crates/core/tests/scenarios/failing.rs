//! What is left of a turn whose commit failed, and what a reload makes of it (DUR4).

use kvgate_core::command::Command;
use kvgate_core::decision::EndHow;
use kvgate_core::effect::{Outcome, TicketView};
use kvgate_core::machine::Untold;
use kvgate_core::units::Timestamp;

use crate::common::*;

/// A reading, then a grace and more.
fn after_the_grace(gate: &mut Gate) {
    gate.round();
    gate.run(11_000);
}

fn admits_and_cancels(gate: &Gate) -> (u64, u64) {
    (gate.admits(), gate.cancels())
}

/// DUR4, CNT1: a grant of a failed turn that is on disk all the same is unclaimed after the reload:
/// charged for the claim grace, then taken back, counted as cancelled. A claimed one stays.
#[test]
fn dur4_an_untold_grant_ends_after_the_grace() {
    let mut gate = Gate::new();
    gate.hold("told", 100);
    let admitted = admits_and_cancels(&gate).0;
    let untold = gate
        .fail_afterwards(vec![Command::Acquire(acquire("lost", 50))])
        .untold();
    let kept = gate.store.image().tally;
    gate.reload(&untold);
    assert_eq!(
        gate.machine().kept().tally,
        kept,
        "a restart would count it"
    );
    gate.round();
    assert_eq!(gate.reserved(), 150);
    after_the_grace(&mut gate);
    assert_eq!(gate.reserved(), 100);
    assert_eq!(
        gate.read("lost"),
        Some(TicketView::Ended(EndHow::TakenBack))
    );
    assert_eq!(admits_and_cancels(&gate), (admitted, 1));
    gate.restart(0);
    assert_eq!(admits_and_cancels(&gate), (admitted, 1));
}

/// DUR4, TIC4: who asks again within the grace is told of the grant for the first time, and keeps it.
#[test]
fn dur4_an_untold_grant_can_be_claimed() {
    let mut gate = Gate::new();
    let untold = gate
        .fail_afterwards(vec![Command::Acquire(acquire("t", 50))])
        .untold();
    gate.reload(&untold);
    gate.round();
    let answer = answer(&gate.ask("t", 50));
    assert!(matches!(answer.outcome, Outcome::Admit { .. }) && !answer.repeated);
    after_the_grace(&mut gate);
    assert_eq!(gate.reserved(), 50);
    assert_eq!(admits_and_cancels(&gate), (1, 0));
}

/// DUR4: a repeat in the failed turn claims nothing, since its caller was told to go on without;
/// and a failed turn that left nothing on disk leaves nothing behind.
#[test]
fn dur4_a_claim_that_was_not_answered_is_none() {
    let mut gate = Gate::new();
    let both = || {
        vec![
            Command::Acquire(acquire("t", 50)),
            Command::Acquire(acquire("t", 50)),
        ]
    };
    let untold = gate.fail_afterwards(both()).untold();
    gate.reload(&untold);
    after_the_grace(&mut gate);
    assert_eq!(gate.reserved(), 0);
    assert_eq!(admits_and_cancels(&gate), (0, 1));

    let mut gate = Gate::new();
    let untold = gate.fail_and_leave(both()).untold();
    gate.reload(&untold);
    after_the_grace(&mut gate);
    assert_eq!(admits_and_cancels(&gate), (0, 0));
    assert_eq!(gate.read("t"), None);
}

/// DUR4: grants of earlier turns whose answer is on its way are untold until it arrives.
#[test]
fn dur4_an_answer_on_its_way_is_told_when_it_arrives() {
    for arrives in [true, false] {
        let mut gate = Gate::new();
        let lease = admitted(&gate.ask("t", 50));
        let mut untold = Untold::default();
        untold.add(
            gate.fail_and_leave(vec![Command::Cancel(ticket("x"))])
                .untold(),
        );
        if arrives {
            untold.told(lease);
        }
        gate.reload(&untold);
        after_the_grace(&mut gate);
        assert_eq!(gate.view().leases, u64::from(arrives));
        assert_eq!(
            admits_and_cancels(&gate),
            (u64::from(arrives), u64::from(!arrives))
        );
    }
}

/// DUR4, TIC3: the shell learns when the queue time of a waiter is over, also when the failed turn
/// had decided it.
#[test]
fn dur4_the_end_of_a_queue_time_outlives_the_core() {
    let mut gate = Gate::new();
    let first = admitted(&gate.ask("first", 900_000));
    gate.park("waits", 10);
    let since = gate.now;
    let max_wait = gate.policy().max_wait;
    gate.now += 5;
    let failed = gate.fail_and_leave(vec![
        Command::Acquire(acquire("new", 950_000)),
        Command::Release(first),
    ]);
    let at = Timestamp::from_millis(since).after(max_wait);
    assert_eq!(failed.bypass_at(&ticket("waits")), Some(at));
    assert_eq!(failed.bypass_at(&ticket("new")), None, "never in line");
    assert_eq!(failed.bypass_at(&ticket("first")), None);
    assert_eq!(failed.bypass_at(&ticket("nobody")), None);
}
