//! Start and stop order. The only file that knows every concrete type.
//!
//! Start (DUR3): bind the ports, serve health, open the store and load it, write down the bound
//! addresses, read the fleet once, be ready. Stop: readiness goes false and waiting calls are
//! answered, answers in flight and calls to engines end, the store is closed; within 5 s.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kvgate_api::Severity;
use kvgate_core::ids::EngineId;
use kvgate_core::reading::Round;
use kvgate_core::settings::Settings;
use kvgate_core::store::Opened;
use kvgate_core::units::Timestamp;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::access::{self, Access, Caller, Right, TokenFile};
use crate::check::{self, Finding};
use crate::clock::Clock;
use crate::config::{Config, ConfigError, Layer, Origins};
use crate::demo::{Agents, AgentsSpec, DemoError, FakeFleet, FleetSpec};
use crate::fleet::close_support::CloseSupport;
use crate::fleet::closer::{Closer, CloserError};
use crate::fleet::dialect::Prefix;
use crate::fleet::poller::{Poller, PollerError, RoundDetails};
use crate::gate::{self, Gate, Phase, WriterConfig};
use crate::history::{History, Sampler};
use crate::http::{
    self, App, Endpoint, FleetDetails, HttpConfig, Limits, Listener, ShellNotice, Tls, TlsFiles,
};
use crate::store::{self, CopyError, OfflineError, OpenError, RedbStore};
use crate::supervisor;
use crate::support::Support;
use crate::telemetry;
use crate::web;
use crate::words;

/// Name of the file with the bound addresses, in the data directory.
const ADDRESS_FILE: &str = "address";

/// Longest time for closing the store when answers in flight have ended.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

/// Threads that speak HTTP, at most. Each of them reads and writes faster than the one writer and the disk commit, and
/// one that waits for work costs the others a wake-up for most requests.
const WORKERS_MAX: usize = 4;

/// File descriptors that are asked for: 20,000 waiting calls, and room for the rest.
const DESCRIPTORS: u64 = 65_536;

/// With fewer an operator is told: the connections of a fleet of callers, one for each waiting call,
/// and 1,024 calls to engines would not fit.
const DESCRIPTORS_FEW: u64 = 8_192;

/// Exit code of a second signal, as a shell reports an interrupt.
const INTERRUPTED: i32 = 130;

/// Why a command ends without having done its work; each kind has its exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Usage or configuration: 2.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store cannot be opened: 65, 74, 75, 77 or 78; its settings do not fit: 2.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A command on a store: 2, or the code of its cause.
    #[error(transparent)]
    Offline(#[from] OfflineError),
    /// An address cannot be taken: 69.
    #[error(
        "cannot listen on {address}: {error}; choose another --listen, or stop what listens there"
    )]
    Listen {
        /// The address.
        address: Endpoint,
        /// Why.
        error: io::Error,
    },
    /// Anything else: 74 for input and output.
    #[error("{0}")]
    Io(String),
}

impl Failure {
    /// From an error of input or output.
    pub fn other(error: impl std::fmt::Display) -> Self {
        Self::Io(error.to_string())
    }

    /// The process's exit code.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Config(_) => 2,
            Self::Offline(
                OfflineError::Missing(_) | OfflineError::Exists(_) | OfflineError::CopyExists(_),
            ) => 2,
            Self::Offline(OfflineError::Copy(
                CopyError::Foreign | CopyError::Truncated(_) | CopyError::Damaged { .. },
            )) => 65,
            Self::Listen { .. } => 69,
            Self::Io(_) | Self::Offline(OfflineError::Copy(CopyError::Io(_))) => 74,
            Self::Offline(OfflineError::Write(_)) => 74,
            Self::Offline(OfflineError::Copy(CopyError::Newer { .. })) => 78,
            Self::Store(error) | Self::Offline(OfflineError::Store(error)) => store_code(error),
        })
    }
}

fn store_code(error: &OpenError) -> u8 {
    match error {
        OpenError::Settings(_) => 2,
        OpenError::Damaged(..) | OpenError::Foreign(_) => 65,
        OpenError::Io(..) => 74,
        OpenError::Locked(_) => 75,
        OpenError::Permission(..) => 77,
        OpenError::Newer { .. } => 78,
    }
}

