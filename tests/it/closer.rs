//! Session closes over real sockets: the gate, the closer and fake engines.

use std::collections::BTreeSet;
use std::time::Duration;

use kvgate::demo::{Behaviour, EngineVersion, FakeFleet, RecordedRequest, RouterKind, WorkerRow};
use kvgate::fleet::closer::{ANSWER_BYTES_MAX, CloserConfig};
use kvgate::fleet::networks::Networks;
use kvgate::fleet::secret::Secret;
use kvgate::gate::Phase;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallFailure, CallResult, CloseIntent, CloseMode, Target, TargetState};
use kvgate_core::command::{Acquire, Command};
use kvgate_core::ids::{EngineId, Label};
use kvgate_core::policy::Policy;
use kvgate_core::reading::{
    EngineKind, ReadFailure, Reading, Role, Round, RouterAnswer, StartMark, Worker,
};
use kvgate_core::units::{Span, Tokens};
use serde_json::{Value, json};

use crate::support::app::asking;
use crate::support::closes::{Rig, bodies, calls, policy, request, soon, spec};
use crate::support::process::Kvgate;
use crate::support::store::{Mood, Switch};

const CLOSE: &str = "/close_session";
const ABORT: &str = "/abort_request";
/// For engines that never answer, in tests that do not wait for them.
const LONG: Duration = Duration::from_secs(3_600);

/// CLO4: closes and aborts may need different keys; without one for aborts the other serves.
#[tokio::test]
async fn clo4_keys_for_closes_and_aborts() {
    let mut fleet = spec(1);
    fleet.engines[0].api_key = Some("user-key".to_owned());
    fleet.engines[0].admin_key = Some("admin-key".to_owned());
    for (admin_key, sent) in [(Some("admin-key"), "admin-key"), (None, "user-key")] {
        let config = CloserConfig {
            engine_key: Some(Secret::new("user-key").unwrap()),
            admin_key: admin_key.map(|key| Secret::new(key).unwrap()),
            ..CloserConfig::default()
        };
        let rig = Rig::of(fleet.clone(), policy(), config).await;
        let lease = rig
            .acquire(Acquire {
                request_id: Some(Label::new("rid-1").unwrap()),
                ..asking("t1", 100, false)
            })
            .await;
        let close = rig.close_with("s", CloseMode::Abort).await;
        let abort = &rig.calls_until(0, 1).await[0];
        assert_eq!(
            (abort.path.as_str(), abort.body.as_ref()),
            (ABORT, br#"{"rid":"rid-1"}"#.as_slice())
        );
        assert_eq!(abort.authorization, Some(format!("Bearer {sent}")));
        rig.gate.release(lease).await.unwrap().value.unwrap();
        let close = rig.done(close.id).await;
        assert_eq!(close.count(TargetState::Delivered), 1);
        let call = &rig.calls(0)[1];
        assert_eq!(call.path, CLOSE);
        assert_eq!(call.authorization.as_deref(), Some("Bearer user-key"));
    }
}

/// CLO6: an engine that takes calls and never answers delays nobody, however many closes there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo6_a_hanging_engine_delays_nobody() {
    let config = CloserConfig {
        timeout: LONG,
        ..CloserConfig::default()
    };
    let rig = Rig::of(spec(3), policy(), config).await;
    rig.fleet.engine(1).behave(CLOSE, Behaviour::Hang);
    let sessions = 200;
    let mut last = None;
    for number in 0..sessions {
        last = Some(rig.close(&format!("s{number}")).await.id);
    }
    for place in [0, 2] {
        let calls = rig.calls_until(place, sessions).await;
        let ids: BTreeSet<String> = bodies(&calls).iter().map(Value::to_string).collect();
        assert_eq!(ids.len(), sessions);
    }
    let hanging = EngineId::new(&rig.fleet.engine_url(1));
    let close = rig
        .until(last.unwrap(), |close| {
            let mut others = close.targets.iter().filter(|(id, _)| **id != hanging);
            others.all(|(_, target)| target.state == TargetState::Delivered)
        })
        .await;
    assert_eq!(rig.target(&close, 1).state, TargetState::Pending);
    // As many as one engine may have at once.
    assert_eq!(rig.calls(1).len(), 16);
}

