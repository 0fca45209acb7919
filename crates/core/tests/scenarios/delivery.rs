//! The delivery of closes: CLO4 to CLO7, deadlines, engines that are away, and what a start sends again.

use std::collections::BTreeMap;

use kvgate_core::close::{CallFailure, CallResult, CloseMode, CloseStage, TargetState};
use kvgate_core::command::{CloseRequest, Command};
use kvgate_core::effect::{CloseReply, Reply};
use kvgate_core::ids::EngineId;
use kvgate_core::policy::{CLOSES_FOR, Policy};
use kvgate_core::reading::EngineKind;
use kvgate_core::units::Span;
use kvgate_core::view::Notice;

use crate::common::*;

/// Closes on, engine `a`.
fn one() -> Gate {
    Gate::with(closes_on())
}

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

/// A close that comes to `result` at once.
fn closed(gate: &mut Gate, name: &str, result: Option<CallResult>) -> TargetState {
    let close = gate.close(name);
    gate.answer_calls(|_| result.clone());
    let close = gate.read_close(close.id);
    let Some(target) = close.targets.get(&engine("a")) else {
        assert_eq!(close.count(TargetState::Delivered), 1);
        return TargetState::Delivered;
    };
    target.state
}

// ---- CLO4 ------------------------------------------------------------------------------------

/// CLO4: the members of the time when delivery begins, and those known at the request.
#[test]
fn clo4_members_of_the_request_and_of_the_delivery_are_asked() {
    let mut gate = two();
    let lease = gate.hold("t", 10);
    let close = gate.close("s");
    gate.engine("b").listed = false;
    gate.engines.insert("c", Engine::of(1_000));
    gate.round();
    gate.release(lease).unwrap();
    assert_eq!(
        gate.sent(),
        ["close s at a", "close s at b", "close s at c"]
    );
    // What joins later is not asked: it never held the session.
    gate.engines.insert("d", Engine::of(1_000));
    gate.round();
    assert!(gate.sent().is_empty());
    assert_eq!(gate.target(close.id, "d"), None);
}

/// CLO4: after a start delivery begins with the members that the first reading finds.
#[test]
fn clo4_a_start_begins_deliveries_after_its_first_reading() {
    let mut gate = two();
    let lease = gate.hold("t", 10);
    gate.close("s");
    gate.turn(vec![kvgate_core::command::Command::Release(lease)]);
    assert_eq!(gate.sent().len(), 2);
    gate.hold("u", 10);
    gate.cancel("u");
    gate.crash(1_000);
    gate.close("s");
    assert!(gate.sent().is_empty(), "nothing was read yet");
    gate.engines.insert("c", Engine::of(1_000));
    gate.round();
    assert_eq!(
        gate.sent(),
        ["close s at a", "close s at b", "close s at c"]
    );
}

// ---- CLO5 ------------------------------------------------------------------------------------

/// CLO5, CLO6, CLO7: what each status makes of an engine.
#[test]
fn clo5_what_each_answer_means() {
    let table = [
        (200, TargetState::Delivered),
        (202, TargetState::Delivered),
        (204, TargetState::Delivered),
        (301, TargetState::Refused),
        (304, TargetState::Refused),
        (400, TargetState::Refused),
        (401, TargetState::Refused),
        (403, TargetState::Refused),
        (404, TargetState::Refused),
        (405, TargetState::Refused),
        (408, TargetState::Pending),
        (422, TargetState::Refused),
        (425, TargetState::Pending),
        (429, TargetState::Pending),
        (500, TargetState::Pending),
        (501, TargetState::Refused),
        (503, TargetState::Pending),
        (599, TargetState::Pending),
    ];
    for (code, state) in table {
        let mut gate = one();
        assert_eq!(closed(&mut gate, "s", status_of(code)), state, "{code}");
        gate.closes_are_stored();
    }
    let failures = [
        (CallFailure::Timeout, TargetState::Pending),
        (CallFailure::Refused, TargetState::Pending),
        (CallFailure::TooLarge, TargetState::Pending),
        (CallFailure::NotAllowed, TargetState::Failed),
    ];
    for (failure, state) in failures {
        let mut gate = one();
        let result = Some(CallResult::Failed(failure));
        assert_eq!(closed(&mut gate, "s", result), state, "{failure:?}");
    }
}

