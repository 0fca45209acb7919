//! The decision from top to bottom, the queue pass, and the order inside a turn.

use kvgate_core::command::Command;
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::effect::{Effect, Outcome, Reply};
use kvgate_core::policy::{AdmissionScope, DECISIONS_PER_TURN, Policy};
use kvgate_core::tally::LeaseEnd;
use kvgate_core::units::Span;
use kvgate_core::view::Notice;

use crate::common::*;

fn eval(name: &str, reservation: u64) -> kvgate_core::command::Acquire {
    let mut ask = acquire(name, reservation);
    ask.scope = Scope::Eval;
    ask
}

fn protected(name: &str, reservation: u64) -> kvgate_core::command::Acquire {
    let mut ask = acquire(name, reservation);
    ask.protected = true;
    ask
}

/// A gate for which every line of DEC1 but the named one and those below applies.
struct Lines {
    disabled: bool,
    out_of_scope: bool,
    protected: bool,
    degraded: bool,
    oversize: bool,
    queue_full: bool,
}

impl Lines {
    fn decide(&self) -> BypassReason {
        let mut gate = Gate::with(Policy {
            max_waiting: if self.queue_full { 1 } else { 100 },
            ..admission_on()
        });
        gate.hold("full", 900_000);
        gate.park("older", 100);
        gate.configure(|policy| {
            policy.paused = self.disabled;
            if self.out_of_scope {
                policy.scope = AdmissionScope::Train;
            }
            policy.max_wait = Span::ZERO;
        });
        // The older waiter left with the change of settings; a full queue needs one.
        if self.queue_full && !self.disabled {
            gate.configure(|policy| policy.max_wait = Span::from_secs(30));
            if gate.waiting() == 0 {
                gate.park("older too", 100);
            }
        }
        if self.degraded {
            // Nobody is left in line then, so the bound of the queue cannot show.
            gate.engine("a").answers = false;
            gate.run(6_000);
        }
        let reservation = if self.oversize { 2_000_000 } else { 100 };
        let mut ask = acquire("t", reservation);
        if self.out_of_scope {
            ask.scope = Scope::Eval;
        }
        ask.protected = self.protected;
        bypassed(&gate.ask_as(ask))
    }
}

/// DEC1: the first line that applies decides, top to bottom.
#[test]
fn dec1_the_first_line_that_applies() {
    let mut lines = Lines {
        disabled: true,
        out_of_scope: true,
        protected: true,
        degraded: true,
        oversize: true,
        queue_full: true,
    };
    assert_eq!(lines.decide(), BypassReason::Disabled);
    lines.disabled = false;
    assert_eq!(lines.decide(), BypassReason::OutOfScope);
    lines.out_of_scope = false;
    assert_eq!(lines.decide(), BypassReason::Protected);
    lines.protected = false;
    assert_eq!(lines.decide(), BypassReason::Degraded);
    lines.degraded = false;
    assert_eq!(lines.decide(), BypassReason::Oversize);
    lines.oversize = false;
    assert_eq!(lines.decide(), BypassReason::QueueFull);
    lines.queue_full = false;
    assert_eq!(
        lines.decide(),
        BypassReason::Aged,
        "max_wait 0: nothing queues"
    );
}

/// DEC1: admission off, paused, and scopes.
#[test]
fn dec1_off_paused_and_out_of_scope() {
    let mut gate = Gate::new();
    gate.configure(|policy| policy.program_admission = false);
    assert_eq!(bypassed(&gate.ask("off", 10)), BypassReason::Disabled);
    gate.configure(|policy| {
        policy.program_admission = true;
        policy.paused = true;
    });
    assert_eq!(bypassed(&gate.ask("paused", 10)), BypassReason::Disabled);
    gate.configure(|policy| {
        policy.paused = false;
        policy.scope = AdmissionScope::Train;
    });
    assert_eq!(
        bypassed(&gate.ask_as(eval("eval", 10))),
        BypassReason::OutOfScope
    );
    gate.hold("train", 10);
    gate.configure(|policy| policy.scope = AdmissionScope::All);
    gate.hold_as(eval("eval too", 10));
    assert_eq!(
        bypassed(&gate.ask_as(protected("protected", 10))),
        BypassReason::Protected
    );
}

