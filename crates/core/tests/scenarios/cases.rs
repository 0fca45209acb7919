//! Cases from the field that are about time and order only, each with its own numbers. Where the
//! others are held stands in `docs/cases.md`.

use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::{BypassReason, Scope};
use kvgate_core::effect::{CancelOutcome, LeaseGone, ReleaseOutcome, Reply};
use kvgate_core::ids::{Issue, LeaseId};
use kvgate_core::tally::{CancelledHow, LeaseEnd};
use kvgate_core::units::{Span, Timestamp};

use crate::common::*;

/// Ceiling 900,000: two engines of 500,000 tokens, headroom 0.90.
fn fleet(max_wait_s: u64) -> Gate {
    let mut policy = admission_on();
    policy.max_wait = Span::from_secs(max_wait_s);
    let mut gate = Gate::unread(policy);
    gate.engines.insert("a", Engine::of(500_000));
    gate.engines.insert("b", Engine::of(500_000));
    gate.round();
    assert_eq!(gate.ceiling(), 900_000);
    gate
}

fn living(name: &str, reservation: u64, ttl_s: u64) -> Acquire {
    let mut ask = acquire(name, reservation);
    ask.ttl = Span::from_secs(ttl_s);
    ask
}

/// Time passes until so many seconds after the beginning.
fn run_to(gate: &mut Gate, second: u64) {
    gate.run(T0 + second * 1_000 - gate.now);
}

fn expired(gate: &Gate) -> u64 {
    gate.view().tally.ends(LeaseEnd::Expired)
}

/// L01, LEA4: killed at 40, 60, 80, 120 and 160: the lease of a dead client gets the grace of the
/// first start and no other, and is reclaimed once.
#[test]
fn l01_a_restart_gives_no_lease_a_fresh_ttl() {
    let mut gate = fleet(30);
    run_to(&mut gate, 1);
    gate.hold_as(living("t1", 300_000, 60));
    for kill in [40, 60] {
        run_to(&mut gate, kill);
        gate.restart(1_000);
        assert_eq!(gate.reserved(), 300_000);
    }
    run_to(&mut gate, 75);
    assert_eq!((gate.reserved(), expired(&gate)), (0, 1));
    for kill in [80, 120, 160] {
        run_to(&mut gate, kill);
        gate.restart(1_000);
        assert_eq!((gate.reserved(), expired(&gate)), (0, 1));
    }
}

/// L01, LEA4: a crash loop of whatever period keeps no dead lease alive: its life and one grace.
#[test]
fn l01_a_crash_loop_ends_every_lease() {
    for period in [1, 3, 7, 13, 29, 31, 40, 59, 61, 100] {
        let mut gate = fleet(30);
        let granted = gate.now;
        gate.hold_as(living("t1", 300_000, 60));
        while gate.reserved() > 0 {
            gate.run((period - 1) * 1_000);
            gate.restart(1_000);
            assert!(
                gate.now <= granted + (60 + 30 + period) * 1_000,
                "every {period} s: {} ms",
                gate.now - granted
            );
        }
        assert_eq!(expired(&gate), 1, "every {period} s");
    }
}

/// L02 (b), TIM1, LEA4: the wall clock goes back an hour between two processes: nothing that is left
/// is longer than it was when it was granted, for a lease, a place and a maximum wait.
#[test]
fn l02_the_wall_clock_set_back_over_a_restart() {
    let mut gate = fleet(30);
    run_to(&mut gate, 1);
    let lease = gate.hold_as(living("t1", 900_000, 60));
    gate.park("w", 1_000);
    run_to(&mut gate, 10);
    let stored = gate.view().now;
    gate.now -= 3_600_000;
    gate.crash(0);
    // As the shell does: the line begins at the last stored time at the latest.
    gate.now = gate.view().now.millis();
    assert!(gate.view().now <= stored && gate.view().now >= Timestamp::from_millis(T0));
    gate.round();
    let held = gate.read_lease(lease).unwrap().lease;
    let left = held.ends_at.since(gate.view().now);
    assert!(
        left <= Span::from_secs(60) && left >= Span::from_secs(30),
        "{left:?}"
    );
    assert!(held.granted_at <= gate.view().now, "no age is negative");
    let place = place(&mut gate, "w");
    assert!(place.age <= Span::from_secs(10), "{:?}", place.age);
    assert!(
        place.bypass_in <= Span::from_secs(30),
        "{:?}",
        place.bypass_in
    );
    let back = gate.now;
    assert_eq!(gate.ask("w", 1_000), Told::Parked);
    gate.run(30_000);
    assert_eq!(gate.bypasses(BypassReason::Aged), 1);
    gate.run(30_000);
    assert_eq!(
        (gate.reserved(), expired(&gate)),
        (0, 1),
        "60 s after {back}"
    );
}

