//! Closes from the request to their end: CLO1 to CLO3, CLO8, CLO9, and what a restart makes of them.

use std::collections::BTreeMap;

use kvgate_core::close::{CloseIntent, CloseMode, CloseReason, CloseStage, TargetState};
use kvgate_core::command::{Acquire, CloseRequest, Command};
use kvgate_core::decision::CancelReason;
use kvgate_core::effect::{CloseReply, Effect, Outcome, Reply, RetryRefused};
use kvgate_core::ids::{EngineId, Label};
use kvgate_core::policy::{CLOSES_OPEN_MAX, Policy};
use kvgate_core::reading::EngineKind;
use kvgate_core::tally::CancelledHow;
use kvgate_core::units::Span;
use kvgate_core::view::Notice;

use crate::common::*;

/// Closes on, engines `a` and `b`.
fn two() -> Gate {
    two_with(closes_on())
}

fn two_with(policy: Policy) -> Gate {
    let mut gate = Gate::with(policy);
    gate.engines.insert("b", Engine::of(1_000_000));
    gate.round();
    gate
}

fn of(session_name: &str, name: &str, reservation: u64) -> Acquire {
    Acquire {
        session: session(session_name),
        ..acquire(name, reservation)
    }
}

fn named(name: &str, request_id: &str) -> Acquire {
    Acquire {
        request_id: Some(Label::new(request_id).unwrap()),
        ..acquire(name, 10)
    }
}

fn close_of(name: &str) -> Command {
    Command::Close(CloseRequest {
        session: session(name),
        mode: CloseMode::Join,
        reason: None,
    })
}

