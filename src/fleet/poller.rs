//! Reading rounds: the router and all engines, once a round (CAP1, CAP2).
//!
//! Discovery and the readings of the engines known so far run at once, each under its own time-out;
//! engines that the router newly lists are read in the same round. While the router is silent or
//! lists nothing, the last known engines are still read (CAP7). A round holds no state that a
//! dropped one could spoil: what is lost then is asked again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, future, stream};
use kvgate_core::ids::EngineId;
use kvgate_core::reading::{Round, RouterAnswer, RouterFailure};
use kvgate_core::units::Timestamp;
use reqwest::Client;
use tokio::time::{Instant, timeout};
use url::Url;

use super::discover::{self, Discovery, Router};
use super::fetch;
use super::networks::Networks;
use super::rows::{BadEntries, RouterKind, Spellings};
use super::scrape::{EngineDetails, Memory, Outcome, Scraper};
use super::secret::Secret;

/// Engines that are read at once: each may hold three sockets, and 1,024 files are a usual limit.
pub const READS_AT_ONCE_MAX: usize = 256;
/// How often a router whose rows do not tell its kind is asked for more.
pub const KIND_EVERY: Duration = Duration::from_secs(60);

/// What a poller reads and how.
#[derive(Clone, Debug)]
pub struct PollerConfig {
    /// The router to discover engines through.
    pub router: Option<Url>,
    /// Engines given by the operator, instead of or beside a router.
    pub engines: Vec<EngineId>,
    /// Members of an earlier start: read until the router gives a list; of no use without a router.
    pub known: Vec<EngineId>,
    /// Bearer key of the router.
    pub router_key: Option<Secret>,
    /// Bearer key of the engines.
    pub engine_key: Option<Secret>,
    /// Which addresses of engines may be contacted.
    pub networks: Networks,
    /// Time between two rounds, for whoever runs them; default 1 s.
    pub interval: Duration,
    /// For the router and for each engine; default 2 s.
    pub timeout: Duration,
    /// Session closes are on at first: engines are asked whether they are routers (CLO10).
    pub session_lifecycle: bool,
}

impl Default for PollerConfig {
    fn default() -> Self {
        Self {
            router: None,
            engines: Vec::new(),
            known: Vec::new(),
            router_key: None,
            engine_key: None,
            networks: Networks::default(),
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(2),
            session_lifecycle: false,
        }
    }
}

/// The HTTP client cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client cannot be set up")]
pub struct PollerError(#[from] reqwest::Error);

/// What pages show of a round beside what the core gets.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct RoundDetails {
    /// Kind of the router; `None` without one.
    pub router_kind: Option<RouterKind>,
    /// Entries of the router's list that were skipped.
    pub bad_entries: BadEntries,
    /// Engines that the router writes in several ways.
    pub spellings: Spellings,
    /// One entry for each engine that was asked.
    pub engines: BTreeMap<EngineId, EngineDetails>,
}

/// Reads the fleet round by round.
#[derive(Debug)]
pub struct Poller {
    router: Option<RouterSide>,
    scraper: Scraper,
    statics: BTreeSet<EngineId>,
    /// The last good list that was not empty.
    members: BTreeSet<EngineId>,
    memories: HashMap<EngineId, Memory>,
    interval: Duration,
}

#[derive(Debug)]
struct RouterSide {
    router: Router,
    client: Client,
    kind: Option<RouterKind>,
    kind_ask_at: Option<Instant>,
}

impl Poller {
    /// Sets up the clients. The process must have installed a rustls provider before.
    ///
    /// # Errors
    /// When a client cannot be made.
    pub fn new(config: PollerConfig) -> Result<Self, PollerError> {
        let networks = Arc::new(config.networks);
        // without a router nothing would ever replace them
        let members = match &config.router {
            Some(router) => {
                let router = discover::as_engine(router);
                let known = config.known.into_iter();
                known
                    .filter(|known| Some(known) != router.as_ref())
                    .collect()
            }
            None => BTreeSet::new(),
        };
        let router = match config.router {
            Some(url) => Some(RouterSide {
                router: Router::new(&url, config.router_key),
                client: fetch::router_client()?,
                kind: None,
                kind_ask_at: None,
            }),
            None => None,
        };
        Ok(Self {
            router,
            scraper: Scraper {
                client: fetch::engine_client(Arc::clone(&networks))?,
                networks,
                key: config.engine_key,
                timeout: config.timeout,
                looks_for_routers: config.session_lifecycle,
            },
            statics: config.engines.into_iter().collect(),
            members,
            memories: HashMap::new(),
            interval: config.interval,
        })
    }

    /// Time between two rounds.
    #[must_use]
    pub const fn interval(&self) -> Duration {
        self.interval
    }

    /// Whether engines are asked from now on whether they are routers: while session closes are on (CLO10).
    pub const fn look_for_routers(&mut self, wanted: bool) {
        self.scraper.looks_for_routers = wanted;
    }

