//! The load room: callers that drive a service over HTTP and what they see.
//!
//! Closed loops, in which every caller waits for its answer, and an open one at a fixed rate; each figure
//! beside what the disk and bare handlers give in the same run. Promises: servers and files that a run
//! starts end with it, whatever ends it; all connections are open before the clock starts. Left to others:
//! what figures mean. This room never touches the gate or the store; it reaches them over HTTP only.

mod answers;
mod ask;
mod bare;
mod callers;
mod figures;
mod machine;
mod scenario;
mod server;
mod wire;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::block_in_place;
use tokio::time::timeout;

use crate::demo::{DemoError, FakeFleet, FleetSpec};

pub use ask::{Head, ID_CHARS_MAX, ID_CHARS_MIN, Ids, SESSION_CHARS_MIN, Shape};
pub use bare::serve as serve_bare;
pub use callers::Ready;
pub use figures::{Figures, Latency, Proof, System, Transport, median, millis};
pub use machine::{Machine, processor_time};
pub use scenario::{Cell, Measured, Scenario, Service, histogram};
pub use wire::{Answer, Connection, Target, WireError};

use figures::{Scrape, rounded};
use machine::resident_bytes;
use server::Server;

/// KV tokens of the built-in engine: so many that only leases made for it can fill it.
const POOL_TOKENS: u64 = 1 << 40;
/// Tokens of an acquire that is to fit.
const TOKENS: u64 = 22_528;
/// How long the disk is measured, for each way to write.
const DISK_TIME_MAX: Duration = Duration::from_secs(1);
/// How long a service may take to know its capacity, and to have written down what it counted.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);
/// Between two looks at it.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long after a failure a signal that caused it may come.
const SIGNAL_WITHIN: Duration = Duration::from_millis(300);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What callers do.
    pub scenarios: Vec<Scenario>,
    /// How many callers; what suits a scenario without.
    pub connections: Option<Vec<usize>>,
    /// For how long they begin anew in one measurement.
    pub time: Duration,
    /// How often each measurement is made, the others in between.
    pub rounds: usize,
    /// How the service is reached.
    pub transports: Vec<Transport>,
    /// What is measured.
    pub systems: Vec<System>,
    /// Pairs a second of [`Scenario::Arrivals`].
    pub rate: f64,
    /// Acquires in one call of [`Scenario::Batch`].
    pub batch: usize,
    /// Leases that fit in [`Scenario::Contended`].
    pub slots: usize,
    /// How long each of them is held there.
    pub hold: Duration,
    /// What acquires look like.
    pub shape: Shape,
    /// Threads that make the load.
    pub threads: usize,
    /// Where stores and measurements of the disk lie, in a folder of their own that ends with the run.
    pub data: PathBuf,
    /// The service that is driven.
    pub gate: Where,
    /// Another build of the program, as [`System::Against`].
    pub against: Option<PathBuf>,
}

/// The service that is driven.
#[derive(Clone, Debug)]
pub enum Where {
    /// One of this run, with these flags beside its own.
    Own(Vec<String>),
    /// One that runs already, and its process if that is known.
    Running(Service, Option<u32>),
}

