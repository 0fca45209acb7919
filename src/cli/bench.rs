//! `kvgate bench`: load on a service, and what it gives beside the disk and bare handlers.

mod report;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::Serialize;
use url::{Host, Url};

use super::Ended;
use super::client::token;
use super::out;
use crate::boot::{self, Failure};
use crate::config::ConfigError;
use crate::load::{
    self, Figures, Head, ID_CHARS_MAX, ID_CHARS_MIN, LoadError, Machine, Plan, Proof,
    SESSION_CHARS_MIN, Scenario, Service, Shape, System, Target, Told, Transport, Where,
};

use self::report::Report;

pub(super) const HELP: &str = "\
Without --url and --socket it starts a service of its own, with an engine that only has a capacity, on \
loopback and on the disk of --data, and ends both. What each figure means stands in docs/CLI.md.

A run is quiet when a sync of the disk takes less than 1 ms (p50) and the load of the machine is below 3 \
at its start. Figures of another run are noisy: only their ratios mean something.

Exit codes: 0 done; 1 callers and service do not count the same; 2 usage; 69 no service answers; 74 input \
or output; 130 interrupted.

Examples:
  kvgate bench
  kvgate bench --scenario open,contended --connections 16,64 --transport both
  kvgate bench --scenario arrivals --rate 500 --seconds 30
  kvgate bench --socket /run/kvgate.sock --scenario open --connections 8 --seconds 5
  kvgate bench --rounds 3 --json | jq -r 'select(.pairs) | [.system, .connections, .pairs_per_s] | @tsv'";

/// Most callers: more than a service keeps connections.
const CONNECTIONS_MAX: usize = 20_000;
/// Most acquires in one call: the bound of the API.
const BATCH_MAX: usize = 1_000;
/// Most leases that batches hold at a time.
const HELD_MAX: usize = 100_000;
/// Exit code of a signal, as a shell reports an interrupt.
const INTERRUPTED: u8 = 130;

/// What is measured, and how.
#[derive(Args, Debug)]
pub(super) struct Bench {
    /// What callers do: `open` (everything fits), `contended` (few leases fit, the others wait), `renewals`,
    /// `closes`, `batch`, `arrivals` (at a fixed rate)
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = scenario(),
        default_value = "open"
    )]
    scenario: Vec<Scenario>,
    /// How many callers, each with a connection of its own; without it what suits the scenario
    #[arg(long, value_name = "COUNT", value_delimiter = ',')]
    connections: Option<Vec<usize>>,
    /// How long each measurement takes, in seconds: 0.05 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// How often each is made, the others in between; medians are shown
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    rounds: usize,
    /// How the service is reached
    #[arg(long, value_enum, default_value_t = TransportName::Tcp)]
    transport: TransportName,
    /// What is measured: the service, and bare axum handlers for the same bodies
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values = ["kvgate", "axum"])]
    systems: Vec<SystemName>,
    /// Measure another build of this program as well, in turn with this one
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["url", "socket"])]
    against: Option<PathBuf>,
    /// Pairs a second of `arrivals`: 1 to 1000000
    #[arg(long, value_name = "COUNT", default_value_t = 1_000.0)]
    rate: f64,
    /// Acquires in one call of `batch`: 1 to 1000
    #[arg(long, value_name = "COUNT", default_value_t = 500)]
    batch: usize,
    /// Leases that fit in `contended`
    #[arg(long, value_name = "COUNT", default_value_t = 16)]
    slots: usize,
    /// How long each of them is held, in milliseconds: 0 to 60000
    #[arg(long, value_name = "MS", default_value_t = 0)]
    hold_ms: u32,
    /// Letters of the ids of tickets and of sessions: from 20 and 16, to 512
    #[arg(long, value_name = "TICKET,SESSION", value_delimiter = ',', num_args = 1, default_values = ["36", "17"])]
    id_chars: Vec<usize>,
    /// Fields of an acquire: all, or those that must be there
    #[arg(long, value_enum, default_value_t = Fields::All)]
    fields: Fields,
    /// Longest time that an acquire waits at the service, in seconds: 0 to 60
    #[arg(long, value_name = "SECONDS", default_value_t = 25)]
    wait_s: u32,
    /// Threads that make the load: 1 to 64
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    threads: usize,
    /// Folder on the disk that is measured; what is written there is removed at the end
    #[arg(long, value_name = "DIR", default_value = ".")]
    data: PathBuf,
    /// Drive a service that runs already at this address of loopback: `http://HOST:PORT`. Its callers feel it
    #[arg(long, value_name = "URL", conflicts_with = "socket")]
    url: Option<String>,
    /// The same at a Unix socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Take addresses of other machines in --url
    #[arg(long, requires = "url")]
    any_address: bool,
    /// File with the token for a service that asks for one, as in `kvgate state`
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Which line of a file with `name:scope:token` lines
    #[arg(long, value_name = "NAME")]
    token_name: Option<String>,
    /// Process of the service of --url or --socket, for processor time and memory
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// One JSON object a line: the machine, then each measurement as it is made, then the proof
    #[arg(long)]
    json: bool,
    /// Flags for the service that it starts
    #[arg(last = true, value_name = "FLAG", conflicts_with_all = ["url", "socket"])]
    flags: Vec<String>,
    /// Be the bare handlers, with this Unix socket
    #[arg(long, hide = true, value_name = "PATH")]
    bare: Option<PathBuf>,
}

