//! Cases of discovery: what routers list and what the gate makes of it. The worker lists are those of the
//! cases, over real sockets; what takes seconds runs on virtual time.

use std::collections::BTreeSet;

use axum::Router;
use axum::routing::{get, post};
use kvgate::demo::{Behaviour, FakeFleet, FleetSpec, RouterKind};
use kvgate::fleet::poller::{Poller, PollerConfig, RoundDetails};
use kvgate::fleet::rows::BadEntryReason;
use kvgate::fleet::secret::Secret;
use kvgate::words;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallResult, CloseIntent, CloseMode, EngineCall, TargetState};
use kvgate_core::command::Command;
use kvgate_core::decision::{BypassReason, DegradedReason};
use kvgate_core::effect::{CloseReply, Effect, Outcome, Reply};
use kvgate_core::ids::{CloseId, EngineId};
use kvgate_core::policy::Policy;
use kvgate_core::units::{Span, Timestamp};
use tokio::net::TcpListener;

use super::{Books, acquire};
use crate::support::app::SOON;
use crate::support::closes::{Rig, bodies, policy, request};
use crate::support::store::Switch;

/// The address that stands in the fixtures for an engine of the fleet.
const PLACES: [&str; 3] = ["127.0.0.1:18101", "127.0.0.1:18102", "127.0.0.1:18103"];

/// A fixture with the addresses of the fleet in it.
fn fixture(fleet: &FakeFleet, name: &str) -> String {
    let path = format!("{}/tests/fixtures/cases/{name}", env!("CARGO_MANIFEST_DIR"));
    let mut text = std::fs::read_to_string(path).unwrap();
    for (place, engine) in PLACES.iter().zip(fleet.engines()) {
        text = text.replace(place, engine.url().trim_start_matches("http://"));
    }
    text
}

/// Lists the workers of a fixture.
fn lists(fleet: &FakeFleet, name: &str) {
    let list = fixture(fleet, name).into_bytes();
    fleet.router().behave("/workers", Behaviour::Raw(list));
}

/// Engines of 500,000 tokens.
async fn fleet(engines: usize) -> FakeFleet {
    // Every client of the process shares one provider; another test may have installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    FakeFleet::start(FleetSpec::uniform(engines, 500_000))
        .await
        .unwrap()
}

fn engine(fleet: &FakeFleet, place: usize) -> EngineId {
    EngineId::new(&fleet.engine_url(place))
}

/// A gate on virtual time whose poller reads the fleet over real sockets, once a second.
struct Gate {
    books: Books,
    poller: Poller,
    _store: tempfile::TempDir,
}

impl Gate {
    fn over(fleet: &FakeFleet, router_key: Option<Secret>) -> Self {
        let store = tempfile::tempdir().unwrap();
        let policy = Policy {
            program_admission: true,
            session_lifecycle: true,
            ..Policy::default()
        };
        let members = FleetConfig {
            has_router: true,
            static_engines: BTreeSet::new(),
        };
        let config = PollerConfig {
            router: Some(fleet.router_url().parse().unwrap()),
            router_key,
            timeout: SOON,
            ..PollerConfig::default()
        };
        let start = Timestamp::from_millis(1_000_000);
        Self {
            books: Books::unread(store.path(), start, policy, members),
            poller: Poller::new(config).unwrap(),
            _store: store,
        }
    }

    /// A second later, with a round.
    async fn second(&mut self) -> (RoundDetails, Vec<EngineCall>) {
        self.books.now = self.books.now.after(Span::from_secs(1));
        let (round, details) = self.poller.round(self.books.now).await;
        let effects = self.books.effects(vec![Command::Round(round)]);
        (details, calls(effects))
    }

    async fn seconds(&mut self, count: u64) {
        for _ in 0..count {
            self.second().await;
        }
    }

    fn ceiling(&self) -> u64 {
        self.books.view().measure.ceiling.get()
    }

    fn reserved(&self) -> u64 {
        self.books.view().reserved.get()
    }

    fn epoch(&self) -> u64 {
        self.books.view().epoch.0
    }

    fn degraded(&self) -> Option<DegradedReason> {
        self.books.view().measure.degraded
    }

