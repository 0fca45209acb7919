//! Discovery through the real routers, sglang-router 0.3.2 and smg 1.13.0, in front of fake engines.
//!
//! Runs when `KVGATE_REAL=1` is set, as `.ci/run` does, and then needs `python3` with `venv` and a
//! pip that can fetch packages. The packages stay installed in the target folder. Everything but pip
//! keeps to loopback.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Once;
use std::time::Duration;

use kvgate::demo::{Behaviour, FakeEngine, FakeFleet, FleetSpec, RankGauges};
use kvgate::fleet::address::BaseUrl;
use kvgate::fleet::fetch::{self, Ask, BODY_BYTES_MAX};
use kvgate::fleet::poller::{Poller, PollerConfig, RoundDetails};
use kvgate::fleet::rows::{BadEntries, RouterKind};
use kvgate::fleet::secret::Secret;
use kvgate_core::capacity::{EngineView, FleetConfig};
use kvgate_core::command;
use kvgate_core::ids::EngineId;
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{Policy, UNHEALTHY_AFTER};
use kvgate_core::reading::{ReadFailure, Role, Round, RouterAnswer, RouterFailure, Worker};
use kvgate_core::store::Image;
use kvgate_core::units::{Span, Timestamp};
use kvgate_core::view::View;
use serde_json::Value;
use tokio::time::Instant;

use crate::support::child::{Process, free_ports, looks, must};

/// For a router to come to what is waited for: it starts within a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// For the packages to be fetched and unpacked, by this or another process.
const INSTALL_PATIENCE: Duration = Duration::from_secs(480);
/// For one answer in a round: longer than usual, so that a busy machine spoils no reading.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// Between two rounds, on the time line of the gate.
const ROUND_EVERY: Span = Span::from_secs(1);
/// Starts of one router whose ports were taken by others meanwhile.
const CLASHES_MAX: u32 = 5;

// ---------------------------------------------------------------------------------------------
// The cases
// ---------------------------------------------------------------------------------------------

/// One test for each router and case, so that each is reported and may be run by itself.
macro_rules! cases {
    ($router:ident, $program:expr, [$($case:ident),*]) => {
        mod $router {
            $(
                #[tokio::test]
                async fn $case() {
                    if let Some(python) = super::installed(&$program).await {
                        super::$case(&$program, python).await;
                    }
                }
            )*
        }
    };
}

cases!(
    sglang_router,
    super::SGLANG_ROUTER,
    [plain, dp_aware, unhealthy, key, empty]
);
cases!(smg, super::SMG, [plain, dp_aware, unhealthy, key, empty]);

/// CAP1, CAP2: both engines are members with their pools, and the router is known by its rows.
async fn plain(program: &'static Program, python: PathBuf) {
    let fleet = fleet(&[300_000, 200_000]).await;
    let mut router = Router::start(program, python, urls(&fleet), &[]);
    let seen = router
        .until("two healthy engines", |seen| seen.healthy() == ids(&fleet))
        .await;
    assert_eq!(seen.details.router_kind, Some(program.kind));
    assert_eq!(seen.details.bad_entries, BadEntries::default());
    for worker in seen.workers() {
        assert_eq!(worker.role, Role::Regular);
        assert_eq!(worker.worker_ids.len(), 1, "{worker:?}");
    }
    let pools = [300_000, 200_000].map(|pool| Ok((pool, 1)));
    assert_eq!(seen.pools(), each(&fleet, &pools));
    assert_eq!(seen.view.measure.capacity.get(), 500_000);
    assert_eq!(seen.counted(), ids(&fleet));

    let again = router.round().await;
    assert_eq!(again.view.epoch, seen.view.epoch, "the rows change order");
    assert_eq!(again.round.router, seen.round.router);
}