/// CLO5: the first three answers as of an engine without session close are refusals; then it has
/// none, is not asked, and is tried again after 5 min by a single attempt.
#[test]
fn clo5_an_engine_without_session_close() {
    let mut gate = one();
    for name in ["s1", "s2", "s3"] {
        assert_eq!(
            closed(&mut gate, name, status_of(404)),
            TargetState::Refused
        );
    }
    let fourth = gate.close("s4");
    assert!(gate.sent().is_empty(), "not asked");
    let done = gate.read_close(fourth.id);
    assert_eq!(done.count(TargetState::Unsupported), 1);
    assert!(!done.has_failed());
    gate.closes_are_stored();

    gate.restart(1_000);
    gate.run(298_000);
    gate.close("s5");
    assert!(gate.sent().is_empty(), "kept over a restart");
    gate.run(2_000);
    let trial = gate.close("s6");
    gate.close("s7");
    assert_eq!(gate.calls.len(), 1, "one trial");
    gate.answer_calls(|_| status_of(503));
    assert_eq!(
        gate.target(trial.id, "a"),
        Some(TargetState::Unsupported),
        "a single attempt"
    );
    gate.run(300_500);
    assert_eq!(
        closed(&mut gate, "s8", status_of(404)),
        TargetState::Unsupported
    );
    gate.run(299_000);
    gate.close("s9");
    assert!(gate.sent().is_empty(), "a 404 restarts the 5 min");
    gate.run(1_500);
    assert_eq!(
        closed(&mut gate, "s10", status_of(200)),
        TargetState::Delivered
    );
    assert_eq!(
        closed(&mut gate, "s11", status_of(200)),
        TargetState::Delivered,
        "supported again"
    );
}

/// CLO5: in a row, and of one incarnation.
#[test]
fn clo5_three_in_a_row_of_one_incarnation() {
    let mut gate = one();
    gate.engine("a").mark = Some(1);
    gate.round();
    for code in [404, 405, 200, 501, 404] {
        closed(&mut gate, &format!("s{code}"), status_of(code));
    }
    gate.engine("a").mark = Some(2);
    gate.jump(100);
    gate.round();
    for code in [404, 405] {
        assert_eq!(
            closed(&mut gate, &format!("t{code}"), status_of(code)),
            TargetState::Refused
        );
    }
    gate.close("u");
    assert_eq!(gate.sent().len(), 1, "asked still");
}

/// CLO5: closes that wait when it turns out are not sent.
#[test]
fn clo5_waiting_closes_learn_of_it() {
    let mut gate = one();
    for number in 0..40 {
        gate.close(&format!("s{number}"));
    }
    assert_eq!(gate.calls.len(), 16);
    let log = gate.serve_until(gate.now, |_| status_of(404));
    assert_eq!(log.len(), 16, "those on their way");
    let view = gate.view();
    assert_eq!(view.closes_pending, 0);
    assert_eq!(view.tally.delivered(TargetState::Refused), 3);
    assert_eq!(view.tally.delivered(TargetState::Unsupported), 37);
}

/// CLO5: vLLM and gRPC have no session close; they are never asked, neither to close nor to abort.
#[test]
fn clo5_vllm_and_grpc_are_unsupported() {
    let mut gate = one();
    gate.engines.insert("v", Engine::of(1_000));
    gate.engine("v").kind = EngineKind::Vllm;
    gate.static_engines.insert(EngineId::new("grpc://g:1"));
    gate.restart(1_000);
    let close = gate.close("s");
    assert_eq!(gate.sent(), ["close s at a"]);
    let read = gate.read_close(close.id);
    assert_eq!(read.targets[&engine("v")].state, TargetState::Unsupported);
    let grpc = &read.targets[&EngineId::new("grpc://g:1")];
    assert_eq!(grpc.state, TargetState::Unsupported);
}

/// CLO5: the KV of an old incarnation is gone: what was ready while it still ran is settled.
#[test]
fn clo5_a_new_incarnation_settles_what_the_old_one_held() {
    let mut gate = two();
    gate.engine("a").mark = Some(1);
    gate.round();
    let close = gate.close("s");
    gate.answer_calls(|call| {
        if call.engine == engine("a") {
            no_answer()
        } else {
            status_of(200)
        }
    });
    gate.jump(500);
    gate.round();
    gate.calls.clear();
    gate.engine("a").mark = Some(2);
    gate.jump(500);
    gate.round();
    let done = gate.read_close(close.id);
    assert_eq!(done.count(TargetState::Restarted), 1);
    assert!(done.is_done() && !done.has_failed());
    gate.closes_are_stored();
}

