//! Cases of session closes: the gate, the closer and fake engines over real sockets.

use kvgate::demo::{Behaviour, FakeFleet, RouterKind};
use kvgate::fleet::closer::CloserConfig;
use kvgate_core::close::{CallFailure, CallResult, CloseStage, TargetState};
use kvgate_core::command::{Acquire, Command, Slice};
use kvgate_core::effect::Outcome;
use kvgate_core::ids::{SessionId, SessionNo};
use kvgate_core::policy::Policy;
use kvgate_core::units::Span;
use kvgate_core::view::Notice;
use serde_json::{Value, json};

use crate::support::app::asking;
use crate::support::closes::{Rig, bodies, policy, soon, spec};
use crate::support::store::Switch;

fn of(session: &str, ticket: &str, tokens: u64) -> Acquire {
    Acquire {
        session: SessionId::new(session).unwrap(),
        ..asking(ticket, tokens, false)
    }
}

/// S01, CLO4: engines behind a router that knows no such route: each of them gets the close once, with
/// the id as its only field, and the router is asked for its list only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s01_a_close_goes_to_engines_and_not_to_the_router() {
    for kind in [
        RouterKind::Smg,
        RouterKind::SglangRouter,
        RouterKind::VllmRouter,
        RouterKind::ListWorkersOnly,
    ] {
        let fleet = FakeFleet::start(spec(2)).await.unwrap();
        fleet.router().set_kind(kind);
        let rig = Rig::routed(fleet, policy(), Switch::default()).await;
        let lease = rig.acquire(of("s1", "t1", 1_000)).await;
        rig.release(lease).await;
        let close = rig.closed("s1").await;
        assert_eq!(close.count(TargetState::Delivered), 2);
        for place in [0, 1] {
            let calls = rig.calls(place);
            assert_eq!(calls.len(), 1);
            assert_eq!(calls[0].path, "/close_session");
            assert_eq!(calls[0].body.as_ref(), br#"{"session_id":"s1"}"#);
        }
        let at_the_router = rig.fleet.router().requests();
        assert!(
            at_the_router.iter().all(|request| request.method == "GET"),
            "{at_the_router:?}"
        );
        let tally = rig.gate.view().tally.clone();
        assert_eq!((tally.closes, tally.close_failures), (1, 0));
    }
}

/// S02, CLO8: a session is used again while an engine still owes its close, and kvgate is killed in
/// between: that engine never gets the old close, and it is no failure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s02_a_session_id_is_used_again_after_its_close() {
    let rig = Rig::start(2).await;
    rig.fleet.engine(1).stop().await;
    let lease = rig.acquire(of("task-7", "t1", 1_000)).await;
    rig.release(lease).await;
    let close = rig.close("task-7").await;
    rig.until(close.id, |close| {
        let mut targets = close.targets.values();
        targets.any(|target| target.state == TargetState::Delivered)
    })
    .await;
    let again = rig.asked(of("task-7", "t2", 1_000)).await;
    assert!(again.session_reopened);
    let Outcome::Admit { lease, .. } = again.outcome else {
        panic!("{again:?}")
    };
    let (fleet, store) = rig.crash();
    fleet.engine(1).start_again().await.unwrap();
    let rig = Rig::over(fleet, policy(), CloserConfig::default(), store).await;
    let ended = rig.done(close.id).await;
    assert_eq!(ended.count(TargetState::Delivered), 1);
    assert_eq!(rig.target(&ended, 1).state, TargetState::Superseded);
    rig.release(lease).await;
    // Whatever was still under way to the engine comes before this.
    rig.closed("another").await;
    let expected = [json!({"session_id": "another"})];
    assert_eq!(bodies(&rig.calls(1)), expected);
    let tally = rig.gate.view().tally.clone();
    assert_eq!((tally.closes, tally.close_failures), (2, 0));
}

/// S03, CLO6, DUR1: one engine is away during the close, and kvgate is killed meanwhile: after the
/// start only that engine is told, as soon as it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s03_one_engine_is_down_during_the_close_and_then_a_crash() {
    let rig = Rig::start(2).await;
    rig.fleet.engine(1).behave("/close_session", Behaviour::Cut);
    let close = rig.close("s1").await;
    assert!(!close.is_done(), "the answer waits for no engine");
    let url = rig.fleet.engine_url(1);
    let owed = rig
        .until(close.id, |close| {
            let mut targets = close.targets.iter();
            targets.all(|(engine, target)| {
                (engine.as_str() == url && target.attempts >= 2)
                    || target.state == TargetState::Delivered
            })
        })
        .await;
    assert_eq!(
        rig.target(&owed, 1).last,
        Some(CallResult::Failed(CallFailure::Refused))
    );
    let before = rig.calls(1).len();
    let (fleet, store) = rig.crash();
    fleet.engine(1).behave("/close_session", Behaviour::Normal);
    let rig = Rig::over(fleet, policy(), CloserConfig::default(), store).await;
    let ended = rig.done(close.id).await;
    assert_eq!(ended.count(TargetState::Delivered), 2);
    assert_eq!(rig.calls(0).len(), 1, "it is not told again");
    assert!(rig.calls(1).len() > before);
    let view = rig.gate.view();
    assert_eq!((view.closes_pending, view.closes_failed), (0, 0));
    assert_eq!((view.tally.closes, view.tally.close_failures), (1, 0));
}