/// DEC1, Q05: larger than the full ceiling bypasses at once and stops nobody; at it, it waits or is admitted.
#[test]
fn dec1_oversize() {
    let mut gate = Gate::new();
    assert_eq!(bypassed(&gate.ask("t1", 900_001)), BypassReason::Oversize);
    gate.hold("t2", 900_000);
    assert_eq!(bypassed(&gate.ask("t3", 950_000)), BypassReason::Oversize);
    gate.park("t4", 900_000);
}

/// DEC1, section 9: the queue has a bound.
#[test]
fn dec1_queue_full() {
    let mut gate = Gate::with(Policy {
        max_waiting: 2,
        ..admission_on()
    });
    let full = gate.hold("full", 900_000);
    gate.park("t1", 10);
    gate.park("t2", 10);
    assert_eq!(bypassed(&gate.ask("t3", 10)), BypassReason::QueueFull);
    assert_eq!(
        gate.ask("t1", 10),
        Told::Parked,
        "who stands in line already keeps its place"
    );
    gate.release(full).unwrap();
    assert_eq!(gate.waiting(), 0);
    gate.hold("t4", 10);
}

/// DEC1: the reasons of a wait, in their order, and their numbers.
#[test]
fn dec1_the_reasons_of_a_wait() {
    let mut gate = Gate::new();
    gate.hold("held", 500_000);
    gate.park("capacity", 400_001);
    let head = place(&mut gate, "capacity");
    assert_eq!(head.reason, WaitReason::CapacityExhausted);
    assert_eq!(
        (head.position, head.tokens_ahead.get(), head.short.get()),
        (1, 0, 1)
    );
    gate.park("behind", 7);
    let behind = place(&mut gate, "behind");
    assert_eq!(
        behind.reason,
        WaitReason::BehindOlder,
        "though it would fit"
    );
    assert_eq!(
        (
            behind.position,
            behind.tokens_ahead.get(),
            behind.short.get()
        ),
        (2, 400_001, 8)
    );
    gate.engine("a").usage = Some(990_000);
    gate.round();
    assert_eq!(
        reason_of(&mut gate, "capacity"),
        WaitReason::PressureGuard,
        "pressure comes first"
    );
    assert_eq!(reason_of(&mut gate, "behind"), WaitReason::BehindOlder);
    let tally = gate.view().tally;
    let counted = tally.scope(Scope::Train);
    assert_eq!(
        counted.waits(WaitReason::CapacityExhausted),
        1,
        "as at the first enqueue"
    );
    assert_eq!(counted.waits(WaitReason::BehindOlder), 1);
    assert_eq!(counted.waits(WaitReason::PressureGuard), 0);
    gate.cancel("capacity");
    gate.cancel("behind");
    gate.park("pressed", 1);
    assert_eq!(
        gate.view()
            .tally
            .scope(Scope::Train)
            .waits(WaitReason::PressureGuard),
        1
    );
}

/// DEC1: what fits to the last token is admitted.
#[test]
fn dec1_admit_to_the_last_token() {
    let mut gate = Gate::new();
    gate.hold("t1", 899_999);
    gate.hold("t2", 1);
    gate.park("t3", 1);
    assert_eq!(gate.reserved(), 900_000);
}

/// DEC1: with a `max_wait` of 0 nothing queues: bypass `aged`, no wait counted, no record.
#[test]
fn dec1_a_max_wait_of_zero() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    gate.park("in line", 10);
    gate.run(2_000);
    gate.configure(|policy| policy.max_wait = Span::ZERO);
    assert_eq!(
        gate.decisions(),
        [("in line".to_owned(), Outcome::Bypass(BypassReason::Aged))]
    );
    let tickets = gate.store.image().tickets;
    let waits = gate.waits();
    let (seq, told) = gate.tell(Command::Acquire(acquire("t", 10)));
    assert_eq!(bypassed(&told), BypassReason::Aged);
    assert_eq!(seq, None);
    assert_eq!(gate.store.image().tickets, tickets, "no record");
    assert_eq!(gate.waits(), waits);
    gate.hold("fits", 0);
}

