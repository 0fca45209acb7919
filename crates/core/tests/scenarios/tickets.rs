//! The life of a ticket.

use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::{BypassReason, CancelReason, EndHow, Scope};
use kvgate_core::effect::{
    AcquireRefused, CancelOutcome, LeaseGone, Outcome, ReleaseOutcome, TicketView, Watched,
};
use kvgate_core::tally::{CancelledHow, LeaseEnd};
use kvgate_core::ticket::Sent;
use kvgate_core::units::Span;

use crate::common::*;

fn brief(name: &str, reservation: u64) -> Acquire {
    let mut ask = acquire(name, reservation);
    ask.stays = false;
    ask
}

/// The head of the queue behind a full ledger, and the lease that fills it.
fn one_waits() -> (Gate, kvgate_core::ids::LeaseId) {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    gate.park("t", 100);
    (gate, full)
}

/// TIC1: a waiting ticket attaches to its place; not a second entry and not a second count.
#[test]
fn tic1_again_while_waiting() {
    let (mut gate, full) = one_waits();
    gate.park("behind", 100);
    let (seq, told) = gate.tell(Command::Acquire(acquire("t", 100)));
    assert_eq!((seq, told), (None, Told::Parked));
    assert_eq!((gate.waiting(), gate.waits()), (2, 2));
    assert_eq!(place(&mut gate, "t").position, 1);
    gate.release(full).unwrap();
    assert_eq!(gate.grants().len(), 2);
    assert_eq!(gate.reserved(), 200);
}

/// TIC1, Q03: a held ticket is told the same lease, repeated; also after a restart, and charged once.
#[test]
fn tic1_again_while_held() {
    let mut gate = Gate::new();
    let told = gate.ask("t1", 300_000);
    assert!(!answer(&told).repeated);
    let lease = admitted(&told);
    let (seq, again) = gate.tell(Command::Acquire(acquire("t1", 300_000)));
    assert_eq!(admitted(&again), lease);
    assert!(answer(&again).repeated);
    assert_eq!(seq, None);
    gate.restart(1_000);
    let again = gate.ask("t1", 300_000);
    assert_eq!(admitted(&again), lease);
    assert!(answer(&again).repeated);
    assert_eq!((gate.reserved(), gate.admits()), (300_000, 1));
    gate.release(lease).unwrap();
    assert_eq!(gate.reserved(), 0);
}

/// TIC1: after a bypass the same bypass, repeated. An immediate one is remembered in memory only.
#[test]
fn tic1_again_after_an_immediate_bypass() {
    let mut gate = Gate::new();
    assert_eq!(bypassed(&gate.ask("t", 950_000)), BypassReason::Oversize);
    gate.engine("a").capacity = 2_000_000;
    gate.round();
    let again = gate.ask("t", 950_000);
    assert_eq!(
        bypassed(&again),
        BypassReason::Oversize,
        "though it would fit now"
    );
    assert!(answer(&again).repeated);
    assert_eq!(gate.bypasses(BypassReason::Oversize), 1);
    gate.restart(1_000);
    admitted(&gate.ask("t", 950_000));
}

/// TIC1, DUR1: a bypass that took a waiter out of the queue is a record.
#[test]
fn tic1_again_after_a_bypass_of_a_waiter() {
    let (mut gate, full) = one_waits();
    gate.run(30_000);
    assert_eq!(gate.bypasses(BypassReason::Aged), 1);
    gate.restart(1_000);
    gate.release(full).unwrap();
    let again = answer(&gate.ask("t", 100));
    assert_eq!(again.outcome, Outcome::Bypass(BypassReason::Aged));
    assert!(again.repeated);
    assert_eq!(again.waited, Span::from_secs(30));
    assert_eq!(gate.bypasses(BypassReason::Aged), 1);
}

/// TIC1: after release or cancel, of whatever state, also before the acquire: `ticket_finished`;
/// over a restart too.
#[test]
fn tic1_again_after_the_end() {
    let mut gate = Gate::new();
    let released = gate.hold("released", 10);
    gate.release(released).unwrap();
    gate.hold("cancelled", 10);
    gate.cancel("cancelled");
    gate.ask("bypassed", 950_000);
    gate.cancel("bypassed");
    gate.cancel("before");
    gate.hold("full", 900_000);
    gate.park("withdrawn", 10);
    gate.cancel("withdrawn");
    let asks = [
        ("released", 10),
        ("cancelled", 10),
        ("bypassed", 950_000),
        ("before", 10),
        ("withdrawn", 10),
    ];
    for restarted in [false, true] {
        for (name, reservation) in asks {
            let again = gate.ask(name, reservation);
            assert_eq!(
                cancelled(&again),
                CancelReason::TicketFinished,
                "{name}, {restarted}"
            );
            assert_eq!(answer(&again).reservation.get(), reservation);
            assert_eq!(answer(&again).session.unwrap(), session("s"));
        }
        gate.restart(1_000);
    }
}