/// L03, LEA3: 1,000 renewals that arrive 0 to 5 ms after the end: renewed and the other waits, or
/// expired and the other is granted. Never both.
#[test]
fn l03_a_renewal_just_after_the_end() {
    let mut gate = fleet(30);
    let mut both = [0, 0];
    for round in 0..1_000_u64 {
        let lease = gate.hold_as(living(&format!("t1-{round}"), 800_000, 5));
        let ends_at = gate.now + 5_000;
        let waiter = format!("t2-{round}");
        gate.park(&waiter, 800_000);
        gate.run(4_990);
        // The writer may or may not have had a turn between the end and the renewal.
        if round % 2 == 0 {
            gate.now = ends_at;
            gate.turn(Vec::new());
            assert_eq!(gate.reserved(), 800_000);
        }
        gate.now = ends_at + round % 6;
        let renewal = gate.renew(lease);
        let granted = gate.grants();
        assert_eq!(gate.reserved(), 800_000, "round {round}");
        assert_ne!(renewal.is_ok(), granted.len() == 1, "round {round}");
        if let Err(gone) = renewal {
            assert_eq!(gone, LeaseGone::Expired);
        }
        both[granted.len()] += 1;
        // Whoever lost stays out.
        gate.run(1_000);
        assert_eq!(gate.reserved(), 800_000, "round {round}");
        assert_eq!(gate.read_lease(lease).is_ok(), granted.is_empty());
        gate.cancel(&waiter);
        gate.cancel(&format!("t1-{round}"));
        assert_eq!((gate.reserved(), gate.waiting()), (0, 0));
        gate.decided.clear();
    }
    assert_eq!(both, [500, 500], "both ways were seen");
}

/// Q01, TIC3, TIC4: a client that hangs up while it waits keeps its place, then its grant, for 10 s;
/// then both are gone, and nobody behind it was held up.
#[test]
fn q01_a_client_goes_away_while_waiting() {
    let mut gate = fleet(30);
    for round in 0..1_000 {
        let t0 = gate.now;
        let to = |gate: &mut Gate, second: u64| gate.run(t0 + second * 1_000 - gate.now);
        let name = |t: &str| format!("{t}-{round}");
        to(&mut gate, 1);
        let t1 = gate.hold_as(living(&name("t1"), 800_000, 120));
        to(&mut gate, 2);
        gate.park(&name("t2"), 200_000);
        to(&mut gate, 3);
        gate.park(&name("t3"), 150_000);
        to(&mut gate, 4);
        gate.gone(&name("t2"));
        to(&mut gate, 6);
        gate.release(t1).unwrap();
        let grants = gate.grants();
        let t3 = grants.iter().find(|(ticket, _)| *ticket == name("t3"));
        let (_, t3) = t3.expect("t3 is granted at once");
        gate.deliver(&name("t3"), Some(*t3));
        to(&mut gate, 7);
        assert_eq!(gate.reserved(), 350_000, "t2's is kept for its caller");
        to(&mut gate, 8);
        gate.release(*t3).unwrap();
        to(&mut gate, 13);
        assert_eq!(gate.reserved(), 200_000, "up to the tenth second");
        to(&mut gate, 14);
        let view = gate.view();
        assert_eq!((gate.reserved(), view.leases, view.waiting), (0, 0, 0));
        let gone = view
            .tally
            .scope(Scope::Train)
            .cancels(CancelledHow::TakenBack);
        assert_eq!((gate.cancels(), gone), (round + 1, round + 1));
    }
    assert_eq!(gate.admits(), 2_000, "t1 and t3 of each round");
}

/// Q03, TIC1: acquired three times, once with the answer lost, once beside another call, once after
/// a restart: one charge, one lease id, one admit; one release.
#[test]
fn q03_a_retried_acquire_charges_once() {
    let mut gate = fleet(30);
    let ask = || living("t1", 300_000, 120);
    let lease = admitted(&gate.ask_as(ask()));
    gate.undeliver("t1", Some(lease));
    let told = gate.tell_all(vec![Command::Acquire(ask()), Command::Acquire(ask())]);
    for (_, told) in &told {
        assert_eq!(admitted(told), lease);
        gate.deliver("t1", Some(lease));
    }
    assert_eq!((gate.reserved(), gate.view().leases), (300_000, 1));
    gate.run(1_000);
    gate.restart(1_000);
    assert_eq!(admitted(&gate.ask_as(ask())), lease);
    assert_eq!((gate.reserved(), gate.view().leases), (300_000, 1));
    assert_eq!(gate.admits(), 1);
    gate.release(lease).unwrap();
    assert_eq!(gate.reserved(), 0);
}

