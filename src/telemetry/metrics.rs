//! What this process counts and measures by itself: it begins anew with each start. What the core
//! counts is durable and is read from its view.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvgate_core::decision::Scope;
use kvgate_core::event::{Event, QueueEnd};
use kvgate_core::reading::{ReadFailure, Reading};
use kvgate_core::units::Span;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Queue times in seconds: from what nobody notices to the longest waits that are set.
const WAITS: [f64; 14] = [
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0,
];

/// Times in seconds for which leases are held: a short completion up to a long life.
const HELD: [f64; 13] = [
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0,
];

/// Times of HTTP requests in seconds: a read of the view up to a disk that hardly answers.
const REQUESTS: [f64; 12] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
];

/// The label `route` of a request that met no route: addresses are the caller's text, and no label.
pub const UNMATCHED: &str = "unmatched";

/// The word of a scope.
#[must_use]
pub const fn scope(scope: Scope) -> &'static str {
    match scope {
        Scope::Train => "train",
        Scope::Eval => "eval",
    }
}

/// What went wrong with the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Trouble {
    /// A commit failed: its outcome is unknown (DUR4).
    Commit,
    /// It could not be opened again.
    Open,
    /// It could not be closed in order.
    Close,
}

impl EncodeLabelValue for Trouble {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Commit => "commit",
            Self::Open => "open",
            Self::Close => "close",
        };
        EncodeLabelValue::encode(&word, encoder)
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Kind {
    kind: Trouble,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct OfOutcome {
    outcome: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct OfScope {
    scope: &'static str,
}

type Histograms<S> = Family<S, Histogram, fn() -> Histogram>;

/// Figures of the writer. Whoever reads them holds it up for no longer than one histogram is written
/// out.
#[derive(Debug)]
pub struct GateMetrics {
    commit_seconds: Histogram,
    commit_commands: Histogram,
    errors: Family<Kind, Counter>,
    waits: Histograms<OfOutcome>,
    waits_by_outcome: [Histogram; QueueEnd::ALL.len()],
    reservations: Histograms<OfScope>,
    reservations_by_scope: [Histogram; Scope::ALL.len()],
    held: Histogram,
    /// Acquires that were told to go on without a lease since the store was away, by [`Scope`].
    without_store: [AtomicU64; Scope::ALL.len()],
}

impl Default for GateMetrics {
    /// Every series is there from the start, so that a rate has a beginning.
    fn default() -> Self {
        let waits = Histograms::new_with_constructor(|| Histogram::new(WAITS));
        // Up to a context of 2^20 tokens.
        let reservations = Histograms::new_with_constructor(|| {
            Histogram::new(exponential_buckets(256.0, 2.0, 13))
        });
        let metrics = Self {
            // From 0.1 ms, below which no disk syncs, to 3 s.
            commit_seconds: Histogram::new(exponential_buckets(0.000_1, 2.0, 16)),
            // Up to the bound of a turn.
            commit_commands: Histogram::new(exponential_buckets(1.0, 2.0, 13)),
            errors: Family::default(),
            waits_by_outcome: QueueEnd::ALL.map(|end| {
                let outcome = queue_end(end);
                waits.get_or_create_owned(&OfOutcome { outcome })
            }),
            waits,
            reservations_by_scope: Scope::ALL.map(|of| {
                let scope = scope(of);
                reservations.get_or_create_owned(&OfScope { scope })
            }),
            reservations,
            held: Histogram::new(HELD),
            without_store: Default::default(),
        };
        for kind in [Trouble::Commit, Trouble::Open, Trouble::Close] {
            metrics.errors.get_or_create(&Kind { kind }).inc_by(0);
        }
        metrics
    }
}

impl GateMetrics {
    /// A turn is durable.
    pub fn committed(&self, took: Duration, commands: usize) {
        self.commit_seconds.observe(took.as_secs_f64());
        self.commit_commands.observe(commands as f64);
    }

    /// What a durable turn did.
    pub fn saw(&self, event: &Event) {
        match event {
            Event::Asked { scope, reservation } => {
                let [train, eval] = &self.reservations_by_scope;
                let sizes = match scope {
                    Scope::Train => train,
                    Scope::Eval => eval,
                };
                sizes.observe(reservation.get() as f64);
            }
            Event::LeftQueue { outcome, waited } => {
                let [admit, bypass, cancelled] = &self.waits_by_outcome;
                let waits = match outcome {
                    QueueEnd::Admit => admit,
                    QueueEnd::Bypass => bypass,
                    QueueEnd::Cancelled => cancelled,
                };
                waits.observe(seconds(*waited));
            }
            Event::LeaseEnded { held, .. } => self.held.observe(seconds(*held)),
            // What is told one by one is in the log.
            Event::Expired { .. } | Event::Operated(_) => {}
        }
    }

    /// Something went wrong with the store.
    pub fn failed(&self, kind: Trouble) {
        self.errors.get_or_create(&Kind { kind }).inc();
    }

    /// An acquire was told to go on without a lease, since the store is away (DUR4).
    pub fn bypassed_without_store(&self, scope: Scope) {
        self.without_store(scope).fetch_add(1, Ordering::Relaxed);
    }

    /// How often that was.
    #[must_use]
    pub fn bypasses_without_store(&self, scope: Scope) -> u64 {
        self.without_store(scope).load(Ordering::Relaxed)
    }

    const fn without_store(&self, scope: Scope) -> &AtomicU64 {
        let [train, eval] = &self.without_store;
        match scope {
            Scope::Train => train,
            Scope::Eval => eval,
        }
    }

    /// Puts the figures into a registry, once: they go on there.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "kvgate_admission_wait",
            "Queue time of tickets that had to wait, by how they left the queue",
            Unit::Seconds,
            self.waits.clone(),
        );
        registry.register_with_unit(
            "kvgate_reservation",
            "Tokens that new tickets asked for",
            Unit::Other("tokens".to_owned()),
            self.reservations.clone(),
        );
        registry.register_with_unit(
            "kvgate_lease_held",
            "Time from the grant of a lease to its end",
            Unit::Seconds,
            self.held.clone(),
        );
        registry.register_with_unit(
            "kvgate_store_commit",
            "Time of a commit, its sync included",
            Unit::Seconds,
            self.commit_seconds.clone(),
        );
        registry.register(
            "kvgate_store_commit_commands",
            "Commands in a commit",
            self.commit_commands.clone(),
        );
        registry.register(
            "kvgate_store_errors",
            "Faults of the store",
            self.errors.clone(),
        );
    }
}