impl From<PollerError> for Failure {
    fn from(error: PollerError) -> Self {
        Self::other(error)
    }
}

impl From<CloserError> for Failure {
    fn from(error: CloserError) -> Self {
        Self::other(error)
    }
}

impl From<DemoError> for Failure {
    fn from(error: DemoError) -> Self {
        Self::other(error)
    }
}

/// Reads something anew at SIGHUP, and says in the log what came of it.
type Reload = Arc<dyn Fn() + Send + Sync>;

/// What `kvgate demo` was asked for.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// Address of API and page.
    pub listen: String,
    /// Directory of the store; a temporary one without it.
    pub data: Option<PathBuf>,
    /// Tokens of callers; everybody is let in without.
    pub token_file: Option<PathBuf>,
    /// Agent sessions at a time.
    pub sessions: u64,
    /// Model seconds per real second.
    pub speed: f64,
    /// Draws everything that is drawn.
    pub seed: u64,
}

/// Runs the coordinator until a signal stops it.
///
/// # Errors
/// See [`Failure`].
pub fn serve(config: Config) -> Result<(), Failure> {
    let (runtime, descriptors) = prepare()?;
    let ended = runtime.block_on(async {
        let signals = Signals::of_a_service().map_err(Failure::other)?;
        let service = Service::start(config, descriptors).await?;
        signals.stop(service).await;
        Ok(())
    });
    // A commit that does not return keeps the thread that it was made on.
    runtime.shutdown_timeout(CLOSE_WITHIN);
    ended
}

/// Runs fleet, agents and coordinator until a signal stops them.
///
/// # Errors
/// See [`Failure`].
pub fn demo(options: DemoOptions) -> Result<(), Failure> {
    if !(options.speed.is_finite() && (0.1..=100.0).contains(&options.speed)) {
        return Err(ConfigError::new("speed must be 0.1 to 100").into());
    }
    let temporary = tempfile::tempdir().map_err(Failure::other)?;
    let data = options
        .data
        .unwrap_or_else(|| temporary.path().to_path_buf());
    let (runtime, descriptors) = prepare()?;
    runtime.block_on(async {
        let signals = Signals::new().map_err(Failure::other)?;
        let clock = Clock::start();
        let wall = clock.now().millis();
        let fleet = FakeFleet::start(FleetSpec::demo(options.speed, wall)).await?;
        let layer = Layer {
            listen: Some(vec![options.listen]),
            data: Some(data.to_string_lossy().into_owned()),
            router: Some(fleet.router_url()),
            program_admission: Some(true),
            session_lifecycle: Some(true),
            token_file: options
                .token_file
                .map(|path| path.to_string_lossy().into_owned()),
            ..Layer::default()
        };
        let mut config = Config::load(layer, [], None)?;
        let token = config.token_file.as_mut().map(token_for_agents);
        let token = token.transpose().map_err(Failure::other)?;
        let service = Service::start(config, descriptors).await?;
        let port = service.ports.first().ok_or_else(|| {
            ConfigError::new("the agents of the demo need a port: --listen must be HOST:PORT")
        })?;
        let base = format!("http://{port}");
        let mut agents = AgentsSpec::demo(&base, &fleet.router_url());
        agents.run = format!("{wall:x}");
        agents.slots = options.sessions;
        agents.speed = options.speed;
        agents.workload.seed = options.seed;
        agents.token = token;
        let stop = CancellationToken::new();
        let agents = Agents::start(agents, &stop)?;
        let router = fleet.router_url();
        tracing::info!(page = %base, %router, sessions = options.sessions, "the demo runs; open the page");
        signals.stop(service).await;
        agents.stop().await;
        Ok(())
    })
}

/// The demo's agents have a token of their own, for this run only.
fn token_for_agents(file: &mut TokenFile) -> Result<String, getrandom::Error> {
    let token = access::fresh_secret()?;
    let caller = Caller {
        name: "demo".into(),
        right: Right::Client,
    };
    file.tokens = file.tokens.with(caller, &token);
    Ok(token)
}