/// TIC1: after expiry, revocation or a drop the ticket is decided afresh and conflicts with nothing.
#[test]
fn tic1_decided_afresh() {
    let mut gate = Gate::new();
    let mut ask = acquire("expired", 10);
    ask.ttl = Span::from_secs(1);
    let expired = gate.hold_as(ask);
    let revoked = gate.hold("revoked", 10);
    gate.revoke(revoked).unwrap();
    gate.run(1_000);
    gate.hold("full", 900_000);
    gate.park("dropped", 10);
    gate.gone("dropped");
    gate.run(10_000);
    assert_eq!(gate.waiting(), 0);
    gate.cancel("full");
    for name in ["expired", "revoked", "dropped"] {
        let mut other = acquire(name, 20);
        other.session = session("another");
        let told = gate.ask_as(other);
        let lease = admitted(&told);
        assert!(!answer(&told).repeated);
        assert!(lease.issue > revoked.issue);
    }
    assert_eq!(gate.release(expired), Err(LeaseGone::Expired));
    assert_eq!(gate.release(revoked), Err(LeaseGone::Expired));
    assert_eq!(gate.reserved(), 60, "old ids touch nothing");
}

/// TIC1: another session or other numbers than were sent before is a conflict, and changes nothing;
/// it is judged first, in every state, and by the numbers as sent.
#[test]
fn tic1_conflicts() {
    let mut gate = Gate::new();
    gate.configure(|policy| policy.expected_decode_cap = Some(tokens(10)));
    let parts = |name: &str, prompt, max_new| {
        let mut ask = acquire(name, 0);
        ask.sent = Sent::Parts {
            prompt: tokens(prompt),
            max_new: tokens(max_new),
        };
        ask
    };
    gate.hold_as(parts("held", 100, 50));
    let lease = gate.hold_as(parts("released", 100, 50));
    gate.release(lease).unwrap();
    let mut protected = parts("bypassed", 100, 50);
    protected.protected = true;
    gate.ask_as(protected);
    gate.hold("full", 899_890);
    assert_eq!(gate.ask_as(parts("waiting", 100, 50)), Told::Parked);
    let before = gate.machine().kept();
    for name in ["held", "released", "bypassed", "waiting"] {
        // The capped sum of these is 110 as well.
        let mut other_session = parts(name, 100, 50);
        other_session.session = session("S");
        for other in [
            parts(name, 100, 60),
            parts(name, 99, 51),
            acquire(name, 110),
            acquire(name, 150),
            other_session,
        ] {
            assert_eq!(
                refusal(&gate.ask_as(other)),
                AcquireRefused::TicketConflict,
                "{name}"
            );
        }
    }
    assert_eq!(gate.machine().kept(), before, "nothing changes");
    gate.configure(|policy| policy.expected_decode_cap = Some(tokens(20)));
    assert_eq!(
        answer(&gate.ask_as(parts("held", 100, 50)))
            .reservation
            .get(),
        110,
        "the first sum stands"
    );
}

/// TIC1: a bare cancel marker conflicts with nothing, and an acquire does not fill it.
#[test]
fn tic1_a_bare_marker_conflicts_with_nothing() {
    let mut gate = Gate::new();
    gate.cancel("t");
    for (name, reservation) in [("s1", 10), ("s2", 20)] {
        let mut ask = acquire("t", reservation);
        ask.session = session(name);
        let told = answer(&gate.ask_as(ask));
        assert_eq!(
            told.outcome,
            Outcome::Cancelled(CancelReason::TicketFinished)
        );
        assert_eq!(told.session.unwrap(), session(name));
        assert_eq!(told.reservation.get(), reservation);
    }
}

/// TIC1: a repeat changes nothing else: the first life, scope, client and request id stand, and it
/// never renews.
#[test]
fn tic1_a_repeat_changes_nothing_else() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 10);
    let before = gate.read_lease(lease).unwrap();
    gate.run(5_000);
    let mut again = acquire("t", 10);
    again.ttl = Span::from_secs(5);
    again.scope = Scope::Eval;
    again.protected = true;
    again.client = Some(kvgate_core::ids::Label::new("c").unwrap());
    again.request_id = Some(kvgate_core::ids::Label::new("r").unwrap());
    assert_eq!(admitted(&gate.ask_as(again)), lease);
    assert_eq!(gate.read_lease(lease).unwrap(), before);
}