const fn queue_end(end: QueueEnd) -> &'static str {
    match end {
        QueueEnd::Admit => "admit",
        QueueEnd::Bypass => "bypass",
        QueueEnd::Cancelled => "cancelled",
    }
}

fn seconds(span: Span) -> f64 {
    Duration::from_millis(span.millis()).as_secs_f64()
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct OfRequest {
    route: String,
    method: &'static str,
    status: u16,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct OfRoute {
    route: String,
}

/// Figures of the HTTP room. A route is the template of an address, never the address itself.
#[derive(Clone, Debug)]
pub struct HttpMetrics {
    requests: Family<OfRequest, Counter>,
    seconds: Histograms<OfRoute>,
}

impl Default for HttpMetrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            seconds: Histograms::new_with_constructor(|| Histogram::new(REQUESTS)),
        }
    }
}

impl HttpMetrics {
    /// What is counted of one route.
    #[must_use]
    pub fn of_route(&self, route: &str) -> RouteMetrics {
        RouteMetrics {
            all: self.clone(),
            route: route.to_owned(),
            seconds: OnceLock::new(),
            requests: Mutex::default(),
        }
    }

    /// Puts the figures into a registry, once: they go on there.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kvgate_http_requests",
            "Answered requests",
            self.requests.clone(),
        );
        registry.register_with_unit(
            "kvgate_http_request",
            "Time from the head of a request to its answer, calls that were held open left out",
            Unit::Seconds,
            self.seconds.clone(),
        );
    }
}