/// CLO5: only when it is certain: a close that became ready after the old incarnation was last seen
/// may be held by the new one, and is delivered.
#[test]
fn clo5_a_new_incarnation_may_hold_what_came_later() {
    let mut gate = one();
    gate.engine("a").mark = Some(1);
    gate.round();
    gate.engine("a").mark = None;
    gate.jump(500);
    gate.round();
    let close = gate.close("s");
    gate.engine("a").mark = Some(2);
    gate.jump(500);
    gate.round();
    assert_eq!(gate.target(close.id, "a"), Some(TargetState::Pending));
    gate.answer_calls(|_| status_of(200));
    assert!(gate.read_close(close.id).is_done());
}

/// CLO5: it fell silent after the close was ready: what answers then as another was not there before.
#[test]
fn clo5_an_engine_that_fell_silent_after_the_close() {
    let mut gate = one();
    gate.engine("a").mark = Some(1);
    gate.round();
    gate.jump(500);
    let close = gate.close("s");
    gate.answer_calls(|_| no_answer());
    gate.engine("a").answers = false;
    gate.engine("a").mark = None;
    gate.jump(500);
    gate.round();
    gate.engine("a").answers = true;
    gate.engine("a").mark = Some(2);
    gate.jump(500);
    gate.round();
    let done = gate.read_close(close.id);
    assert_eq!(done.count(TargetState::Restarted), 1, "{done:?}");
}

/// CLO5: an outcome that comes late does not make an engine silent later than its call began.
#[test]
fn clo5_a_late_outcome_proves_no_later_silence() {
    let mut gate = one();
    gate.engine("a").mark = Some(1);
    gate.round();
    gate.engine("a").mark = None;
    gate.jump(100);
    gate.close("before");
    let call = gate.calls.pop().unwrap();
    // The engine restarts here, and is up again before the next session ends.
    gate.jump(900);
    let close = gate.close("s");
    gate.jump(100);
    gate.called(vec![(call.id, no_answer().unwrap())]);
    gate.engine("a").mark = Some(2);
    gate.jump(100);
    gate.round();
    assert_eq!(gate.target(close.id, "a"), Some(TargetState::Pending));
}

/// CLO5: the same for a reading that began before.
#[test]
fn clo5_a_slow_reading_proves_no_later_silence() {
    let mut gate = one();
    gate.engine("a").mark = Some(1);
    gate.round();
    gate.engine("a").mark = None;
    gate.jump(500);
    let began_at = gate.now;
    gate.jump(500);
    let close = gate.close("s");
    gate.jump(500);
    gate.engine("a").answers = false;
    let round = gate.round_of(began_at);
    gate.tell(kvgate_core::command::Command::Round(round));
    gate.engine("a").answers = true;
    gate.engine("a").mark = Some(2);
    gate.jump(500);
    gate.round();
    assert_eq!(gate.target(close.id, "a"), Some(TargetState::Pending));
}

/// CLO5, CAP8: a second kind of sign is the same incarnation; what it may hold is not settled.
#[test]
fn clo5_a_second_sign_settles_nothing_more() {
    let mut gate = one();
    gate.engine("a").mark = Some(1);
    gate.engine("a").counters = Some((100, 100));
    gate.round();
    gate.engine("a").answers = false;
    gate.engine("a").counters = None;
    gate.engine("a").mark = None;
    gate.run(7_000);
    gate.engine("a").answers = true;
    gate.engine("a").mark = Some(2);
    gate.jump(500);
    gate.round();
    let close = gate.close("s");
    gate.calls.clear();
    // One reading fails; then counters are read for the first time since.
    gate.engine("a").answers = false;
    gate.jump(500);
    gate.round();
    gate.engine("a").answers = true;
    gate.engine("a").counters = Some((1, 1));
    gate.jump(500);
    gate.round();
    assert_eq!(gate.target(close.id, "a"), Some(TargetState::Pending));
}

/// CLO5: a changed worker id alone settles nothing.
#[test]
fn clo5_a_changed_worker_id_settles_nothing() {
    let mut gate = one();
    gate.engine("a").worker_ids = vec!["w1"];
    gate.round();
    let close = gate.close("s");
    gate.jump(500);
    gate.round();
    gate.engine("a").worker_ids = vec!["w2"];
    gate.jump(500);
    gate.round();
    assert_eq!(gate.target(close.id, "a"), Some(TargetState::Pending));
}