    fn close(&mut self, session: &str) -> (CloseId, Vec<EngineCall>) {
        let request = request(session, CloseMode::Join);
        let effects = self.books.effects(vec![Command::Close(request)]);
        let close = effects.iter().find_map(|effect| match effect {
            Effect::Reply {
                reply: Reply::Close(CloseReply::Taken(close)),
                ..
            } => Some(close.id),
            _ => None,
        });
        (close.unwrap(), calls(effects))
    }

    fn read_close(&mut self, close: CloseId) -> CloseIntent {
        let effects = self.books.effects(vec![Command::ReadClose(close)]);
        effects
            .into_iter()
            .find_map(|effect| match effect {
                Effect::Reply {
                    reply: Reply::ReadClose(close),
                    ..
                } => close,
                _ => None,
            })
            .unwrap()
    }
}

fn calls(effects: Vec<Effect>) -> Vec<EngineCall> {
    let call = |effect| match effect {
        Effect::Call(call) => Some(call),
        _ => None,
    };
    effects.into_iter().filter_map(call).collect()
}

/// W01, CAP7: from second 6 to 8 the list is empty: leases, ceiling and epoch stand, and no close target is
/// lost. When it stays empty for longer than the staleness limit requests bypass, and the rest stands still.
#[tokio::test]
async fn w01_the_routers_list_is_empty_for_a_moment() {
    let fleet = fleet(2).await;
    let mut gate = Gate::over(&fleet, None);
    gate.seconds(2).await;
    for ticket in ["t1", "t2"] {
        assert_eq!(gate.books.turn(vec![acquire(ticket, 200_000)]).len(), 1);
    }
    let epoch = gate.epoch();
    for second in 3..=12 {
        if second == 6 {
            fleet.router().set_rows(Vec::new());
        }
        if second == 9 {
            fleet.router().unset_rows();
        }
        gate.second().await;
        assert_eq!(
            (
                gate.ceiling(),
                gate.reserved(),
                gate.epoch(),
                gate.degraded()
            ),
            (900_000, 400_000, epoch, None),
            "second {second}"
        );
    }
    fleet.router().set_rows(Vec::new());
    gate.seconds(20).await;
    assert_eq!(gate.degraded(), Some(DegradedReason::RouterUnreachable));
    let effects = gate.books.effects(vec![acquire("t3", 10)]);
    let bypassed = |effect: &Effect| {
        matches!(effect, Effect::Reply { reply: Reply::Acquire(Ok(answer)), .. }
            if matches!(answer.outcome, Outcome::Bypass(BypassReason::Degraded)))
    };
    assert!(effects.iter().any(bypassed), "{effects:?}");
    assert_eq!(
        (gate.ceiling(), gate.reserved(), gate.epoch()),
        (900_000, 400_000, epoch)
    );
    assert_eq!(
        gate.close("another").1.len(),
        2,
        "close targets as last known"
    );
    fleet.router().unset_rows();
    gate.second().await;
    assert_eq!((gate.degraded(), gate.epoch()), (None, epoch));
}

/// W02, CAP1: four rows of one engine with ranks, and a plain one: two engines, each read once a round and
/// told of a close once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w02_worker_urls_with_a_dp_rank_suffix() {
    let fleet = fleet(2).await;
    lists(&fleet, "W02-workers.json");
    let rig = Rig::routed(fleet, policy(), Switch::default()).await;
    let view = rig.gate.view();
    assert_eq!(view.engines.len(), 2);
    assert_eq!(view.measure.ceiling.get(), 900_000);
    for place in [0, 1] {
        let read = rig.fleet.requests(place);
        let loads = read.iter().filter(|asked| asked.path == "/v1/loads");
        assert_eq!(loads.count(), 1);
    }
    let close = rig.closed("s1").await;
    assert_eq!(close.count(TargetState::Delivered), 2);
    for place in [0, 1] {
        assert_eq!(bodies(&rig.calls(place)).len(), 1);
    }
}