/// Asks router and engines once.
///
/// # Errors
/// See [`Failure`].
pub fn check(config: &Config) -> Result<Vec<Finding>, Failure> {
    let (runtime, _) = prepare()?;
    Ok(runtime.block_on(check::run(config))?)
}

/// What every command that speaks to the network needs, and how many files it may open.
pub(crate) fn prepare() -> Result<(Runtime, u64), Failure> {
    // Fails only when a provider is installed already, which serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let descriptors = rlimit::increase_nofile_limit(DESCRIPTORS).or_else(|error| {
        tracing::warn!(%error, "the limit of file descriptors cannot be raised");
        rlimit::Resource::NOFILE.get_soft()
    });
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // One core is left to the writer.
        .worker_threads(cores.saturating_sub(1).clamp(1, WORKERS_MAX))
        .enable_all()
        .build()
        .map_err(Failure::other)?;
    // A system that tells no limit has none that is known.
    Ok((runtime, descriptors.unwrap_or(DESCRIPTORS)))
}

/// A running coordinator.
struct Service {
    gate: Gate,
    ports: Vec<SocketAddr>,
    stop: CancellationToken,
    servers: TaskTracker,
    poller: JoinHandle<()>,
    /// Samples go on while it is held.
    _sampler: Sampler,
    closer: Closer,
    reloads: Vec<Reload>,
}

impl Service {
    async fn start(config: Config, descriptors: u64) -> Result<Self, Failure> {
        let open = opener(&config);
        let tls = config.tls.map(load_tls).transpose()?;
        let listeners = bind(&config.listen, tls.as_ref()).await?;
        let ports: Vec<SocketAddr> = listeners.iter().filter_map(Listener::port).collect();
        let addresses: Vec<String> = listeners.iter().map(Listener::name).collect();
        for address in &addresses {
            tracing::info!(address, "listening");
        }
        let origins = config.origins.clone();
        let mut reloads: Vec<Reload> = Vec::new();
        let access = match config.token_file {
            Some(file) => {
                let (access, reload) = by_tokens(file);
                reloads.push(reload);
                access
            }
            None => Access::open(),
        };
        reloads.extend(tls.map(by_certificate));
        if access.is_open() && ports.iter().any(|port| !port.ip().is_loopback()) {
            tracing::warn!(
                "open to the network without tokens: whoever reaches the port has every right"
            );
        }
        let writer = WriterConfig {
            policy: config.policy,
            reset_settings: config.reset_settings,
            fleet: config.fleet,
            salts: random,
            recorder: None,
        };
        let (gate, opened) = gate::spawn(writer, Clock::start(), open).map_err(Failure::other)?;
        let (details, fleet) = watch::channel(Arc::new(FleetDetails::default()));
        let (notices, shown_notices) = watch::channel(Vec::new());
        let http = HttpConfig {
            bound: ports.clone(),
            allowed_hosts: config.allowed_hosts,
            access: access.clone(),
            metrics_auth: config.metrics_auth,
            default_ttl: config.lease_ttl,
            origins: config.origins,
            configured: config.shown,
            stuck_after: http::STUCK_AFTER,
        };
        let history = History::default();
        let app = App::new(
            gate.clone(),
            http,
            fleet,
            shown_notices,
            history.clone(),
            random(),
        );
        let pages = web::routes(app.clone());
        let routes = http::router(app.clone(), pages);
        let stop = CancellationToken::new();
        let servers = TaskTracker::new();
        servers.spawn(http::serve(
            listeners,
            app.clone(),
            routes,
            limits(descriptors),
            stop.clone(),
        ));
        servers.close();
        tokio::spawn(supervisor::attend(app));

        opened
            .await
            .map_err(|_| Failure::other("the writer ended before the store was open"))??;
        tell_settings(&gate, &origins);
        write_addresses(&config.data, &addresses)?;
        if let Err(error) = history.keep_in(&config.data) {
            tracing::warn!(%error, "history is kept in memory only");
        }
        let sampler = history.sample(gate.clone()).map_err(Failure::other)?;
        notices.send_modify(|notices| {
            notices.extend(network_notice(&config.data, &gate));
            notices.extend(descriptor_notice(descriptors, &gate));
        });
        let closer = Closer::start(config.closer, gate.clone())?;
        let mut poller = config.poller;
        let known = gate.view();
        poller.known = known
            .engines
            .iter()
            .map(|engine| engine.id.clone())
            .collect();
        let watched = Watched {
            details,
            closes: WatchedCloses::new(notices, closer.routers()),
        };
        let poller = tokio::spawn(poll(Poller::new(poller)?, gate.clone(), watched));
        tokio::spawn(say_when_ready(gate.clone()));
        tokio::spawn(telemetry::tell_repeats());
        Ok(Self {
            gate,
            ports,
            stop,
            servers,
            poller,
            _sampler: sampler,
            closer,
            reloads,
        })
    }

