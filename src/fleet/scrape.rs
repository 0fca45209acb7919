//! Reads one engine (CAP2): its loads, its gauges, and what it says of itself.
//!
//! `/v1/loads` gives capacity, usage and queues of all ranks in one small answer; `/metrics` stands
//! in where it is missing, and is read beside it every 10 s and after an absence, since only it has
//! evictable and available KV and the token counters. `/server_info` is asked at least every 10 s
//! and at once when an engine answers again (CAP8). Everything shares one time-out; what is optional
//! is asked last and never spoils the reading.

use std::sync::Arc;
use std::time::Duration;

use kvgate_core::ids::EngineId;
use kvgate_core::reading::{EngineKind, ReadFailure, Reading, Source, StartMark, TokenCounters};
use kvgate_core::units::Tokens;
use reqwest::Client;
use tokio::time::{Instant, timeout_at};

use super::address::{BaseUrl, Scheme};
use super::close_support::CloseSupport;
use super::dialect::{self, Disaggregation, Gauges, Prefix};
use super::fetch::{self, Ask, BODY_BYTES_MAX, FetchError};
use super::loads::{self, Loads};
use super::networks::Networks;
use super::rows;
use super::secret::Secret;
use super::server_info::{self, ServerInfo};

/// How often `/metrics` is read beside `/v1/loads` (CAP2).
pub const METRICS_EVERY: Duration = Duration::from_secs(10);
/// How often `/server_info` is asked (CAP8).
pub const INFO_EVERY: Duration = Duration::from_secs(10);
/// How long an engine that does not know a path, or refuses it, is not asked for it again while it
/// goes on answering. An engine that was away is asked at once.
pub const ABSENT_FOR: Duration = Duration::from_secs(60);
/// Largest body of `/v1/loads` and `/server_info`, in bytes after unpacking: a few hundred bytes a
/// rank, and the argument list of an engine once a rank.
const JSON_BYTES_MAX: usize = 8 << 20;

/// How engines are asked: the same for all of them.
#[derive(Clone, Debug)]
pub struct Scraper {
    /// Resolves names to allowed addresses only; see [`fetch::engine_client`].
    pub client: Client,
    /// Judges addresses that are written as numbers.
    pub networks: Arc<Networks>,
    /// Bearer key of the engines.
    pub key: Option<Secret>,
    /// For the whole reading of one engine.
    pub timeout: Duration,
    /// Engines are asked for a list of workers too: only a router has one.
    pub looks_for_routers: bool,
}

/// What is remembered of one engine between rounds. A new one means: ask everything at once.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The last reading was good.
    good: bool,
    /// Why `/v1/loads` is not asked, and until when.
    loads_absent: Option<(ReadFailure, Instant)>,
    metrics_ask_at: Option<Instant>,
    info_ask_at: Option<Instant>,
    /// The last `/metrics`; its evictable and available KV stand until it is read again.
    gauges: Option<Gauges>,
    server: Option<ServerInfo>,
    /// Whether it has a list of workers; `None` while it has not said.
    is_router: Option<bool>,
}

/// What one engine said in one round.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The reading, or why there is none.
    pub reading: Result<Reading, ReadFailure>,
    /// The start time it told in this round.
    pub start_mark: Option<StartMark>,
    /// For show.
    pub details: EngineDetails,
}

/// What pages show of an engine beside its reading.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct EngineDetails {
    /// Spelling of its metric names, once they were read.
    pub prefix: Option<Prefix>,
    /// Its part in a disaggregated fleet, as it says itself.
    pub disaggregation: Option<Disaggregation>,
    /// Tokens it is committed to, queued requests included.
    pub committed: Option<Tokens>,
    /// Lines of its last `/metrics` that are no sample.
    pub bad_lines: u64,
    /// Why `/v1/loads` gave nothing in this round although it was asked.
    pub loads_failure: Option<ReadFailure>,
    /// Why `/metrics` gave nothing in this round although it was asked.
    pub metrics_failure: Option<ReadFailure>,
    /// What it last said of itself.
    pub server: Option<ServerInfo>,
    /// What a session close comes to there; `None` while that is not known (CLO10).
    pub close_support: Option<CloseSupport>,
}

impl Scraper {
    /// Reads one engine. `now` only paces what is not asked every round.
    pub async fn read(&self, engine: &EngineId, memory: &mut Memory, now: Instant) -> Outcome {
        let mut round = Round {
            details: EngineDetails::default(),
            counters: None,
            start_mark: None,
            now,
        };
        let reading = match self.target(engine) {
            Ok(target) => round.read(&target, memory).await,
            Err(failure) => Err(failure),
        };
        Outcome {
            reading,
            start_mark: round.start_mark,
            details: round.details,
        }
    }

    fn target<'a>(&'a self, engine: &'a EngineId) -> Result<Target<'a>, ReadFailure> {
        let base = BaseUrl::parse(engine.as_str()).map_err(|_| ReadFailure::NotAllowed)?;
        if base.ip().is_some_and(|ip| !self.networks.allow(ip)) {
            return Err(ReadFailure::NotAllowed);
        }
        Ok(Target {
            scraper: self,
            engine,
            base,
            deadline: Instant::now() + self.timeout,
        })
    }
}