/// What a run tells as it goes.
#[derive(Clone, Copy, Debug)]
pub enum Told<'a> {
    /// The machine, first of all.
    Machine(&'a Machine),
    /// One measurement.
    Figures(&'a Figures),
    /// The proof, last of all; only of services that the run started.
    Proof(&'a Proof),
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Input or output failed.
    #[error("{what}: {error}")]
    Io {
        /// What could not be done.
        what: &'static str,
        /// Why.
        error: io::Error,
    },
    /// The disk cannot be measured.
    #[error("the disk cannot be measured: {0}")]
    Disk(String),
    /// A server did not start.
    #[error("the service did not start: {0}")]
    Start(String),
    /// The engine did not start.
    #[error("the built-in engine did not start: {0}")]
    Engine(#[from] DemoError),
    /// Nobody answers.
    #[error(
        "cannot connect to {target}: {error}; start the service there, or leave --url and --socket out"
    )]
    Connect {
        /// Where.
        target: Target,
        /// Why.
        error: io::Error,
    },
    /// An exchange failed.
    #[error("the service was lost: {0}")]
    Wire(#[from] WireError),
    /// It answers in other words.
    #[error(
        "{path} answers with status {status}, not as kvgate does; check --url, and --token-file where it asks for tokens"
    )]
    Foreign {
        /// What was asked.
        path: &'static str,
        /// Status of the answer.
        status: u16,
    },
    /// It has nothing to reserve.
    #[error(
        "the service has no ceiling to reserve under; turn admission on there and see `kvgate state`"
    )]
    NoCapacity,
    /// A lease that must be held was not given.
    #[error("the service gave no lease: {}", .0.as_deref().unwrap_or("it let the acquire go on without"))]
    NoLease(Option<String>),
    /// A thread of the load is gone.
    #[error("a thread of the load ended early")]
    Ended,
    /// What callers saw is not what the service says.
    #[error("callers and service do not count the same: {0:?}")]
    Proof(Proof),
    /// Nobody can be told.
    #[error("{0}")]
    Told(String),
    /// A signal.
    #[error("interrupted")]
    Interrupted,
}

impl LoadError {
    fn io(what: &'static str, error: io::Error) -> Self {
        Self::Io { what, error }
    }

    fn connect(target: &Target, error: io::Error) -> Self {
        Self::Connect {
            target: target.clone(),
            error,
        }
    }
}

/// Makes all measurements of a plan, and tells of each. A signal ends it, and what it started.
///
/// What blocks does so in place: a run that is given up never leaves a thread behind that goes on to write.
/// So this needs a runtime of several threads.
///
/// # Errors
/// See [`LoadError`].
pub async fn run(
    plan: &Plan,
    tell: impl FnMut(Told<'_>) -> Result<(), LoadError>,
) -> Result<(), LoadError> {
    let stream =
        |kind| signal(kind).map_err(|error| LoadError::io("no signal can be taken", error));
    let (mut term, mut int, mut hangup) = (
        stream(SignalKind::terminate())?,
        stream(SignalKind::interrupt())?,
        stream(SignalKind::hangup())?,
    );
    let interrupted = async {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            _ = hangup.recv() => {}
        }
    };
    tokio::pin!(interrupted);
    tokio::select! {
        biased;
        () = &mut interrupted => Err(LoadError::Interrupted),
        ended = Run::all(plan, tell) => match ended {
            Ok(()) => Ok(()),
            // A signal to all processes of a terminal ends the servers first.
            Err(error) => match timeout(SIGNAL_WITHIN, interrupted).await {
                Ok(()) => Err(LoadError::Interrupted),
                Err(_) => Err(error),
            },
        },
    }
}

/// What a run has started. The servers end before their files.
struct Run<'a> {
    plan: &'a Plan,
    ids: Ids,
    gate: Gate,
    against: Option<Gate>,
    bare: Option<Server>,
    fleet: Option<FakeFleet>,
    proof: Proof,
    folders: Folders,
}