/// CLO6: a flood of closes does not cost a transaction of the store for each call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo6_outcomes_of_a_flood_share_transactions() {
    let rig = Rig::start(8).await;
    let before = rig.store.commits(0).len();
    let commands = (0..250)
        .map(|number| Command::Close(request(&format!("s{number}"), CloseMode::Join)))
        .collect();
    rig.gate.batch(commands).await.unwrap();
    let mut views = rig.gate.views();
    let closed = views.wait_for(|view| view.closes_pending == 0);
    let view = std::sync::Arc::clone(&*soon(closed).await.unwrap());
    assert_eq!((view.tally.closes, view.tally.close_failures), (250, 0));
    let calls: usize = (0..8).map(|place| rig.calls(place).len()).sum();
    assert_eq!(calls, 2_000);
    let commits = rig.store.commits(before).len();
    assert!(commits < calls / 2, "{commits} transactions");
}

/// What one close comes to at an engine that behaves so, with one attempt.
async fn once(behaviour: Behaviour, timeout: Duration) -> (CloseIntent, Target) {
    let policy = Policy {
        close_attempts: 1,
        ..policy()
    };
    let config = CloserConfig {
        timeout,
        engine_key: Some(Secret::new("user-key").unwrap()),
        ..CloserConfig::default()
    };
    let rig = Rig::of(spec(1), policy, config).await;
    rig.fleet.engine(0).behave(CLOSE, behaviour);
    let close = rig.closed("s").await;
    assert_eq!(rig.calls(0).len(), 1);
    let engine = EngineId::new(&rig.fleet.engine_url(0));
    let target = close.targets.get(&engine).cloned();
    (close, target.unwrap_or(Target::PENDING))
}

fn status(code: u16, text: &str) -> Option<CallResult> {
    Some(CallResult::Status {
        code,
        text: (!text.is_empty()).then(|| text.into()),
    })
}

/// CLO5: what an engine answers is told apart; the beginning of its text is kept, without the key and
/// without control characters.
#[tokio::test]
async fn clo5_answers() {
    for (behaviour, state, last) in [
        (
            Behaviour::Status(400, "bad\u{1b}[1m session of user-key\n".to_owned()),
            TargetState::Refused,
            status(400, "bad[1m session of ***"),
        ),
        (
            Behaviour::Status(503, String::new()),
            TargetState::Failed,
            status(503, ""),
        ),
        (
            Behaviour::Status(404, "x".repeat(1_000)),
            TargetState::Refused,
            status(404, &"x".repeat(200)),
        ),
        (
            Behaviour::Cut,
            TargetState::Failed,
            Some(CallResult::Failed(CallFailure::Refused)),
        ),
        (
            Behaviour::Endless,
            TargetState::Failed,
            Some(CallResult::Failed(CallFailure::TooLarge)),
        ),
        (
            Behaviour::Huge(ANSWER_BYTES_MAX as u64 + 1),
            TargetState::Failed,
            Some(CallResult::Failed(CallFailure::TooLarge)),
        ),
    ] {
        let (close, target) = once(behaviour.clone(), LONG).await;
        assert_eq!(
            (target.state, &target.last),
            (state, &last),
            "{behaviour:?}"
        );
        assert!(close.has_failed());
    }
    let (close, _) = once(Behaviour::Huge(ANSWER_BYTES_MAX as u64), LONG).await;
    assert_eq!(close.count(TargetState::Delivered), 1);
    let (_, target) = once(Behaviour::Hang, Duration::from_millis(50)).await;
    assert_eq!(target.last, Some(CallResult::Failed(CallFailure::Timeout)));
}

/// CLO5: a redirect is a refusal; it is not followed.
#[tokio::test]
async fn clo5_redirects_are_not_followed() {
    let rig = Rig::start(2).await;
    let to = format!("{}{CLOSE}", rig.fleet.engine_url(1));
    rig.fleet.engine(0).behave(CLOSE, Behaviour::Redirect(to));
    let close = rig.closed("s").await;
    let target = rig.target(&close, 0);
    assert_eq!(
        (target.state, target.last),
        (TargetState::Refused, status(307, ""))
    );
    assert_eq!(rig.calls(1).len(), 1, "its own close only");
}