    /// Reads anew what can be read anew. A file may lie on a slow disk, so this is done aside.
    async fn reload(&self) {
        if self.reloads.is_empty() {
            tracing::info!("nothing to read anew; other settings need a restart");
        }
        for reload in self.reloads.iter().cloned() {
            // It fails only when the reading itself panicked, and that is logged.
            let _ = tokio::task::spawn_blocking(move || reload()).await;
        }
    }

    async fn drain(self) {
        tracing::info!("draining: waiting callers are told to come back");
        self.gate.begin_drain();
        supervisor::stopping();
        self.stop.cancel();
        tokio::join!(self.servers.wait(), self.closer.stop());
        self.poller.abort();
        if timeout(CLOSE_WITHIN, self.gate.stop()).await.is_err() {
            tracing::error!("the store could not be closed in time; the next start repairs it");
        }
        telemetry::tell_repeats_at_the_end();
        tracing::info!("stopped");
    }
}

/// Who is let in by this file, and how it is read anew. A file that cannot be used changes nothing.
fn by_tokens(file: TokenFile) -> (Access, Reload) {
    warn_if_open_to_others(&file);
    let (path, access) = (file.path, Access::by(file.tokens));
    let kept = access.clone();
    let reload = move || match TokenFile::read(&path) {
        Ok(file) => {
            warn_if_open_to_others(&file);
            let tokens = file.tokens.count();
            let changed = access.replace(file.tokens);
            let (added, removed) = (changed.added, changed.removed);
            tracing::info!(tokens, added, removed, "the token file was read anew");
        }
        Err(error) => {
            let path = path.display();
            tracing::error!(%path, %error, "the token file cannot be used; the tokens stay as they were");
        }
    };
    (kept, Arc::new(reload))
}

fn warn_if_open_to_others(file: &TokenFile) {
    if file.is_open_to_others {
        let path = file.path.display();
        tracing::warn!(%path, "every user of this machine may read or change the token file: chmod 640");
    }
}

/// Opens the store, at the start and whenever it failed. What was set at run time must fit what is
/// configured now.
fn opener(config: &Config) -> impl FnMut() -> Result<Opened<RedbStore>, OpenError> + use<> {
    let data = config.data.clone();
    let configured = config.policy.clone();
    let reset = config.reset_settings;
    move || {
        let opened = store::open(&data)?;
        let settings = Settings {
            configured: configured.clone(),
            overrides: opened.image.overrides.clone(),
        };
        if !reset {
            settings.validated().map_err(OpenError::Settings)?;
        }
        Ok(opened)
    }
}

/// What a start tells of the settings.
fn tell_settings(gate: &Gate, origins: &Origins) {
    let view = gate.view();
    for (hidden, origin) in origins.hidden(&view.settings) {
        tracing::warn!(
            setting = words::setting(hidden.setting),
            in_force = words::setting_value(hidden.in_force),
            configured = words::setting_value(hidden.configured),
            by = origin.word(),
            "a setting that was set at run time hides a configured one; --reset-settings drops it"
        );
    }
    if !view.policy.program_admission && !view.policy.session_lifecycle {
        tracing::warn!("neither feature is on: observing only, every acquire is a bypass");
    }
}