/// W03, CAP1, CAP8: one engine in four spellings and another with a blank behind it are two; a later list in
/// another order and spelling is no change.
#[tokio::test]
async fn w03_the_same_engine_is_written_in_several_ways() {
    let fleet = fleet(2).await;
    let mut gate = Gate::over(&fleet, None);
    lists(&fleet, "W03-workers-1.json");
    let (details, _) = gate.second().await;
    let epoch = gate.epoch();
    assert_eq!(
        (gate.ceiling(), gate.books.view().engines.len()),
        (900_000, 2)
    );
    assert_eq!(details.bad_entries.total, 0);
    let told: Vec<&EngineId> = details.spellings.keys().collect();
    assert_eq!(told, [&engine(&fleet, 0)]);
    lists(&fleet, "W03-workers-2.json");
    gate.seconds(3).await;
    assert_eq!((gate.ceiling(), gate.epoch()), (900_000, epoch));
    for place in [0, 1] {
        let asked = fleet.requests(place);
        assert!(asked.iter().all(|asked| !asked.path.starts_with("//")));
        assert!(asked.iter().any(|asked| asked.path == "/metrics"));
    }
}

/// W04, CAP1: an IPv6 address without brackets is shown as it is written and never guessed; it stops nothing.
/// With brackets it is read and told of a close.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w04_an_ipv6_worker_url_without_brackets() {
    let fleet = fleet(1).await;
    lists(&fleet, "W04-workers.json");
    let mut gate = Gate::over(&fleet, None);
    let (details, _) = gate.second().await;
    assert_eq!((gate.ceiling(), gate.degraded()), (450_000, None));
    assert_eq!(details.bad_entries.total, 1);
    let bad = &details.bad_entries.shown[0];
    assert_eq!(bad.raw, "http://2001:db8::5:30000");
    assert_eq!(bad.reason.to_string(), "not a valid address");
    assert!(matches!(bad.reason, BadEntryReason::Address(_)));

    // A machine without IPv6 has no such engine.
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        return;
    };
    let address = listener.local_addr().unwrap();
    let loads = r#"{"loads":[{"dp_rank":0,"max_total_num_tokens":500000,"token_usage":0.1}]}"#;
    let app = Router::new()
        .route("/v1/loads", get(async move || loads))
        .route("/close_session", post(async || ""));
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let list = fixture(&fleet, "W04-workers.json")
        .replace("http://2001:db8::5:30000", &format!("http://{address}"));
    fleet
        .router()
        .behave("/workers", Behaviour::Raw(list.into_bytes()));
    let rig = Rig::routed(fleet, policy(), Switch::default()).await;
    assert_eq!(rig.gate.view().measure.ceiling.get(), 900_000);
    let close = rig.closed("s1").await;
    assert_eq!(close.count(TargetState::Delivered), 2);
    server.abort();
}

/// W05, CAP3, CLO4: engines that were never seen healthy do not count, whichever name the field has, though
/// they can be read; a close goes there as well, and one that hangs does not delay the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w05_an_unhealthy_worker_stays_in_the_list() {
    let fleet = fleet(3).await;
    lists(&fleet, "W05-workers.json");
    fleet.engine(1).behave("/close_session", Behaviour::Hang);
    let rig = Rig::routed(fleet, policy(), Switch::default()).await;
    let view = rig.gate.view();
    assert_eq!(view.measure.ceiling.get(), 450_000);
    let healthy: Vec<bool> = [0, 1, 2]
        .map(|place| engine(&rig.fleet, place))
        .iter()
        .map(|id| {
            view.engines
                .iter()
                .find(|engine| engine.id == *id)
                .unwrap()
                .healthy
        })
        .collect();
    assert_eq!(healthy, [true, false, false]);
    assert!(view.engines.iter().all(|engine| engine.reading.is_some()));
    let close = rig.close("s1").await;
    let delivered = |close: &CloseIntent| {
        let targets = close.targets.values();
        targets
            .filter(|target| target.state == TargetState::Delivered)
            .count()
    };
    let told = rig.until(close.id, |close| delivered(close) == 2).await;
    assert_eq!(rig.target(&told, 1).state, TargetState::Pending, "it hangs");
    rig.calls_until(1, 1).await;
}