/// What one round gathers of one engine.
struct Round {
    details: EngineDetails,
    /// From a `/metrics` of this very round: older counters would hide that they stand still.
    counters: Option<TokenCounters>,
    start_mark: Option<StartMark>,
    now: Instant,
}

impl Round {
    async fn read(
        &mut self,
        target: &Target<'_>,
        memory: &mut Memory,
    ) -> Result<Reading, ReadFailure> {
        let was_good = memory.good;
        let mut reading = self.main_reading(target, memory).await;
        memory.good = reading.is_ok();
        if matches!(reading, Err(ReadFailure::Timeout | ReadFailure::Refused)) {
            // what it had or lacked may be another thing when it comes back
            *memory = Memory::default();
            return reading;
        }
        if let Ok(reading) = &reading
            && !was_good
        {
            memory.info_ask_at = None;
            memory.is_router = None;
            if reading.source == Source::Loads {
                memory.metrics_ask_at = None;
            }
        }
        self.read_beside(target, memory).await;
        if let Ok(reading) = &mut reading
            && reading.source == Source::Loads
        {
            self.complete(reading, memory);
        }
        self.describe(memory);
        if let Ok(reading) = &mut reading {
            reading.role = self.details.disaggregation.map(Disaggregation::role);
        }
        let kind = reading.as_ref().ok().map(|reading| reading.kind);
        self.details.close_support = close_support(target, memory, kind);
        reading
    }

    /// Capacity, usage and queues: `/v1/loads`, else `/metrics`.
    async fn main_reading(
        &mut self,
        target: &Target<'_>,
        memory: &mut Memory,
    ) -> Result<Reading, ReadFailure> {
        let from_loads = match memory.loads_absent {
            // its gauges are on an HTTP side port that has nothing else
            _ if target.base.scheme() == Scheme::Grpc => Err(ReadFailure::Status(404)),
            Some((failure, until)) if self.now < until => Err(failure),
            _ => target.loads().await.inspect_err(|&failure| {
                self.details.loads_failure = Some(failure);
                memory.loads_absent = stays(failure).then(|| (failure, self.now + ABSENT_FOR));
            }),
        };
        match from_loads {
            Ok(loads) => {
                memory.loads_absent = None;
                self.details.committed = loads.committed;
                self.details.disaggregation = loads.disaggregation;
                Ok(loads.reading)
            }
            // no time is left
            Err(ReadFailure::Timeout) => Err(ReadFailure::Timeout),
            Err(loads_failure) => {
                let gauges = target.gauges().await;
                let reading = gauges.clone().and_then(|gauges| gauges.reading());
                self.note_gauges(gauges, memory);
                reading.map_err(|failure| telling(loads_failure, failure))
            }
        }
    }

    /// What is due and optional: failures are for show only.
    async fn read_beside(&mut self, target: &Target<'_>, memory: &mut Memory) {
        let is_due = |ask_at: Option<Instant>| ask_at.is_none_or(|ask_at| self.now >= ask_at);
        let metrics_due = is_due(memory.metrics_ask_at);
        let info_due = is_due(memory.info_ask_at) && target.base.scheme() != Scheme::Grpc;
        let metrics = async {
            match metrics_due {
                true => Some(target.gauges().await),
                false => None,
            }
        };
        let info = async {
            match info_due {
                true => Some(target.info().await),
                false => None,
            }
        };
        let router = async {
            match info_due && target.scraper.looks_for_routers && memory.is_router.is_none() {
                true => target.is_router().await,
                false => None,
            }
        };
        let (gauges, info, is_router) = futures_util::future::join3(metrics, info, router).await;
        memory.is_router = is_router.or(memory.is_router);
        if let Some(gauges) = gauges {
            self.note_gauges(gauges, memory);
        }
        if let Some(info) = info {
            self.note_info(info, memory);
        }
    }

    fn note_gauges(&mut self, gauges: Result<Gauges, ReadFailure>, memory: &mut Memory) {
        memory.metrics_ask_at = Some(self.now + METRICS_EVERY);
        match gauges {
            Ok(gauges) => {
                self.counters = gauges.counters;
                memory.gauges = Some(gauges);
            }
            Err(failure) => {
                self.details.metrics_failure = Some(failure);
                memory.gauges = None;
            }
        }
    }

    fn note_info(&mut self, info: Result<ServerInfo, ReadFailure>, memory: &mut Memory) {
        let pause = match info {
            Err(ReadFailure::Status(404)) => ABSENT_FOR,
            _ => INFO_EVERY,
        };
        memory.info_ask_at = Some(self.now + pause);
        if let Ok(info) = info {
            self.start_mark = info.start_mark;
            let known = memory.server.as_ref().and_then(|server| server.start_mark);
            if known.is_some() && known != info.start_mark {
                // another process may be another thing
                memory.is_router = None;
            }
            memory.server = Some(info);
        }
    }

