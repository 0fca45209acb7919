//! The demo room: a fake router and fake engines over HTTP, and agents that work against a real
//! coordinator. The tests drive the same fleet.
//!
//! Promises: everything listens on loopback at a port of the system's choice and ends with its
//! handle. Left to others: every admission decision. This room never touches the gate or the store;
//! it reaches the coordinator over HTTP only.

pub mod agents;
pub mod engines;
pub mod router;
mod serve;
mod shapes;

use std::io;
use std::sync::Arc;

use tokio_util::sync::{CancellationToken, DropGuard};

pub use agents::{Agents, AgentsSpec, Tally};
pub use engines::{EngineSetup, FakeEngine, Script};
pub use router::{FakeRouter, RouterSetup};
pub use serve::{Behaviour, RecordedRequest};
pub use shapes::{EngineVersion, RankGauges, RouterKind, WorkerRow};

/// Pools of the demo's engines in tokens, none like the other, and their versions: a fleet in the
/// middle of an upgrade.
const DEMO_ENGINES: [(u64, EngineVersion); 4] = [
    (416_000, EngineVersion::V0_5_15Post1),
    (400_000, EngineVersion::V0_5_23),
    (392_000, EngineVersion::V0_5_15Post1),
    (384_000, EngineVersion::V0_5_23),
];
/// How much faster than life the demo runs.
pub const DEMO_SPEED: f64 = 2.0;
/// Start of the fleets that are given no time, in milliseconds since the Unix epoch.
const WALL_START_MS: u64 = 1_795_971_600_000;

/// Why the demo room could not start.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A loopback address could not be taken.
    #[error("cannot listen on loopback")]
    Listen(#[source] io::Error),
    /// The HTTP client could not be made.
    #[error("cannot make an HTTP client")]
    Client(#[source] reqwest::Error),
    /// The TLS settings of the HTTP client could not be made.
    #[error("cannot set up TLS")]
    Tls(#[source] rustls::Error),
    /// The workload makes no sense.
    #[error("the workload has a distribution that cannot be drawn from")]
    Workload,
}

/// What a fleet is made of.
#[derive(Clone, PartialEq, Debug)]
pub struct FleetSpec {
    /// Its engines.
    pub engines: Vec<EngineSetup>,
    /// Its router.
    pub router: RouterSetup,
    /// Model seconds per real second.
    pub speed: f64,
    /// Wall time at the start in milliseconds since the Unix epoch, for the times in answers.
    pub wall_start_ms: u64,
}

impl FleetSpec {
    /// `count` engines with pools of `pool_tokens` each, in real time.
    #[must_use]
    pub fn uniform(count: usize, pool_tokens: u64) -> Self {
        Self {
            engines: vec![EngineSetup::with_pool(pool_tokens); count],
            router: RouterSetup::default(),
            speed: 1.0,
            wall_start_ms: WALL_START_MS,
        }
    }

    /// The demo: four engines of about 400,000 tokens. At two of them a close frees KV, at two it lets
    /// KV go first when room is needed. `wall_start_ms` is the time now in milliseconds since the Unix
    /// epoch, `speed` the model seconds per real second.
    #[must_use]
    pub fn demo(speed: f64, wall_start_ms: u64) -> Self {
        let engines = DEMO_ENGINES.map(|(pool_tokens, version)| EngineSetup {
            stale_gauges: version == EngineVersion::V0_5_15Post1,
            ..EngineSetup::with_pool(pool_tokens).of(version)
        });
        Self {
            engines: engines.to_vec(),
            router: RouterSetup::default(),
            speed,
            wall_start_ms,
        }
    }
}

/// A running fleet. It stops when this is dropped.
pub struct FakeFleet {
    router: FakeRouter,
    engines: Vec<FakeEngine>,
    _stop: Arc<DropGuard>,
}

impl FakeFleet {
    /// Starts engines and router.
    ///
    /// # Errors
    /// An address could not be taken, or the router's HTTP client not be made.
    pub async fn start(spec: FleetSpec) -> Result<Self, DemoError> {
        let stop = CancellationToken::new();
        let guard = Arc::new(stop.clone().drop_guard());
        let mut engines = Vec::with_capacity(spec.engines.len());
        for setup in spec.engines {
            let engine = FakeEngine::start(setup, spec.speed, spec.wall_start_ms, &stop).await;
            engines.push(engine.map_err(DemoError::Listen)?);
        }
        let http = http_client()?;
        let router = FakeRouter::start(spec.router, engines.clone(), http, &stop)
            .await
            .map_err(DemoError::Listen)?;
        Ok(Self {
            router,
            engines,
            _stop: guard,
        })
    }

    /// The router.
    #[must_use]
    pub const fn router(&self) -> &FakeRouter {
        &self.router
    }

    /// Base address of the router.
    #[must_use]
    pub fn router_url(&self) -> String {
        self.router.url()
    }

    /// All engines, in the order of the spec.
    #[must_use]
    pub fn engines(&self) -> &[FakeEngine] {
        &self.engines
    }

    /// Engine number `place`, from 0.
    ///
    /// # Panics
    /// There is no such engine: a fault of the test that asks.
    #[must_use]
    #[expect(
        clippy::indexing_slicing,
        reason = "only tests name engines by number, and a wrong number is to fail them"
    )]
    pub fn engine(&self, place: usize) -> &FakeEngine {
        &self.engines[place]
    }

    /// Base address of engine number `place`.
    ///
    /// # Panics
    /// There is no such engine.
    #[must_use]
    pub fn engine_url(&self, place: usize) -> String {
        self.engine(place).url()
    }

    /// The requests that engine number `place` has seen.
    ///
    /// # Panics
    /// There is no such engine.
    #[must_use]
    pub fn requests(&self, place: usize) -> Vec<RecordedRequest> {
        self.engine(place).requests()
    }
}

/// Starts the demo's fleet. `wall_start_ms` is the time now in milliseconds since the Unix epoch.
/// The agents are started apart, with [`Agents::start`], once the coordinator listens.
///
/// # Errors
/// As [`FakeFleet::start`].
pub async fn run_fleet(speed: f64, wall_start_ms: u64) -> Result<FakeFleet, DemoError> {
    FakeFleet::start(FleetSpec::demo(speed, wall_start_ms)).await
}

/// A client for plain HTTP on loopback: no proxy, no redirects, no trusted certificates.
fn http_client() -> Result<reqwest::Client, DemoError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(DemoError::Tls)?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .map_err(DemoError::Client)
}