/// CLO4: addresses outside the allowed networks are not called, as numbers and as names.
#[tokio::test]
async fn clo4_networks() {
    for (network, name, delivered) in [
        ("127.0.0.0/8", "127.0.0.1", true),
        ("127.0.0.0/8", "localhost", true),
        ("10.0.0.0/8", "127.0.0.1", false),
        ("10.0.0.0/8", "localhost", false),
    ] {
        let config = CloserConfig {
            networks: Networks::only(vec![network.parse().unwrap()]),
            ..CloserConfig::default()
        };
        let fleet = FakeFleet::start(spec(1)).await.unwrap();
        let url = fleet.engine_url(0).replace("127.0.0.1", name);
        let engine = EngineId::new(&url);
        let engines = BTreeSet::from([engine.clone()]);
        let rig = Rig::with(fleet, engines, policy(), config, Switch::default()).await;
        let close = rig.closed("s").await;
        if delivered {
            assert_eq!(close.count(TargetState::Delivered), 1, "{name}");
            assert_eq!(rig.calls(0).len(), 1);
        } else {
            let target = &close.targets[&engine];
            let not_allowed = Some(CallResult::Failed(CallFailure::NotAllowed));
            assert_eq!(
                (target.state, &target.last),
                (TargetState::Failed, &not_allowed),
                "{name}"
            );
            assert!(rig.calls(0).is_empty());
        }
    }
}

/// A round in which the router lists these engines, each with its reading.
fn listed(rig: &Rig, readings: Vec<(EngineId, Result<Reading, ReadFailure>)>) -> Round {
    let workers = readings.iter().map(|(engine, _)| Worker {
        engine: engine.clone(),
        role: Role::Regular,
        healthy: true,
        worker_ids: BTreeSet::new(),
    });
    Round {
        began_at: rig.gate.line().unwrap().now(),
        router: Some(RouterAnswer::Workers(workers.collect())),
        readings,
        start_marks: Vec::new(),
    }
}

/// CLO5, CLO9: one engine hangs, one refuses, one restarts, one leaves, one is vLLM: each has its own
/// end, the close counts as failed once, and the engine that is well has it long before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo5_each_engine_has_its_own_end() {
    let fleet = FakeFleet::start(spec(6)).await.unwrap();
    let [well, hangs, refuses, restarts, leaves, vllm] =
        std::array::from_fn(|place| EngineId::new(&fleet.engine_url(place)));
    fleet.engine(1).behave(CLOSE, Behaviour::Hang);
    let refusal = Behaviour::Status(400, "no".to_owned());
    fleet.engine(2).behave(CLOSE, refusal);
    fleet.engine(3).behave(CLOSE, Behaviour::Cut);
    fleet.engine(4).behave(CLOSE, Behaviour::Cut);
    let policy = Policy {
        close_deadline: Span::from_secs(5),
        ..policy()
    };
    let config = CloserConfig {
        timeout: Duration::from_millis(100),
        ..CloserConfig::default()
    };
    let members = FleetConfig {
        has_router: true,
        static_engines: BTreeSet::new(),
    };
    let rig = Rig::unread(fleet, members, policy, config, Switch::default()).await;
    let idle = || Reading::idle(Tokens::new(100_000).unwrap());
    let good = |engine: &EngineId| (engine.clone(), Ok(idle()));
    let of_vllm = Reading {
        kind: EngineKind::Vllm,
        ..idle()
    };
    let mut first = listed(
        &rig,
        vec![
            good(&well),
            good(&hangs),
            good(&refuses),
            good(&restarts),
            good(&leaves),
            (vllm.clone(), Ok(of_vllm.clone())),
        ],
    );
    first.start_marks = vec![(restarts.clone(), StartMark(1))];
    rig.gate.round(first).await.unwrap();
    rig.ready().await;

    let close = rig.close("s").await;
    rig.until(close.id, |close| {
        let tried = |engine: &EngineId| close.targets[engine].attempts > 0;
        close.targets[&well].state == TargetState::Delivered
            && [&hangs, &restarts, &leaves].into_iter().all(tried)
    })
    .await;
    let mut later = listed(
        &rig,
        vec![
            good(&well),
            good(&hangs),
            good(&refuses),
            good(&restarts),
            (vllm.clone(), Ok(of_vllm)),
        ],
    );
    later.start_marks = vec![(restarts.clone(), StartMark(2))];
    rig.gate.round(later).await.unwrap();
    let close = rig.done(close.id).await;
    let ends =
        [&hangs, &refuses, &restarts, &leaves, &vllm].map(|engine| close.targets[engine].state);
    assert_eq!(
        ends,
        [
            TargetState::Failed,
            TargetState::Refused,
            TargetState::Restarted,
            TargetState::Gone,
            TargetState::Unsupported
        ]
    );
    assert_eq!(close.count(TargetState::Delivered), 1);
    let tally = rig.gate.view().tally.clone();
    assert_eq!((tally.closes, tally.close_failures), (1, 1));
    assert!(rig.calls(5).is_empty());
}

