//! The gate and the closer over the engines of a fake fleet; readings are handed in by the test.

use std::collections::BTreeSet;
use std::time::Duration;

use kvgate::clock::Clock;
use kvgate::demo::{FakeFleet, FleetSpec, RecordedRequest};
use kvgate::fleet::closer::{Closer, CloserConfig};
use kvgate::fleet::discover;
use kvgate::fleet::poller::{Poller, PollerConfig};
use kvgate::gate::{Gate, GateError, Phase, WriterConfig, spawn};
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CloseIntent, CloseMode, Target};
use kvgate_core::command::{Acquire, CloseRequest};
use kvgate_core::effect::{Answer, CloseReply, Outcome};
use kvgate_core::ids::{CloseId, EngineId, LeaseId, SessionId};
use kvgate_core::policy::Policy;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::units::{Span, Tokens};
use serde_json::Value;

use super::app::SOON;
use super::store::{Mood, Switch};

/// A gate with a closer over the engines of a fake fleet; readings are handed in by the test.
pub struct Rig {
    pub fleet: FakeFleet,
    pub gate: Gate,
    pub closer: Closer,
    pub store: Switch,
}

pub fn policy() -> Policy {
    Policy {
        program_admission: true,
        session_lifecycle: true,
        stale_after: Span::from_secs(3_600),
        ..Policy::default()
    }
}

pub fn spec(engines: usize) -> FleetSpec {
    FleetSpec::uniform(engines, 100_000)
}

impl Rig {
    pub async fn start(engines: usize) -> Self {
        Self::of(spec(engines), policy(), CloserConfig::default()).await
    }

    pub async fn of(spec: FleetSpec, policy: Policy, config: CloserConfig) -> Self {
        let fleet = FakeFleet::start(spec).await.unwrap();
        Self::over(fleet, policy, config, Switch::default()).await
    }

    /// A service on what the store holds.
    pub async fn over(
        fleet: FakeFleet,
        policy: Policy,
        config: CloserConfig,
        store: Switch,
    ) -> Self {
        let engines = fleet.engines().iter();
        let engines = engines.map(|engine| EngineId::new(&engine.url())).collect();
        Self::with(fleet, engines, policy, config, store).await
    }

    /// A service that knows the engines by these addresses.
    pub async fn with(
        fleet: FakeFleet,
        engines: BTreeSet<EngineId>,
        policy: Policy,
        config: CloserConfig,
        store: Switch,
    ) -> Self {
        let members = FleetConfig {
            has_router: false,
            static_engines: engines.clone(),
        };
        let rig = Self::unread(fleet, members, policy, config, store).await;
        rig.read(engines).await;
        rig.ready().await;
        rig
    }

    /// A service that finds the engines of the fleet through its router.
    pub async fn routed(fleet: FakeFleet, policy: Policy, store: Switch) -> Self {
        let router: url::Url = fleet.router_url().parse().unwrap();
        let members = FleetConfig {
            has_router: true,
            static_engines: BTreeSet::new(),
        };
        let config = CloserConfig {
            router: discover::as_engine(&router),
            ..CloserConfig::default()
        };
        let rig = Self::unread(fleet, members, policy, config, store).await;
        let poller = PollerConfig {
            router: Some(router),
            timeout: SOON,
            session_lifecycle: true,
            ..PollerConfig::default()
        };
        let began_at = rig.gate.line().unwrap().now();
        let (round, _) = Poller::new(poller).unwrap().round(began_at).await;
        rig.gate.round(round).await.unwrap();
        rig.ready().await;
        rig
    }