/// TIC2, Q07: a call that ends by itself is told place and reason, and its ticket keeps its place.
#[test]
fn tic2_a_call_ends_and_the_place_stays() {
    let (mut gate, full) = one_waits();
    gate.run(3_000);
    let told = gate.leave("t").unwrap();
    assert_eq!(status(&told).position, 1);
    assert_eq!(status(&told).age, Span::from_secs(3));
    assert_eq!(status(&told).bypass_in, Span::from_secs(27));
    assert_eq!(told.waited, Span::from_secs(3));
    gate.park("behind", 100);
    gate.run(9_000);
    assert_eq!(gate.ask("t", 100), Told::Parked);
    assert_eq!(place(&mut gate, "t").position, 1, "it kept its place");
    gate.run(3_000);
    gate.release(full).unwrap();
    assert_eq!(gate.grants()[0].0, "t");
    let granted = answer(&gate.ask("t", 100));
    assert_eq!(
        granted.waited,
        Span::from_secs(15),
        "the whole time in the queue"
    );
    assert_eq!(gate.waits(), 2);
}

/// TIC2: an acquire that does not stay is answered at the end of its turn, and its caller is away from then on.
#[test]
fn tic2_a_call_that_does_not_stay() {
    let mut gate = Gate::new();
    let full = gate.hold("full", 900_000);
    let (seq, told) = gate.tell(Command::Acquire(brief("t", 100)));
    assert!(
        seq.is_some(),
        "the place is stored before its position is told"
    );
    assert_eq!(status(&answer(&told)).position, 1);
    gate.run(9_500);
    assert_eq!(gate.waiting(), 1);
    gate.run(500);
    assert_eq!(gate.waiting(), 0, "dropped");
    // What the same turn decides is told by the same answer.
    let told = gate.tell_all(vec![
        Command::Acquire(brief("u", 100)),
        Command::Release(full),
    ]);
    let lease = admitted(&told[0].1);
    assert!(!answer(&told[0].1).repeated);
    assert_eq!(gate.reserved(), 100);
    gate.deliver("u", Some(lease));
    assert_eq!(gate.admits(), 2);
}

/// TIC2: a call may end when nothing waits any more.
#[test]
fn tic2_a_call_ends_after_the_decision() {
    let (mut gate, full) = one_waits();
    assert_eq!(gate.leave("unknown"), None);
    gate.release(full).unwrap();
    assert_eq!(gate.leave("t"), None);
    // The end of the call and the decision in one turn: the decision is told.
    gate.hold("full again", 899_900);
    gate.park("u", 100);
    let told = gate.tell_all(vec![
        Command::Cancel(ticket("full again")),
        Command::Leave(ticket("u")),
    ]);
    assert_eq!(
        told[1].1,
        Told::Reply(kvgate_core::effect::Reply::Left(None))
    );
    assert_eq!(gate.grants().last().unwrap().0, "u");
}

/// TIC3, Q01: a caller that is away for longer than the claim grace is dropped and counted as cancelled.
#[test]
fn tic3_away_too_long() {
    let (mut gate, _) = one_waits();
    gate.run(4_000);
    gate.gone("t");
    gate.run(9_999);
    assert_eq!(gate.waiting(), 1);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.waiting(), 0);
    assert_eq!(
        gate.view()
            .tally
            .scope(Scope::Train)
            .cancels(CancelledHow::Dropped),
        1
    );
    assert_eq!(gate.read("t"), Some(TicketView::Ended(EndHow::Dropped)));
    assert_eq!(gate.reserved(), 900_000);
}

/// TIC3: a caller with another open call is not away; the grace begins with the last one.
#[test]
fn tic3_several_calls() {
    let (mut gate, _) = one_waits();
    gate.ask("t", 100);
    assert_eq!(gate.watch(&["t"]), [Watched::Waiting]);
    gate.gone("t");
    gate.leave("t");
    gate.run(12_000);
    assert_eq!(gate.waiting(), 1, "the watch is the caller's presence");
    gate.gone("t");
    gate.run(10_000);
    assert_eq!(gate.waiting(), 0);
}