/// CLO4: the router is never called, whatever the store or a list says; neither is an engine that
/// turns out to be one.
#[tokio::test]
async fn clo4_routers_are_not_called() {
    let fleet = FakeFleet::start(spec(3)).await.unwrap();
    let config = CloserConfig {
        router: Some(EngineId::new(&fleet.engine_url(0))),
        ..CloserConfig::default()
    };
    let rig = Rig::over(fleet, policy(), config, Switch::default()).await;
    let found = EngineId::new(&rig.fleet.engine_url(1));
    rig.closer.routers().send_replace(BTreeSet::from([found]));
    let close = rig.closed("s").await;
    for place in [0, 1] {
        let target = rig.target(&close, place);
        assert_eq!(
            target.last,
            Some(CallResult::Failed(CallFailure::NotAllowed))
        );
        assert!(rig.calls(place).is_empty());
    }
    assert_eq!(rig.calls(2).len(), 1);
}

/// CLO6: an engine that is not there is called again, and a connection that died is replaced.
#[tokio::test]
async fn clo6_an_engine_that_comes_back_gets_the_close() {
    let rig = Rig::start(1).await;
    rig.closed("s1").await;
    let engine = rig.fleet.engine(0);
    engine.stop().await;
    let close = rig.close("s2").await;
    let target = rig
        .until(close.id, |close| {
            close.targets.values().any(|target| target.attempts > 0)
        })
        .await;
    let target = rig.target(&target, 0);
    assert_eq!(
        (target.state, target.last),
        (
            TargetState::Pending,
            Some(CallResult::Failed(CallFailure::Refused))
        )
    );
    engine.start_again().await.unwrap();
    let close = rig.done(close.id).await;
    assert_eq!(close.count(TargetState::Delivered), 1);
}

/// A stop waits a moment for calls under way: their outcomes are durable, and no call begins any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur1_outcomes_of_calls_under_way_are_kept_by_a_stop() {
    let rig = Rig::start(1).await;
    let slow = Behaviour::Slow(Duration::from_millis(100));
    rig.fleet.engine(0).behave(CLOSE, slow);
    let close = rig.close("s").await;
    rig.calls_until(0, 1).await;
    let Rig {
        fleet,
        gate,
        closer,
        store,
    } = rig;
    gate.begin_drain();
    closer.stop().await;
    gate.close_session(request("late", CloseMode::Join))
        .await
        .unwrap();
    gate.stop().await;
    assert_eq!(calls(&fleet.requests(0)).len(), 1);
    let kept = store.image();
    let states: Vec<(bool, bool)> = kept
        .closes
        .iter()
        .map(|kept| (kept.id == close.id, kept.is_done()))
        .collect();
    assert_eq!(states, [(true, true), (false, false)]);

    let rig = Rig::over(fleet, policy(), CloserConfig::default(), store).await;
    let calls = rig.calls_until(0, 2).await;
    assert_eq!(bodies(&calls)[1], json!({"session_id": "late"}));
}

/// An engine that hangs holds up no stop; what it was sent is sent again after the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur1_a_stop_does_not_wait_for_an_engine_that_hangs() {
    let config = CloserConfig {
        timeout: LONG,
        ..CloserConfig::default()
    };
    let rig = Rig::of(spec(2), policy(), config).await;
    rig.fleet.engine(0).behave(CLOSE, Behaviour::Hang);
    let close = rig.close("s").await;
    rig.calls_until(0, 1).await;
    rig.until(close.id, |close| {
        let mut targets = close.targets.values();
        targets.any(|target| target.state == TargetState::Delivered)
    })
    .await;
    let Rig {
        fleet,
        gate,
        closer,
        store,
    } = rig;
    gate.begin_drain();
    soon(closer.stop()).await;
    soon(gate.stop()).await;

    fleet.engine(0).behave(CLOSE, Behaviour::Normal);
    let rig = Rig::over(fleet, policy(), CloserConfig::default(), store).await;
    let close = rig.done(close.id).await;
    assert_eq!(close.count(TargetState::Delivered), 2);
    assert_eq!((rig.calls(0).len(), rig.calls(1).len()), (2, 1));
}