/// S04, CLO4: the id goes into the body as it is, whatever its letters; there is nothing else in it.
#[tokio::test]
async fn s04_session_ids_with_slashes_and_percent_signs() {
    let rig = Rig::start(1).await;
    let ids: Vec<String> =
        serde_json::from_str(include_str!("../../fixtures/cases/S04-ids.json")).unwrap();
    let (good, bad): (Vec<_>, Vec<_>) = ids.iter().partition(|id| SessionId::new(id).is_ok());
    assert_eq!(bad, ["."], "the only one that is no id (ID1)");
    for id in &good {
        let close = rig.closed(id).await;
        assert_eq!(close.count(TargetState::Delivered), 1, "{id}");
    }
    let calls = rig.calls(0);
    let expected: Vec<Value> = good.iter().map(|id| json!({"session_id": id})).collect();
    assert_eq!(bodies(&calls), expected);
    assert!(calls.iter().all(|call| call.path == "/close_session"));
    assert_eq!(calls[1].body.as_ref(), br#"{"session_id":"a%2Fb"}"#);
}

/// S05, CLO3, CLO8: a close waits for the leases of its session; a new acquire of the session ends it
/// without a call, and no lease is cut short.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s05_a_close_while_a_request_is_in_flight() {
    let rig = Rig::start(1).await;
    let first = rig.acquire(of("s1", "t1", 10_000)).await;
    let second = rig.acquire(of("s1", "t2", 10_000)).await;
    let close = rig.close("s1").await;
    assert!(matches!(close.stage, CloseStage::Joining { .. }));
    rig.release(first).await;
    let third = rig.asked(of("s1", "t3", 10_000)).await;
    assert!(third.session_reopened);
    assert!(matches!(third.outcome, Outcome::Admit { .. }));
    let ended = rig.done(close.id).await;
    assert_eq!(rig.target(&ended, 0).state, TargetState::Superseded);
    assert!(!ended.has_failed());
    assert_eq!(rig.gate.view().leases, 2);
    rig.release(second).await;
    rig.closed("another").await;
    assert_eq!(bodies(&rig.calls(0)), [json!({"session_id": "another"})]);

    // Without a new acquire it goes out after the last lease, and not before.
    let lease = rig.acquire(of("s2", "t4", 10_000)).await;
    let close = rig.close("s2").await;
    rig.closed("yet another").await;
    assert_eq!(rig.calls(0).len(), 2);
    rig.release(lease).await;
    rig.done(close.id).await;
    assert_eq!(bodies(&rig.calls(0))[2], json!({"session_id": "s2"}));
}

/// S06, CLO11: a client dies with twenty sessions: their leases end by themselves. With the idle
/// option each session is closed once; without it they are listed, and can be closed by hand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s06_a_client_dies_without_closing() {
    for idle_close in [None, Some(Span::from_millis(200))] {
        let policy = Policy {
            session_idle_close: idle_close,
            ..policy()
        };
        let rig = Rig::of(spec(2), policy, CloserConfig::default()).await;
        let acquires = (0..20).map(|number| {
            let session = format!("s{number}");
            Command::Acquire(Acquire {
                ttl: Span::from_secs(1),
                ..of(&session, &session, 1_000)
            })
        });
        rig.gate.batch(acquires.collect()).await.unwrap();
        assert_eq!(rig.gate.view().leases, 20);
        let mut views = rig.gate.views();
        let reclaimed = views.wait_for(|view| view.leases == 0);
        assert_eq!(soon(reclaimed).await.unwrap().reserved.get(), 0);
        if idle_close.is_some() {
            let closed = views.wait_for(|view| view.tally.closes == 20 && view.closes_pending == 0);
            drop(soon(closed).await.unwrap());
        } else {
            let page = rig.gate.list_sessions(Slice {
                from: SessionNo(0),
                rows: 100,
            });
            let page = page.await.unwrap();
            assert_eq!(page.items.len(), 20);
            assert!(page.items.iter().all(|session| session.closes.is_empty()));
            assert!(rig.calls(0).is_empty());
            for number in 0..20 {
                rig.closed(&format!("s{number}")).await;
            }
        }
        for place in [0, 1] {
            let mut told: Vec<String> = bodies(&rig.calls(place))
                .iter()
                .map(Value::to_string)
                .collect();
            told.sort();
            told.dedup();
            assert_eq!((told.len(), rig.calls(place).len()), (20, 20));
        }
    }
}

/// S07, CLO8: a session that was closed by mistake goes on: its acquire says so, it is counted and
/// noticed, and its second close is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s07_an_engine_remembers_closed_ids() {
    let rig = Rig::start(1).await;
    let lease = rig.acquire(of("task-3", "t1", 1_000)).await;
    rig.release(lease).await;
    rig.closed("task-3").await;
    let again = rig.asked(of("task-3", "t2", 1_000)).await;
    assert!(again.session_reopened);
    let Outcome::Admit { lease, .. } = again.outcome else {
        panic!("{again:?}")
    };
    let later = rig.asked(of("task-3", "t3", 1_000)).await;
    assert!(!later.session_reopened, "once is enough");
    let view = rig.gate.view();
    assert_eq!(view.tally.sessions_reopened, 1);
    let noticed = |notice: &Notice| matches!(notice, Notice::SessionReopened { ticket, .. } if ticket.as_str() == "t2");
    assert!(view.notices.iter().any(noticed), "{:?}", view.notices);
    rig.release(lease).await;
    let Outcome::Admit { lease, .. } = later.outcome else {
        panic!("{later:?}")
    };
    rig.release(lease).await;
    let close = rig.closed("task-3").await;
    assert_eq!(close.count(TargetState::Delivered), 1);
    assert_eq!(rig.calls(0).len(), 2);
    let view = rig.gate.view();
    assert_eq!(view.tally.closes, 2);
    assert!(!view.notices.iter().any(noticed));
}