/// What is counted of the requests to one route: its series are looked up once, and not for each request.
#[derive(Debug)]
pub struct RouteMetrics {
    all: HttpMetrics,
    route: String,
    seconds: OnceLock<Histogram>,
    /// By method and status: a few.
    requests: Mutex<Vec<(&'static str, u16, Counter)>>,
}

impl RouteMetrics {
    /// A request was answered. `took` is `None` for a call that was held open: how long that was says
    /// nothing of the service.
    pub fn answered(&self, method: &str, status: u16, took: Option<Duration>) {
        if let Some(took) = took {
            let seconds = self.seconds.get_or_init(|| {
                let route = self.route.clone();
                self.all.seconds.get_or_create_owned(&OfRoute { route })
            });
            seconds.observe(took.as_secs_f64());
        }
        let method = known_method(method);
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = |(its_method, its_status, _): &&(&str, u16, Counter)| {
            *its_method == method && *its_status == status
        };
        if let Some((.., counter)) = requests.iter().find(counted) {
            counter.inc();
            return;
        }
        let route = self.route.clone();
        let of_request = OfRequest {
            route,
            method,
            status,
        };
        let counter = self.all.requests.get_or_create_owned(&of_request);
        counter.inc();
        requests.push((method, status, counter));
    }
}

/// Methods are the caller's text too.
fn known_method(method: &str) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    let known = KNOWN.into_iter().find(|known| *known == method);
    known.unwrap_or("other")
}

/// What a reading came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadingResult {
    /// A good reading.
    Ok,
    /// No answer within the time-out.
    Timeout,
    /// No connection, or a cut one.
    Refused,
    /// A status that brings no reading.
    Status,
    /// An answer that cannot be read.
    Unreadable,
    /// An answer without a KV capacity.
    Missing,
    /// The address is outside the allowed networks; nothing was sent.
    NotAllowed,
}

impl ReadingResult {
    /// All, in the order of their counters.
    pub const ALL: [Self; 7] = [
        Self::Ok,
        Self::Timeout,
        Self::Refused,
        Self::Status,
        Self::Unreadable,
        Self::Missing,
        Self::NotAllowed,
    ];

    /// What a reading came to.
    #[must_use]
    pub const fn of(reading: &Result<Reading, ReadFailure>) -> Self {
        match reading {
            Ok(_) => Self::Ok,
            Err(ReadFailure::Timeout) => Self::Timeout,
            Err(ReadFailure::Refused) => Self::Refused,
            Err(ReadFailure::MetricsOff | ReadFailure::KeyRefused(_) | ReadFailure::Status(_)) => {
                Self::Status
            }
            Err(ReadFailure::Unreadable) => Self::Unreadable,
            Err(ReadFailure::Missing) => Self::Missing,
            Err(ReadFailure::NotAllowed) => Self::NotAllowed,
        }
    }

    /// Its word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Timeout => "timeout",
            Self::Refused => "refused",
            Self::Status => "status",
            Self::Unreadable => "unreadable",
            Self::Missing => "missing",
            Self::NotAllowed => "not_allowed",
        }
    }
}

/// Readings of one engine by result, since it was first asked.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Readings([u64; ReadingResult::ALL.len()]);

impl Readings {
    /// One more.
    pub fn count(&mut self, result: ReadingResult) {
        for (count, candidate) in self.0.iter_mut().zip(ReadingResult::ALL) {
            *count += u64::from(candidate == result);
        }
    }

    /// All results with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (ReadingResult, u64)> {
        ReadingResult::ALL.into_iter().zip(self.0)
    }
}