/// Q04, TIC6: three releases at once, one after the end, one of an id that nobody knows.
#[test]
fn q04_released_twice_or_after_the_end() {
    let mut gate = fleet(30);
    run_to(&mut gate, 1);
    let t1 = gate.hold_as(living("t1", 300_000, 5));
    let t2 = gate.hold_as(living("t2", 200_000, 5));
    run_to(&mut gate, 2);
    let told = gate.tell_all(vec![Command::Release(t1); 3]);
    let outcomes: Vec<_> = told.into_iter().map(|(_, told)| told).collect();
    let reply = |outcome| Told::Reply(Reply::Release(Ok(outcome)));
    assert_eq!(
        outcomes,
        [
            reply(ReleaseOutcome::Released),
            reply(ReleaseOutcome::AlreadyReleased),
            reply(ReleaseOutcome::AlreadyReleased),
        ]
    );
    run_to(&mut gate, 3);
    assert_eq!(gate.reserved(), 200_000);
    run_to(&mut gate, 9);
    assert_eq!((gate.reserved(), expired(&gate)), (0, 1));
    assert_eq!(gate.release(t2), Err(LeaseGone::Expired));
    let nope = LeaseId {
        issue: Issue(9_999),
        salt: 1,
    };
    assert_eq!(gate.release(nope), Err(LeaseGone::NotFound));
    assert_eq!(gate.cancel("nope"), CancelOutcome::Unknown);
    assert_eq!((gate.reserved(), gate.view().leases), (0, 0));
    assert_eq!(gate.view().tally.ends(LeaseEnd::Released), 1);
}

/// Q05, DEC1: larger than the whole ceiling with nothing held: let pass at once, and the one behind
/// it is admitted at once.
#[test]
fn q05_a_request_larger_than_the_whole_ceiling() {
    let mut gate = fleet(30);
    assert_eq!(bypassed(&gate.ask("t1", 950_000)), BypassReason::Oversize);
    admitted(&gate.ask("t2", 1_000));
    assert_eq!(
        (gate.waiting(), gate.waits(), gate.reserved()),
        (0, 0, 1_000)
    );
}

/// Q07, TIC2: a wait of 75 s in calls of 25 s: one place, one `wait`, granted with its whole time; a
/// caller that does not come back within the grace is dropped.
#[test]
fn q07_a_proxy_cuts_the_wait() {
    let mut gate = fleet(120);
    run_to(&mut gate, 1);
    let t1 = gate.hold_as(living("t1", 800_000, 120));
    run_to(&mut gate, 2);
    gate.park("t2", 200_000);
    gate.park("lost", 200_000);
    for end in [27, 52, 77] {
        run_to(&mut gate, end);
        let told = gate.leave("t2").unwrap();
        assert_eq!(status(&told).position, 1);
        if end == 27 {
            gate.leave("lost").unwrap();
        }
        assert_eq!(gate.ask("t2", 200_000), Told::Parked);
        assert_eq!(gate.waits(), 2, "one for each ticket");
    }
    assert_eq!(gate.waiting(), 1, "the lost one was dropped");
    gate.release(t1).unwrap();
    let grants = gate.grants();
    assert_eq!(grants.len(), 1);
    gate.deliver("t2", Some(grants[0].1));
    let tally = gate.view().tally;
    assert_eq!((tally.granted_after_wait, tally.waited_millis), (1, 75_000));
    assert_eq!((gate.waits(), gate.admits(), gate.cancels()), (2, 2, 1));
}

/// Q08, LEA1: a lease that is renewed is never reclaimed; one that is not goes after its life, and
/// its late release is harmless.
#[test]
fn q08_the_reaper_leaves_live_requests() {
    let mut gate = fleet(300);
    run_to(&mut gate, 1);
    let t1 = gate.hold_as(living("t1", 800_000, 20));
    run_to(&mut gate, 2);
    gate.park("t2", 300_000);
    for renewal in (7..91).step_by(6) {
        run_to(&mut gate, renewal);
        gate.renew(t1).unwrap();
        assert_eq!((gate.reserved(), gate.waiting()), (800_000, 1));
    }
    assert_eq!(expired(&gate), 0);
    run_to(&mut gate, 91);
    gate.release(t1).unwrap();
    assert_eq!(gate.grants().len(), 1);

    let mut gate = fleet(300);
    run_to(&mut gate, 1);
    let t9 = gate.hold_as(living("t9", 800_000, 20));
    gate.park("t2", 300_000);
    run_to(&mut gate, 20);
    assert_eq!(gate.grants(), []);
    run_to(&mut gate, 21);
    assert_eq!(gate.grants().len(), 1, "t9 was reclaimed after 20 s");
    assert_eq!((gate.reserved(), expired(&gate)), (300_000, 1));
    run_to(&mut gate, 91);
    assert_eq!(gate.release(t9), Err(LeaseGone::Expired));
    assert_eq!((gate.reserved(), expired(&gate)), (300_000, 1));
}