impl<'a> Run<'a> {
    async fn all(
        plan: &'a Plan,
        mut tell: impl FnMut(Told<'_>) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let folders = Folders::new(&plan.data)?;
        let folder = folders.data.path();
        let time = plan.time.min(DISK_TIME_MAX);
        let machine = block_in_place(|| Machine::measure(folder, time))?;
        tell(Told::Machine(&machine))?;
        let mut run = Self::start(plan, folders).await?;
        for round in 1..=plan.rounds {
            for &transport in &plan.transports {
                for &scenario in &plan.scenarios {
                    for connections in run.connections(scenario) {
                        let mut systems = run.systems(scenario);
                        // Nobody is always the one who comes after the same other.
                        let first = round % systems.len().max(1);
                        systems.rotate_left(first);
                        for system in systems {
                            let cell = run.cell(scenario, connections);
                            let measured = run.measure(system, transport, cell, round).await?;
                            tell(Told::Figures(&measured))?;
                        }
                    }
                }
            }
        }
        if matches!(plan.gate, Where::Own(_)) {
            let mut proof = run.proof.and(run.gate.proof().await?);
            if let Some(against) = &mut run.against {
                proof = proof.and(against.proof().await?);
            }
            tell(Told::Proof(&proof))?;
            if !proof.holds() {
                return Err(LoadError::Proof(proof));
            }
        }
        Ok(())
    }

    async fn start(plan: &'a Plan, folders: Folders) -> Result<Self, LoadError> {
        let bare = match plan.systems.contains(&System::Axum) {
            true => {
                let socket = folders.socket("bare");
                Some(block_in_place(|| Server::bare(socket))?)
            }
            false => None,
        };
        let (gate, against, fleet) = match &plan.gate {
            Where::Own(_) => {
                let fleet = FakeFleet::start(FleetSpec::uniform(1, POOL_TOKENS)).await?;
                let gate = Gate::start(plan, System::Kvgate, &folders, &fleet, false).await?;
                let against = match &plan.against {
                    Some(_) => {
                        Some(Gate::start(plan, System::Against, &folders, &fleet, false).await?)
                    }
                    None => None,
                };
                (gate, against, Some(fleet))
            }
            Where::Running(service, pid) => {
                let gate = Gate::of_others(service.clone(), *pid).await?;
                (gate, None, None)
            }
        };
        Ok(Self {
            plan,
            ids: Ids::new(getrandom::u32().unwrap_or_else(|_| std::process::id())),
            gate,
            against,
            bare,
            fleet,
            proof: Proof::default(),
            folders,
        })
    }

    /// How many callers a scenario is measured with.
    fn connections(&self, scenario: Scenario) -> Vec<usize> {
        let suitable = || match scenario {
            Scenario::Open => vec![1, 16, 64, 256, 1_024],
            Scenario::Contended => vec![64, 256, 1_024],
            Scenario::Batch => vec![1, 4, 16],
            Scenario::Renewals | Scenario::Closes | Scenario::Arrivals => vec![64],
        };
        self.plan.connections.clone().unwrap_or_else(suitable)
    }

    /// Bare handlers know pairs only, and nobody ever waits there.
    fn systems(&self, scenario: Scenario) -> Vec<System> {
        let mut systems = self.plan.systems.clone();
        if !matches!(scenario, Scenario::Open | Scenario::Arrivals) {
            systems.retain(|system| *system != System::Axum);
        }
        systems
    }

    fn cell(&self, scenario: Scenario, connections: usize) -> Cell {
        let plan = self.plan;
        let at_once = match scenario {
            Scenario::Batch => connections.saturating_mul(plan.batch),
            _ => connections,
        };
        let at_once = u64::try_from(at_once).unwrap_or(u64::MAX).max(1);
        let ceiling = self.gate.ceiling;
        let tokens = match scenario {
            Scenario::Contended => ceiling / u64::try_from(plan.slots).unwrap_or(1).max(1),
            _ => TOKENS.min(ceiling / at_once),
        };
        Cell {
            scenario,
            connections,
            time: plan.time,
            tokens: tokens.max(1),
            slots: plan.slots,
            hold: plan.hold,
            batch: plan.batch,
            rate: plan.rate,
            shape: plan.shape.clone(),
            threads: plan.threads,
        }
    }

    async fn measure(
        &mut self,
        system: System,
        transport: Transport,
        cell: Cell,
        round: usize,
    ) -> Result<Figures, LoadError> {
        // Closes go on for long after they were asked for: others are not to pay for them.
        let mut own = match (&self.fleet, cell.scenario) {
            (Some(fleet), Scenario::Closes) => {
                Some(Gate::start(self.plan, system, &self.folders, fleet, true).await?)
            }
            _ => None,
        };
        let gate = match (&mut own, &mut self.against, system) {
            (Some(own), _, _) => own,
            (None, Some(against), System::Against) => against,
            _ => &mut self.gate,
        };
        let (service, pid) = match (system, &self.bare) {
            (System::Axum, Some(bare)) => (bare.service(transport), Some(bare.pid())),
            _ => (gate.service(transport), gate.pid),
        };
        let is_gate = system != System::Axum;
        let load = std::process::id();
        let mut callers = Ready::connect(&service, &cell, &self.ids).await?;
        let scraped = gate.scrape().await?;
        let used = (pid.and_then(processor_time), processor_time(load));
        let seen = callers.run().await?;
        let uses = (pid.and_then(processor_time), processor_time(load));
        let scrape = gate.scrape().await?;
        let rss_bytes = pid.and_then(resident_bytes);
        let counted = callers.finish().await?;
        if is_gate {
            gate.granted += counted.granted;
            gate.released += counted.released;
        }
        let seconds = seen.time.as_secs_f64();
        let per_pair = |before: Option<Duration>, after: Option<Duration>| {
            let used = after?.saturating_sub(before?).as_secs_f64() * 1e6;
            (seen.pairs > 0).then(|| rounded(used / seen.pairs as f64))
        };
        let commits = scrape.commits - scraped.commits;
        let has_commits = is_gate && commits > 0.0;
        let commit_s = (scrape.commit_seconds - scraped.commit_seconds) / commits;
        let grant_ms = Latency::of(&seen.grant).filter(|_| is_gate);
        let is_contended = cell.scenario == Scenario::Contended;
        let in_commits = |latency: Latency| {
            let commits = |ms: f64| rounded(ms / 1e3 / commit_s);
            Latency {
                p50: commits(latency.p50),
                p99: commits(latency.p99),
                p999: commits(latency.p999),
            }
        };
        let grant_after_ms = Latency::of(&seen.grant_after).filter(|_| is_gate);
        let figures = Figures {
            system,
            transport,
            scenario: cell.scenario,
            connections: cell.connections,
            slots: is_contended.then_some(cell.slots),
            hold_ms: is_contended.then_some(cell.hold.as_secs_f64() * 1e3),
            round,
            seconds: rounded(seconds),
            pairs: seen.pairs,
            pairs_per_s: rounded(seen.pairs as f64 / seconds),
            acquire_ms: Latency::of(&seen.acquire),
            release_ms: Latency::of(&seen.release),
            act_ms: Latency::of(&seen.act),
            grant_ms,
            grant_commits: grant_ms.filter(|_| has_commits).map(in_commits),
            grant_after_ms,
            grant_after_commits: grant_after_ms.filter(|_| has_commits).map(in_commits),
            start_lag_ms: Latency::of(&seen.lag).filter(|_| cell.scenario == Scenario::Arrivals),
            server_cpu_us_per_pair: per_pair(used.0, uses.0),
            load_cpu_us_per_pair: per_pair(used.1, uses.1),
            rss_bytes,
            commits_per_s: is_gate.then(|| rounded(commits / seconds)),
            operations_per_commit: has_commits.then(|| rounded(seen.operations as f64 / commits)),
            commit_mean_ms: has_commits.then(|| rounded(commit_s * 1e3)),
            closes_pending: is_gate.then_some(scrape.closes_pending),
            asked_again: seen.asked_again,
            bypassed: seen.bypassed,
            refused: seen.refused,
            first_refusal: seen.first_refusal,
            not_begun: seen.not_begun,
        };
        if let Some(mut own) = own {
            self.proof = self.proof.and(own.proof().await?);
        }
        Ok(figures)
    }
}

/// Folders of a run; they end with it.
struct Folders {
    data: TempDir,
    /// Apart, since the path of a socket must be short.
    sockets: TempDir,
}

impl Folders {
    fn new(data: &Path) -> Result<Self, LoadError> {
        let failed =
            |error| LoadError::io("no folder can be made; name another place by --data", error);
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix(".kvgate-bench-");
        Ok(Self {
            data: builder.tempdir_in(data).map_err(failed)?,
            sockets: builder.tempdir().map_err(failed)?,
        })
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }
}

/// The service that is driven, and what it counts.
struct Gate {
    reached: Reached,
    pid: Option<u32>,
    ceiling: u64,
    connection: Connection,
    head: Head,
    /// What it had counted before this run.
    first: Scrape,
    granted: u64,
    released: u64,
    /// Its store, when it is of this run; it goes with it.
    _folder: Option<TempDir>,
}

enum Reached {
    Own(Server),
    Running(Service),
}

impl Gate {
    async fn start(
        plan: &Plan,
        system: System,
        folders: &Folders,
        fleet: &FakeFleet,
        closes: bool,
    ) -> Result<Self, LoadError> {
        let folder = TempDir::new_in(folders.data.path())
            .map_err(|error| LoadError::io("no folder can be made", error))?;
        let engine = fleet.engines().first().map(crate::demo::FakeEngine::url);
        let mut flags = vec![
            "--program-admission".to_owned(),
            format!("--session-lifecycle={closes}"),
        ];
        flags.extend(engine.map(|engine| format!("--engine={engine}")));
        if let Where::Own(more) = &plan.gate {
            flags.extend(more.iter().cloned());
        }
        let name = if closes { "closes" } else { system.name() };
        let socket = folders.socket(name);
        let program = plan.against.as_deref();
        let program = program.filter(|_| system == System::Against);
        let start = || Server::kvgate(program, folder.path(), socket, &flags);
        let server = block_in_place(start)?;
        let pid = server.pid();
        let service = server.service(Transport::Tcp);
        Self::open(Some(folder), Reached::Own(server), service, Some(pid)).await
    }