/// CLO5: an engine that left is still tried, and is `gone` in place of `failed`.
#[test]
fn clo5_an_engine_that_left_is_tried_and_gone() {
    let mut gate = two();
    let close = gate.close("s");
    gate.answer_calls(|call| {
        if call.engine == engine("a") {
            status_of(200)
        } else {
            status_of(500)
        }
    });
    gate.engine("b").listed = false;
    gate.round();
    let log = gate.serve_until(gate.now + 119_000, |_| status_of(500));
    assert_eq!(log.len(), 7, "eight attempts in all");
    let done = gate.read_close(close.id);
    assert_eq!(done.count(TargetState::Gone), 1);
    assert!(!done.has_failed());
    assert_eq!(gate.view().tally.close_failures, 0);
    gate.retry(close.id).unwrap();
    assert_eq!(gate.sent(), ["close s at b"]);
}

/// CLO5: the notice of an engine that refuses carries status and text, and goes with a success.
#[test]
fn clo5_a_refusing_engine_is_a_notice() {
    let mut gate = one();
    let refusing = |gate: &Gate| {
        gate.view()
            .notices
            .into_iter()
            .find_map(|notice| match notice {
                Notice::CallRefused {
                    status,
                    text,
                    abort,
                    ..
                } => Some((status, text, abort)),
                _ => None,
            })
    };
    let refused = CallResult::Status {
        code: 400,
        text: Some("no such key".into()),
    };
    closed(&mut gate, "s1", Some(refused));
    assert_eq!(
        refusing(&gate),
        Some((400, Some("no such key".into()), false))
    );
    closed(&mut gate, "s2", status_of(503));
    assert!(refusing(&gate).is_some());
    closed(&mut gate, "s3", status_of(200));
    assert_eq!(refusing(&gate), None);
}

// ---- CLO6 ------------------------------------------------------------------------------------

/// CLO6: 0.25 s doubling to 15 s, each times 0.75 to 1.25; eight attempts.
#[test]
fn clo6_retries_double_and_end() {
    let mut gate = one();
    let close = gate.close("s");
    let log = gate.serve_until(gate.now + 119_000, |_| status_of(500));
    let times: Vec<u64> = log.iter().map(|(at, _)| *at).collect();
    assert_eq!(times.len(), 8, "{times:?}");
    let mut nominal = 250;
    for pair in times.windows(2) {
        let wait = pair[1] - pair[0];
        let (least, most) = (nominal * 3 / 4, nominal * 5 / 4);
        assert!((least..=most).contains(&wait), "{wait} of {nominal}");
        nominal = (nominal * 2).min(15_000);
    }
    let done = gate.read_close(close.id);
    assert_eq!(done.count(TargetState::Failed), 1);
    assert_eq!(done.targets[&engine("a")].attempts, 8);
    assert_eq!(done.targets[&engine("a")].last, status_of(500));
    assert_eq!(gate.view().tally.close_failures, 1);
    gate.closes_are_stored();
}

/// CLO6: engines and intents that fail together do not come back together.
#[test]
fn clo6_retries_are_spread() {
    let mut gate = two();
    for number in 0..8 {
        gate.close(&format!("s{number}"));
    }
    gate.answer_calls(|_| status_of(503));
    let log = gate.serve_until(gate.now + 400, |_| None);
    let times: std::collections::BTreeSet<u64> = log.iter().map(|(at, _)| *at).collect();
    assert!(times.len() > 8, "{times:?}");
}

/// CLO6: the deadline ends what is pending, a call under way as well.
#[test]
fn clo6_the_deadline_ends_an_intent() {
    let mut gate = two();
    let close = gate.close("s");
    let late = gate.calls.clone();
    gate.answer_calls(|call| (call.engine == engine("b")).then(|| status_of(200).unwrap()));
    gate.serve_until(gate.now + 119_999, |_| None);
    assert!(!gate.read_close(close.id).is_done());
    gate.serve_until(gate.now + 1, |_| None);
    let done = gate.read_close(close.id);
    assert!(done.is_done() && done.has_failed());
    gate.called(vec![(late[0].id, status_of(200).unwrap())]);
    assert_eq!(gate.read_close(close.id), done, "final");
    assert_eq!(gate.done.len(), 1);
}