/// TIC3: whoever comes back within the grace is there again, and the grace begins anew next time.
#[test]
fn tic3_back_within_the_grace() {
    let (mut gate, _) = one_waits();
    gate.gone("t");
    gate.run(9_000);
    gate.ask_as(brief("t", 100));
    gate.run(9_000);
    assert_eq!(gate.waiting(), 1);
    gate.ask("t", 100);
    gate.run(11_500);
    assert_eq!(gate.waiting(), 1);
}

/// TIC3: a dropped ticket gets a new place at the tail, but not a new maximum wait; over a restart too.
#[test]
fn tic3_a_dropped_ticket_keeps_its_clock() {
    for restart in [false, true] {
        let (mut gate, _) = one_waits();
        let enqueued = gate.now;
        gate.gone("t");
        gate.run(10_000);
        gate.park("other", 100);
        if restart {
            gate.restart(1_000);
            gate.ask("other", 100);
        }
        gate.park("t", 100);
        let stands = place(&mut gate, "t");
        assert_eq!(stands.position, 2, "at the tail");
        assert_eq!(stands.age.millis(), gate.now - enqueued);
        gate.run(enqueued + 30_000 - gate.now);
        assert_eq!(
            gate.decisions().last().unwrap(),
            &("t".to_owned(), Outcome::Bypass(BypassReason::Aged))
        );
        assert_eq!(
            gate.waiting(),
            1,
            "it left before the one that stood before it"
        );
        assert_eq!(gate.waits(), 3, "decided afresh counts as a new one");
    }
}

/// TIC3: a ticket that comes back with its clock used up gets no place: bypass `aged` at once.
#[test]
fn tic3_a_clock_that_is_used_up() {
    let (mut gate, _) = one_waits();
    gate.gone("t");
    gate.run(30_000);
    let waits = gate.waits();
    assert_eq!(bypassed(&gate.ask("t", 100)), BypassReason::Aged);
    assert_eq!(gate.waits(), waits, "no wait is counted");
    let again = answer(&gate.ask("t", 100));
    assert!(again.repeated);
}

/// TIC3, section 9: the clock is forgotten with the finished ticket.
#[test]
fn tic3_the_clock_is_forgotten_after_ten_minutes() {
    let (mut gate, _) = one_waits();
    gate.gone("t");
    gate.run(590_000);
    assert!(gate.read("t").is_some());
    gate.run(25_000);
    assert_eq!(gate.read("t"), None);
    gate.hold("full again", 900_000);
    gate.park("t", 100);
    assert_eq!(place(&mut gate, "t").age, Span::ZERO);
}

/// TIC3, DUR2: after a restart every waiter has the claim grace to come back.
#[test]
fn tic3_waiters_after_a_restart() {
    let (mut gate, _) = one_waits();
    gate.park("u", 100);
    gate.crash(1_000);
    let started = gate.now;
    gate.round();
    gate.ask("u", 100);
    gate.run(started + 9_999 - gate.now);
    assert_eq!(gate.waiting(), 2);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.waiting(), 1);
    assert_eq!(place(&mut gate, "u").position, 1);
}

/// TIC4, Q02: a grant made while the caller is away is kept until the grace ends, then taken back
/// and offered to the next.
#[test]
fn tic4_a_grant_in_a_gap() {
    let (mut gate, full) = one_waits();
    gate.park("next", 900_000);
    gate.gone("t");
    gate.run(4_000);
    gate.release(full).unwrap();
    assert_eq!(gate.grants().len(), 1);
    assert_eq!(gate.admits(), 1, "not an admit before it is claimed");
    gate.run(5_999);
    assert_eq!(gate.reserved(), 100);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.grants()[0].0, "next");
    assert_eq!(gate.reserved(), 900_000);
    assert_eq!(gate.read("t"), Some(TicketView::Ended(EndHow::TakenBack)));
    assert_eq!(
        gate.view()
            .tally
            .scope(Scope::Train)
            .cancels(CancelledHow::TakenBack),
        1
    );
    assert_eq!(
        gate.view().tally.ends(LeaseEnd::Released),
        1,
        "only the one that was claimed"
    );
}

/// TIC4: the first delivery of a decision made in a gap says `repeated: false`, and claims it.
#[test]
fn tic4_the_first_delivery_is_not_repeated() {
    let (mut gate, full) = one_waits();
    gate.gone("t");
    gate.release(full).unwrap();
    let lease = gate.grants()[0].1;
    let told = gate.ask("t", 100);
    assert_eq!(admitted(&told), lease);
    assert!(!answer(&told).repeated);
    assert!(answer(&gate.ask("t", 100)).repeated);
    assert_eq!(gate.admits(), 2);
    gate.run(30_000);
    assert_eq!(gate.reserved(), 100, "claimed, so it is not taken back");
}