async fn bind(endpoints: &[Endpoint], tls: Option<&Arc<Tls>>) -> Result<Vec<Listener>, Failure> {
    let mut listeners = Vec::new();
    for endpoint in endpoints {
        let listener =
            Listener::bind_patiently(endpoint)
                .await
                .map_err(|error| Failure::Listen {
                    address: endpoint.clone(),
                    error,
                })?;
        listeners.push(listener.with_tls(tls.cloned()));
    }
    Ok(listeners)
}

/// How the certificate is read anew. Files that cannot be used change nothing.
fn by_certificate(tls: Arc<Tls>) -> Reload {
    Arc::new(move || match tls.reload() {
        Ok(()) => tracing::info!("the certificate was read anew"),
        Err(error) => tracing::error!(%error, "the certificate stays as it was"),
    })
}

fn load_tls(files: TlsFiles) -> Result<Arc<Tls>, Failure> {
    let tls = Tls::load(files).map_err(|error| ConfigError::new(error.to_string()))?;
    Ok(Arc::new(tls))
}

/// The bounds of the server where so many files may be open: a quarter is left to the store and to
/// the calls to router and engines, so that callers cannot keep the service from its fleet.
fn limits(descriptors: u64) -> Limits {
    let limits = Limits::default();
    let room = usize::try_from(descriptors.saturating_sub(descriptors / 4)).unwrap_or(usize::MAX);
    Limits {
        connections: limits.connections.min(room),
        ..limits
    }
}

/// With few file descriptors callers are turned away long before the other bounds are reached.
fn descriptor_notice(descriptors: u64, gate: &Gate) -> Option<ShellNotice> {
    let connections = limits(descriptors).connections;
    if descriptors >= DESCRIPTORS_FEW {
        return None;
    }
    tracing::warn!(descriptors, connections, "few files may be open");
    Some(ShellNotice {
        code: "few_file_descriptors".to_owned(),
        severity: Severity::Warning,
        text: format!(
            "The process may open {descriptors} files, so at most {connections} connections are kept; each waiting \
             call needs one. Raise the hard limit (`LimitNOFILE=` of systemd, `ulimit -Hn`) to {DESCRIPTORS}, and start \
             the service again."
        ),
        since: gate.line().map_or(Timestamp::default(), |line| line.now()),
    })
}

/// A store on a network file system works, but a sync and a lock mean there what its server makes of
/// them.
fn network_notice(data: &Path, gate: &Gate) -> Option<ShellNotice> {
    let kind = store::network_file_system(data)?;
    tracing::warn!(
        data = %data.display(),
        kind,
        "the store lies on a network file system; what a sync promises depends on its server"
    );
    Some(ShellNotice {
        code: "network_file_system".to_owned(),
        severity: Severity::Warning,
        text: format!(
            "The store lies on a network file system ({kind}). What a sync and a lock promise there depends on its \
             server; a local disk is safer and faster."
        ),
        since: gate.line().map_or(Timestamp::default(), |line| line.now()),
    })
}

/// One line an address, in the order given; whole or not at all.
fn write_addresses(data: &Path, addresses: &[String]) -> Result<(), Failure> {
    let lines: String = addresses
        .iter()
        .map(|address| format!("{address}\n"))
        .collect();
    let fresh = data.join(format!("{ADDRESS_FILE}.new"));
    fs::write(&fresh, lines)
        .and_then(|()| fs::rename(&fresh, data.join(ADDRESS_FILE)))
        .map_err(|error| Failure::Io(format!("cannot write {}: {error}", fresh.display())))
}

async fn say_when_ready(gate: Gate) {
    // Ends without a word when the service stops before.
    if gate
        .phases()
        .wait_for(|phase| *phase == Phase::Ready)
        .await
        .is_ok()
    {
        let view = gate.view();
        tracing::info!(
            leases = view.leases,
            waiting = view.waiting,
            epoch = view.epoch.0,
            ceiling = view.measure.ceiling.get(),
            "ready"
        );
    }
}

/// Who is told of the rounds besides the core.
struct Watched {
    details: watch::Sender<Arc<FleetDetails>>,
    closes: WatchedCloses,
}