    /// A service that read nothing yet.
    pub async fn unread(
        fleet: FakeFleet,
        members: FleetConfig,
        policy: Policy,
        config: CloserConfig,
        store: Switch,
    ) -> Self {
        // Every client of the process shares one provider; another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let writer = WriterConfig {
            policy: policy.validated().unwrap(),
            reset_settings: false,
            fleet: members,
            salts: || 42,
            recorder: None,
        };
        let opener = store.clone();
        let (gate, opened) = spawn(writer, Clock::start(), move || opener.open()).unwrap();
        opened.await.unwrap().unwrap();
        let closer = Closer::start(config, gate.clone()).unwrap();
        Self {
            fleet,
            gate,
            closer,
            store,
        }
    }

    pub async fn ready(&self) {
        let mut phases = self.gate.phases();
        let ready = phases.wait_for(|phase| *phase == Phase::Ready);
        soon(ready).await.unwrap();
    }

    /// Hands in a reading round in which every engine does nothing.
    pub async fn read(&self, engines: BTreeSet<EngineId>) {
        self.try_read(engines).await.unwrap();
    }

    /// The same where the store may be away.
    pub async fn try_read(&self, engines: BTreeSet<EngineId>) -> Result<(), GateError> {
        let readings = engines
            .into_iter()
            .map(|engine| (engine, Ok(Reading::idle(Tokens::new(100_000).unwrap()))))
            .collect();
        let round = Round {
            began_at: self.gate.line().unwrap().now(),
            router: None,
            readings,
            start_marks: Vec::new(),
        };
        self.gate.round(round).await
    }

    pub async fn close(&self, session: &str) -> CloseIntent {
        self.close_with(session, CloseMode::Join).await
    }

    pub async fn close_with(&self, session: &str, mode: CloseMode) -> CloseIntent {
        let request = request(session, mode);
        match self.gate.close_session(request).await.unwrap().value {
            CloseReply::Taken(close) => close,
            other => panic!("{other:?}"),
        }
    }

    /// Closes and waits until it is done.
    pub async fn closed(&self, session: &str) -> CloseIntent {
        let close = self.close(session).await;
        self.done(close.id).await
    }

    pub async fn done(&self, close: CloseId) -> CloseIntent {
        let done = self.gate.close_done(close, SOON).await;
        done.expect("the close is not done")
    }

    /// Waits until a close stands so.
    pub async fn until(&self, close: CloseId, so: impl Fn(&CloseIntent) -> bool) -> CloseIntent {
        let mut views = self.gate.views();
        let seen = async {
            loop {
                views.borrow_and_update();
                let close = self.gate.read_close(close).await.unwrap().unwrap();
                if so(&close) {
                    return close;
                }
                views.changed().await.unwrap();
            }
        };
        soon(seen).await
    }

    pub fn target(&self, close: &CloseIntent, place: usize) -> Target {
        let engine = EngineId::new(&self.fleet.engine_url(place));
        close.targets.get(&engine).cloned().unwrap()
    }

    /// The calls that an engine got.
    pub fn calls(&self, place: usize) -> Vec<RecordedRequest> {
        calls(&self.fleet.requests(place))
    }

    pub async fn calls_until(&self, place: usize, count: usize) -> Vec<RecordedRequest> {
        let engine = self.fleet.engine(place);
        let seen = engine.wait_for(|requests| calls(requests).len() >= count);
        calls(&soon(seen).await)
    }

    pub async fn acquire(&self, acquire: Acquire) -> LeaseId {
        let answer = self.asked(acquire).await;
        match answer.outcome {
            Outcome::Admit { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    }

    /// The answer to an acquire.
    pub async fn asked(&self, acquire: Acquire) -> Answer {
        let answered = self.gate.acquire(acquire, Duration::ZERO).await.unwrap();
        answered.value.unwrap().answer
    }

    pub async fn release(&self, lease: LeaseId) {
        self.gate.release(lease).await.unwrap().value.unwrap();
    }

    /// Ends as a kill does: nothing is written any more, and calls under way are cut.
    pub fn crash(self) -> (FakeFleet, Switch) {
        self.store.set(Mood::Failing);
        drop(self.closer);
        drop(self.gate);
        self.store.set(Mood::Good);
        (self.fleet, self.store)
    }
}

pub fn request(session: &str, mode: CloseMode) -> CloseRequest {
    CloseRequest {
        session: SessionId::new(session).unwrap(),
        mode,
        reason: None,
    }
}

pub fn calls(requests: &[RecordedRequest]) -> Vec<RecordedRequest> {
    let calls = requests.iter().filter(|request| request.method == "POST");
    calls.cloned().collect()
}

pub fn bodies(calls: &[RecordedRequest]) -> Vec<Value> {
    calls.iter().map(RecordedRequest::json).collect()
}

pub async fn soon<T>(happens: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, happens)
        .await
        .expect("it did not happen")
}