/// DEC2: the pass runs after a release, a cancel, an expiry, a reading, a change of settings and a deadline.
#[test]
fn dec2_what_moves_the_queue() {
    let stuck = || {
        let mut gate = Gate::new();
        let mut ask = acquire("full", 900_000);
        ask.ttl = Span::from_secs(20);
        let lease = gate.hold_as(ask);
        gate.park("t", 10);
        (gate, lease)
    };
    let (mut gate, lease) = stuck();
    gate.release(lease).unwrap();
    assert_eq!(gate.grants().len(), 1, "release");
    let (mut gate, _) = stuck();
    gate.cancel("full");
    assert_eq!(gate.grants().len(), 1, "cancel");
    let (mut gate, lease) = stuck();
    gate.revoke(lease).unwrap();
    assert_eq!(gate.grants().len(), 1, "revocation");
    let (mut gate, _) = stuck();
    gate.run(20_000);
    assert_eq!(gate.grants().len(), 1, "expiry");
    let (mut gate, _) = stuck();
    gate.engine("a").capacity = 2_000_000;
    gate.round();
    assert_eq!(gate.grants().len(), 1, "reading");
    let (mut gate, _) = stuck();
    gate.configure(|policy| policy.headroom = kvgate_core::units::Ppm::ONE);
    assert_eq!(gate.grants().len(), 1, "settings");
    let (mut gate, _) = stuck();
    gate.park("behind", 5);
    gate.cancel("t");
    gate.engine("a").capacity = 1_000_006;
    gate.round();
    assert_eq!(
        gate.grants().len(),
        1,
        "a cancel of the head lets the next one be looked at"
    );
}

/// DEC2: only the head is looked at, and nothing overtakes it.
#[test]
fn dec2_strict_order() {
    let mut gate = Gate::new();
    let held = gate.hold("held", 600_000);
    gate.park("large", 400_000);
    for name in ["s1", "s2", "s3"] {
        gate.park(name, 10);
    }
    gate.run(5_000);
    assert_eq!(
        gate.grants(),
        [],
        "small ones would fit, but do not overtake"
    );
    gate.release(held).unwrap();
    let granted: Vec<String> = gate.grants().into_iter().map(|(name, _)| name).collect();
    assert_eq!(granted, ["large", "s1", "s2", "s3"]);
}

/// DEC2: the lines of the pass in their order: disabled, out of scope, aged, degraded, oversize.
#[test]
fn dec2_the_lines_of_the_pass() {
    let reason = |change: fn(&mut Gate)| {
        let mut gate = Gate::new();
        gate.engines.insert("b", Engine::of(1_000_000));
        gate.round();
        gate.hold("full", 1_800_000);
        assert_eq!(gate.ask_as(eval("t", 1_000_000)), Told::Parked);
        change(&mut gate);
        match gate.decisions().as_slice() {
            [(_, Outcome::Bypass(reason))] => *reason,
            other => panic!("{other:?}"),
        }
    };
    fn lose(gate: &mut Gate) {
        gate.engine("a").answers = false;
        gate.engine("b").answers = false;
    }
    /// Ends the maximum wait, the readings and the room together in one turn.
    fn all_at_once(gate: &mut Gate, change: impl FnOnce(&mut kvgate_core::policy::Policy)) {
        lose(gate);
        gate.unread_for(5_000);
        gate.jump(1_000);
        gate.configure(|policy| {
            policy.max_wait = Span::from_secs(6);
            change(policy);
        });
    }
    assert_eq!(
        reason(|gate| all_at_once(gate, |policy| {
            policy.paused = true;
            policy.scope = AdmissionScope::Train;
        })),
        BypassReason::Disabled
    );
    assert_eq!(
        reason(|gate| all_at_once(gate, |policy| policy.scope = AdmissionScope::Train)),
        BypassReason::OutOfScope
    );
    assert_eq!(reason(|gate| all_at_once(gate, |_| {})), BypassReason::Aged);
    assert_eq!(
        reason(|gate| all_at_once(gate, |policy| policy.max_wait = Span::from_secs(60))),
        BypassReason::Degraded
    );
    assert_eq!(
        reason(|gate| {
            gate.engine("b").listed = false;
            gate.round();
        }),
        BypassReason::Oversize
    );
}

/// DEC2: a waiter of a scope that is no longer selected leaves when it is the head.
#[test]
fn dec2_the_head_only() {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    gate.park("train", 10);
    assert_eq!(gate.ask_as(eval("eval", 10)), Told::Parked);
    gate.configure(|policy| policy.scope = AdmissionScope::Train);
    assert_eq!(gate.decisions(), []);
    gate.release(full).unwrap();
    let decisions = gate.decisions();
    assert_eq!(decisions.len(), 2);
    assert_eq!(
        decisions[1],
        ("eval".to_owned(), Outcome::Bypass(BypassReason::OutOfScope))
    );
}