    /// One round. `now` is when it begins.
    pub async fn round(&mut self, now: Timestamp) -> (Round, RoundDetails) {
        self.round_at(now, Instant::now()).await
    }

    /// `pace` stands for the clock that paces what is not asked every round.
    async fn round_at(&mut self, now: Timestamp, pace: Instant) -> (Round, RoundDetails) {
        let known: BTreeSet<EngineId> = self.members.union(&self.statics).cloned().collect();
        let asked = self.take_memories(&known);
        let Self {
            router,
            scraper,
            memories,
            ..
        } = self;
        let scraper = &*scraper;
        let discover = async {
            let discovery = match router {
                Some(side) => Some(side.ask(scraper.timeout, pace).await),
                None => None,
            };
            let newcomers = listed(discovery.as_ref())
                .filter(|engine| !known.contains(*engine))
                .map(|engine| {
                    let memory = memories.remove(engine).unwrap_or_default();
                    (engine.clone(), memory)
                })
                .collect();
            let read = read_all(scraper, newcomers, pace).await;
            (discovery, read)
        };
        let (mut read, (discovery, newcomers)) =
            future::join(read_all(scraper, asked, pace), discover).await;
        read.extend(newcomers);
        self.settle(discovery.as_ref());
        self.told(now, discovery, read)
    }

    fn take_memories(&mut self, engines: &BTreeSet<EngineId>) -> Vec<(EngineId, Memory)> {
        engines
            .iter()
            .map(|engine| {
                let memory = self.memories.remove(engine).unwrap_or_default();
                (engine.clone(), memory)
            })
            .collect()
    }

    /// CAP7: only a good list that is not empty changes the members.
    fn settle(&mut self, discovery: Option<&Discovery>) {
        let members: BTreeSet<EngineId> = listed(discovery).cloned().collect();
        if !members.is_empty() {
            self.members = members;
        }
    }

    fn told(
        &mut self,
        began_at: Timestamp,
        discovery: Option<Discovery>,
        mut read: Vec<(EngineId, Memory, Outcome)>,
    ) -> (Round, RoundDetails) {
        read.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        let (router, bad_entries, spellings) = match discovery {
            Some(discovery) => (Some(discovery.answer), discovery.bad, discovery.spellings),
            None => (None, BadEntries::default(), Spellings::new()),
        };
        let mut round = Round {
            began_at,
            router,
            readings: Vec::with_capacity(read.len()),
            start_marks: Vec::new(),
        };
        let mut details = RoundDetails {
            router_kind: self.router.as_ref().map(RouterSide::kind),
            bad_entries,
            spellings,
            engines: BTreeMap::new(),
        };
        for (engine, memory, outcome) in read {
            if self.members.contains(&engine) || self.statics.contains(&engine) {
                self.memories.insert(engine.clone(), memory);
            }
            if let Some(mark) = outcome.start_mark {
                round.start_marks.push((engine.clone(), mark));
            }
            details.engines.insert(engine.clone(), outcome.details);
            round.readings.push((engine, outcome.reading));
        }
        (round, details)
    }
}

impl RouterSide {
    async fn ask(&mut self, limit: Duration, pace: Instant) -> Discovery {
        let kind_wanted =
            self.kind.is_none() && self.kind_ask_at.is_none_or(|ask_at| pace >= ask_at);
        let answer = timeout(limit, self.router.ask(&self.client, kind_wanted)).await;
        let discovery = answer.unwrap_or_else(|_| Discovery::failed(RouterFailure::Timeout));
        // a router that gave no list was not asked, unless the time ran out on the question itself
        let asked = matches!(
            discovery.answer,
            RouterAnswer::Workers(_) | RouterAnswer::Failed(RouterFailure::Timeout)
        );
        if kind_wanted && asked {
            self.kind_ask_at = Some(pace + KIND_EVERY);
        }
        self.kind = discovery.kind.or(self.kind);
        discovery
    }

    fn kind(&self) -> RouterKind {
        self.kind.unwrap_or(RouterKind::Unknown)
    }
}

fn listed(discovery: Option<&Discovery>) -> impl Iterator<Item = &EngineId> {
    let workers = match discovery.map(|discovery| &discovery.answer) {
        Some(RouterAnswer::Workers(workers)) => workers.as_slice(),
        Some(RouterAnswer::Failed(_)) | None => &[],
    };
    workers.iter().map(|worker| &worker.engine)
}

async fn read_all(
    scraper: &Scraper,
    engines: Vec<(EngineId, Memory)>,
    pace: Instant,
) -> Vec<(EngineId, Memory, Outcome)> {
    stream::iter(engines)
        .map(|(engine, mut memory)| async move {
            let outcome = scraper.read(&engine, &mut memory, pace).await;
            (engine, memory, outcome)
        })
        .buffer_unordered(READS_AT_ONCE_MAX)
        .collect()
        .await
}
