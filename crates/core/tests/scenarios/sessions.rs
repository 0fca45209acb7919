//! The book of sessions: CLO1, CLO11, its bounds, and what readers see of sessions and closes.

use kvgate_core::close::{CloseReason, TargetState};
use kvgate_core::command::{Acquire, Command, Slice};
use kvgate_core::effect::{Page, Reply, SessionView};
use kvgate_core::ids::{CloseNo, SessionNo};
use kvgate_core::policy::{Policy, SESSIONS_FOR, SESSIONS_MAX};
use kvgate_core::units::{Span, Timestamp};

use crate::common::*;

const LIMIT: u64 = 300_000;

fn idle_close() -> Policy {
    Policy {
        session_idle_close: Some(Span::from_millis(LIMIT)),
        ..closes_on()
    }
}

fn of(session_name: &str, name: &str, reservation: u64) -> Acquire {
    Acquire {
        session: session(session_name),
        ..acquire(name, reservation)
    }
}

fn list(gate: &mut Gate, from: u64, rows: usize) -> Page<SessionView> {
    let slice = Slice {
        from: SessionNo(from),
        rows,
    };
    match gate.tell(Command::ListSessions(slice)).1 {
        Told::Reply(Reply::Sessions(page)) => page,
        other => panic!("not sessions: {other:?}"),
    }
}

// ---- CLO1 ------------------------------------------------------------------------------------

/// CLO1: a session exists from its first acquire, whatever that was told, or its first close.
#[test]
fn clo1_a_session_exists_from_its_first_acquire_or_close() {
    let mut gate = Gate::with(closes_on());
    assert_eq!(gate.read_session("held"), None);
    gate.hold_as(of("held", "t1", 600_000));
    gate.ask_as(of("waits", "t2", 400_000));
    gate.ask_as(of("bypassed", "t3", 2_000_000));
    gate.close("closed");
    let held = gate.read_session("held").unwrap();
    assert_eq!(held.leases.len(), 1);
    assert_eq!(held.last_use, Some(Timestamp::from_millis(gate.now)));
    assert_eq!(gate.read_session("waits").unwrap().waiting.len(), 1);
    let bypassed = gate.read_session("bypassed").unwrap();
    assert!(bypassed.leases.is_empty() && bypassed.last_use.is_some());
    let closed = gate.read_session("closed").unwrap();
    assert_eq!((closed.closes.len(), closed.last_use), (1, None));
}

/// CLO1: the last use is the last acquire or the end of the last lease.
#[test]
fn clo1_the_last_use_is_an_acquire_or_the_end_of_a_lease() {
    let mut gate = Gate::with(closes_on());
    let lease = gate.hold("t", 10);
    let granted = gate.now;
    gate.run(10_000);
    gate.renew(lease).unwrap();
    let at = |gate: &mut Gate| gate.read_session("s").unwrap().last_use.unwrap().millis();
    assert_eq!(at(&mut gate), granted);
    gate.release(lease).unwrap();
    assert_eq!(at(&mut gate), granted + 10_000);
    gate.run(10_000);
    gate.ask("t", 10);
    assert_eq!(at(&mut gate), granted + 10_000, "a repeat is no use");
}

/// CLO1: many leases and waiters of one session, in the order of the line.
#[test]
fn clo1_a_session_shows_its_leases_and_waiters_in_order() {
    let mut gate = Gate::with(closes_on());
    for name in ["a", "b", "c"] {
        gate.hold(name, 300_000);
    }
    for name in ["w1", "w2", "w3"] {
        gate.park(name, 10);
    }
    gate.cancel("b");
    gate.cancel("w2");
    let view = gate.read_session("s").unwrap();
    let leases: Vec<&str> = view
        .leases
        .iter()
        .map(|lease| lease.ticket.as_str())
        .collect();
    let waiting: Vec<&str> = view.waiting.iter().map(|row| row.ticket.as_str()).collect();
    assert_eq!(leases, ["a", "c", "w1", "w3"]);
    assert!(waiting.is_empty());
}