/// DEC2, TIC3: a waiter leaves at its deadline wherever it stands, so that no wait is endless.
#[test]
fn dec2_every_waiter_leaves_by_its_deadline() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    for number in 0..50 {
        gate.park(&format!("t{number}"), 10);
        gate.jump(300);
        gate.round();
    }
    gate.drain_until(gate.now + 30_000);
    assert_eq!(gate.waiting(), 0);
    assert_eq!(
        gate.bypasses(BypassReason::Aged) + gate.bypasses(BypassReason::Degraded),
        50
    );
}

/// DEC3, L03: inputs, then expiries, then the queue: a renewal in the turn of the end wins.
#[test]
fn dec3_inputs_before_expiries_before_the_queue() {
    let mut gate = Gate::new();
    let mut ask = acquire("t1", 800_000);
    ask.ttl = Span::from_secs(1);
    let lease = gate.hold_as(ask);
    gate.park("t2", 800_000);
    gate.jump(1_000);
    gate.renew(lease).unwrap();
    assert_eq!((gate.grants().len(), gate.reserved()), (0, 800_000));
    gate.jump(1_000);
    gate.turn(Vec::new());
    assert_eq!(
        (gate.grants().len(), gate.reserved()),
        (1, 800_000),
        "expired and granted in one turn"
    );
    assert_eq!(gate.view().tally.ends(LeaseEnd::Expired), 1);
    assert!(gate.renew(lease).is_err());
}

/// DEC3: a turn makes at most 1,024 decisions; the rest come in the next, which is due at once.
#[test]
fn dec3_decisions_in_a_turn_are_bounded() {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    let many = DECISIONS_PER_TURN + 10;
    let asks = (0..many)
        .map(|number| Command::Acquire(acquire(&format!("t{number}"), 1)))
        .collect();
    gate.turn(asks);
    assert_eq!(gate.waiting(), many as u64);
    gate.release(full).unwrap();
    assert_eq!(gate.grants().len(), DECISIONS_PER_TURN);
    assert_eq!(gate.machine().next_deadline(), Some(gate.view().now));
    gate.turn(Vec::new());
    assert_eq!(gate.grants().len(), 10);
    // Expiries have the same bound, and so have bypasses.
    gate.run(599_000);
    gate.jump(1_000);
    gate.turn(Vec::new());
    assert_eq!(
        gate.view().tally.ends(LeaseEnd::Expired),
        0,
        "nobody claimed them, so they are taken back"
    );
    assert_eq!(gate.view().leases, 10);
    gate.turn(Vec::new());
    assert_eq!(gate.view().leases, 0);
    assert_eq!(gate.cancels(), many as u64);
}

/// DEC3: a drain by bypass is bounded too, and each waiter is decided once.
#[test]
fn dec3_a_drain_goes_over_several_turns() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    let many = 2 * DECISIONS_PER_TURN + 1;
    let asks = (0..many)
        .map(|number| Command::Acquire(acquire(&format!("t{number}"), 1)))
        .collect();
    gate.turn(asks);
    gate.configure(|policy| policy.paused = true);
    assert_eq!(gate.decisions().len(), DECISIONS_PER_TURN);
    gate.turn(Vec::new());
    assert_eq!(gate.decisions().len(), DECISIONS_PER_TURN);
    gate.turn(Vec::new());
    assert_eq!(gate.decisions().len(), 1);
    assert_ne!(gate.machine().next_deadline(), Some(gate.view().now));
    assert_eq!(gate.bypasses(BypassReason::Disabled), many as u64);
}

/// DEC3: commands of one turn see the changes of those before them.
#[test]
fn dec3_commands_see_those_before_them() {
    let mut gate = Gate::new();
    let held = gate.hold("held", 900_000);
    let told = gate.tell_all(vec![
        Command::Acquire(acquire("t1", 500_000)),
        Command::Release(held),
        Command::Acquire(acquire("t2", 10)),
        Command::Cancel(ticket("t1")),
        Command::Acquire(acquire("t3", 10)),
    ]);
    assert_eq!(told[0].1, Told::Parked);
    assert_eq!(told[2].1, Told::Parked, "t1 is older");
    assert_eq!(told[4].1, Told::Parked, "t2 is older");
    let names: Vec<String> = gate.decisions().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["t1", "t2", "t3"]);
    assert_eq!(gate.reserved(), 20);
}