/// TIC4: a bypass made in a gap is kept as a finished ticket.
#[test]
fn tic4_a_bypass_in_a_gap() {
    let (mut gate, _) = one_waits();
    gate.run(25_000);
    gate.gone("t");
    gate.run(60_000);
    let told = answer(&gate.ask("t", 100));
    assert_eq!(told.outcome, Outcome::Bypass(BypassReason::Aged));
    assert!(!told.repeated);
    assert!(answer(&gate.ask("t", 100)).repeated);
}

/// TIC4: a connection that breaks counts as away at once: the grant has the grace from then on.
#[test]
fn tic4_an_answer_that_could_not_be_written() {
    let mut gate = Gate::new();
    let lease = admitted(&gate.ask("t", 100));
    gate.run(2_000);
    gate.undeliver("t", Some(lease));
    gate.run(9_999);
    assert_eq!(gate.reserved(), 100);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.reserved(), 0);
    assert_eq!((gate.admits(), gate.cancels()), (0, 1));
    assert_eq!(gate.view().tally.leases_ended, [0; 4]);
    assert_eq!(gate.release(lease), Err(LeaseGone::Expired));
}

/// TIC4: an undelivered bypass is told as the first time.
#[test]
fn tic4_a_bypass_that_could_not_be_written() {
    let mut gate = Gate::new();
    gate.ask("t", 950_000);
    gate.undeliver("t", None);
    assert!(!answer(&gate.ask("t", 950_000)).repeated);
    assert!(answer(&gate.ask("t", 950_000)).repeated);
    gate.undeliver("t", None);
    gate.deliver("t", None);
    assert!(answer(&gate.ask("t", 950_000)).repeated);
}

/// TIC1, TIC4: a bypass that arrived once is repeated from then on, though the answer to a later
/// call of it was lost.
#[test]
fn tic4_a_bypass_that_arrived_stays_told() {
    let mut gate = Gate::new();
    gate.ask("t", 950_000);
    gate.deliver("t", None);
    assert!(answer(&gate.ask("t", 950_000)).repeated);
    gate.undeliver("t", None);
    assert!(answer(&gate.ask("t", 950_000)).repeated);
    // One that was lost is told as the first time until it arrives.
    gate.ask("u", 950_000);
    gate.undeliver("u", None);
    for _ in 0..2 {
        assert!(!answer(&gate.ask("u", 950_000)).repeated);
        gate.undeliver("u", None);
    }
    assert!(!answer(&gate.ask("u", 950_000)).repeated);
    gate.deliver("u", None);
    gate.undeliver("u", None);
    assert!(answer(&gate.ask("u", 950_000)).repeated);
}

/// TIC4: a grant is claimed by its delivery, by a renewal or by a repeated acquire; what comes
/// later, or belongs to another lease, does not undo it.
#[test]
fn tic4_what_claims_a_grant() {
    let claims: [fn(&mut Gate, kvgate_core::ids::LeaseId); 3] = [
        |gate, lease| gate.deliver("t", Some(lease)),
        |gate, lease| drop(gate.renew(lease).unwrap()),
        |gate, _| drop(gate.ask("t", 100)),
    ];
    for away in [false, true] {
        for claim in claims {
            let mut gate = Gate::new();
            let lease = admitted(&gate.ask("t", 100));
            assert_eq!(gate.admits(), 0);
            if away {
                gate.undeliver("t", Some(lease));
            }
            claim(&mut gate, lease);
            assert_eq!(gate.admits(), 1);
            gate.undeliver("t", Some(lease));
            gate.gone("t");
            gate.run(20_000);
            assert_eq!((gate.reserved(), gate.admits()), (100, 1));
        }
    }
    let mut gate = Gate::new();
    let lease = admitted(&gate.ask("t", 100));
    let other = kvgate_core::ids::LeaseId { salt: 1, ..lease };
    gate.deliver("t", Some(other));
    gate.deliver("t", None);
    gate.deliver("unknown", Some(lease));
    assert_eq!(gate.admits(), 0, "another decision was delivered");
    gate.undeliver("t", None);
    gate.undeliver("t", Some(other));
    gate.run(20_000);
    assert_eq!(gate.reserved(), 100);
}

/// TIC4: a waiter with an open call whose grant is on its way is not taken back by time.
#[test]
fn tic4_a_grant_on_its_way_waits_for_its_delivery() {
    let (mut gate, full) = one_waits();
    gate.release(full).unwrap();
    let lease = gate.grants()[0].1;
    gate.run(60_000);
    assert_eq!((gate.reserved(), gate.admits()), (100, 1));
    gate.deliver("t", Some(lease));
    assert_eq!(gate.admits(), 2);
}