fn ended(close: &CloseIntent) -> BTreeMap<&'static str, u32> {
    let words = [
        ("delivered", TargetState::Delivered),
        ("refused", TargetState::Refused),
        ("unsupported", TargetState::Unsupported),
        ("restarted", TargetState::Restarted),
        ("superseded", TargetState::Superseded),
        ("failed", TargetState::Failed),
        ("gone", TargetState::Gone),
    ];
    words
        .into_iter()
        .map(|(word, state)| (word, close.count(state)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

fn reopened(gate: &Gate) -> Option<(u64, String, String)> {
    gate.view()
        .notices
        .into_iter()
        .find_map(|notice| match notice {
            Notice::SessionReopened {
                count,
                session,
                ticket,
                ..
            } => Some((
                count,
                session.as_str().to_owned(),
                ticket.as_str().to_owned(),
            )),
            _ => None,
        })
}

// ---- CLO1 ------------------------------------------------------------------------------------

/// CLO1, CLO4: closes work with admission off and for ids never seen before; each engine is asked.
#[test]
fn clo1_a_close_needs_neither_admission_nor_an_earlier_use() {
    let mut gate = two();
    gate.configure(|policy| policy.program_admission = false);
    let close = gate.close("never seen");
    assert_eq!(
        gate.sent(),
        ["close never seen at a", "close never seen at b"]
    );
    assert_eq!(close.stage, CloseStage::Joining { ready_since: None });
    assert!(gate.read_session("never seen").is_some());
    gate.closes_are_stored();
}

/// CLO1: with the feature off nothing is kept and nothing is sent.
#[test]
fn clo1_with_the_feature_off_nothing_happens() {
    let mut gate = Gate::new();
    let seq = gate.view().seq;
    assert_eq!(
        gate.try_close("s", CloseMode::Abort),
        (None, CloseReply::Disabled)
    );
    assert_eq!(gate.view().seq, seq);
    assert_eq!(gate.view().tally.closes, 0);
    assert!(gate.sent().is_empty() && gate.read_session("s").is_none());
}

/// CLO1: admission is the same with the feature on or off.
#[test]
fn clo1_closes_leave_admission_alone() {
    let mut gate = two();
    let lease = gate.hold("t", 100);
    gate.close("s");
    assert_eq!(gate.reserved(), 100);
    assert!(
        gate.renew(lease).is_ok(),
        "a closing session keeps its leases"
    );
}

// ---- CLO2 ------------------------------------------------------------------------------------

/// CLO2, DUR1: the intent is a record of the turn that answers; a failed commit leaves none.
#[test]
fn clo2_a_close_is_a_record_before_its_answer() {
    let mut gate = two();
    let commits = gate.store.commits();
    let (seq, reply) = gate.try_close("s", CloseMode::Join);
    assert!(seq.is_some() && matches!(reply, CloseReply::Taken(_)));
    assert_eq!(gate.store.commits(), commits + 1);
    gate.closes_are_stored();

    gate.fail(vec![close_of("another")]);
    gate.calls.clear();
    gate.start();
    gate.round();
    assert!(gate.read_session("another").is_none());
    assert_eq!(gate.view().tally.closes, 1);
    assert_eq!(gate.sent(), ["close s at a", "close s at b"], "sent again");
}

/// CLO2: a second close joins the running one, and only a done one is followed by a new one.
#[test]
fn clo2_a_second_close_joins_the_running_one() {
    let mut gate = two();
    gate.hold("t", 10);
    let first = gate.close("s");
    let (seq, reply) = gate.try_close("s", CloseMode::Join);
    assert_eq!((seq, reply), (None, CloseReply::Taken(first.clone())));
    assert_eq!(gate.view().tally.closes, 1);

    let (seq, reply) = gate.try_close("s", CloseMode::Abort);
    let CloseReply::Taken(upgraded) = reply else {
        panic!("{reply:?}");
    };
    assert!(seq.is_some(), "an upgrade is a change");
    assert_eq!((upgraded.id, upgraded.mode), (first.id, CloseMode::Abort));
    let (seq, reply) = gate.try_close("s", CloseMode::Join);
    assert_eq!(
        (seq, reply),
        (None, CloseReply::Taken(upgraded)),
        "abort stays"
    );

    gate.cancel("t");
    gate.answer_calls(|_| status_of(200));
    assert!(gate.read_close(first.id).is_done());
    let next = gate.close("s");
    assert!(next.id.number > first.id.number, "a later generation");
    assert_eq!(gate.view().tally.closes, 2);
}

/// CLO2: with no known member it waits for one, and ends as a failure at its deadline.
#[test]
fn clo2_without_a_member_it_waits_until_its_deadline() {
    let mut gate = Gate::unread(closes_on());
    gate.router = Router::Empty;
    gate.round();
    let close = gate.close("s");
    let read = gate.read_close(close.id);
    assert!(matches!(
        read.stage,
        CloseStage::Joining {
            ready_since: Some(_)
        }
    ));
    gate.serve_until(gate.now + 119_999, |_| None);
    assert!(!gate.read_close(close.id).is_done());
    gate.serve_until(gate.now + 1, |_| None);
    let done = gate.read_close(close.id);
    assert!(done.is_done() && done.has_failed(), "{done:?}");
    let view = gate.view();
    assert_eq!((view.tally.closes, view.tally.close_failures), (1, 1));
    assert_eq!((view.closes_pending, view.closes_failed), (0, 1));
    // A later use of the session does not make it a success.
    gate.ask("t", 10);
    assert_eq!(gate.view().closes_failed, 1);
}

/// CLO2: a member that comes in time is asked.
#[test]
fn clo2_a_first_member_is_asked_when_it_comes() {
    let mut gate = Gate::unread(closes_on());
    gate.router = Router::Empty;
    gate.round();
    let close = gate.close("s");
    gate.serve_until(gate.now + 60_000, |_| None);
    gate.restart(60_000);
    assert!(
        !gate.read_close(close.id).is_done(),
        "a start leaves it a while"
    );
    gate.router = Router::Lists;
    gate.engines.insert("a", Engine::of(1_000));
    gate.round();
    assert_eq!(gate.sent(), ["close s at a"]);
}

/// CLO2: one that waits for a member and becomes needless is no failure.
#[test]
fn clo2_needless_without_a_member_is_no_failure() {
    let mut gate = Gate::unread(closes_on());
    gate.router = Router::Empty;
    gate.round();
    let close = gate.close("s");
    gate.ask("t", 10);
    let done = gate.read_close(close.id);
    assert!(done.is_done() && !done.has_failed());
    assert_eq!(gate.view().tally.close_failures, 0);
}

/// Section 9: open intents have a bound, and at the bound nothing spins.
#[test]
fn clo2_open_intents_have_a_bound() {
    let mut gate = Gate::unread(Policy {
        session_idle_close: Some(Span::from_secs(1)),
        close_deadline: Span::from_secs(100_000),
        ..closes_on()
    });
    gate.router = Router::Empty;
    gate.round();
    gate.ask("t", 10);
    let all = (0..CLOSES_OPEN_MAX).map(|number| close_of(&format!("c{number}")));
    gate.turn(all.collect());
    gate.run(60_000);
    assert_eq!(gate.view().closes_pending, CLOSES_OPEN_MAX as u64);
    assert_eq!(
        gate.try_close("s", CloseMode::Join),
        (None, CloseReply::Full)
    );
    assert!(matches!(
        gate.try_close("c7", CloseMode::Join).1,
        CloseReply::Taken(_)
    ));
    // The idle session waits for room; nothing is due because of it.
    let next = gate.machine().next_deadline();
    assert!(next.is_none_or(|next| next.millis() > gate.now), "{next:?}");
}

// ---- CLO3 ------------------------------------------------------------------------------------

/// CLO3, CNT1: waiting tickets of the session are withdrawn, each as a change of its own.
#[test]
fn clo3_waiting_tickets_are_withdrawn() {
    let mut gate = two();
    gate.hold_as(of("other", "big", 1_800_000));
    gate.park("w1", 10);
    gate.park("w2", 10);
    assert_eq!(gate.ask_as(of("other", "w3", 10)), Told::Parked);
    let before = gate.seqs.len();
    gate.close("s");
    let told: Vec<_> = gate.decisions();
    let closed = Outcome::Cancelled(CancelReason::SessionClosed);
    assert_eq!(
        told,
        [("w1".to_owned(), closed.clone()), ("w2".to_owned(), closed)]
    );
    let numbers: std::collections::BTreeSet<_> = gate.seqs[before..].iter().collect();
    assert_eq!(numbers.len(), 3, "two waiters and the close");
    let scope = &gate.view().tally.scopes[0];
    assert_eq!(scope.cancels(CancelledHow::SessionClosed), 2);
    assert_eq!(gate.waiting(), 1);
    // Asked again they say so, and that is no new use of the session.
    let again = gate.ask("w1", 10);
    assert_eq!(cancelled(&again), CancelReason::SessionClosed);
    assert!(!answer(&again).session_reopened);
    gate.restart(1_000);
    assert_eq!(cancelled(&gate.ask("w2", 10)), CancelReason::SessionClosed);
}

/// CLO3: nothing goes out before the last lease has ended, however it ends.
#[test]
fn clo3_the_close_waits_for_the_last_lease() {
    let mut gate = two();
    let released = gate.hold("released", 10);
    let revoked = gate.hold("revoked", 10);
    gate.hold("cancelled", 10);
    gate.hold_as(Acquire {
        ttl: Span::from_secs(5),
        ..acquire("expired", 10)
    });
    let unclaimed = admitted(&gate.ask("unclaimed", 10));
    gate.undeliver("unclaimed", Some(unclaimed));
    let close = gate.close("s");
    gate.release(released).unwrap();
    gate.revoke(revoked).unwrap();
    gate.cancel("cancelled");
    gate.run(9_500);
    assert!(gate.sent().is_empty());
    assert_eq!(gate.view().closes_pending, 1);
    gate.run(1_000);
    assert_eq!(gate.sent(), ["close s at a", "close s at b"]);
    let read = gate.read_close(close.id);
    assert!(matches!(
        read.stage,
        CloseStage::Delivering { early: false, .. }
    ));
}

/// CLO3: leases of other sessions hold nothing up.
#[test]
fn clo3_other_sessions_hold_nothing_up() {
    let mut gate = two();
    gate.hold_as(of("other", "t", 10));
    gate.close("s");
    assert_eq!(gate.sent().len(), 2);
}

/// CLO3, DEC3: orders within one turn.
#[test]
fn clo3_orders_within_one_turn() {
    let mut gate = two();
    // Acquire, close: the lease is joined.
    let told = gate.tell_all(vec![Command::Acquire(acquire("t1", 10)), close_of("s")]);
    let lease = admitted(&told[0].1);
    assert!(gate.sent().is_empty());
    // Release and close of another in one turn.
    gate.tell_all(vec![Command::Release(lease), close_of("other")]);
    assert_eq!(
        gate.sent(),
        [
            "close s at a",
            "close other at a",
            "close s at b",
            "close other at b"
        ]
    );
    // Close, acquire: the close never goes out.
    let told = gate.tell_all(vec![close_of("x"), Command::Acquire(of("x", "t2", 10))]);
    assert!(answer(&told[1].1).session_reopened);
    assert!(gate.sent().is_empty());
    // Close, acquire, close: the first is superseded, the second joins.
    let told = gate.tell_all(vec![
        close_of("y"),
        Command::Acquire(of("y", "t3", 10)),
        close_of("y"),
    ]);
    let lease = admitted(&told[1].1);
    assert!(gate.sent().is_empty());
    gate.release(lease).unwrap();
    assert_eq!(gate.sent(), ["close y at a", "close y at b"]);
    gate.closes_are_stored();
}

/// CLO3: with `abort` each held lease that named a request is aborted on every engine.
#[test]
fn clo3_abort_ends_the_requests_of_held_leases() {
    let mut gate = two();
    let first = gate.hold_as(named("t1", "rid-1"));
    let second = gate.hold_as(named("t2", "rid-2"));
    let third = gate.hold("t3", 10);
    let ended_before = gate.hold_as(named("t4", "rid-4"));
    gate.release(ended_before).unwrap();
    gate.abort("s");
    assert_eq!(
        gate.sent(),
        [
            "abort rid-1 at a",
            "abort rid-2 at a",
            "abort rid-1 at b",
            "abort rid-2 at b"
        ]
    );
    for lease in [first, second, third] {
        assert!(gate.sent().is_empty(), "then it joins");
        gate.release(lease).unwrap();
    }
    assert_eq!(gate.sent(), ["close s at a", "close s at b"]);
}

/// CLO3: an engine that has no session close may abort all the same; vLLM and gRPC may not.
#[test]
fn clo3_aborts_go_to_engines_without_session_close_too() {
    let mut gate = Gate::with(closes_on());
    gate.engines.insert("v", Engine::of(1_000));
    gate.engine("v").kind = EngineKind::Vllm;
    gate.static_engines.insert(EngineId::new("grpc://g:1"));
    gate.restart(1_000);
    for name in ["x", "y", "z"] {
        gate.close(name);
        gate.answer_calls(|_| status_of(404));
    }
    gate.hold_as(named("t1", "rid-1"));
    gate.abort("s");
    assert_eq!(gate.sent(), ["abort rid-1 at a"]);
}

/// CLO3: an upgrade aborts what a join left alone.
#[test]
fn clo3_an_upgrade_to_abort_aborts() {
    let mut gate = two();
    gate.hold_as(named("t1", "rid-1"));
    gate.close("s");
    assert!(gate.sent().is_empty());
    gate.abort("s");
    assert_eq!(gate.sent(), ["abort rid-1 at a", "abort rid-1 at b"]);
    gate.abort("s");
    assert!(gate.sent().is_empty(), "once");
}

/// CLO3: engines match by prefix; one that begins the request of another session is spared and shown.
#[test]
fn clo3_a_prefix_of_another_sessions_request_is_spared() {
    let mut gate = two();
    gate.hold_as(named("t1", "rid-1"));
    let own = gate.hold_as(named("t2", "rid-11"));
    gate.hold_as(named("t3", "same"));
    let foreign = Acquire {
        session: session("other"),
        ..named("t4", "rid-12")
    };
    gate.hold_as(foreign);
    let same = Acquire {
        session: session("other"),
        ..named("t5", "same")
    };
    let same = gate.hold_as(same);
    let close = gate.abort("s");
    assert_eq!(gate.sent(), ["abort rid-11 at a", "abort rid-11 at b"]);
    let spared: Vec<&str> = close.not_aborted.iter().map(Label::as_str).collect();
    assert_eq!(spared, ["rid-1", "same"]);
    gate.closes_are_stored();
    gate.release(own).unwrap();
    gate.release(same).unwrap();
    gate.cancel("t1");
    assert!(gate.sent().is_empty());
    gate.cancel("t3");
    assert_eq!(gate.sent().len(), 2, "joined");
}

/// CLO3: what is spared is judged when the call goes out; an abort of a lease that ended is not sent.
#[test]
fn clo3_an_abort_that_waits_is_judged_again() {
    let mut gate = Gate::with(closes_on());
    gate.hold_as(named("t1", "rid-1"));
    gate.hold_as(named("t2", "rid-2"));
    let close = gate.abort("s");
    gate.answer_calls(|_| status_of(503));
    let foreign = Acquire {
        session: session("other"),
        ..named("t3", "rid-1-and-more")
    };
    gate.hold_as(foreign);
    gate.cancel("t2");
    gate.run(20_000);
    assert!(gate.sent().is_empty());
    let read = gate.read_close(close.id);
    assert!(read.not_aborted.contains(&Label::new("rid-1").unwrap()));
    gate.closes_are_stored();
}

/// CLO3, CLO6: aborts are repeated like closes, and given up without effect on the intent.
#[test]
fn clo3_aborts_are_repeated_and_given_up() {
    let mut gate = Gate::with(closes_on());
    gate.hold_as(named("t1", "rid-1"));
    let close = gate.abort("s");
    let log = gate.serve_until(gate.now + 110_000, |_| status_of(500));
    assert_eq!(log.len(), 8, "{log:?}");
    assert!(!gate.read_close(close.id).is_done());
    gate.cancel("t1");
    gate.answer_calls(|_| status_of(200));
    assert!(gate.read_close(close.id).is_done());
    assert_eq!(gate.view().tally.close_failures, 0);
}

/// CLO3: a start asks for aborts again, since nobody knows whether they arrived.
#[test]
fn clo3_a_start_aborts_again() {
    let mut gate = Gate::with(closes_on());
    gate.hold_as(named("t1", "rid-1"));
    gate.abort("s");
    gate.answer_calls(|_| status_of(200));
    gate.restart(1_000);
    assert_eq!(gate.sent(), ["abort rid-1 at a"]);
}

// ---- CLO3: the join time-out -----------------------------------------------------------------

fn with_join_timeout() -> Gate {
    two_with(Policy {
        join_timeout: Some(Span::from_secs(5)),
        ..closes_on()
    })
}

/// CLO3, CLO9: one delivery at the join time-out, one more after the last lease; counted once.
#[test]
fn clo3_one_delivery_at_the_time_out_and_one_after_the_last_lease() {
    let mut gate = with_join_timeout();
    let lease = gate.hold("t", 10);
    let close = gate.close("s");
    gate.run(4_500);
    assert!(gate.sent().is_empty());
    gate.run(500);
    let early = gate.read_close(close.id);
    assert!(matches!(
        early.stage,
        CloseStage::Delivering { early: true, .. }
    ));
    assert_eq!(gate.calls.len(), 2);
    gate.answer_calls(|_| status_of(400));
    let joining = gate.read_close(close.id);
    assert_eq!(joining.stage, CloseStage::Joining { ready_since: None });
    gate.run(20_000);
    assert!(gate.sent().is_empty(), "once only");
    gate.closes_are_stored();
    gate.release(lease).unwrap();
    assert_eq!(gate.calls.len(), 2);
    gate.answer_calls(|_| status_of(200));
    let done = gate.read_close(close.id);
    assert_eq!(ended(&done), BTreeMap::from([("delivered", 2)]));
    let tally = gate.view().tally;
    assert_eq!(tally.delivered(TargetState::Delivered), 2);
    assert_eq!(tally.delivered(TargetState::Refused), 0);
    assert_eq!(tally.close_failures, 0);
}

/// CLO3: the last lease ends while the early delivery is under way: all engines are asked anew, and
/// what comes of the early calls settles nothing.
#[test]
fn clo3_the_last_lease_ends_during_the_early_delivery() {
    let mut gate = with_join_timeout();
    let lease = gate.hold("t", 10);
    let close = gate.close("s");
    gate.run(5_000);
    let early = std::mem::take(&mut gate.calls);
    assert_eq!(early.len(), 2);
    gate.called(vec![(early[0].id, status_of(200).unwrap())]);
    gate.release(lease).unwrap();
    let late = gate.calls.clone();
    assert_eq!(late.len(), 2, "both anew");
    gate.called(vec![(early[1].id, status_of(200).unwrap())]);
    assert_eq!(gate.target(close.id, "b"), Some(TargetState::Pending));
    gate.answer_calls(|_| status_of(200));
    assert!(gate.read_close(close.id).is_done());
    assert_eq!(gate.view().tally.delivered(TargetState::Delivered), 2);
}

/// CLO3, CLO9: reopened after the early delivery: what was delivered then is all, and is counted.
#[test]
fn clo3_reopened_after_the_early_delivery() {
    let mut gate = with_join_timeout();
    gate.hold("t", 10);
    let close = gate.close("s");
    gate.run(5_000);
    gate.answer_calls(|_| status_of(200));
    gate.hold("t2", 10);
    let done = gate.read_close(close.id);
    assert_eq!(ended(&done), BTreeMap::from([("delivered", 2)]));
    assert_eq!(gate.view().tally.delivered(TargetState::Delivered), 2);
}

/// CLO3, CLO8, CLO9: reopened in the middle of the early delivery.
#[test]
fn clo3_reopened_during_the_early_delivery() {
    let mut gate = with_join_timeout();
    gate.hold("t", 10);
    let close = gate.close("s");
    gate.run(5_000);
    let calls = std::mem::take(&mut gate.calls);
    gate.called(vec![(calls[0].id, status_of(200).unwrap())]);
    gate.hold("t2", 10);
    let done = gate.read_close(close.id);
    let expected = BTreeMap::from([("delivered", 1), ("superseded", 1)]);
    assert_eq!(ended(&done), expected);
    let tally = gate.view().tally;
    assert_eq!(tally.delivered(TargetState::Delivered), 1);
    assert_eq!(tally.delivered(TargetState::Superseded), 1);
}

/// CLO3, CLO6: an early delivery that takes too long ends, and the join goes on.
#[test]
fn clo3_an_early_delivery_has_its_deadline_too() {
    let mut gate = with_join_timeout();
    gate.hold("t", 10);
    let close = gate.close("s");
    gate.run(5_000);
    gate.calls.clear();
    for _ in 0..12 {
        assert!(!gate.read_close(close.id).is_done());
        gate.run(10_000);
    }
    let read = gate.read_close(close.id);
    assert_eq!(read.stage, CloseStage::Joining { ready_since: None });
    assert_eq!(gate.view().tally.close_failures, 0);
    gate.cancel("t");
    gate.answer_calls(|_| status_of(200));
    assert!(!gate.read_close(close.id).has_failed());
}

/// CLO3: a time-out that is set while the close waits already counts from the request.
#[test]
fn clo3_a_time_out_that_is_set_later_counts() {
    let mut gate = two();
    gate.hold("t", 10);
    gate.close("s");
    gate.run(20_000);
    assert!(gate.sent().is_empty());
    gate.policy.join_timeout = Some(Span::from_secs(10));
    gate.restart(0);
    assert_eq!(gate.sent(), ["close s at a", "close s at b"]);
}

// ---- CLO8 ------------------------------------------------------------------------------------

/// CLO8: a newer acquire supersedes what is pending; what was delivered stays so.
#[test]
fn clo8_a_newer_acquire_supersedes_what_is_pending() {
    let mut gate = two();
    let close = gate.close("s");
    gate.answer_calls(|call| {
        if call.engine == engine("a") {
            status_of(200)
        } else {
            status_of(503)
        }
    });
    assert!(answer(&gate.ask("t", 10)).session_reopened);
    let done = gate.read_close(close.id);
    let expected = BTreeMap::from([("delivered", 1), ("superseded", 1)]);
    assert_eq!(ended(&done), expected);
    assert_eq!(done.reopened.unwrap().ticket, ticket("t"));
    assert_eq!(gate.done.len(), 1, "whoever waits for it is told");
    gate.run(130_000);
    assert!(gate.sent().is_empty(), "no late close hits the newer use");
    gate.closes_are_stored();
    let tally = gate.view().tally;
    assert_eq!((tally.close_failures, tally.sessions_reopened), (0, 1));
    assert_eq!(tally.delivered(TargetState::Superseded), 1);
}

/// CLO8: a call on its way cannot be called back; its outcome settles nothing any more.
#[test]
fn clo8_a_call_on_its_way_settles_nothing() {
    let mut gate = two();
    let close = gate.close("s");
    gate.hold("t", 10);
    let calls = std::mem::take(&mut gate.calls);
    let results = calls.iter().map(|call| (call.id, status_of(500).unwrap()));
    assert_eq!(gate.called(results.collect()), None, "nothing changes");
    let done = gate.read_close(close.id);
    assert_eq!(ended(&done), BTreeMap::from([("superseded", 2)]));
    gate.run(30_000);
    assert!(gate.sent().is_empty());
}

/// CLO8, DUR2: the same after a restart in between.
#[test]
fn clo8_a_superseded_close_stays_so_over_a_restart() {
    let mut gate = two();
    gate.close("s");
    gate.answer_calls(|_| status_of(503));
    gate.hold("t", 10);
    gate.restart(2_000);
    gate.cancel("t");
    gate.run(60_000);
    assert!(gate.sent().is_empty());
}

/// CLO8: the answer to the acquire that reopened says so, whatever it is; repeats do not.
#[test]
fn clo8_every_kind_of_answer_says_that_the_session_was_reopened() {
    let mut gate = two();
    let closed = |gate: &mut Gate| {
        gate.close("s");
        gate.answer_calls(|_| status_of(200));
    };
    closed(&mut gate);
    let told = gate.ask("admit", 10);
    assert!(answer(&told).session_reopened);
    assert!(!answer(&gate.ask("admit", 10)).session_reopened, "a repeat");
    assert!(
        !answer(&gate.ask("second", 10)).session_reopened,
        "used already"
    );
    gate.cancel("admit");
    gate.cancel("second");

    closed(&mut gate);
    let (seq, told) = gate.tell(Command::Acquire(acquire("oversize", 1_900_000)));
    assert!(answer(&told).session_reopened && seq.is_some());
    assert!(!answer(&gate.ask("oversize", 1_900_000)).session_reopened);

    gate.hold_as(of("other", "big", 1_800_000));
    closed(&mut gate);
    let passing = Acquire {
        stays: false,
        ..acquire("passes", 10)
    };
    assert!(answer(&gate.ask_as(passing.clone())).session_reopened);
    assert!(!answer(&gate.ask_as(passing)).session_reopened);

    closed(&mut gate);
    let effects = gate.turn(vec![Command::Acquire(acquire("parked", 10))]);
    let parked = effects.iter().any(|effect| {
        matches!(
            effect,
            Effect::Parked {
                session_reopened: true,
                ..
            }
        )
    });
    assert!(parked, "{effects:?}");
    let effects = gate.turn(vec![Command::Acquire(acquire("parked", 10))]);
    let again = effects.iter().any(|effect| {
        matches!(
            effect,
            Effect::Parked {
                session_reopened: false,
                ..
            }
        )
    });
    assert!(again, "{effects:?}");
    assert_eq!(gate.view().tally.sessions_reopened, 4);
}

/// CLO8: a call that ends in the turn of its decision still says so.
#[test]
fn clo8_a_passing_call_that_is_decided_in_its_turn_says_so() {
    let mut gate = two();
    let big = gate.hold_as(of("other", "big", 1_800_000));
    gate.close("s");
    gate.answer_calls(|_| status_of(200));
    let passing = Acquire {
        stays: false,
        ..acquire("t", 10)
    };
    let told = gate.tell_all(vec![Command::Acquire(passing), Command::Release(big)]);
    let told = answer(&told[0].1);
    assert!(matches!(told.outcome, Outcome::Admit { .. }) && told.session_reopened);
}

/// CLO8: refused input, markers and repeats of finished tickets use no session.
#[test]
fn clo8_what_decides_nothing_reopens_nothing() {
    let mut gate = two();
    gate.hold("t", 10);
    gate.cancel("t");
    gate.cancel("marked");
    let close = gate.close("s");
    assert!(!answer(&gate.ask("t", 10)).session_reopened);
    assert!(!answer(&gate.ask("marked", 10)).session_reopened);
    refusal(&gate.ask("t", 11));
    gate.read("t");
    assert!(gate.read_close(close.id).reopened.is_none());
}

/// CLO8: with the feature off meanwhile, a newer use supersedes all the same.
#[test]
fn clo8_a_newer_use_counts_with_the_feature_off() {
    let mut gate = two();
    let close = gate.close("s");
    gate.answer_calls(|_| status_of(503));
    gate.configure(|policy| policy.session_lifecycle = false);
    assert!(answer(&gate.ask("t", 10)).session_reopened);
    gate.configure(|policy| policy.session_lifecycle = true);
    gate.run(60_000);
    assert!(gate.sent().is_empty());
    assert!(gate.read_close(close.id).is_done());
}

/// CLO8: the notice appears at the reopening acquire, names it, and goes with the next close.
#[test]
fn clo8_the_notice_names_the_ticket_until_the_session_is_closed_again() {
    let mut gate = two();
    gate.close("s");
    gate.answer_calls(|_| status_of(200));
    assert_eq!(reopened(&gate), None);
    gate.run(60_000);
    gate.hold("late", 10);
    let expected = Some((1, "s".to_owned(), "late".to_owned()));
    assert_eq!(reopened(&gate), expected, "within 60 s");
    gate.hold("later", 10);
    assert_eq!(reopened(&gate), expected);
    gate.restart(1_000);
    assert_eq!(reopened(&gate), expected, "known again after a start");
    gate.close("s");
    assert_eq!(reopened(&gate), None);
}

/// CLO8: after more than 60 s it is no notice, and a notice goes after an hour.
#[test]
fn clo8_the_notice_has_its_times() {
    let mut gate = two();
    gate.close("s");
    gate.answer_calls(|_| status_of(200));
    gate.run(60_500);
    gate.ask("t", 10);
    assert_eq!(reopened(&gate), None);
    assert_eq!(
        gate.view().tally.sessions_reopened,
        1,
        "counted all the same"
    );

    gate.close("x");
    gate.answer_calls(|_| status_of(200));
    gate.ask_as(of("x", "t2", 10));
    gate.unread_for(3_599_500);
    assert!(reopened(&gate).is_some());
    gate.unread_for(1_000);
    assert_eq!(reopened(&gate), None);
}

// ---- CLO9 ------------------------------------------------------------------------------------

/// CLO9: closes and failures count per intent, outcomes per engine; a retry counts no intent again.
#[test]
fn clo9_counts_per_intent_and_per_engine() {
    let mut gate = two();
    let close = gate.close("s");
    gate.answer_calls(|_| status_of(400));
    let tally = gate.view().tally;
    assert_eq!((tally.closes, tally.close_failures), (1, 1));
    assert_eq!(tally.delivered(TargetState::Refused), 2);
    assert_eq!(gate.view().closes_failed, 1);

    assert!(!gate.retry(close.id).unwrap().is_done());
    assert_eq!(
        (gate.view().closes_pending, gate.view().closes_failed),
        (1, 0)
    );
    gate.answer_calls(|call| {
        if call.engine == engine("a") {
            status_of(200)
        } else {
            status_of(400)
        }
    });
    let done = gate.read_close(close.id);
    let expected = BTreeMap::from([("delivered", 1), ("refused", 1)]);
    assert_eq!(ended(&done), expected);
    let tally = gate.view().tally;
    assert_eq!(
        (tally.closes, tally.close_failures),
        (1, 1),
        "once per intent"
    );

    gate.retry(close.id).unwrap();
    assert_eq!(gate.sent(), ["close s at b"], "failed engines only");
    gate.closes_are_stored();
}

/// CLO8, CLO9: a retry is refused when the session was used or closed anew, and of the unknown.
#[test]
fn clo9_a_retry_never_hits_a_newer_use() {
    let mut gate = two();
    let close = gate.close("s");
    gate.answer_calls(|_| status_of(400));
    gate.hold("t", 10);
    assert_eq!(gate.retry(close.id), Err(RetryRefused::Superseded));
    gate.cancel("t");
    let newer = gate.close("s");
    assert_eq!(gate.retry(close.id), Err(RetryRefused::Superseded));
    gate.answer_calls(|_| status_of(400));
    gate.configure(|policy| policy.session_lifecycle = false);
    assert_eq!(gate.retry(newer.id), Err(RetryRefused::Disabled));
    let unknown = kvgate_core::ids::CloseId {
        salt: 1,
        ..newer.id
    };
    assert_eq!(gate.retry(unknown), Err(RetryRefused::NotFound));
}

/// CLO9: a retry of what is still joining or has nothing failed changes nothing.
#[test]
fn clo9_a_retry_with_nothing_failed_changes_nothing() {
    let mut gate = two();
    let lease = gate.hold("t", 10);
    let close = gate.close("s");
    let (seq, _) = gate.tell(Command::RetryClose(close.id));
    assert_eq!(seq, None);
    gate.release(lease).unwrap();
    gate.answer_calls(|_| status_of(200));
    let (seq, told) = gate.tell(Command::RetryClose(close.id));
    assert_eq!(seq, None);
    let Told::Reply(Reply::RetryClose(Ok(done))) = told else {
        panic!("{told:?}");
    };
    assert!(done.is_done() && gate.sent().is_empty());
}

/// CLO2, CLO9: one that never found an engine asks those that are there at its retry.
#[test]
fn clo9_a_retry_of_one_that_found_no_engine() {
    let mut gate = Gate::unread(closes_on());
    gate.router = Router::Empty;
    gate.round();
    let close = gate.close("s");
    gate.serve_until(gate.now + 121_000, |_| None);
    assert!(gate.read_close(close.id).has_failed());
    let waits = gate.retry(close.id).unwrap();
    assert_eq!(waits.stage, CloseStage::Joining { ready_since: None });
    gate.router = Router::Lists;
    gate.engines.insert("a", Engine::of(1_000));
    gate.round();
    assert_eq!(gate.calls.len(), 1);
    gate.answer_calls(|_| status_of(200));
    let done = gate.read_close(close.id);
    assert!(done.is_done() && !done.has_failed());
    assert_eq!(
        gate.view().tally.close_failures,
        1,
        "the failure stays counted"
    );
}

/// CLO2: what a caller says of the end is kept.
#[test]
fn clo2_the_reason_is_kept() {
    let mut gate = two();
    gate.tell(Command::Close(CloseRequest {
        session: session("s"),
        mode: CloseMode::Join,
        reason: Some(CloseReason::Dropped),
    }));
    let stored = gate.store.image().closes;
    assert_eq!(stored[0].reason, Some(CloseReason::Dropped));
}