/// CAP1, CAP2: the rows of the ranks are one engine, whose pool is the sum over its ranks.
async fn dp_aware(program: &'static Program, python: PathBuf) {
    let fleet = fleet(&[300_000, 200_000]).await;
    let rank = |capacity| RankGauges {
        capacity: Some(capacity),
        usage: Some(0.25),
        ..RankGauges::default()
    };
    fleet
        .engine(0)
        .set_ranks(vec![rank(120_000), rank(130_000)]);
    let mut router = Router::start(program, python, urls(&fleet), &["--dp-aware"]);
    let seen = router
        .until("two healthy engines, one with two rows", |seen| {
            let rows = |engine: &EngineId| {
                let worker = seen.workers().iter().find(|w| w.engine == *engine);
                worker.map_or(0, |worker| worker.worker_ids.len())
            };
            seen.healthy() == ids(&fleet) && rows(&id(fleet.engine(0))) == 2
        })
        .await;
    assert_eq!(seen.details.router_kind, Some(program.kind));
    assert_eq!(seen.details.bad_entries, BadEntries::default());
    assert_eq!(seen.workers().len(), 2);
    let pools = [Ok((250_000, 2)), Ok((200_000, 1))];
    assert_eq!(seen.pools(), each(&fleet, &pools));
    assert_eq!(seen.view.measure.capacity.get(), 450_000);

    let (two, one) = (fleet.engine_url(0), fleet.engine_url(1));
    let one = format!("{one}{}", program.single_rank);
    let rows = BTreeSet::from([format!("{two}@0"), format!("{two}@1"), one]);
    assert_eq!(router.row_urls().await, rows);
}

/// CAP3: an engine that is gone and one whose health probe fails are listed as unhealthy, and lose
/// their share until they are healthy again.
async fn unhealthy(program: &'static Program, python: PathBuf) {
    let fleet = fleet(&[300_000, 200_000, 100_000]).await;
    let (living, gone, sick) = (fleet.engine(0), fleet.engine(1), fleet.engine(2));
    let mut router = Router::start(program, python, urls(&fleet), &[]);
    let before = router
        .until("three healthy engines", |seen| {
            seen.healthy() == ids(&fleet)
        })
        .await;
    assert_eq!(before.view.measure.capacity.get(), 600_000);

    gone.stop().await;
    sick.behave("/health", Behaviour::Status(503, String::new()));
    let seen = router
        .until("the sick one unhealthy", |seen| {
            !seen.healthy().contains(&id(sick))
        })
        .await;
    assert!(seen.counted().contains(&id(sick)), "not at once");
    let mut seen = router
        .until("the two unhealthy", |seen| {
            seen.healthy() == BTreeSet::from([id(living)])
        })
        .await;
    assert_eq!(seen.members(), ids(&fleet), "their rows stay");
    let pools = [
        Ok((300_000, 1)),
        Err(ReadFailure::Refused),
        Ok((100_000, 1)),
    ];
    assert_eq!(seen.pools(), each(&fleet, &pools));
    let since = seen.view.now;
    while seen.view.now.since(since) < UNHEALTHY_AFTER {
        seen = router.round().await;
        assert_eq!(seen.healthy(), BTreeSet::from([id(living)]));
    }
    assert_eq!(seen.counted(), BTreeSet::from([id(living)]));
    assert_eq!(seen.view.measure.capacity.get(), 300_000);
    assert_eq!(seen.view.epoch, before.view.epoch, "all stay members");

    gone.start_again().await.unwrap();
    sick.behave("/health", Behaviour::Normal);
    let after = router
        .until("all of them healthy", |seen| seen.healthy() == ids(&fleet))
        .await;
    assert_eq!(after.view.measure.capacity.get(), 600_000);
    assert_eq!(after.counted(), ids(&fleet));
}

/// CAP1: a router with a key says 401 to those without it or with another, and lists its engines to
/// those with it.
async fn key(program: &'static Program, python: PathBuf) {
    const KEY: &str = "open-sesame";
    let fleet = fleet(&[300_000]).await;
    let mut router = Router::start(program, python, urls(&fleet), &["--api-key", KEY]);
    let refused = RouterAnswer::Failed(RouterFailure::KeyRefused(401));
    for wrong in [None, Some("open-barley")] {
        router.ask_with(wrong);
        let seen = router
            .until("the key refused", |seen| {
                seen.round.router.as_ref() == Some(&refused)
            })
            .await;
        assert_eq!(seen.round.readings, []);
        assert_eq!(
            seen.view.router_failure,
            Some(RouterFailure::KeyRefused(401))
        );
    }
    router.ask_with(Some(KEY));
    let seen = router
        .until("one healthy engine", |seen| seen.healthy() == ids(&fleet))
        .await;
    assert_eq!(seen.details.router_kind, Some(program.kind));
    assert_eq!(seen.view.measure.capacity.get(), 300_000);
    assert_eq!(seen.view.router_failure, None);
}

