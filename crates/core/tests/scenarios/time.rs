//! Clocks, deadlines and pauses.

use kvgate_core::command::Command;
use kvgate_core::decision::{BypassReason, DegradedReason};
use kvgate_core::effect::{LeaseGone, Outcome, ReleaseOutcome};
use kvgate_core::tally::LeaseEnd;
use kvgate_core::units::{Span, Timestamp};

use crate::common::*;

fn lease_of_secs(name: &str, secs: u64) -> kvgate_core::command::Acquire {
    let mut ask = acquire(name, 100);
    ask.ttl = Span::from_secs(secs);
    ask
}

/// TIM1: the line never goes back: neither within a process nor at a start behind the stored time.
#[test]
fn tim1_the_line_never_goes_back() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("t", 60));
    gate.run(10_000);
    let latest = gate.view().now;
    gate.now -= 8_000;
    gate.turn(Vec::new());
    assert_eq!(gate.view().now, latest, "a turn in the past is a turn now");
    gate.now = T0 - 3_600_000;
    gate.crash(0);
    assert_eq!(gate.view().now, gate.store.image().now);
    assert!(
        gate.view().now >= Timestamp::from_millis(T0),
        "never below the last stored time"
    );
    gate.now = gate.view().now.millis();
    gate.round();
    let ends_at = gate.read_lease(lease).unwrap().lease.ends_at;
    assert!(
        ends_at.since(gate.view().now) <= Span::from_secs(60),
        "at most the whole life is left"
    );
}

/// TIM1, LEA4: a wall clock that was a day ahead before the restart leaves no long remainder.
#[test]
fn tim1_a_step_of_the_wall_clock_over_a_restart_is_clamped() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("t", 60));
    gate.restart(86_400_000);
    let view = gate.read_lease(lease).unwrap();
    assert_eq!(
        view.lease.ends_at.since(gate.view().now),
        Span::from_secs(30),
        "the grace, not death"
    );
}

/// TIM2, LEA1: a deadline is reached when now >= deadline, and never before.
#[test]
fn tim2_a_deadline_is_reached_when_now_is_the_deadline() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("t", 1));
    gate.jump(999);
    gate.turn(Vec::new());
    assert_eq!(gate.reserved(), 100);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.reserved(), 0);
    assert_eq!(gate.release(lease), Err(LeaseGone::Expired));
}

/// TIM2, DEC2: the maximum wait ends at its deadline, not a millisecond earlier.
#[test]
fn tim2_the_maximum_wait_ends_at_its_deadline() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    gate.park("t", 100);
    let deadline = gate.now + 30_000;
    gate.run(29_999);
    assert_eq!(gate.waiting(), 1);
    assert_eq!(place(&mut gate, "t").bypass_in, Span::from_millis(1));
    gate.jump(1);
    assert_eq!(gate.now, deadline);
    gate.turn(Vec::new());
    assert_eq!(
        gate.decisions(),
        [("t".to_owned(), Outcome::Bypass(BypassReason::Aged))]
    );
}

/// TIM2, DUR2: waiting time and lease time go on while the gate is down.
#[test]
fn tim2_time_goes_on_while_the_gate_is_down() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("full", 600));
    let full = gate.hold("fuller", 899_900);
    gate.park("t", 200);
    gate.run(10_000);
    gate.restart(15_000);
    let stands = place(&mut gate, "t");
    assert_eq!(stands.age, Span::from_secs(25));
    assert_eq!(stands.bypass_in, Span::from_secs(5));
    let left = gate
        .read_lease(lease)
        .unwrap()
        .lease
        .ends_at
        .since(gate.view().now);
    assert_eq!(left, Span::from_secs(575));
    gate.restart(5_000);
    assert_eq!(
        gate.decisions(),
        [("t".to_owned(), Outcome::Bypass(BypassReason::Aged))]
    );
    assert!(gate.read_lease(full).is_ok());
}