/// CLO6: at most 16 calls at once per engine; a slow engine delays no other.
#[test]
fn clo6_at_most_sixteen_calls_at_once() {
    let mut gate = two();
    for number in 0..100 {
        gate.close(&format!("s{number:02}"));
    }
    let of = |gate: &Gate, name| {
        let calls = gate.calls.iter();
        calls.filter(|call| call.engine == engine(name)).count()
    };
    assert_eq!((of(&gate, "a"), of(&gate, "b")), (16, 16));
    let (slow, quick): (Vec<_>, Vec<_>) = std::mem::take(&mut gate.calls)
        .into_iter()
        .partition(|call| call.engine == engine("a"));
    gate.calls = quick;
    let log = gate.serve_until(gate.now + 400, |_| status_of(200));
    assert_eq!(log.len(), 100, "all of b");
    gate.called(vec![(slow[0].id, status_of(200).unwrap())]);
    assert_eq!(of(&gate, "a"), 1, "one for one, the oldest first");
    assert_eq!(gate.sent(), ["close s16 at a"]);
}

/// CLO6: 32 calls go to an engine as fast as it answers, then one every 5 ms; a long line goes faster,
/// so that it is worked off within about half a minute.
#[test]
fn clo6_calls_are_paced() {
    let mut gate = one();
    for number in 0..200 {
        gate.close(&format!("s{number:03}"));
    }
    let begin = gate.now;
    let log = gate.serve_until(begin, |_| status_of(200));
    assert_eq!(log.len(), 32);
    let log = gate.serve_until(begin + 100, |_| status_of(200));
    assert_eq!(log.len(), 20, "{log:?}");
    let log = gate.serve_until(begin + 1_000, |_| status_of(200));
    assert_eq!(log.len(), 148);
    assert!(log.last().unwrap().0 <= 760, "{log:?}");

    let mut gate = one();
    for number in 0..12_000 {
        gate.close(&format!("s{number}"));
    }
    let begin = gate.now;
    let log = gate.serve_until(begin + 60_000, |_| status_of(200));
    assert_eq!(log.len(), 12_000);
    // 12,000 would take a minute at one every 5 ms.
    assert!(log.last().unwrap().0 < begin + 52_000);
}

/// CLO6: after five transport failures in a row an engine is away: one probe at a time, 1 s after the
/// last, doubling to 15 s; probes use up no attempts, and the deadline runs.
#[test]
fn clo6_an_engine_that_is_away_is_probed() {
    let mut gate = one();
    let close = gate.close("s");
    gate.close("t");
    let log = gate.serve_until(gate.now + 119_000, |_| no_answer());
    let probes: Vec<u64> = log.iter().skip(5).map(|(at, _)| *at).collect();
    let waits: Vec<u64> = probes.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(waits[..5], [2_000, 4_000, 8_000, 15_000, 15_000], "{log:?}");
    assert!(log[5..].iter().all(|(_, call)| call == "close s at a"));
    let read = gate.read_close(close.id);
    assert!(!read.is_done());
    assert!(read.targets[&engine("a")].attempts <= 5);
    gate.serve_until(gate.now + 2_000, |_| no_answer());
    let done = gate.read_close(close.id);
    assert_eq!(done.count(TargetState::Failed), 1);
}

/// CLO6: an answer ends the absence, whatever it says; all that waits goes out.
#[test]
fn clo6_an_answer_ends_the_absence() {
    let mut gate = one();
    for number in 0..20 {
        gate.close(&format!("s{number:02}"));
    }
    gate.answer_calls(|_| no_answer());
    gate.sent();
    gate.jump(1_000);
    gate.turn(Vec::new());
    assert_eq!(gate.calls.len(), 1, "one probe");
    gate.answer_calls(|_| status_of(503));
    assert_eq!(gate.calls.len(), 16);
}

/// CLO6: a reading of an engine that is away brings the probe at once.
#[test]
fn clo6_a_reading_brings_the_probe_at_once() {
    let mut gate = one();
    for number in 0..8 {
        gate.close(&format!("s{number}"));
    }
    gate.answer_calls(|_| no_answer());
    gate.jump(100);
    gate.turn(Vec::new());
    assert!(gate.sent().is_empty());
    gate.round();
    assert_eq!(gate.sent(), ["close s0 at a"], "the oldest");
    gate.round();
    assert!(gate.sent().is_empty(), "one at a time");
}