    /// Adds what only `/metrics` knows. Evictable and available KV are at most one pause old.
    fn complete(&self, reading: &mut Reading, memory: &Memory) {
        reading.counters = self.counters;
        if let Some(gauges) = &memory.gauges {
            reading.kind = gauges.kind;
            reading.evictable = gauges.evictable;
            reading.available = gauges.available;
            reading.unknown_label |= gauges.unknown_label;
        }
    }

    fn describe(&mut self, memory: &Memory) {
        if let Some(gauges) = &memory.gauges {
            self.details.prefix = Some(gauges.prefix);
            self.details.bad_lines = gauges.bad_lines;
            self.details.disaggregation = self.details.disaggregation.or(gauges.disaggregation);
        }
        if let Some(server) = &memory.server {
            self.details.disaggregation = self.details.disaggregation.or(server.disaggregation);
        }
        self.details.server.clone_from(&memory.server);
    }
}

fn close_support(
    target: &Target<'_>,
    memory: &Memory,
    kind: Option<EngineKind>,
) -> Option<CloseSupport> {
    let may_be_a_router = target.scraper.looks_for_routers && memory.is_router.is_none();
    match kind {
        _ if target.base.scheme() == Scheme::Grpc => Some(CloseSupport::Grpc),
        _ if memory.is_router == Some(true) => Some(CloseSupport::Router),
        _ if may_be_a_router => None,
        Some(EngineKind::Vllm) => Some(CloseSupport::Vllm),
        Some(EngineKind::Sglang) | None => memory.server.as_ref().map(CloseSupport::of),
    }
}

/// One engine with the time that is left for it.
struct Target<'a> {
    scraper: &'a Scraper,
    engine: &'a EngineId,
    base: BaseUrl,
    deadline: Instant,
}

impl Target<'_> {
    async fn loads(&self) -> Result<Loads, ReadFailure> {
        let body = self
            .get("/v1/loads?include=core", "application/json", JSON_BYTES_MAX)
            .await?;
        loads::read(&body)
    }

    async fn gauges(&self) -> Result<Gauges, ReadFailure> {
        // one OpenMetrics version renames the samples, so plain text is asked for
        let body = self.get("/metrics", "text/plain", BODY_BYTES_MAX).await?;
        dialect::read(&String::from_utf8_lossy(&body), self.engine)
    }

    async fn info(&self) -> Result<ServerInfo, ReadFailure> {
        let body = self
            .get("/server_info", "application/json", JSON_BYTES_MAX)
            .await?;
        server_info::read(&body).map_err(|_| ReadFailure::Unreadable)
    }

    /// `None` when it did not say.
    async fn is_router(&self) -> Option<bool> {
        match self
            .get("/workers", "application/json", JSON_BYTES_MAX)
            .await
        {
            Ok(body) => Some(rows::read(&body).is_ok()),
            Err(ReadFailure::Timeout | ReadFailure::Refused | ReadFailure::NotAllowed) => None,
            Err(_) => Some(false),
        }
    }

    async fn get(
        &self,
        path: &str,
        accept: &'static str,
        bytes_max: usize,
    ) -> Result<Vec<u8>, ReadFailure> {
        let url = self.base.endpoint(path);
        let ask = Ask {
            url: &url,
            key: self.scraper.key.as_ref(),
            accept,
        };
        let answer = fetch::get(&self.scraper.client, ask, bytes_max);
        match timeout_at(self.deadline, answer).await {
            Ok(answer) => answer.map_err(|error| failure(&error)),
            Err(_) => Err(ReadFailure::Timeout),
        }
    }
}

const fn failure(error: &FetchError) -> ReadFailure {
    match error {
        FetchError::Status {
            status: status @ (401 | 403),
            ..
        } => ReadFailure::KeyRefused(*status),
        FetchError::Status { status, .. } => ReadFailure::Status(*status),
        FetchError::Unreadable => ReadFailure::Unreadable,
        FetchError::NotAllowed(_) => ReadFailure::NotAllowed,
        FetchError::Refused(_) => ReadFailure::Refused,
    }
}

/// Whether asking again in a second is pointless: the path is unknown, refused or something else.
const fn stays(failure: ReadFailure) -> bool {
    match failure {
        ReadFailure::KeyRefused(_) | ReadFailure::Unreadable => true,
        ReadFailure::Status(status) => {
            status >= 300 && status < 500 && !matches!(status, 408 | 425 | 429)
        }
        ReadFailure::Timeout
        | ReadFailure::Refused
        | ReadFailure::MetricsOff
        | ReadFailure::Missing
        | ReadFailure::NotAllowed => false,
    }
}

/// Of the failures of both paths the one an operator can act on: 404 on both means that metrics are
/// off; when only `/metrics` is unknown, what `/v1/loads` said counts.
const fn telling(loads: ReadFailure, metrics: ReadFailure) -> ReadFailure {
    match (loads, metrics) {
        (ReadFailure::Status(404), ReadFailure::Status(404)) => ReadFailure::MetricsOff,
        (loads, ReadFailure::Status(404)) => loads,
        (_, metrics) => metrics,
    }
}
