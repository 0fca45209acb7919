//! The life of a lease, and what is counted.

use kvgate_core::command::Command;
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::effect::{CancelOutcome, LeaseGone};
use kvgate_core::policy::{AdmissionScope, RENEWALS_SHARE_MIN, TTL_MAX, TTL_MIN, ttl_in_range};
use kvgate_core::tally::{CancelledHow, LeaseEnd, LocalBypass};
use kvgate_core::units::{Span, Timestamp};

use crate::common::*;

fn living(name: &str, secs: u64) -> kvgate_core::command::Acquire {
    let mut ask = acquire(name, 100);
    ask.ttl = Span::from_secs(secs);
    ask
}

fn left(gate: &mut Gate, lease: kvgate_core::ids::LeaseId) -> u64 {
    let view = gate.read_lease(lease).unwrap();
    view.lease.ends_at.since(gate.view().now).millis()
}

/// LEA1: 1 s to 24 h; other numbers are brought into range, and the answer says so.
#[test]
fn lea1_lives_are_brought_into_range() {
    assert_eq!(
        (TTL_MIN, TTL_MAX),
        (Span::from_secs(1), Span::from_secs(86_400))
    );
    for (asked, got, changed) in [
        (0, 1_000, true),
        (999, 1_000, true),
        (1_000, 1_000, false),
        (600_000, 600_000, false),
        (86_400_000, 86_400_000, false),
        (86_400_001, 86_400_000, true),
        (u64::MAX, 86_400_000, true),
    ] {
        assert_eq!(
            ttl_in_range(Span::from_millis(asked)),
            (Span::from_millis(got), changed)
        );
    }
}

/// LEA1, Q08: a lease lives since its grant or its last renewal; an expiry is counted once.
#[test]
fn lea1_life_and_renewal() {
    let mut gate = Gate::new();
    let renewed = gate.hold_as(living("renewed", 20));
    let silent = gate.hold_as(living("silent", 20));
    for _ in 0..15 {
        gate.run(6_000);
        gate.renew(renewed).unwrap();
    }
    assert_eq!(gate.reserved(), 100);
    assert_eq!(gate.release(silent), Err(LeaseGone::Expired));
    assert_eq!(gate.view().tally.ends(LeaseEnd::Expired), 1);
    gate.run(19_999);
    assert_eq!(gate.reserved(), 100);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.reserved(), 0);
    gate.run(5_000);
    assert_eq!(gate.view().tally.ends(LeaseEnd::Expired), 2);
}

/// LEA1: a renewal may bring a new life, which then stands; without one the present life goes on.
#[test]
fn lea1_a_renewal_may_change_the_life() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(living("t", 20));
    gate.run(1_000);
    let view = gate.renew_for(lease, Some(Span::from_secs(5))).unwrap();
    assert_eq!(view.lease.ttl, Span::from_secs(5));
    assert_eq!(view.terms.ttl, Span::from_secs(5));
    gate.run(1_000);
    gate.renew(lease).unwrap();
    assert_eq!(left(&mut gate, lease), 5_000);
    let granted_at = Timestamp::from_millis(T0);
    assert_eq!(gate.read_lease(lease).unwrap().lease.granted_at, granted_at);
}

/// LEA1: the next deadline is the end of the lease, so that it is reclaimed in time.
#[test]
fn lea1_the_machine_names_the_end() {
    let mut gate = Gate::new();
    gate.hold_as(living("t", 3));
    let end = gate.now + 3_000;
    gate.unread_for(2_000);
    assert_eq!(
        gate.machine().next_deadline(),
        Some(Timestamp::from_millis(end))
    );
}

/// LEA2: renewals are held in memory and written within 5 s, together.
#[test]
fn lea2_renewals_are_written_within_five_seconds() {
    let mut gate = Gate::new();
    let leases: Vec<_> = (0..100)
        .map(|n| gate.hold_as(living(&format!("t{n}"), 60)))
        .collect();
    gate.run(2_000);
    let commits = gate.store.commits();
    let (seq, _) = gate.tell(Command::Renew {
        lease: leases[0],
        ttl: None,
    });
    assert_eq!(seq, None);
    for lease in &leases {
        gate.renew(*lease).unwrap();
    }
    assert_eq!(gate.store.commits(), commits, "no commit for a renewal");
    let renewed_at = gate.now;
    gate.drain_until(renewed_at + 5_000);
    let stored = gate.store.image();
    let ends: Vec<u64> = stored
        .tickets
        .iter()
        .filter_map(|ticket| match &ticket.stage {
            kvgate_core::ticket::Stage::Held(lease) => Some(lease.ends_at.millis()),
            _ => None,
        })
        .collect();
    assert_eq!(ends, vec![renewed_at + 60_000; 100]);
    assert_eq!(gate.store.commits(), commits + 1, "one commit for all");
}

