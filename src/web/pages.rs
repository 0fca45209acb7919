//! The overview: budget, epoch, engines, the head of the queue and the latest closes.

use std::collections::BTreeMap;

use askama::Template;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use kvgate_core::capacity::EngineView;
use kvgate_core::close::{CloseIntent, CloseStage, TargetState};
use kvgate_core::command::Slice;
use kvgate_core::decision::{BypassReason, DegradedReason, WaitReason};
use kvgate_core::effect::WaiterView;
use kvgate_core::ids::{CloseNo, RowNo};
use kvgate_core::reading::Reading;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::View;

use super::WebState;
use super::format::{duration, grouped, percent, percent_of, tenths_of};
use crate::gate::{Phase, StoreTrouble};
use crate::words;

/// Closes that the overview shows, newest first.
const CLOSE_ROWS: usize = 8;

/// Waiters that the overview shows.
const QUEUE_ROWS: usize = 12;

/// Nothing from elsewhere, no script, no frame.
const POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    alert: Option<String>,
    version: &'static str,
    epoch: u64,
    mode: &'static str,
    waiting: String,
    waiting_tokens: String,
    oldest: String,
    leases: String,
    oldest_lease: String,
    admitted: String,
    bypassed: String,
    cancelled: String,
    /// What clients decided by themselves, when there is any.
    client_bypasses: Option<String>,
    budget: Budget,
    queue: Vec<QueueRow>,
    queue_more: Option<String>,
    closes: Option<Closes>,
    engines: Vec<EngineRow>,
    counted: usize,
    threshold: String,
    usage_mean: String,
    usage_max: String,
    store_bytes: String,
    commit_p99: String,
}

struct Budget {
    available: String,
    reserved: String,
    reserved_share: String,
    overdraft: Option<String>,
    ceiling: String,
    kept: String,
    capacity: String,
    headroom: String,
    /// For the bar: 0 to 1,000.
    bar_reserved: u64,
}

struct QueueRow {
    position: String,
    ticket: String,
    session: String,
    tokens: String,
    age: String,
    bypass_in: String,
    waits_for: String,
    head: bool,
}

/// Shown while session closes are on.
struct Closes {
    all: String,
    pending: String,
    failed: String,
    rows: Vec<CloseRow>,
}

struct CloseRow {
    session: String,
    state: &'static str,
    engines: String,
    age: String,
    failed: bool,
}

struct EngineRow {
    url: String,
    state: String,
    good: bool,
    usage: String,
    /// For the bar: 0 to 1,000.
    bar: u64,
    run_queue: String,
    capacity: String,
    evictable: String,
    free: String,
    age: String,
}