// ---- CLO11 -----------------------------------------------------------------------------------

/// CLO11: off by default: retained sessions are never closed.
#[test]
fn clo11_by_default_no_session_is_closed() {
    let mut gate = Gate::with(closes_on());
    gate.hold("t", 10);
    gate.cancel("t");
    gate.unread_for(3_500_000);
    assert_eq!(gate.view().tally.closes, 0);
    assert!(
        gate.store.image().sessions.is_empty(),
        "and nothing is kept for it"
    );
}

/// CLO11: a session is idle since its last use, and closed at the limit, once.
#[test]
fn clo11_an_idle_session_is_closed_once() {
    let mut gate = Gate::with(idle_close());
    let lease = gate.hold("t", 10);
    gate.run(LIMIT + 10_000);
    assert_eq!(gate.view().tally.closes, 0, "a lease is a use");
    gate.release(lease).unwrap();
    gate.run(LIMIT - 1_000);
    assert!(gate.sent().is_empty());
    gate.run(1_000);
    assert_eq!(gate.sent(), ["close s at a"]);
    let session = gate.read_session("s").unwrap();
    assert_eq!(session.closes[0].reason, Some(CloseReason::Idle));
    gate.run(2 * LIMIT);
    assert_eq!(gate.view().tally.closes, 1);
    // Used anew it can become idle anew.
    assert!(answer(&gate.ask("t2", 10)).session_reopened);
    gate.cancel("t2");
    gate.run(LIMIT + 1_000);
    assert_eq!(gate.view().tally.closes, 2);
}

/// CLO11: waiting is a use, and so is an acquire that was told to bypass.
#[test]
fn clo11_what_counts_as_a_use() {
    let mut gate = Gate::with(Policy {
        session_idle_close: Some(Span::from_secs(5)),
        max_wait: Span::from_secs(60),
        ..closes_on()
    });
    gate.hold_as(of("big", "big", 900_000));
    gate.park("w", 10);
    gate.run(20_000);
    assert_eq!(gate.view().tally.closes, 0);
    gate.cancel("w");
    gate.run(4_000);
    assert_eq!(
        bypassed(&gate.ask("t", 2_000_000)),
        kvgate_core::decision::BypassReason::Oversize
    );
    gate.run(4_500);
    assert_eq!(gate.view().tally.closes, 0);
    gate.run(1_000);
    assert_eq!(gate.view().tally.closes, 1);
}

/// CLO11: sessions that were closed, or were only closed, are not idle.
#[test]
fn clo11_a_closed_session_is_not_idle() {
    let mut gate = Gate::with(idle_close());
    gate.hold("t", 10);
    gate.cancel("t");
    gate.close("s");
    gate.close("only closed");
    gate.answer_calls(|_| status_of(200));
    gate.run(LIMIT + 10_000);
    assert_eq!(gate.view().tally.closes, 2);
    gate.restart(1_000);
    gate.run(LIMIT + 10_000);
    assert_eq!(gate.view().tally.closes, 2);
}

/// CLO11: it is not closed again when its close is forgotten before its last use is.
#[test]
fn clo11_a_session_whose_close_is_forgotten_is_over() {
    let mut gate = Gate::with(Policy {
        session_idle_close: Some(Span::from_secs(4 * 3_600)),
        ..closes_on()
    });
    gate.hold("t", 10);
    gate.cancel("t");
    gate.run(2_000);
    gate.close("s");
    gate.answer_calls(|_| status_of(200));
    gate.unread_for(3_610_000);
    assert_eq!(gate.read_session("s"), None);
    gate.run(2_000);
    assert!(gate.store.image().sessions.is_empty());
}