/// SET4, CLO6: closes are turned off: what was promised goes on to its end, over a start too, and a new
/// close is told that they are off.
#[test]
fn set4_open_closes_go_on_with_the_feature_off() {
    let mut gate = two();
    let close = gate.close("s");
    let joining = {
        gate.hold("t", 10);
        gate.close("s")
    };
    let calls = std::mem::take(&mut gate.calls);
    gate.called(vec![(calls[0].id, status_of(503).unwrap())]);
    gate.configure(|policy| policy.session_lifecycle = false);
    let request = CloseRequest {
        session: session("other"),
        mode: CloseMode::Join,
        reason: None,
    };
    let refused = gate.tell(Command::Close(request));
    assert_eq!(
        refused,
        (None, Told::Reply(Reply::Close(CloseReply::Disabled)))
    );
    assert!(
        gate.read_close(close.id).is_done(),
        "superseded by the new use"
    );
    gate.crash(1_000);
    gate.cancel("t");
    gate.round();
    let log = gate.serve_until(gate.now + 10_000, |_| status_of(200));
    assert_eq!(log.len(), 2, "{log:?}");
    let done = gate.read_close(joining.id);
    assert_eq!(done.count(TargetState::Delivered), 2);
    gate.configure(|policy| policy.session_lifecycle = true);
    assert!(gate.sent().is_empty());
}

/// CLO6, DUR2: a start sends again to pending engines only, with the attempts that are left, and
/// leaves at least 30 s.
#[test]
fn clo6_a_start_sends_again_to_pending_engines_only() {
    let mut gate = two();
    let close = gate.close("s");
    gate.answer_calls(|call| {
        if call.engine == engine("a") {
            status_of(200)
        } else {
            status_of(503)
        }
    });
    let old = gate.calls.clone();
    let before = gate.read_close(close.id);
    gate.crash(500_000);
    gate.closes_are_stored();
    assert_eq!(gate.read_close(close.id), before);
    assert!(gate.sent().is_empty());
    gate.round();
    assert_eq!(gate.sent(), ["close s at b"]);
    // Outcomes of the calls of before belong to nobody.
    gate.called(
        old.iter()
            .map(|call| (call.id, status_of(200).unwrap()))
            .collect(),
    );
    assert!(!gate.read_close(close.id).is_done());
    gate.serve_until(gate.now + 29_000, |_| None);
    assert!(!gate.read_close(close.id).is_done());
    gate.serve_until(gate.now + 1_000, |_| None);
    let done = gate.read_close(close.id);
    assert_eq!(done.count(TargetState::Delivered), 1);
    assert_eq!(done.count(TargetState::Failed), 1);
}

/// DUR2, CLO6: a crash after every step of a close; in the end each engine got it.
#[test]
fn dur2_a_crash_in_every_stage() {
    for crash_at in 0..9 {
        let mut gate = two_with(Policy {
            join_timeout: Some(Span::from_secs(5)),
            ..closes_on()
        });
        let lease = gate.hold("t", 10);
        let mut close = None;
        let mut got: BTreeMap<String, u32> = BTreeMap::new();
        for step in 0..9 {
            match step {
                0 => close = Some(gate.close("s").id),
                1 => gate.run(5_000),
                2 | 5 | 7 => {
                    let calls = std::mem::take(&mut gate.calls);
                    for call in calls.iter().take(1) {
                        *got.entry(call.engine.as_str().to_owned()).or_default() += 1;
                        gate.called(vec![(call.id, status_of(200).unwrap())]);
                    }
                    gate.calls.extend(calls.into_iter().skip(1));
                }
                4 => drop(gate.release(lease)),
                _ => gate.run(1_000),
            }
            gate.closes_are_stored();
            if step == crash_at {
                let before = gate.machine().kept();
                gate.crash(1_000);
                let after = gate.machine().kept();
                assert_eq!(after.closes, before.closes, "crash at {crash_at}");
                assert_eq!(after.tally.closes, before.tally.closes);
                gate.round();
            }
        }
        let log = gate.serve_until(gate.now + 20_000, |_| status_of(200));
        for (_, call) in log {
            let (_, name) = call.split_once(" at ").unwrap();
            *got.entry(engine(name).as_str().to_owned()).or_default() += 1;
        }
        let done = gate.read_close(close.unwrap());
        assert!(
            done.is_done() && done.count(TargetState::Delivered) == 2,
            "{done:?}"
        );
        assert!(got.len() == 2, "crash at {crash_at}: {got:?}");
        assert_eq!(gate.view().tally.closes, 1);
    }
}