/// `GET /`.
pub(super) async fn overview(State(state): State<WebState>) -> Response {
    let slice = Slice {
        from: RowNo(0),
        rows: QUEUE_ROWS,
    };
    // While the store is away the page still shows the last good state.
    let queue = state.gate.list_queue(slice).await;
    let queue = queue.map(|page| page.items).unwrap_or_default();
    let slice = Slice {
        from: CloseNo(u64::MAX),
        rows: CLOSE_ROWS,
    };
    let closes = state.gate.list_closes(slice).await;
    let closes = closes.map(|page| page.items).unwrap_or_default();
    let view = state.gate.view();
    let page = Overview::new(&state, &view, &queue, &closes);
    match page.render() {
        Ok(html) => (
            [
                (CONTENT_TYPE, "text/html; charset=utf-8"),
                (CACHE_CONTROL, "no-store"),
                (CONTENT_SECURITY_POLICY, POLICY),
            ],
            html,
        )
            .into_response(),
        Err(error) => {
            tracing::error!(%error, "the overview cannot be rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

impl Overview {
    fn new(state: &WebState, view: &View, queue: &[WaiterView], closes: &[CloseIntent]) -> Self {
        let phase = state.gate.phase();
        let now = state.gate.line().map_or(view.now, |line| line.now());
        let stats = state.gate.stats();
        let more = view.waiting.saturating_sub(queue.len() as u64);
        let mut bypassed = 0;
        let mut admitted = 0;
        let mut cancelled = 0;
        for scope in &view.tally.scopes {
            admitted += scope.admit;
            // What admission does not apply to is in no sum (CNT1).
            bypassed += BypassReason::ALL
                .into_iter()
                .filter(|reason| {
                    !matches!(reason, BypassReason::Disabled | BypassReason::OutOfScope)
                })
                .map(|reason| scope.bypasses(reason))
                .sum::<u64>();
            cancelled += scope.cancelled.iter().sum::<u64>();
        }
        let client_bypasses: u64 = view.tally.local_bypasses.iter().sum();
        Self {
            alert: alert(phase, state.gate.store_trouble(), view),
            version: env!("CARGO_PKG_VERSION"),
            epoch: view.epoch.0,
            mode: mode(view),
            waiting: grouped(view.waiting),
            waiting_tokens: grouped(view.waiting_tokens.get()),
            oldest: since(view.oldest_waiter, now),
            leases: grouped(view.leases),
            oldest_lease: since(view.oldest_lease, now),
            admitted: grouped(admitted),
            bypassed: grouped(bypassed),
            cancelled: grouped(cancelled),
            client_bypasses: (client_bypasses > 0).then(|| grouped(client_bypasses)),
            budget: Budget::new(view),
            queue: queue.iter().map(QueueRow::new).collect(),
            queue_more: (more > 0).then(|| grouped(more)),
            closes: view.policy.session_lifecycle.then(|| Closes {
                all: grouped(view.tally.closes),
                pending: grouped(view.closes_pending),
                failed: grouped(view.tally.close_failures),
                rows: closes
                    .iter()
                    .map(|close| CloseRow::new(close, now))
                    .collect(),
            }),
            engines: view
                .engines
                .iter()
                .map(|engine| EngineRow::new(engine, now))
                .collect(),
            counted: view.engines.iter().filter(|engine| engine.counted).count(),
            threshold: percent(view.policy.pressure_threshold),
            usage_mean: view.measure.usage_mean.map_or("–".to_owned(), percent),
            usage_max: view.measure.usage_max.map_or("–".to_owned(), percent),
            store_bytes: format!("{} KiB", grouped(stats.bytes() / 1_024)),
            commit_p99: stats.commit_p99().map_or("–".to_owned(), |time| {
                format!("{:.1} ms", time.as_secs_f64() * 1e3)
            }),
        }
    }
}

impl Budget {
    fn new(view: &View) -> Self {
        let measure = &view.measure;
        let overdraft = view.reserved.saturating_sub(measure.ceiling).get();
        let share = tenths_of(view.reserved.get(), measure.ceiling.get());
        Self {
            available: grouped(view.available().get()),
            reserved: grouped(view.reserved.get()),
            reserved_share: percent_of(view.reserved.get(), measure.ceiling.get()),
            overdraft: (overdraft > 0).then(|| grouped(overdraft)),
            ceiling: grouped(measure.ceiling.get()),
            kept: grouped(measure.capacity.saturating_sub(measure.ceiling).get()),
            capacity: grouped(measure.capacity.get()),
            headroom: percent(view.policy.headroom),
            bar_reserved: share.unwrap_or(0).min(1_000),
        }
    }
}

impl QueueRow {
    fn new(waiter: &WaiterView) -> Self {
        let status = &waiter.status;
        Self {
            position: grouped(status.position),
            ticket: waiter.ticket.as_str().to_owned(),
            session: waiter.session.as_str().to_owned(),
            tokens: grouped(waiter.terms.reservation.get()),
            age: duration(status.age),
            bypass_in: duration(status.bypass_in),
            waits_for: match status.reason {
                WaitReason::BehindOlder => "behind #1".to_owned(),
                WaitReason::PressureGuard => "engine pressure".to_owned(),
                WaitReason::CapacityExhausted => format!("{} short", grouped(status.short.get())),
            },
            head: status.position == 1,
        }
    }
}

impl CloseRow {
    fn new(close: &CloseIntent, now: Timestamp) -> Self {
        let mut counts: BTreeMap<TargetState, u32> = BTreeMap::new();
        if close.is_done() {
            counts.extend(TargetState::ENDS.map(|state| (state, close.count(state))));
        } else {
            for target in close.targets.values() {
                *counts.entry(target.state).or_default() += 1;
            }
        }
        let parts: Vec<String> = counts
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(state, count)| format!("{} {}", grouped(count.into()), words::target(state)))
            .collect();
        Self {
            session: close.session.as_str().to_owned(),
            state: match close.stage {
                CloseStage::Joining { ready_since: None } => "joining its leases",
                CloseStage::Joining {
                    ready_since: Some(_),
                } => "waiting for an engine",
                CloseStage::Delivering { .. } => "delivering",
                CloseStage::Done { .. } if close.has_failed() => "done, with failures",
                CloseStage::Done { .. } => "done",
            },
            engines: parts.join(" · "),
            age: duration(now.since(close.requested_at)),
            failed: close.has_failed(),
        }
    }
}

impl EngineRow {
    fn new(engine: &EngineView, now: Timestamp) -> Self {
        let reading = engine.reading.as_ref();
        let usage = reading.and_then(|(_, reading)| reading.usage);
        let number = |count: Option<u64>| count.map_or_else(|| "–".to_owned(), grouped);
        let tokens = |part: fn(&Reading) -> Option<Tokens>| {
            number(
                reading
                    .and_then(|(_, reading)| part(reading))
                    .map(Tokens::get),
            )
        };
        Self {
            url: engine.id.as_str().to_owned(),
            state: match engine.failure {
                _ if engine.counted => "counted".to_owned(),
                Some(failure) => words::read_failure(failure),
                None if !engine.fresh => "no fresh reading".to_owned(),
                None if !engine.healthy => "unhealthy".to_owned(),
                None => "not counted".to_owned(),
            },
            good: engine.counted,
            usage: usage.map_or("–".to_owned(), percent),
            bar: u64::from(usage.map_or(0, Ppm::get) / 1_000),
            run_queue: format!(
                "{} / {}",
                number(reading.and_then(|(_, reading)| reading.running)),
                number(reading.and_then(|(_, reading)| reading.queued))
            ),
            capacity: number(reading.map(|(_, reading)| reading.capacity.get())),
            evictable: tokens(|reading| reading.evictable),
            free: tokens(|reading| reading.available),
            age: since(reading.map(|(at, _)| *at), now),
        }
    }
}

fn since(at: Option<Timestamp>, now: Timestamp) -> String {
    at.map_or_else(|| "–".to_owned(), |at| duration(now.since(at)))
}

fn mode(view: &View) -> &'static str {
    match (view.policy.program_admission, view.policy.paused) {
        (false, _) => "observing",
        (true, true) => "paused",
        (true, false) => "admission on",
    }
}

/// The one thing to know first; `None` when all is well.
fn alert(phase: Phase, store: StoreTrouble, view: &View) -> Option<String> {
    match phase {
        Phase::Starting => return Some("Recovering: the store is being loaded.".to_owned()),
        Phase::Unavailable => {
            return Some(
                "The store is not available: new work bypasses until it is open again.".to_owned(),
            );
        }
        Phase::Draining => return Some("Stopping: waiting callers come back later.".to_owned()),
        Phase::Ready => {}
    }
    if store.low_space.is_some() {
        return Some(
            "The disk of the store is nearly full: new work bypasses until there is room."
                .to_owned(),
        );
    }
    let grace = duration(Span::from_millis(view.policy.stale_after.millis()));
    let reason = match view.measure.degraded? {
        DegradedReason::NoFleet => "no router and no engine is configured".to_owned(),
        DegradedReason::RouterUnreachable => match view.router_failure {
            Some(failure) => words::router_failure(failure),
            None => format!("the router lists no worker for {grace}"),
        },
        DegradedReason::NoFreshReading => match view.router_failure {
            Some(failure) => words::router_failure(failure),
            None => format!("no engine gave a reading within {grace}"),
        },
        DegradedReason::NoCapacity => "no engine that counts has a KV capacity".to_owned(),
    };
    Some(format!("Degraded, all work bypasses: {reason}."))
}