/// A scenario by its name.
fn scenario() -> impl TypedValueParser<Value = Scenario> {
    PossibleValuesParser::new(Scenario::ALL.map(Scenario::name)).try_map(|name| {
        let named = |scenario: &Scenario| scenario.name() == name;
        Scenario::ALL.into_iter().find(named).ok_or("no scenario")
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum TransportName {
    Tcp,
    Unix,
    Both,
}

impl TransportName {
    fn transports(self) -> Vec<Transport> {
        match self {
            Self::Tcp => vec![Transport::Tcp],
            Self::Unix => vec![Transport::Unix],
            Self::Both => vec![Transport::Tcp, Transport::Unix],
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum SystemName {
    Kvgate,
    Axum,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Fields {
    All,
    Least,
}

impl Bench {
    fn plan(&self) -> Result<Plan, Ended> {
        let within = |is_within: bool, says: &str| match is_within {
            true => Ok(()),
            false => Err(ConfigError::new(says)),
        };
        let counts = self.connections.as_deref().unwrap_or_default();
        within(
            counts
                .iter()
                .all(|count| (1..=CONNECTIONS_MAX).contains(count)),
            "connections must be 1 to 20000 each",
        )?;
        within(
            (0.05..=3_600.0).contains(&self.seconds),
            "seconds must be 0.05 to 3600",
        )?;
        within(
            (1..=1_000).contains(&self.rounds),
            "rounds must be 1 to 1000",
        )?;
        within(
            (1.0..=1e6).contains(&self.rate),
            "rate must be 1 to 1000000",
        )?;
        within(
            (1..=BATCH_MAX).contains(&self.batch),
            "batch must be 1 to 1000",
        )?;
        within(
            (1..=CONNECTIONS_MAX).contains(&self.slots),
            "slots must be 1 to 20000",
        )?;
        within(self.hold_ms <= 60_000, "hold-ms must be 0 to 60000")?;
        within((1..=64).contains(&self.threads), "threads must be 1 to 64")?;
        within(self.wait_s <= 60, "wait-s must be 0 to 60")?;
        let &[ticket_chars, session_chars] = self.id_chars.as_slice() else {
            let says = "id-chars must be two numbers: of a ticket and of a session, such as 36,17";
            return Err(ConfigError::new(says).into());
        };
        within(
            (ID_CHARS_MIN..=ID_CHARS_MAX).contains(&ticket_chars)
                && (SESSION_CHARS_MIN..=ID_CHARS_MAX).contains(&session_chars),
            "id-chars must be 20 to 512 for a ticket and 16 to 512 for a session",
        )?;
        let has_batches = self.scenario.contains(&Scenario::Batch);
        let most = counts.iter().max().copied().unwrap_or(1);
        within(
            !has_batches || most.saturating_mul(self.batch) <= HELD_MAX,
            "connections times batch must be at most 100000, since all of them are held at once; say fewer \
             --connections, or a smaller --batch",
        )?;
        let (gate, transports) = self.gate()?;
        let mut systems = Vec::new();
        for system in &self.systems {
            match system {
                SystemName::Kvgate => {
                    systems.push(System::Kvgate);
                    systems.extend(self.against.as_ref().map(|_| System::Against));
                }
                SystemName::Axum => systems.push(System::Axum),
            }
        }
        Ok(Plan {
            scenarios: self.scenario.clone(),
            connections: self.connections.clone(),
            time: Duration::from_secs_f64(self.seconds),
            rounds: self.rounds,
            transports,
            systems,
            rate: self.rate,
            batch: self.batch,
            slots: self.slots,
            hold: Duration::from_millis(self.hold_ms.into()),
            shape: Shape {
                ticket_chars,
                session_chars,
                all_fields: self.fields == Fields::All,
                wait_s: self.wait_s,
            },
            threads: self.threads,
            data: self.data.clone(),
            gate,
            against: self.against.clone(),
        })
    }

    /// The service, and how it is reached.
    fn gate(&self) -> Result<(Where, Vec<Transport>), Ended> {
        let mut service = match (&self.url, &self.socket) {
            (None, None) => {
                return Ok((Where::Own(self.flags.clone()), self.transport.transports()));
            }
            (_, Some(path)) => Service {
                target: Target::Unix(path.clone()),
                head: head("localhost", ""),
            },
            (Some(url), None) => at_url(url, self.any_address)?,
        };
        let token = token(self.token_file.as_deref(), self.token_name.as_deref())?;
        service.head.authorization = token.and_then(|token| {
            let header = token.authorization();
            header.to_str().ok().map(str::to_owned)
        });
        let transport = match service.target {
            Target::Tcp(_) => Transport::Tcp,
            Target::Unix(_) => Transport::Unix,
        };
        Ok((Where::Running(service, self.pid), vec![transport]))
    }
}

fn head(host: &str, prefix: &str) -> Head {
    Head {
        host: host.to_owned(),
        prefix: prefix.to_owned(),
        authorization: None,
    }
}

/// A service that runs already. Load on a machine of others is never an oversight.
fn at_url(text: &str, any_address: bool) -> Result<Service, ConfigError> {
    let bad = || ConfigError::new("url must be http://HOST:PORT, such as http://127.0.0.1:7070");
    let url = Url::parse(text).map_err(|_| bad())?;
    let is_plain = url.scheme() == "http"
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    if !is_plain {
        return Err(bad());
    }
    let is_loopback = match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => IpAddr::V4(ip).is_loopback(),
        Some(Host::Ipv6(ip)) => IpAddr::V6(ip).is_loopback(),
        None => return Err(bad()),
    };
    if !is_loopback && !any_address {
        return Err(ConfigError::new(
            "url names another machine, and a load takes its service from its callers; say --any-address if that is \
             wanted",
        ));
    }
    let addresses = url.socket_addrs(|| None).map_err(|error| {
        ConfigError::new(format!("url names no machine that is known: {error}"))
    })?;
    let target = addresses.first().copied().ok_or_else(bad)?;
    let host = url.host_str().unwrap_or_default();
    let host = match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    };
    Ok(Service {
        target: Target::Tcp(target),
        head: head(&host, url.path().trim_end_matches('/')),
    })
}

/// Measures and tells.
pub(super) fn run(bench: &Bench) -> Result<ExitCode, Ended> {
    if let Some(socket) = &bench.bare {
        let (runtime, _) = boot::prepare()?;
        runtime
            .block_on(load::serve_bare(socket))
            .map_err(Failure::other)?;
        return Ok(ExitCode::SUCCESS);
    }
    let plan = bench.plan()?;
    let (runtime, _) = boot::prepare()?;
    let mut report = Report::default();
    let ended = runtime.block_on(load::run(&plan, |told| match bench.json {
        true => print_line(&told),
        false => report.take(told, plan.rounds),
    }));
    match ended {
        Ok(()) => {}
        Err(LoadError::Interrupted) => {
            out::say("interrupted; nothing is left behind");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        Err(error @ LoadError::Proof(_)) => {
            out::say(&error.to_string());
            return Ok(ExitCode::FAILURE);
        }
        Err(
            error @ (LoadError::Connect { .. } | LoadError::Wire(_) | LoadError::Foreign { .. }),
        ) => {
            out::say(&error.to_string());
            return Ok(ExitCode::from(69));
        }
        Err(error) => return Err(Failure::other(error).into()),
    }
    if !bench.json {
        out::print(&report.text())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_line(told: &Told<'_>) -> Result<(), LoadError> {
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Line<'a> {
        Machine(&'a Machine),
        Proof(&'a Proof),
        #[serde(untagged)]
        Figures(&'a Figures),
    }
    let line = match told {
        Told::Machine(machine) => serde_json::to_string(&Line::Machine(machine)),
        Told::Figures(figures) => serde_json::to_string(&Line::Figures(figures)),
        Told::Proof(proof) => serde_json::to_string(&Line::Proof(proof)),
    };
    let line = line.map_err(|error| LoadError::Told(error.to_string()))?;
    out::print_raw(&format!("{line}\n")).map_err(|error| LoadError::Told(error.to_string()))
}