/// LEA2: many renewals are written in shares, all within 5 s, so that no commit is long.
#[test]
fn lea2_many_renewals_are_written_in_shares() {
    let mut gate = Gate::new();
    let leases: Vec<_> = (0..2_000)
        .map(|n| gate.hold_as(living(&format!("t{n}"), 60)))
        .collect();
    gate.run(2_000);
    let commits = gate.store.commits();
    let renewed_at = gate.now;
    for lease in &leases {
        gate.renew(*lease).unwrap();
    }
    gate.drain_until(renewed_at + 5_000);
    let stored = gate.store.image();
    let late = stored.tickets.iter().filter(|ticket| match &ticket.stage {
        kvgate_core::ticket::Stage::Held(lease) => lease.ends_at.millis() < renewed_at + 60_000,
        _ => false,
    });
    assert_eq!(late.count(), 0);
    let shares = u64::try_from(leases.len().div_ceil(RENEWALS_SHARE_MIN)).unwrap();
    assert_eq!(gate.store.commits() - commits, shares);
}

/// LEA2, LEA4: a crash may lose a renewal; the lease still has its grace.
#[test]
fn lea2_a_crash_may_lose_a_renewal() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(living("t", 60));
    gate.run(50_000);
    gate.renew(lease).unwrap();
    gate.restart(1_000);
    assert_eq!(left(&mut gate, lease), 30_000);
    // An orderly stop loses none.
    gate.run(1_000);
    gate.renew(lease).unwrap();
    gate.stop();
    gate.restart(1_000);
    assert_eq!(left(&mut gate, lease), 59_000);
}

/// LEA2: a renewal that was not written yet goes with the end of its lease.
#[test]
fn lea2_a_renewed_lease_that_ends() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(living("t", 60));
    gate.renew(lease).unwrap();
    gate.release(lease).unwrap();
    gate.run(10_000);
    gate.restart(1_000);
    assert_eq!(gate.reserved(), 0);
}

/// LEA3, L03: renewal and reclaim go through the same writer; the budget never counts both.
#[test]
fn lea3_one_of_them_wins() {
    for late in 0..6 {
        let mut gate = Gate::new();
        let mut ask = acquire("t1", 800_000);
        ask.ttl = Span::from_secs(1);
        let lease = gate.hold_as(ask);
        gate.park("t2", 800_000);
        gate.jump(998);
        gate.turn(Vec::new());
        gate.jump(late);
        let renewed = gate.renew(lease).is_ok();
        let granted = gate.grants().len() == 1;
        assert_ne!(renewed, granted, "{late}");
        assert_eq!(gate.reserved(), 800_000);
        gate.jump(1);
        gate.turn(Vec::new());
        assert_eq!(gate.reserved(), 800_000);
    }
}

/// LEA4, L01: stored ends are kept; an end nearer than min(ttl, 30 s) is moved to that distance once.
#[test]
fn lea4_the_grace_is_given_once() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(living("t", 60));
    gate.run(39_000);
    gate.restart(1_000);
    assert_eq!(left(&mut gate, lease), 30_000, "20 s were left");
    gate.run(19_000);
    gate.restart(1_000);
    assert_eq!(left(&mut gate, lease), 10_000, "not again");
    gate.restart(10_000);
    assert_eq!(gate.read_lease(lease).unwrap_err(), LeaseGone::Expired);
    assert_eq!(gate.view().tally.ends(LeaseEnd::Expired), 1);
}