    async fn of_others(service: Service, pid: Option<u32>) -> Result<Self, LoadError> {
        Self::open(None, Reached::Running(service.clone()), service, pid).await
    }

    /// The folder comes first, since what comes first is dropped last: after the server that writes there.
    async fn open(
        folder: Option<TempDir>,
        reached: Reached,
        service: Service,
        pid: Option<u32>,
    ) -> Result<Self, LoadError> {
        let connection = Connection::open(&service.target)
            .await
            .map_err(|error| LoadError::connect(&service.target, error))?;
        let mut gate = Self {
            reached,
            pid,
            ceiling: 0,
            connection,
            head: service.head,
            first: Scrape::default(),
            granted: 0,
            released: 0,
            _folder: folder,
        };
        gate.ceiling = match timeout(SETTLED_WITHIN, gate.known_ceiling()).await {
            Ok(ceiling) => ceiling?,
            Err(_) => return Err(LoadError::NoCapacity),
        };
        gate.first = gate.scrape().await?;
        Ok(gate)
    }

    fn service(&self, transport: Transport) -> Service {
        match &self.reached {
            Reached::Own(server) => server.service(transport),
            Reached::Running(service) => service.clone(),
        }
    }

    async fn known_ceiling(&mut self) -> Result<u64, LoadError> {
        #[derive(Deserialize)]
        struct State {
            budget: Budget,
        }
        #[derive(Deserialize)]
        struct Budget {
            ceiling: u64,
        }
        let path = "/v1/state";
        loop {
            let body = self.get(path).await?;
            let state: State = serde_json::from_slice(body)
                .map_err(|_| LoadError::Foreign { path, status: 200 })?;
            if state.budget.ceiling > 0 {
                return Ok(state.budget.ceiling);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn scrape(&mut self) -> Result<Scrape, LoadError> {
        let body = self.get("/metrics").await?;
        Ok(Scrape::parse(&String::from_utf8_lossy(body)))
    }

    async fn get(&mut self, path: &'static str) -> Result<&[u8], LoadError> {
        let answer = self.connection.call(&self.head.get(path)).await?;
        match answer.status {
            200 => Ok(answer.body),
            status => Err(LoadError::Foreign { path, status }),
        }
    }

    /// What both sides count, once the service has written down what it counted.
    async fn proof(&mut self) -> Result<Proof, LoadError> {
        let mut proof = Proof::default();
        for _ in 0..SETTLED_WITHIN.as_millis() / LOOK_EVERY.as_millis() {
            let scrape = self.scrape().await?;
            proof = Proof {
                granted_by_callers: self.granted,
                granted_by_service: scrape.granted - self.first.granted,
                released_by_callers: self.released,
                released_by_service: scrape.released - self.first.released,
                reserved_tokens: scrape.reserved,
            };
            if proof.holds() {
                break;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(proof)
    }
}