/// CAP7: a router without engines gives a good, empty list, which leaves the gate without a fleet.
async fn empty(program: &'static Program, python: PathBuf) {
    let mut router = Router::start(program, python, Vec::new(), &[]);
    let nobody = RouterAnswer::Workers(Vec::new());
    let seen = router
        .until("an empty list", |seen| {
            seen.round.router.as_ref() == Some(&nobody)
        })
        .await;
    assert_eq!(seen.details.bad_entries, BadEntries::default());
    assert_eq!(seen.details.router_kind, Some(program.kind_when_empty));
    assert_eq!(seen.round.readings, []);
    assert_eq!(seen.view.measure.capacity.get(), 0);
    assert!(seen.view.measure.degraded.is_some());
}

// ---------------------------------------------------------------------------------------------
// Engines and rounds
// ---------------------------------------------------------------------------------------------

async fn fleet(pools: &[u64]) -> FakeFleet {
    let fleet = FakeFleet::start(FleetSpec::uniform(pools.len(), 0))
        .await
        .unwrap();
    for (engine, pool) in fleet.engines().iter().zip(pools) {
        engine.set_capacity(*pool);
    }
    fleet
}

fn urls(fleet: &FakeFleet) -> Vec<String> {
    fleet.engines().iter().map(FakeEngine::url).collect()
}

fn id(engine: &FakeEngine) -> EngineId {
    BaseUrl::parse(&engine.url()).unwrap().engine()
}

fn ids(fleet: &FakeFleet) -> BTreeSet<EngineId> {
    fleet.engines().iter().map(id).collect()
}

fn each<T: Copy>(fleet: &FakeFleet, values: &[T]) -> BTreeMap<EngineId, T> {
    let values = values.iter().copied();
    fleet.engines().iter().map(id).zip(values).collect()
}

/// A round, and what the gate makes of all rounds up to it.
#[derive(Debug)]
struct Seen {
    round: Round,
    details: RoundDetails,
    view: View,
}

impl Seen {
    fn workers(&self) -> &[Worker] {
        match &self.round.router {
            Some(RouterAnswer::Workers(workers)) => workers,
            _ => &[],
        }
    }

    fn members(&self) -> BTreeSet<EngineId> {
        let workers = self.workers().iter();
        workers.map(|worker| worker.engine.clone()).collect()
    }

    fn healthy(&self) -> BTreeSet<EngineId> {
        let healthy = self.workers().iter().filter(|worker| worker.healthy);
        healthy.map(|worker| worker.engine.clone()).collect()
    }

    fn counted(&self) -> BTreeSet<EngineId> {
        let counted = self.view.engines.iter().filter(|engine| engine.counted);
        counted.map(|EngineView { id, .. }| id.clone()).collect()
    }

    /// Pool and number of ranks of every engine that was asked.
    fn pools(&self) -> BTreeMap<EngineId, Result<(u64, u32), ReadFailure>> {
        let readings = self.round.readings.iter();
        readings
            .map(|(engine, reading)| {
                let pool = reading
                    .as_ref()
                    .map(|good| (good.capacity.get(), good.ranks));
                (engine.clone(), pool.map_err(|failure| *failure))
            })
            .collect()
    }
}

/// The core of a gate, on a time line that the test moves.
struct Gate {
    machine: Option<Box<Machine>>,
    store: MemoryStore,
    now: Timestamp,
}

impl Gate {
    fn new() -> Self {
        let now = Timestamp::from_millis(1_000_000);
        let params = StartParams {
            now,
            salt: 1,
            seed: 1,
            policy: Policy::default(),
            reset_settings: false,
            fleet: FleetConfig {
                has_router: true,
                static_engines: BTreeSet::new(),
            },
        };
        let start = Machine::restore(Image::default(), params);
        let mut store = MemoryStore::default();
        let Ok(started) = start.commit(&mut store);
        Self {
            machine: Some(started.machine),
            store,
            now,
        }
    }