/// LEA4: far ends stay, a short life has its whole life at most, a renewal earns the grace again.
#[test]
fn lea4_ends_after_a_restart() {
    let mut gate = Gate::new();
    let far = gate.hold_as(living("far", 600));
    let at = gate.hold_as(living("at", 35));
    let short = gate.hold_as(living("short", 5));
    gate.run(4_000);
    gate.restart(1_000);
    assert_eq!(left(&mut gate, far), 595_000);
    assert_eq!(left(&mut gate, at), 30_000, "exactly 30 s were left: kept");
    assert_eq!(left(&mut gate, short), 5_000);
    gate.run(4_000);
    gate.renew(short).unwrap();
    gate.run(4_500);
    gate.restart(3_000);
    assert_eq!(
        left(&mut gate, short),
        5_000,
        "renewed, so the grace may come again"
    );
    // `at` had its whole 30 s before: the grace comes now, for the first time.
    assert_eq!(left(&mut gate, at), 30_000);
}

/// LEA4: a crash loop does not keep a dead lease alive.
#[test]
fn lea4_a_crash_loop() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(living("t", 60));
    let granted = gate.now;
    while gate.read_lease(lease).is_ok() {
        gate.restart(3_000);
        assert!(
            gate.now <= granted + 93_000,
            "60 s and at most one grace of 30 s"
        );
    }
    assert_eq!(gate.view().tally.ends(LeaseEnd::Expired), 1);
}

/// LEA4: a lease that had its grace and ended while the gate was down ends at the start.
#[test]
fn lea4_a_graced_lease_ends_at_the_start() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(living("t", 5));
    gate.restart(20_000);
    assert_eq!(left(&mut gate, lease), 5_000);
    gate.crash(5_000);
    assert_eq!(gate.reserved(), 0);
    assert_eq!(gate.read_lease(lease).unwrap_err(), LeaseGone::Expired);
}

/// CNT1: `wait` once per ticket at its first enqueue; then exactly one of admit, bypass, cancelled.
#[test]
fn cnt1_each_ticket_counts_once() {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    for name in ["admitted", "cancelled", "dropped", "aged"] {
        gate.park(name, 100);
        gate.ask(name, 100);
    }
    assert_eq!(gate.waits(), 4);
    gate.cancel("cancelled");
    gate.gone("dropped");
    gate.gone("dropped");
    gate.run(11_000);
    gate.release(full).unwrap();
    let granted = gate.grants();
    assert_eq!(granted.len(), 2);
    for (name, lease) in granted {
        gate.deliver(&name, Some(lease));
        gate.deliver(&name, Some(lease));
        gate.ask(&name, 100);
    }
    let tally = gate.view().tally;
    let train = tally.scope(Scope::Train);
    assert_eq!(
        (
            train.admit,
            train.cancelled.iter().sum::<u64>(),
            train.bypass.iter().sum::<u64>()
        ),
        (3, 2, 0)
    );
    assert_eq!(train.cancels(CancelledHow::Withdrawn), 1);
    assert_eq!(train.cancels(CancelledHow::Dropped), 1);
    assert_eq!(train.waits(WaitReason::CapacityExhausted), 1);
    assert_eq!(train.waits(WaitReason::BehindOlder), 3);
    assert_eq!((tally.granted_after_wait, tally.waited_millis), (2, 22_000));
    assert_eq!(tally.scope(Scope::Eval), &Default::default());
}

/// CNT1: scopes are counted apart; `disabled` and `out_of_scope` have their own numbers.
#[test]
fn cnt1_scopes_and_reasons() {
    let mut gate = Gate::new();
    let eval = |name: &str| {
        let mut ask = acquire(name, 10);
        ask.scope = Scope::Eval;
        ask
    };
    gate.hold_as(eval("e1"));
    gate.configure(|policy| policy.scope = AdmissionScope::Train);
    gate.ask_as(eval("e2"));
    gate.configure(|policy| policy.paused = true);
    gate.ask("t1", 10);
    let tally = gate.view().tally;
    assert_eq!(tally.scope(Scope::Eval).admit, 1);
    assert_eq!(
        tally.scope(Scope::Eval).bypasses(BypassReason::OutOfScope),
        1
    );
    assert_eq!(
        tally.scope(Scope::Train).bypasses(BypassReason::Disabled),
        1
    );
    assert_eq!(
        tally.scope(Scope::Train).bypasses(BypassReason::Protected),
        0
    );
}