/// W06, CAP1, CAP7: a router that knows only the old list is read by it, with the health that the readings
/// tell. One that asks for a key is told as that, is not asked for the old list, and gets its key as a bearer
/// token, which the engines never see.
#[tokio::test]
async fn w06_an_old_router_and_a_router_with_a_key() {
    let fleet = fleet(2).await;
    let router = fleet.router();
    router.set_kind(RouterKind::ListWorkersOnly);
    let list = fixture(&fleet, "W06-list_workers.json");
    router.behave("/list_workers", Behaviour::Raw(list.into_bytes()));
    let mut gate = Gate::over(&fleet, None);
    gate.second().await;
    assert_eq!((gate.ceiling(), gate.degraded()), (900_000, None));

    router.set_kind(RouterKind::SglangRouter);
    router.set_api_key(Some("router-key"));
    let asked_before = router.requests().len();
    let mut gate = Gate::over(&fleet, Some(Secret::new("another-key").unwrap()));
    gate.second().await;
    assert!(gate.degraded().is_some());
    let failure = gate.books.view().router_failure.unwrap();
    assert_eq!(
        words::router_failure(failure),
        "router asks for a key (401)"
    );
    let asked: Vec<String> = router.requests()[asked_before..]
        .iter()
        .map(|asked| asked.path.clone())
        .collect();
    assert_eq!(asked, ["/workers"], "a 401 is no 404");

    let mut gate = Gate::over(&fleet, Some(Secret::new("router-key\n").unwrap()));
    gate.second().await;
    assert_eq!((gate.ceiling(), gate.degraded()), (900_000, None));
    let last = router.requests().pop().unwrap();
    assert_eq!(last.authorization.as_deref(), Some("Bearer router-key"));
    for place in [0, 1] {
        assert!(
            fleet
                .requests(place)
                .iter()
                .all(|asked| asked.authorization.is_none())
        );
    }
}

/// W07, CAP3, CAP8, CLO5: engine-b is silent from second 6 to 14 and comes back with a smaller pool and
/// counters that began again: its capacity leaves once it is stale, the new one counts at once, the epoch
/// moves once, and a close that waited for it is done.
#[tokio::test]
async fn w07_an_engine_comes_back_on_the_same_address() {
    let fleet = fleet(2).await;
    let b = fleet.engine(1);
    let shows = |name: &str| {
        let text = fixture(&fleet, name).into_bytes();
        b.behave("/v1/loads", Behaviour::Status(404, String::new()));
        b.behave("/server_info", Behaviour::Status(404, String::new()));
        b.behave("/metrics", Behaviour::Raw(text));
    };
    shows("W07-b1.txt");
    let mut gate = Gate::over(&fleet, None);
    gate.seconds(6).await;
    assert_eq!((gate.ceiling(), gate.epoch()), (900_000, 1));
    for path in ["/v1/loads", "/metrics", "/server_info"] {
        b.behave(path, Behaviour::Cut);
    }
    gate.second().await;
    assert_eq!(gate.ceiling(), 900_000, "its last reading is fresh");
    let (close, calls) = gate.close("s1");
    assert_eq!(calls.len(), 2);
    let done = calls
        .iter()
        .filter(|call| call.engine == engine(&fleet, 0))
        .map(|call| {
            (
                call.id,
                CallResult::Status {
                    code: 200,
                    text: None,
                },
            )
        });
    gate.books.effects(vec![Command::Called(done.collect())]);
    gate.seconds(7).await;
    assert_eq!(
        (gate.ceiling(), gate.epoch()),
        (450_000, 1),
        "away alone is no restart"
    );
    assert_eq!(gate.degraded(), None);

    shows("W07-b2.txt");
    gate.second().await;
    assert_eq!((gate.ceiling(), gate.epoch()), (720_000, 2));
    let close = gate.read_close(close);
    assert_eq!(
        close.targets[&engine(&fleet, 1)].state,
        TargetState::Restarted
    );
    assert!(close.is_done() && !close.has_failed());
    gate.seconds(3).await;
    assert_eq!((gate.ceiling(), gate.epoch()), (720_000, 2), "once");
}