/// Who is told what closes come to, while they are on.
struct WatchedCloses {
    support: Support,
    notices: watch::Sender<Vec<ShellNotice>>,
    /// Those of the start.
    others: Vec<ShellNotice>,
    routers: watch::Sender<BTreeSet<EngineId>>,
}

impl WatchedCloses {
    fn new(
        notices: watch::Sender<Vec<ShellNotice>>,
        routers: watch::Sender<BTreeSet<EngineId>>,
    ) -> Self {
        let others = notices.borrow().clone();
        Self {
            support: Support::default(),
            others,
            notices,
            routers,
        }
    }

    fn take(&mut self, found: &RoundDetails, now: Timestamp) {
        if let Some(notices) = self.support.take(found, now) {
            self.routers.send_replace(self.support.routers());
            let all = self.others.iter().cloned().chain(notices);
            self.notices.send_replace(all.collect());
        }
    }

    /// Closes are off: what they come to is nobody's concern until they are on again.
    fn forget(&mut self) {
        self.support = Support::default();
        self.notices.send_if_modified(|notices| {
            let told = *notices != self.others;
            if told {
                notices.clone_from(&self.others);
            }
            told
        });
    }
}

/// Reading rounds, one after the other.
async fn poll(mut poller: Poller, gate: Gate, mut watched: Watched) {
    let mut ticks = interval(poller.interval());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let began_at = gate.line().map_or(Timestamp::default(), |line| line.now());
        let lifecycle = gate.view().policy.session_lifecycle;
        poller.look_for_routers(lifecycle);
        let (round, found) = poller.round(began_at).await;
        if lifecycle {
            watched.closes.take(&found, began_at);
        } else {
            watched.closes.forget();
        }
        watched.details.send_replace(Arc::new(shown(&round, found)));
        // While the store is away nobody takes a round; the next one comes soon.
        let _ = gate.round(round).await;
    }
}

/// What the API shows of a round beside what the core keeps.
fn shown(round: &Round, found: RoundDetails) -> FleetDetails {
    FleetDetails {
        has_router: round.router.is_some(),
        router_kind: found.router_kind.map(|kind| kind.name().to_owned()),
        bad_entries: found
            .bad_entries
            .shown
            .into_iter()
            .map(|entry| (entry.raw, entry.reason.to_string()))
            .collect(),
        engines: found
            .engines
            .iter()
            .map(|(engine, details)| {
                let shown = http::EngineDetails {
                    close_support: details.close_support.map(CloseSupport::has_effect),
                    version: details
                        .server
                        .as_ref()
                        .and_then(|server| server.version.clone()),
                    dialect: details.prefix.map(Prefix::mark),
                    readings: details.readings,
                };
                (engine.as_str().to_owned(), shown)
            })
            .collect(),
    }
}

/// A number that nobody can guess: for lease ids, request ids and hash tables.
fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|error| {
        tracing::error!(%error, "the operating system gives no random numbers; the clock serves");
        Clock::start().now().millis()
    })
}

/// SIGTERM and SIGINT; for a service SIGHUP too.
struct Signals {
    term: Signal,
    int: Signal,
    /// `None` where it ends the process, as a terminal that is closed should.
    hangup: Option<Signal>,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hangup: None,
        })
    }

    fn of_a_service() -> io::Result<Self> {
        let hangup = Some(signal(SignalKind::hangup())?);
        Ok(Self {
            hangup,
            ..Self::new()?
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }

    /// Whether something is to be read anew; otherwise it is to stop.
    async fn next_is_hangup(&mut self) -> bool {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.term.recv() => false,
            _ = self.int.recv() => false,
            _ = hangup => true,
        }
    }

    /// Reads anew at each SIGHUP and drains at the first other signal; a second one ends the process at once.
    async fn stop(mut self, service: Service) {
        while self.next_is_hangup().await {
            // A file that does not come must not keep the service from stopping.
            tokio::select! {
                () = service.reload() => {}
                () = self.next() => break,
            }
        }
        tokio::select! {
            () = service.drain() => {}
            () = self.next() => std::process::exit(INTERRUPTED),
        }
    }
}