/// TIM3: after a pause nothing ages, expires or goes stale until the inputs that queued up were
/// applied and one new reading round has ended.
#[test]
fn tim3_a_pause_holds_deadlines_until_a_round_has_ended() {
    let mut gate = Gate::new();
    let renewed = gate.hold_as(lease_of_secs("renewed", 5));
    let silent = gate.hold_as(lease_of_secs("silent", 5));
    gate.hold("full", 899_800);
    gate.park("waits", 300);
    gate.run(1_000);
    gate.jump(60_000);
    // What was sent before the pause ended is applied first.
    gate.tell(Command::Renew {
        lease: renewed,
        ttl: None,
    });
    assert!(gate.read_lease(silent).is_ok(), "not expired yet");
    assert_eq!(gate.waiting(), 1, "not aged yet");
    assert_eq!(gate.view().measure.degraded, None, "not stale yet");
    gate.unread_for(3_000);
    assert!(gate.read_lease(silent).is_ok());
    assert_eq!(gate.waiting(), 1);
    gate.round();
    assert_eq!(gate.read_lease(silent).unwrap_err(), LeaseGone::Expired);
    assert!(gate.read_lease(renewed).is_ok(), "the renewal came in time");
    assert_eq!(
        gate.decisions(),
        [("waits".to_owned(), Outcome::Bypass(BypassReason::Aged))]
    );
}

/// TIM3: a round that began before the pause does not end the hold.
#[test]
fn tim3_a_round_from_before_the_pause_does_not_count() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("t", 5));
    let began_at = gate.now;
    gate.jump(8_000);
    let old = gate.round_of(began_at);
    gate.tell(Command::Round(old));
    assert!(gate.read_lease(lease).is_ok());
    gate.jump(500);
    gate.round();
    assert_eq!(gate.read_lease(lease).unwrap_err(), LeaseGone::Expired);
}

/// TIM3: the hold lasts at most as long as the gap, and at most 10 s.
#[test]
fn tim3_the_hold_is_bounded() {
    for (gap, hold) in [
        (1_500, 1_500),
        (9_000, 9_000),
        (10_000, 10_000),
        (300_000, 10_000),
    ] {
        let mut gate = Gate::new();
        let lease = gate.hold_as(lease_of_secs("t", 1));
        gate.jump(gap);
        gate.turn(Vec::new());
        gate.unread_for(hold - 1);
        assert!(gate.read_lease(lease).is_ok(), "held for {gap}");
        gate.jump(1);
        gate.turn(Vec::new());
        assert!(gate.read_lease(lease).is_err(), "not longer than {hold}");
    }
}

/// TIM3: a gap of exactly one second is no pause.
#[test]
fn tim3_a_gap_of_a_second_is_no_pause() {
    for (gap, reserved) in [(1_000, 0), (1_001, 100)] {
        let mut gate = Gate::new();
        gate.hold_as(lease_of_secs("t", 1));
        gate.jump(gap);
        gate.turn(Vec::new());
        assert_eq!(gate.reserved(), reserved, "{gap}");
    }
}

/// TIM3: a hold is granted at most once a minute.
#[test]
fn tim3_a_hold_is_granted_once_a_minute() {
    for (later, held) in [(59_999, false), (60_000, true)] {
        let mut gate = Gate::new();
        gate.jump(2_000);
        gate.round();
        let first = gate.now;
        gate.run(later - 5_000);
        let lease = gate.hold_as(lease_of_secs("t", 2));
        gate.jump(first + later - gate.now);
        gate.turn(Vec::new());
        assert_eq!(gate.read_lease(lease).is_ok(), held, "{later}");
    }
}

/// TIM3: what is decided in a hold is decided by the readings from before the pause; the queue moves.
#[test]
fn tim3_the_queue_moves_in_a_hold() {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    gate.park("t", 100);
    gate.jump(20_000);
    gate.release(full).unwrap();
    assert_eq!(gate.grants().len(), 1);
    admitted(&gate.ask("new", 100));
}

/// TIM3, DUR3: the time between the take-over and the first turn is no pause.
#[test]
fn tim3_the_first_turn_is_no_pause() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("t", 3));
    gate.run(1_000);
    gate.crash(1_000);
    gate.jump(5_000);
    gate.turn(Vec::new());
    assert_eq!(
        gate.read_lease(lease).unwrap_err(),
        LeaseGone::Expired,
        "no hold of a pause"
    );
    gate.round();
    let lease = gate.hold_as(lease_of_secs("u", 2));
    gate.jump(5_000);
    gate.turn(Vec::new());
    assert!(
        gate.read_lease(lease).is_ok(),
        "the hold was not used up by the start"
    );
}