/// CNT1: a grant that ends in any way before it was claimed counts as cancelled, and in no
/// `leases_ended`.
#[test]
fn cnt1_ends_before_the_claim() {
    type End = fn(&mut Gate, kvgate_core::ids::LeaseId);
    let ends: [(End, CancelledHow); 5] = [
        (
            |gate, _| assert_eq!(gate.cancel("t"), CancelOutcome::Released),
            CancelledHow::Withdrawn,
        ),
        (
            |gate, lease| gate.revoke(lease).unwrap(),
            CancelledHow::TakenBack,
        ),
        (
            |gate, lease| assert!(gate.release(lease).is_ok()),
            CancelledHow::TakenBack,
        ),
        (|gate, _| gate.run(5_000), CancelledHow::TakenBack),
        (|gate, _| gate.run(10_000), CancelledHow::TakenBack),
    ];
    for (number, (end, how)) in ends.into_iter().enumerate() {
        let mut gate = Gate::new();
        let lease = admitted(&gate.ask_as(living("t", if number == 3 { 5 } else { 600 })));
        gate.undeliver("t", Some(lease));
        end(&mut gate, lease);
        let tally = gate.view().tally;
        assert_eq!(gate.reserved(), 0, "{number}");
        assert_eq!(tally.scope(Scope::Train).cancels(how), 1, "{number}");
        assert_eq!(tally.scope(Scope::Train).admit, 0, "{number}");
        assert_eq!(tally.leases_ended, [0; 4], "{number}");
    }
}

/// CNT1, TIC4: whoever releases a lease whose answer is on its way has read that answer, so it was
/// written whole: an admit that was released.
#[test]
fn cnt1_a_release_overtakes_the_delivery() {
    let mut gate = Gate::new();
    let lease = admitted(&gate.ask("t", 10));
    gate.release(lease).unwrap();
    gate.deliver("t", Some(lease));
    assert_eq!((gate.admits(), gate.cancels()), (1, 0));
    assert_eq!(gate.view().tally.ends(LeaseEnd::Released), 1);
}

/// CNT1: how counted leases end.
#[test]
fn cnt1_ends_of_counted_leases() {
    let mut gate = Gate::new();
    let released = gate.hold("released", 10);
    gate.release(released).unwrap();
    let revoked = gate.hold("revoked", 10);
    gate.revoke(revoked).unwrap();
    gate.hold("cancelled", 10);
    gate.cancel("cancelled");
    gate.hold_as(living("expired", 1));
    gate.run(1_000);
    let tally = gate.view().tally;
    for end in LeaseEnd::ALL {
        assert_eq!(tally.ends(end), 1, "{end:?}");
    }
    assert_eq!((gate.admits(), gate.cancels()), (4, 0));
}

/// CNT1: an unclaimed grant is an admit from a start on, also in the counters that were stored.
#[test]
fn cnt1_unclaimed_grants_over_a_restart() {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    gate.park("t", 100);
    gate.gone("t");
    gate.run(4_000);
    gate.release(full).unwrap();
    assert_eq!(gate.admits(), 1);
    gate.restart(1_000);
    let tally = gate.view().tally;
    assert_eq!(tally.scope(Scope::Train).admit, 2);
    assert_eq!((tally.granted_after_wait, tally.waited_millis), (1, 4_000));
    gate.run(1_000);
    gate.cancel("t");
    assert_eq!(gate.cancels(), 0);
    assert_eq!(gate.view().tally.ends(LeaseEnd::Cancelled), 1);
}

/// CNT1: a grant that was stored on its way and then taken back is cancelled over the restart too.
#[test]
fn cnt1_a_grant_taken_back_before_the_restart() {
    let mut gate = Gate::new();
    let lease = admitted(&gate.ask("t", 100));
    gate.undeliver("t", Some(lease));
    gate.run(10_000);
    gate.restart(1_000);
    assert_eq!((gate.admits(), gate.cancels()), (0, 1));
}

/// CNT1: what callers decided by themselves is added up by reason.
#[test]
fn cnt1_local_bypasses() {
    let mut gate = Gate::new();
    gate.tell(Command::LocalBypasses(vec![
        (LocalBypass::Unreachable, 3),
        (LocalBypass::Timeout, u64::MAX),
        (LocalBypass::Timeout, 5),
    ]));
    gate.run(2_000);
    gate.restart(1_000);
    let tally = gate.view().tally;
    assert_eq!(tally.reported(LocalBypass::Unreachable), 3);
    assert_eq!(
        tally.reported(LocalBypass::Timeout),
        u64::MAX,
        "no sum wraps"
    );
    assert_eq!(tally.reported(LocalBypass::Breaker), 0);
}