/// TIM3: after a pause no deadline of a close is judged before a reading.
#[test]
fn tim3_a_pause_ends_no_close() {
    let mut gate = one();
    let close = gate.close("s");
    gate.answer_calls(|_| None);
    gate.jump(300_000);
    gate.turn(Vec::new());
    assert!(!gate.read_close(close.id).is_done());
    let next = gate.machine().next_deadline().unwrap();
    assert!(next.millis() > gate.now, "and nothing spins");
    gate.round();
    assert!(gate.read_close(close.id).is_done());
}

/// CLO6, TIM3: before the first reading, in a pause, and with the feature off, no deadline is named
/// that no turn serves.
#[test]
fn clo6_no_deadline_is_named_that_no_turn_serves() {
    let later = |gate: &Gate| {
        let next = gate.machine().next_deadline();
        assert!(next.is_none_or(|next| next.millis() > gate.now), "{next:?}");
    };
    let mut gate = two_with(Policy {
        join_timeout: Some(Span::from_secs(1)),
        session_idle_close: Some(Span::from_secs(2)),
        ..closes_on()
    });
    gate.hold("t", 10);
    gate.close("s");
    gate.close("x");
    gate.answer_calls(|_| no_answer());
    gate.drain_until(gate.now + 10_000);
    later(&gate);
    gate.crash(400_000);
    later(&gate);
    gate.drain_until(gate.now + 10_000);
    later(&gate);
    gate.configure(|policy| policy.session_lifecycle = false);
    gate.cancel("t");
    later(&gate);
    gate.drain_until(gate.now + 1_000_000);
    later(&gate);
    gate.configure(|policy| policy.session_lifecycle = true);
    gate.drain_until(gate.now + 1_000_000);
    later(&gate);
}

// ---- section 9 -------------------------------------------------------------------------------

/// Section 9: a finished close names at most 16 exceptions beside its counts, failed ones first.
#[test]
fn clo5_a_finished_close_names_sixteen_exceptions() {
    let names: Vec<&'static str> = (0..20)
        .map(|number| &*Box::leak(format!("e{number:02}").into_boxed_str()))
        .collect();
    let mut gate = one();
    for name in &names {
        gate.engines.insert(*name, Engine::of(1_000));
    }
    gate.round();
    let close = gate.close("s");
    assert_eq!(
        gate.read_close(close.id).targets.len(),
        21,
        "all while it runs"
    );
    gate.answer_calls(|call| status_of(if call.engine == engine("a") { 200 } else { 400 }));
    let done = gate.read_close(close.id);
    assert_eq!(done.targets.len(), 16);
    assert!(!done.targets.contains_key(&engine("a")));
    assert_eq!(done.count(TargetState::Refused), 20);
    assert_eq!(done.count(TargetState::Delivered), 1);
    // Not all that failed are named: a retry asks every member.
    gate.retry(close.id).unwrap();
    assert_eq!(gate.calls.len(), 21);
    gate.answer_calls(|_| status_of(200));
    let done = gate.read_close(close.id);
    assert_eq!(
        (
            done.count(TargetState::Delivered),
            done.count(TargetState::Refused)
        ),
        (21, 0)
    );
}

/// Section 9: finished closes are forgotten after an hour, open ones never.
#[test]
fn clo2_finished_closes_are_forgotten_after_an_hour() {
    let mut gate = one();
    gate.hold("t", 10);
    let open = gate.close("s");
    let close = gate.close("x");
    gate.answer_calls(|_| status_of(400));
    let CloseStage::Done { at } = gate.read_close(close.id).stage else {
        panic!("not done");
    };
    gate.renew_for(
        kvgate_core::ids::LeaseId {
            issue: kvgate_core::ids::Issue(1),
            salt: gate.salt,
        },
        Some(Span::from_secs(24 * 3_600)),
    )
    .unwrap();
    gate.unread_for(at.after(CLOSES_FOR).millis() - gate.now - 1);
    assert!(gate.find_close(close.id).is_some());
    assert_eq!(gate.view().closes_failed, 1);
    gate.unread_for(1);
    gate.run(2_000);
    assert_eq!(gate.find_close(close.id), None);
    assert_eq!(gate.read_session("x"), None, "its session with it");
    assert_eq!(gate.view().closes_failed, 0);
    assert!(gate.find_close(open.id).is_some());
    gate.closes_are_stored();
}