    fn take(&mut self, round: Round) -> View {
        let mut turn = self.machine.take().unwrap().turn(self.now);
        turn.handle(command::Command::Round(round));
        let Ok(committed) = turn.finish().commit(&mut self.store);
        let view = committed.machine.view();
        self.machine = Some(committed.machine);
        view
    }
}

// ---------------------------------------------------------------------------------------------
// Routers
// ---------------------------------------------------------------------------------------------

/// A router as it is packaged.
struct Program {
    package: &'static str,
    version: &'static str,
    /// The module that launches it: both packages bring a script named `smg`.
    module: &'static str,
    flags: &'static [&'static str],
    kind: RouterKind,
    /// What is known of it while it has no rows.
    kind_when_empty: RouterKind,
    /// What `--dp-aware` adds to the address of an engine with one rank.
    single_rank: &'static str,
}

const SGLANG_ROUTER: Program = Program {
    package: "sglang-router",
    version: "0.3.2",
    module: "sglang_router.launch_router",
    flags: &[],
    kind: RouterKind::SglangRouter,
    kind_when_empty: RouterKind::Unknown,
    single_rank: "@0",
};

const SMG: Program = Program {
    package: "smg",
    version: "1.13.0",
    module: "smg.launch_router",
    flags: &["--disable-tokenizer-autoload"],
    kind: RouterKind::Smg,
    kind_when_empty: RouterKind::Smg,
    single_rank: "",
};

/// Health is probed often; a probe fails by its answer, not by a busy machine.
const FLAGS: &[&str] = &[
    "--health-check-interval-secs=1",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
    "--health-check-timeout-secs=10",
    "--worker-startup-timeout-secs=120",
    "--worker-startup-check-interval=1",
];

/// Through these a router would ask a proxy for its engines.
const PROXIES: &[&str] = &["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"];
/// sglang-router fetches the tokenizer of the model that its engines name, and goes on without it.
/// With this proxy for HTTPS, where nothing listens, neither router reaches beyond loopback.
const NO_WAY_OUT: [(&str, &str); 2] = [
    ("https_proxy", "http://127.0.0.1:9"),
    ("HTTPS_PROXY", "http://127.0.0.1:9"),
];

/// A router that runs, and a gate behind it.
struct Router {
    program: &'static Program,
    python: PathBuf,
    engines: Vec<String>,
    flags: Vec<String>,
    key: Option<&'static str>,
    process: Process,
    clashes: u32,
    url: String,
    poller: Poller,
    gate: Gate,
}

impl Router {
    fn start(
        program: &'static Program,
        python: PathBuf,
        engines: Vec<String>,
        flags: &[&str],
    ) -> Self {
        let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
        let (process, url) = launch(program, &python, &engines, &flags);
        Self {
            poller: poller(&url, None),
            program,
            python,
            engines,
            flags,
            key: None,
            process,
            clashes: 0,
            url,
            gate: Gate::new(),
        }
    }

    /// From now on with this key, by a gate that knows nothing yet.
    fn ask_with(&mut self, key: Option<&'static str>) {
        self.key = key;
        self.poller = poller(&self.url, key);
        self.gate = Gate::new();
    }

    async fn round(&mut self) -> Seen {
        self.gate.now = self.gate.now.after(ROUND_EVERY);
        let (round, details) = self.poller.round(self.gate.now).await;
        let view = self.gate.take(round.clone());
        Seen {
            round,
            details,
            view,
        }
    }

    /// Reads rounds until one is as wanted.
    async fn until(&mut self, what: &str, wanted: impl Fn(&Seen) -> bool) -> Seen {
        let began = Instant::now();
        let mut looks = looks();
        let mut last = None;
        while began.elapsed() < PATIENCE {
            looks.tick().await;
            if let Some(status) = self.process.ended() {
                self.again(status);
            }
            let seen = self.round().await;
            if wanted(&seen) {
                return seen;
            }
            last = Some(seen);
        }
        let name = self.program.package;
        let log = self.process.tail();
        panic!(
            "no {what} through {name} in {PATIENCE:?}; the last round: {last:#?}\nits log:\n{log}"
        );
    }