/// CLO11, DUR2: a restart knows last uses, closes no session too early, and none twice.
#[test]
fn clo11_last_uses_outlive_a_restart() {
    let mut gate = Gate::with(idle_close());
    gate.hold("t1", 10);
    gate.cancel("t1");
    gate.run(2_000);
    assert_eq!(gate.store.image().sessions.len(), 1);
    // A use within the minute is not written; a start reckons with it.
    gate.run(50_000);
    gate.hold("t2", 10);
    gate.cancel("t2");
    let used = gate.now;
    gate.run(2_000);
    let stored = gate.store.image().sessions[0].1.millis();
    assert!(stored < used, "at most once a minute");
    gate.crash(1_000);
    gate.round();
    for _ in 0..3 {
        gate.run(20_000);
        gate.crash(1_000);
        gate.round();
    }
    gate.run(used + LIMIT - gate.now - 1_000);
    assert_eq!(gate.view().tally.closes, 0, "not too early");
    gate.run(62_000);
    assert_eq!(gate.view().tally.closes, 1, "restarts do not put it off");
}

/// CLO11, TIM2: time goes on while kvgate is down; the close waits for the first reading.
#[test]
fn clo11_idle_time_goes_on_while_down() {
    let mut gate = Gate::with(idle_close());
    gate.hold("t", 10);
    gate.cancel("t");
    gate.run(2_000);
    gate.crash(2 * LIMIT);
    assert!(gate.sent().is_empty());
    gate.round();
    assert_eq!(gate.sent(), ["close s at a"]);
}

/// CLO11: closes turned off and on at run time turn it off and on with them: what is kept of last uses is
/// forgotten meanwhile. The limit itself is told to a start.
#[test]
fn clo11_turned_off_and_on_with_closes() {
    let mut gate = Gate::with(idle_close());
    gate.hold("t", 10);
    gate.cancel("t");
    gate.run(2_000);
    assert_eq!(gate.store.image().sessions.len(), 1);
    gate.configure(|policy| policy.session_lifecycle = false);
    gate.run(2_000);
    assert!(gate.store.image().sessions.is_empty());
    gate.run(LIMIT);
    assert_eq!(gate.view().tally.closes, 0);
    gate.configure(|policy| policy.session_lifecycle = true);
    assert_eq!(gate.view().tally.closes, 1);
    gate.hold("again", 10);
    gate.cancel("again");
    gate.run(2_000);
    assert_eq!(gate.store.image().sessions.len(), 1);
    gate.policy.session_idle_close = None;
    gate.restart(0);
    gate.run(2_000);
    assert!(gate.store.image().sessions.is_empty());
}

/// CLO11: a session that is forgotten and used again within a second is kept with its new use.
#[test]
fn clo11_a_forgotten_session_that_comes_back_is_kept() {
    let mut gate = Gate::with(Policy {
        session_idle_close: Some(Span::from_secs(4 * 3_600)),
        ..closes_on()
    });
    gate.hold("t", 10);
    gate.cancel("t");
    gate.run(2_000);
    let close = gate.close("s");
    gate.answer_calls(|_| status_of(200));
    while gate.find_close(close.id).is_some() {
        gate.unread_for(500);
    }
    gate.ask("t9", 10);
    gate.cancel("t9");
    gate.run(2_000);
    let stored = gate.store.image().sessions;
    assert_eq!(gate.machine().image().sessions, stored);
    assert_eq!(stored.len(), 1);
}

// ---- section 9 -------------------------------------------------------------------------------

/// Section 9: sessions at rest are remembered for an hour.
#[test]
fn clo1_a_session_at_rest_is_remembered_for_an_hour() {
    let mut gate = Gate::with(closes_on());
    gate.hold("t", 10);
    gate.hold_as(of("held", "t2", 10));
    let lease = kvgate_core::ids::LeaseId {
        issue: kvgate_core::ids::Issue(2),
        salt: gate.salt,
    };
    gate.renew_for(lease, Some(Span::from_secs(24 * 3_600)))
        .unwrap();
    gate.cancel("t");
    gate.unread_for(SESSIONS_FOR.millis() - 1);
    assert!(gate.read_session("s").is_some());
    gate.unread_for(1);
    assert!(gate.read_session("s").is_none());
    assert!(gate.read_session("held").is_some());
}