/// TIC4, CNT1: after a start every lease counts as claimed.
#[test]
fn tic4_after_a_start_every_lease_is_claimed() {
    let (mut gate, full) = one_waits();
    gate.gone("t");
    gate.release(full).unwrap();
    let on_its_way = admitted(&gate.ask("u", 100));
    gate.restart(1_000);
    gate.run(30_000);
    assert_eq!(gate.reserved(), 200);
    assert!(answer(&gate.ask("t", 100)).repeated);
    assert_eq!(gate.admits(), 3);
    gate.release(on_its_way).unwrap();
    assert_eq!(gate.view().tally.ends(LeaseEnd::Released), 2);
}

/// TIC4, Q02: the caller goes in the very turn of the grant.
#[test]
fn tic4_gone_in_the_turn_of_the_grant() {
    let (mut gate, full) = one_waits();
    gate.tell_all(vec![Command::Release(full), Command::Gone(ticket("t"))]);
    assert_eq!(gate.reserved(), 100);
    gate.run(10_000);
    assert_eq!(gate.reserved(), 0);
    let (mut gate, full) = one_waits();
    gate.tell_all(vec![Command::Release(full), Command::Cancel(ticket("t"))]);
    assert_eq!((gate.reserved(), gate.view().leases), (0, 0));
    assert_eq!(
        gate.decisions(),
        [("t".to_owned(), Outcome::Cancelled(CancelReason::Cancelled))]
    );
}

/// TIC5: cancel in every state, and what it answers.
#[test]
fn tic5_cancel_in_every_state() {
    let (mut gate, full) = one_waits();
    assert_eq!(gate.cancel("t"), CancelOutcome::Withdrawn);
    assert_eq!(
        gate.decisions(),
        [("t".to_owned(), Outcome::Cancelled(CancelReason::Cancelled))]
    );
    assert_eq!(gate.cancel("t"), CancelOutcome::AlreadyFinished);
    assert_eq!(gate.cancel("full"), CancelOutcome::Released);
    assert_eq!(gate.reserved(), 0);
    assert_eq!(gate.cancel("full"), CancelOutcome::AlreadyFinished);
    assert_eq!(gate.release(full), Ok(ReleaseOutcome::AlreadyReleased));
    gate.ask("large", 950_000);
    assert_eq!(gate.cancel("large"), CancelOutcome::Bypassed);
    assert_eq!(gate.cancel("large"), CancelOutcome::AlreadyFinished);
    assert_eq!(gate.cancel("unknown"), CancelOutcome::Unknown);
    assert_eq!(gate.cancel("unknown"), CancelOutcome::AlreadyFinished);
    let released = gate.hold("released", 10);
    gate.release(released).unwrap();
    assert_eq!(gate.cancel("released"), CancelOutcome::AlreadyFinished);
}

/// TIC5: a ticket that ended by itself answers `already_finished` and keeps the marker.
#[test]
fn tic5_a_ticket_that_ended_by_itself_keeps_the_marker() {
    let mut gate = Gate::new();
    let mut ask = acquire("expired", 10);
    ask.ttl = Span::from_secs(1);
    let expired = gate.hold_as(ask);
    let revoked = gate.hold("revoked", 10);
    gate.revoke(revoked).unwrap();
    let back = admitted(&gate.ask("taken back", 10));
    gate.undeliver("taken back", Some(back));
    gate.hold("full", 899_000);
    gate.park("dropped", 899_000);
    gate.gone("dropped");
    gate.run(10_000);
    for name in ["expired", "revoked", "taken back", "dropped"] {
        let (seq, _) = gate.tell(Command::Cancel(ticket(name)));
        assert!(seq.is_some(), "the marker is a change");
        assert_eq!(gate.cancel(name), CancelOutcome::AlreadyFinished);
    }
    gate.restart(1_000);
    for name in ["expired", "revoked", "taken back"] {
        assert_eq!(
            cancelled(&gate.ask(name, 10)),
            CancelReason::TicketFinished,
            "{name}"
        );
    }
    assert_eq!(
        gate.release(expired),
        Err(LeaseGone::Expired),
        "its lease ended before"
    );
    assert_eq!(
        gate.cancels(),
        2,
        "taken back and dropped: a marker counts nothing"
    );
}