/// TIM3, DUR3: until the first reading round, at most 2 s, the queue stands still after a start.
#[test]
fn tim3_a_start_waits_for_the_first_round() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    gate.park("t", 100);
    gate.crash(1_000);
    assert!(gate.machine().is_starting());
    gate.unread_for(1_999);
    assert_eq!(gate.waiting(), 1, "no bypass for want of readings");
    assert!(gate.machine().is_starting());
    gate.jump(1);
    gate.turn(Vec::new());
    assert!(!gate.machine().is_starting());
    assert_eq!(
        gate.decisions(),
        [("t".to_owned(), Outcome::Bypass(BypassReason::Degraded))]
    );
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::NoFreshReading)
    );
}

/// TIM3, LEA1: an expiry that a hold delayed is counted once.
#[test]
fn tim3_a_delayed_expiry_is_counted_once() {
    let mut gate = Gate::new();
    gate.hold_as(lease_of_secs("t", 5));
    gate.jump(20_000);
    gate.turn(Vec::new());
    gate.round();
    gate.run(20_000);
    assert_eq!(gate.view().tally.ends(LeaseEnd::Expired), 1);
}

/// TIM3: until a new round has ended, a round from before the pause makes nothing stale either: its
/// readings failed because the gate stood still.
#[test]
fn tim3_an_old_round_makes_nothing_stale() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    gate.park("t", 100);
    let began_at = gate.now;
    gate.jump(8_000);
    gate.engine("a").answers = false;
    gate.router = Router::Silent;
    let old = gate.round_of(began_at);
    gate.tell(Command::Round(old));
    assert_eq!(gate.view().measure.degraded, None);
    assert_eq!((gate.waiting(), gate.decisions()), (1, vec![]));
    assert_eq!(gate.ask("u", 100), Told::Parked);
    gate.round();
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::RouterUnreachable)
    );
}

/// TIM3: a pause that begins while the hold of an earlier one lasts is a pause of its own, once a
/// minute has passed.
#[test]
fn tim3_a_pause_within_a_hold() {
    let mut gate = Gate::new();
    let lease = gate.hold_as(lease_of_secs("t", 5));
    gate.jump(20_000);
    gate.turn(Vec::new());
    gate.jump(500);
    gate.turn(Vec::new());
    gate.jump(80_000);
    gate.turn(Vec::new());
    assert!(gate.read_lease(lease).is_ok(), "no round has ended since");
    gate.unread_for(9_999);
    assert!(gate.read_lease(lease).is_ok());
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.read_lease(lease).unwrap_err(), LeaseGone::Expired);
}

/// TIM3: a hold whose time is over does not reach into the next turn.
#[test]
fn tim3_a_hold_that_is_over_decides_nothing() {
    let mut gate = Gate::new();
    gate.jump(8_000);
    gate.turn(Vec::new());
    admitted(&gate.ask("held", 10));
    gate.unread_for(7_999);
    gate.jump(1);
    assert_eq!(
        bypassed(&gate.ask("over", 10)),
        kvgate_core::decision::BypassReason::Degraded
    );
}

/// TIM3: a pause within the first two seconds after a start is a pause like any other.
#[test]
fn tim3_a_pause_while_starting() {
    // The first turn may come in the very millisecond of the take-over.
    for first in [0, 500] {
        let mut gate = Gate::new();
        let lease = gate.hold_as(lease_of_secs("t", 3));
        gate.crash(1_000);
        gate.jump(first);
        gate.turn(Vec::new());
        gate.jump(30_000);
        gate.turn(Vec::new());
        assert!(gate.read_lease(lease).is_ok());
        gate.round();
        assert!(gate.read_lease(lease).is_err());
    }
}

/// TIM3: nothing is forgotten by age either before the inputs that queued up were applied.
#[test]
fn tim3_a_pause_does_not_age_finished_tickets() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 10);
    gate.release(lease).unwrap();
    gate.jump(1_200_000);
    gate.turn(Vec::new());
    assert_eq!(gate.release(lease), Ok(ReleaseOutcome::AlreadyReleased));
    gate.round();
    assert_eq!(gate.release(lease), Err(LeaseGone::Expired));
}