/// Section 9: and at most 100,000 of them.
#[test]
fn clo1_sessions_at_rest_have_a_bound() {
    let mut gate = Gate::with(Policy {
        program_admission: false,
        ..closes_on()
    });
    let all = (0..=SESSIONS_MAX + 1)
        .map(|number| Command::Acquire(of(&format!("s{number}"), &format!("t{number}"), 10)));
    gate.turn(all.collect());
    gate.turn(Vec::new());
    assert_eq!(gate.read_session("s0"), None);
    assert_eq!(gate.read_session("s1"), None);
    assert!(gate.read_session("s2").is_some());
    let first = list(&mut gate, 0, 2);
    assert_eq!(first.items[0].id, session("s2"));
    assert!(first.more);
}

// ---- lists -----------------------------------------------------------------------------------

/// CLO1: sessions come in pages by first sight; a page with much in it ends early.
#[test]
fn clo1_sessions_come_in_pages() {
    let mut gate = Gate::with(closes_on());
    let acquires = (0..1_500).map(|number| Command::Acquire(of("many", &format!("m{number}"), 1)));
    gate.turn(acquires.collect());
    for name in ["x", "y", "z"] {
        gate.ask_as(of(name, name, 1));
    }
    let page = list(&mut gate, 0, 100);
    assert_eq!(page.items.len(), 1, "a thousand leases are a page");
    assert_eq!(page.items[0].leases.len(), 1_000);
    assert!(page.more);
    let next = list(&mut gate, page.items[0].number.0 + 1, 2);
    let names: Vec<&str> = next.items.iter().map(|view| view.id.as_str()).collect();
    assert_eq!(names, ["x", "y"]);
    assert!(next.more);
    let last = list(&mut gate, next.items[1].number.0 + 1, 2);
    assert_eq!((last.items.len(), last.more), (1, false));
}

/// CLO2: closes come newest first.
#[test]
fn clo2_closes_come_in_pages() {
    let mut gate = Gate::with(closes_on());
    for name in ["x", "y", "z"] {
        gate.close(name);
    }
    gate.answer_calls(|_| status_of(200));
    let list = |gate: &mut Gate, from, rows| {
        let slice = Slice {
            from: CloseNo(from),
            rows,
        };
        match gate.tell(Command::ListCloses(slice)).1 {
            Told::Reply(Reply::Closes(page)) => page,
            other => panic!("not closes: {other:?}"),
        }
    };
    let page = list(&mut gate, u64::MAX, 2);
    let names: Vec<&str> = page
        .items
        .iter()
        .map(|close| close.session.as_str())
        .collect();
    assert_eq!(names, ["z", "y"]);
    assert!(page.more);
    let page = list(&mut gate, page.items[1].id.number.0 - 1, 2);
    assert_eq!((page.items.len(), page.more), (1, false));
    assert_eq!(page.items[0].count(TargetState::Delivered), 1);
}

/// DUR4, ID2: after a failed commit the close is not known, and ids do not repeat.
#[test]
fn dur4_a_close_of_a_failed_commit_is_not_applied_later() {
    let mut gate = Gate::with(closes_on());
    let before = gate.close("x");
    gate.answer_calls(|_| status_of(200));
    let close = Command::Close(kvgate_core::command::CloseRequest {
        session: session("s"),
        mode: kvgate_core::close::CloseMode::Join,
        reason: None,
    });
    let failed = gate.fail_and_leave(vec![close]);
    gate.reload(&failed.untold());
    gate.round();
    assert!(gate.sent().is_empty());
    assert_eq!(gate.view().tally.closes, 1);
    let after = gate.close("s");
    assert!(after.id != before.id && after.id.salt != before.id.salt);
}