/// CLO10: the service says what closes come to in its fleet, once, and what it says follows the fleet.
/// No key of an engine is shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo10_the_service_tells_what_closes_come_to() {
    let mut fleet = spec(3);
    fleet.engines[0].version = EngineVersion::V0_5_15Post1;
    fleet.engines[1].session_close = false;
    let fleet = FakeFleet::start(fleet).await.unwrap();
    let info = r#"{"version":"0.5.14","api_key":"SECRET-in-clear"}"#;
    let info = Behaviour::Raw(info.as_bytes().to_vec());
    fleet.engine(2).behave("/server_info", info);
    fleet.router().set_kind(RouterKind::SglangRouter);
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let mut gate = Kvgate::serve(
        data.path(),
        &[
            "--router",
            &router,
            "--session-lifecycle",
            "--poll-interval-s",
            "0.05",
        ],
    );
    let codes = async |gate: &Kvgate| -> Vec<String> {
        let state = gate.get("/v1/state").await;
        let notices = state["notices"].as_array().unwrap().iter();
        let mut codes: Vec<String> = notices
            .map(|notice| notice["code"].as_str().unwrap().to_owned())
            .collect();
        codes.sort();
        codes
    };
    let expected = [
        "close_absent",
        "close_session_cache_off",
        "router_drops_session_id",
    ];
    assert_eq!(codes(&gate).await, expected);
    let engines = gate.get("/v1/engines").await;
    let support = |place: usize| {
        let url = fleet.engine_url(place);
        let mut engines = engines["items"].as_array().unwrap().iter();
        let engine = engines.find(|engine| engine["url"] == url);
        engine.unwrap()["close_support"].clone()
    };
    assert_eq!(
        [support(0), support(1), support(2)],
        [json!(true), json!(false), json!(false)]
    );
    let at_rest = |requests: &[RecordedRequest]| requests.len() > 30;
    soon(fleet.engine(1).wait_for(at_rest)).await;
    let told = gate.log_text();
    let lines = told.matches("session closes at an engine").count();
    assert_eq!(lines, 3, "{told}");
    assert!(!told.contains("SECRET"), "{told}");
    assert!(!gate.get("/v1/state").await.to_string().contains("SECRET"));

    fleet
        .router()
        .set_rows(vec![WorkerRow::new("a", &fleet.engine_url(0))]);
    gate.wait_for_log("the worker set changed");
    let settled = async {
        while codes(&gate).await != ["router_drops_session_id"] {
            tokio::task::yield_now().await;
        }
    };
    soon(settled).await;
    assert!(gate.terminate().success());
}

/// DUR4, CLO6: what engines answer while the store is away is lost, and asked again when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur4_closes_outlive_a_failed_store() {
    let rig = Rig::start(1).await;
    let engine = rig.fleet.engine(0);
    engine.behave_times(CLOSE, 1, Behaviour::Slow(Duration::from_millis(50)));
    let close = rig.close("s").await;
    rig.store.set(Mood::Failing);
    rig.calls_until(0, 1).await;
    let mut phases = rig.gate.phases();
    soon(phases.wait_for(|phase| *phase == Phase::Unavailable))
        .await
        .unwrap();
    rig.store.set(Mood::Good);
    let engines = BTreeSet::from([EngineId::new(&rig.fleet.engine_url(0))]);
    let again = async {
        while rig.gate.phase() != Phase::Ready {
            // Nobody takes a round until the store is open again.
            let _ = rig.try_read(engines.clone()).await;
        }
    };
    soon(again).await;
    let close = rig.done(close.id).await;
    assert_eq!(close.count(TargetState::Delivered), 1);
    assert_eq!(rig.calls(0).len(), 2);
}