/// TIC5: a read of a released or cancelled ticket shows what an acquire would answer; those that
/// would be decided afresh are `ended`. Reads have no side effects.
#[test]
fn tic5_reads_of_tickets() {
    let (mut gate, full) = one_waits();
    let show = |gate: &mut Gate, name: &str| match gate.read(name) {
        Some(TicketView::Answer(answer)) => answer.outcome,
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(gate.read("unknown"), None);
    assert!(matches!(show(&mut gate, "t"), Outcome::Wait(_)));
    assert!(matches!(show(&mut gate, "full"), Outcome::Admit { lease, .. } if lease == full));
    gate.ask("large", 950_000);
    assert_eq!(
        show(&mut gate, "large"),
        Outcome::Bypass(BypassReason::Oversize)
    );
    gate.cancel("marker");
    assert_eq!(
        show(&mut gate, "marker"),
        Outcome::Cancelled(CancelReason::TicketFinished)
    );
    match gate.read("marker") {
        Some(TicketView::Answer(answer)) => assert_eq!(answer.session, None),
        other => panic!("{other:?}"),
    }
    gate.release(full).unwrap();
    assert_eq!(
        show(&mut gate, "full"),
        Outcome::Cancelled(CancelReason::TicketFinished)
    );
    gate.gone("t");
    for _ in 0..3 {
        match gate.read("t") {
            Some(TicketView::Answer(answer)) => {
                assert!(matches!(answer.outcome, Outcome::Admit { .. }))
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(gate.admits(), 1, "a read claims nothing");
    let revoked = gate.hold("revoked", 10);
    gate.revoke(revoked).unwrap();
    assert_eq!(
        gate.read("revoked"),
        Some(TicketView::Ended(EndHow::Revoked))
    );
    let mut ask = acquire("expired", 10);
    ask.ttl = Span::from_secs(1);
    gate.hold_as(ask);
    gate.run(1_000);
    assert_eq!(
        gate.read("expired"),
        Some(TicketView::Ended(EndHow::Expired))
    );
}

/// TIC6, Q04: release is idempotent, and never touches a newer lease of the same ticket.
#[test]
fn tic6_release() {
    let mut gate = Gate::new();
    let mut ask = acquire("t", 300_000);
    ask.ttl = Span::from_secs(1);
    let old = gate.hold_as(ask);
    gate.run(1_000);
    let new = gate.hold("t", 300_000);
    assert_eq!(gate.release(old), Err(LeaseGone::Expired));
    assert_eq!(gate.renew(old).unwrap_err(), LeaseGone::Expired);
    assert_eq!(gate.read_lease(old).unwrap_err(), LeaseGone::Expired);
    assert_eq!(gate.revoke(old).unwrap_err(), LeaseGone::Expired);
    assert_eq!(gate.reserved(), 300_000);
    let told = gate.tell_all(vec![
        Command::Release(new),
        Command::Release(new),
        Command::Release(new),
    ]);
    let outcomes: Vec<_> = told.iter().map(|(seq, _)| seq.is_some()).collect();
    assert_eq!(outcomes, [true, false, false], "one change");
    assert_eq!(gate.reserved(), 0);
    assert_eq!(gate.release(new), Ok(ReleaseOutcome::AlreadyReleased));
    assert_eq!(gate.renew(new).unwrap_err(), LeaseGone::Released);
    assert_eq!(gate.read_lease(new).unwrap_err(), LeaseGone::Released);
    assert_eq!(gate.revoke(new).unwrap_err(), LeaseGone::Released);
    gate.restart(1_000);
    assert_eq!(gate.release(new), Ok(ReleaseOutcome::AlreadyReleased));
    gate.run(601_000);
    assert_eq!(gate.release(new), Err(LeaseGone::Expired), "forgotten");
    assert_eq!(gate.view().tally.ends(LeaseEnd::Released), 1);
}

/// TIC6: a lease whose ticket was cancelled was given back.
#[test]
fn tic6_release_after_a_cancel() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 10);
    gate.cancel("t");
    assert_eq!(gate.release(lease), Ok(ReleaseOutcome::AlreadyReleased));
    assert_eq!(gate.renew(lease).unwrap_err(), LeaseGone::Released);
    assert_eq!(gate.view().tally.ends(LeaseEnd::Cancelled), 1);
}

/// TIC4: a watch tells what is decided, and is the presence of its caller for what is not.
#[test]
fn tic4_watch() {
    let mut gate = Gate::new();
    let revoked = gate.hold("revoked", 0);
    gate.revoke(revoked).unwrap();
    let full = gate.hold("full", 900_000);
    gate.park("t", 100);
    gate.gone("t");
    gate.ask("large", 950_000);
    gate.cancel("marker");
    let watched = gate.watch(&["t", "full", "unknown", "large", "marker", "revoked"]);
    assert_eq!(watched[0], Watched::Waiting);
    assert_eq!(
        watched_answer(&watched[1]).outcome,
        Outcome::Admit {
            lease: full,
            ttl: Span::from_secs(600),
            ends_at: gate.read_lease(full).unwrap().lease.ends_at,
        }
    );
    assert_eq!(watched[2], Watched::Unknown);
    assert_eq!(
        watched_answer(&watched[3]).outcome,
        Outcome::Bypass(BypassReason::Oversize)
    );
    assert_eq!(
        watched_answer(&watched[4]).outcome,
        Outcome::Cancelled(CancelReason::TicketFinished)
    );
    assert_eq!(watched[5], Watched::Unknown, "it would be decided afresh");
    gate.run(12_000);
    assert_eq!(gate.waiting(), 1, "the watch is there");
    gate.gone("t");
    gate.run(10_000);
    assert_eq!(gate.waiting(), 0);
}

/// TIC4: a watch that tells of a grant does not claim it: its answer may be lost as well.
#[test]
fn tic4_a_watch_does_not_claim() {
    let (mut gate, full) = one_waits();
    gate.gone("t");
    gate.release(full).unwrap();
    let told = watched_answer(&gate.watch(&["t"])[0]);
    assert!(!told.repeated, "the first delivery");
    assert_eq!(gate.admits(), 1);
    let lease = gate.grants()[0].1;
    gate.run(12_000);
    assert_eq!(gate.reserved(), 100, "its answer is on its way");
    gate.undeliver("t", Some(lease));
    gate.run(10_000);
    assert_eq!(gate.reserved(), 0, "a vanished caller keeps no grant");
    assert_eq!((gate.admits(), gate.cancels()), (1, 1));
    // Delivered, it is claimed.
    gate.hold("full again", 899_900);
    let other = admitted(&gate.ask("u", 100));
    gate.watch(&["u"]);
    assert_eq!(gate.admits(), 2);
    gate.deliver("u", Some(other));
    assert_eq!(gate.admits(), 3);
}

/// TIC2, TIC3: a ticket that comes back and is granted at once keeps its clock too: taken back, it
/// gets no new maximum wait, and its whole time counts from the first enqueue.
#[test]
fn tic3_a_clock_goes_through_a_grant_that_was_taken_back() {
    let (mut gate, full) = one_waits();
    let enqueued = gate.now;
    gate.gone("t");
    gate.run(10_000);
    gate.release(full).unwrap();
    let told = answer(&gate.ask("t", 100));
    assert_eq!(told.waited, Span::from_secs(10));
    gate.undeliver(
        "t",
        Some(admitted(&Told::Reply(kvgate_core::effect::Reply::Acquire(
            Ok(told),
        )))),
    );
    gate.run(10_000);
    assert_eq!(gate.read("t"), Some(TicketView::Ended(EndHow::TakenBack)));
    gate.hold("full again", 900_000);
    gate.park("t", 100);
    assert_eq!(place(&mut gate, "t").age.millis(), gate.now - enqueued);
    gate.run(10_000);
    assert_eq!(
        gate.decisions().last().unwrap(),
        &("t".to_owned(), Outcome::Bypass(BypassReason::Aged))
    );
}

/// TIC2, TIC3: the immediate bypass of a clock that is used up tells the whole time too.
#[test]
fn tic3_a_clock_that_is_used_up_tells_its_time() {
    let (mut gate, _) = one_waits();
    gate.gone("t");
    gate.run(31_000);
    let told = answer(&gate.ask("t", 100));
    assert_eq!(told.outcome, Outcome::Bypass(BypassReason::Aged));
    assert_eq!(told.waited, Span::from_secs(31));
}

/// TIC1, TIC2: a call that ends with its turn is told what that turn decided, as open calls are:
/// cancelled in the same turn is `cancelled`, not that the ticket was used before.
#[test]
fn tic2_cancelled_in_the_turn_of_the_acquire() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    let told = gate.tell_all(vec![
        Command::Acquire(brief("t", 100)),
        Command::Cancel(ticket("t")),
        Command::Acquire(brief("t", 100)),
    ]);
    assert_eq!(cancelled(&told[0].1), CancelReason::Cancelled);
    assert_eq!(told[0].0, told[1].0, "the number of the cancel");
    assert_eq!(cancelled(&told[2].1), CancelReason::TicketFinished);
}