    /// Other ports, when somebody else got these between the look and the start.
    fn again(&mut self, status: ExitStatus) {
        let name = self.program.package;
        let log = self.process.tail();
        self.clashes += 1;
        assert!(
            log.contains("Address already in use") && self.clashes < CLASHES_MAX,
            "{name} ended with {status}; its log:\n{log}"
        );
        (self.process, self.url) = launch(self.program, &self.python, &self.engines, &self.flags);
        self.ask_with(self.key);
    }

    /// The addresses of the rows, as they are.
    async fn row_urls(&self) -> BTreeSet<String> {
        let ask = Ask {
            url: &format!("{}/workers", self.url),
            key: None,
            accept: "application/json",
        };
        let client = fetch::router_client().unwrap();
        let body = fetch::get(&client, ask, BODY_BYTES_MAX).await.unwrap();
        let list: Value = serde_json::from_slice(&body).unwrap();
        let rows = list["workers"].as_array().unwrap().iter();
        rows.map(|row| row["url"].as_str().unwrap().to_owned())
            .collect()
    }
}

fn poller(url: &str, key: Option<&str>) -> Poller {
    // fails when another test was first
    let _ = rustls::crypto::ring::default_provider().install_default();
    Poller::new(PollerConfig {
        router: Some(url.parse().unwrap()),
        router_key: key.map(|key| Secret::new(key).unwrap()),
        timeout: ANSWER_WITHIN,
        ..PollerConfig::default()
    })
    .unwrap()
}

fn launch(
    program: &Program,
    python: &Path,
    engines: &[String],
    flags: &[String],
) -> (Process, String) {
    let [port, prometheus_port] = free_ports().map(|port| port.to_string());
    let mut command = Command::new(python);
    command
        .args([
            "-I",
            "-m",
            program.module,
            "--host=127.0.0.1",
            "--port",
            &port,
        ])
        .args([
            "--prometheus-host=127.0.0.1",
            "--prometheus-port",
            &prometheus_port,
        ])
        .args(FLAGS)
        .args(program.flags)
        .args(flags)
        .arg("--worker-urls")
        .args(engines)
        .envs(NO_WAY_OUT);
    for name in PROXIES {
        command.env_remove(name);
    }
    (Process::start(command), format!("http://127.0.0.1:{port}"))
}

// ---------------------------------------------------------------------------------------------
// Processes and packages
// ---------------------------------------------------------------------------------------------

/// The Python that has the package; `None`, and a loud word, when real routers are not wanted.
async fn installed(program: &Program) -> Option<PathBuf> {
    static SKIPPED: Once = Once::new();
    if std::env::var_os("KVGATE_REAL").is_none_or(|real| real != "1") {
        // past the capture of the test harness, which hides what a passing test prints
        SKIPPED.call_once(|| {
            let _ = writeln!(
                io::stderr(),
                "\nSKIPPED: the tests against real routers; KVGATE_REAL=1 runs them (docs/ci.md)"
            );
        });
        return None;
    }
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("real-routers");
    fs::create_dir_all(&place).unwrap();
    let name = format!("{}-{}", program.package, program.version);
    let _lock = lock(&place.join(format!("{name}.lock"))).await;

    let folder = place.join(name);
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    if complete.exists() && answers(&python, program).await {
        return Some(python);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv"]).arg(&folder);
    must(venv, INSTALL_PATIENCE).await;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
    ])
    .arg(format!("{}=={}", program.package, program.version));
    must(pip, INSTALL_PATIENCE).await;
    File::create(complete).unwrap();
    Some(python)
}

/// Whether it still runs and has the version: the Python below it may have been replaced.
async fn answers(python: &Path, program: &Program) -> bool {
    let mut ask = Command::new(python);
    let (package, version) = (program.package, program.version);
    let code =
        format!("import importlib.metadata as m; assert m.version('{package}') == '{version}'");
    ask.args(["-I", "-c", &code]);
    python.exists() && Process::start(ask).success(PATIENCE).await
}

/// One at a time, also among processes; the system releases it should we be killed.
async fn lock(path: &Path) -> File {
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).open(path);
    let file = file.unwrap();
    let began = Instant::now();
    let mut looks = looks();
    while began.elapsed() < INSTALL_PATIENCE {
        looks.tick().await;
        match file.try_lock() {
            Ok(()) => return file,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => panic!("{}: {error}", path.display()),
        }
    }
    panic!("{} is held by another process", path.display());
}