/// DEC4, Q06: when the ceiling falls below what is reserved, leases stay, `available` is 0 and the
/// ledger drains by itself.
#[test]
fn dec4_a_ceiling_below_the_reserved() {
    let mut gate = Gate::unread(admission_on());
    gate.engines.insert("a", Engine::of(500_000));
    gate.engines.insert("b", Engine::of(500_000));
    gate.round();
    let leases: Vec<_> = (1..=4)
        .map(|n| gate.hold(&format!("t{n}"), 200_000))
        .collect();
    gate.engine("b").listed = false;
    gate.round();
    assert_eq!((gate.ceiling(), gate.reserved()), (450_000, 800_000));
    assert_eq!(gate.view().available().get(), 0);
    gate.park("t5", 100_000);
    assert_eq!(place(&mut gate, "t5").short.get(), 450_000);
    for lease in &leases[..2] {
        gate.release(*lease).unwrap();
        assert_eq!(gate.grants(), []);
    }
    gate.release(leases[2]).unwrap();
    assert_eq!(gate.grants().len(), 1);
    assert_eq!(gate.view().available().get(), 150_000);
}

/// DEC4: a bypassed request holds no lease and charges nothing.
#[test]
fn dec4_a_bypass_charges_nothing() {
    let mut gate = Gate::new();
    gate.ask_as(protected("t", 500_000));
    assert_eq!((gate.reserved(), gate.view().leases), (0, 0));
    assert_eq!(gate.admits(), 0);
}

/// DEC5: larger than the largest single pool: decided as always, with the notice.
#[test]
fn dec5_larger_than_any_pool() {
    let mut gate = Gate::unread(admission_on());
    gate.engines.insert("a", Engine::of(500_000));
    gate.engines.insert("b", Engine::of(400_000));
    gate.round();
    gate.hold("fits", 500_000);
    assert_eq!(gate.view().notices, []);
    gate.park("t", 500_001);
    match gate.view().notices.as_slice() {
        [
            Notice::LargerThanAnyPool {
                reservation,
                largest_pool,
                ..
            },
        ] => {
            assert_eq!((reservation.get(), largest_pool.get()), (500_001, 500_000));
        }
        other => panic!("{other:?}"),
    }
    gate.run(599_500);
    assert_eq!(gate.view().notices.len(), 1);
    gate.run(1_000);
    assert_eq!(
        gate.view().notices,
        [],
        "it goes 10 min after the last cause"
    );
}

/// CAP2: rows that differ by an unknown label are a notice while they last.
#[test]
fn cap2_the_notice_of_an_unknown_label() {
    let mut gate = Gate::new();
    gate.engine("a").unknown_label = true;
    gate.round();
    let since = gate.view().now;
    gate.run(5_000);
    assert_eq!(
        gate.view().notices,
        [Notice::UnknownLabel { since }],
        "once, since the first time"
    );
    gate.engine("a").unknown_label = false;
    gate.round();
    assert_eq!(gate.view().notices, []);
}

/// Q09: a burst between two readings is bounded by the ledger, in the order of arrival.
#[test]
fn dec2_a_burst_between_two_readings() {
    let mut gate = Gate::new();
    let asks = (0..2_000)
        .map(|number| Command::Acquire(acquire(&format!("t{number}"), 5_000)))
        .collect();
    let mut admitted = 0;
    let mut parked = 0;
    for effect in gate.turn(asks) {
        match effect {
            Effect::Reply {
                tag,
                reply: Reply::Acquire(Ok(_)),
                ..
            } => {
                assert_eq!(tag.0, admitted);
                admitted += 1;
            }
            Effect::Parked { .. } => parked += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((admitted, parked), (180, 1_820));
    assert_eq!(gate.reserved(), 900_000);
}

/// DEC5, section 10: a notice tells the time since when, and goes 10 min after its last cause.
#[test]
fn dec5_the_notice_is_dated_from_its_first_cause() {
    let mut gate = Gate::new();
    gate.engines.insert("b", Engine::of(1_000_000));
    gate.round();
    let first = gate.view().now;
    gate.hold("t1", 1_000_001);
    gate.run(400_000);
    gate.park("t2", 1_000_002);
    match gate.view().notices.as_slice() {
        [
            Notice::LargerThanAnyPool {
                since, reservation, ..
            },
        ] => {
            assert_eq!((*since, reservation.get()), (first, 1_000_002));
        }
        other => panic!("{other:?}"),
    }
    gate.run(599_500);
    assert_eq!(gate.view().notices.len(), 1);
    gate.run(1_000);
    assert_eq!(gate.view().notices, []);
}
