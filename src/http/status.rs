//! State and fleet, from the view.

use axum::extract::State as AppState;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{
    BadRouterEntry, Budget, Closes, Engine, EngineKind, EngineRole, Engines, Features, Leases,
    Notice, Pressure, Queue, ReadingSource, Router, Severity, State, StoreFigures, StoreState,
};
use kvgate_core::capacity::EngineView;
use kvgate_core::reading::{self, Role, Source};
use kvgate_core::units::Tokens;
use kvgate_core::view;

use super::answer::json;
use super::app::{App, FleetDetails, Shown};
use super::convert::{ratio, seconds, time};
use super::extract::NoQuery;
use crate::gate::{Gate, Phase};
use crate::words;

/// The whole picture in one answer of a fixed size.
#[utoipa::path(
    get,
    path = "/v1/state",
    tag = "state",
    responses((status = 200, description = "As of the last committed turn", body = State))
)]
pub(super) async fn state(AppState(app): AppState<App>, _: NoQuery) -> Response {
    json(StatusCode::OK, &state_of(&app))
}

/// The whole picture.
#[must_use]
pub fn state_of(app: &App) -> State {
    let shown = app.shown();
    let view = &shown.view;
    let measure = &view.measure;
    let age = |since: Option<_>| since.map(|since| seconds(shown.now.since(since)));
    State {
        budget: budget(view),
        epoch: view.epoch.0,
        degraded: measure.degraded.is_some(),
        degraded_reason: measure
            .degraded
            .map(|why| words::degraded_reason(why).to_owned()),
        pressure: Pressure {
            usage_mean: measure.usage_mean.map(ratio),
            usage_max: measure.usage_max.map(ratio),
            threshold: ratio(view.policy.pressure_threshold),
            engine: measure
                .pressure
                .as_ref()
                .map(|(_, engine)| engine.as_str().to_owned()),
        },
        queue: Queue {
            waiting: view.waiting,
            tokens: view.waiting_tokens.get(),
            oldest_age_s: age(view.oldest_waiter),
        },
        leases: Leases {
            count: view.leases,
            oldest_age_s: age(view.oldest_lease),
        },
        closes: Closes {
            pending: view.closes_pending,
            failed: view.closes_failed,
        },
        features: Features {
            program_admission: view.policy.program_admission,
            session_lifecycle: view.policy.session_lifecycle,
            paused: view.policy.paused,
        },
        notices: notices(app, &shown),
        store: store(app.gate()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_at: time(app.started_at(shown.now), &shown),
    }
}

fn budget(view: &view::View) -> Budget {
    let measure = &view.measure;
    Budget {
        ceiling: measure.ceiling.get(),
        full_ceiling: measure.full_ceiling.get(),
        capacity: measure.capacity.get(),
        reserved: view.reserved.get(),
        available: view.available().get(),
        reserved_utilization: utilization(view.reserved, measure.ceiling),
        headroom: ratio(view.policy.headroom),
    }
}

/// Shown with six digits: counts are exact up to 2^53, but a quotient is a float anyway.
#[expect(
    clippy::cast_precision_loss,
    reason = "token counts are at most 2^53-1, which a float holds exactly"
)]
fn utilization(reserved: Tokens, ceiling: Tokens) -> Option<f64> {
    (ceiling != Tokens::ZERO).then(|| reserved.get() as f64 / ceiling.get() as f64)
}

fn notices(app: &App, shown: &Shown) -> Vec<Notice> {
    let store = app.gate().store_trouble();
    let shell = app.shell_notices();
    let core = shown.view.notices.iter().map(|notice| match notice {
        view::Notice::LargerThanAnyPool {
            since,
            reservation,
            largest_pool,
            ..
        } => Notice {
            code: "larger_than_any_pool".to_owned(),
            severity: Severity::Warning,
            text: format!(
                "A request asked for {} tokens, but the largest pool of the fleet has {}: no engine can hold it.",
                reservation.get(),
                largest_pool.get()
            ),
            since: time(*since, shown),
        },
        view::Notice::UnknownLabel { since } => Notice {
            code: "unknown_label".to_owned(),
            severity: Severity::Warning,
            text: "The gauges of an engine differ by a label that is not known here. The smaller capacity and the \
                   larger usage are taken."
                .to_owned(),
            since: time(*since, shown),
        },
        view::Notice::SessionReopened {
            count,
            session,
            ticket,
            since,
        } => Notice {
            code: "session_reopened".to_owned(),
            severity: Severity::Warning,
            text: format!(
                "{count} {} used again within a minute of the close and not closed since, the last one {:?} by ticket \
                 {:?}. Some engine versions never tag such an id again: give each attempt a fresh session id.",
                if *count == 1 { "session was" } else { "sessions were" },
                session.as_str(),
                ticket.as_str(),
            ),
            since: time(*since, shown),
        },
        view::Notice::CallRefused {
            engine,
            abort,
            status,
            text,
            since,
            ..
        } => Notice {
            code: if *abort { "abort_refused" } else { "close_refused" }.to_owned(),
            severity: Severity::Warning,
            text: format!(
                "{} refuses {} with status {status}{}. {}",
                engine.as_str(),
                if *abort { "aborts" } else { "session closes" },
                text.as_ref().map_or_else(String::new, |text| format!(" ({text})")),
                words::refusal_advice(*abort, *status),
            ),
            since: time(*since, shown),
        },
    });
    let unavailable = store.unavailable.map(|since| Notice {
        code: "store_unavailable".to_owned(),
        severity: Severity::Error,
        text: "The store failed. Acquires bypass until it is open again; that is tried without an end. Make room on the \
               disk or mend it."
            .to_owned(),
        since: time(since, shown),
    });
    let low_space = store.low_space.map(|since| Notice {
        code: "low_space".to_owned(),
        severity: Severity::Error,
        text: "The disk of the store is nearly full. New acquires bypass; releases and waiting requests go on. Make room \
               on the disk."
            .to_owned(),
        since: time(since, shown),
    });
    let shell = shell.into_iter().map(|notice| Notice {
        code: notice.code,
        severity: notice.severity,
        text: notice.text,
        since: time(notice.since, shown),
    });
    core.chain(unavailable)
        .chain(low_space)
        .chain(hidden(app, shown))
        .chain(shell)
        .collect()
}

/// What somebody configured and is not in force, since it was set otherwise at run time.
fn hidden(app: &App, shown: &Shown) -> Option<Notice> {
    let settings = &shown.view.settings;
    let hidden = app.config().origins.hidden(settings);
    if hidden.is_empty() {
        return None;
    }
    let named: Vec<String> = hidden
        .iter()
        .map(|(hidden, origin)| words::hidden_setting(hidden, *origin))
        .collect();
    let since = settings.overrides.changed_at;
    Some(Notice {
        code: "setting_hidden".to_owned(),
        severity: Severity::Info,
        text: format!(
            "Settings that were set at run time hide what is configured: {}. Return them at /settings, by PATCH \
             /v1/settings with null, or all at a start with --reset-settings.",
            named.join(", ")
        ),
        since: time(since.unwrap_or_else(|| app.started_at(shown.now)), shown),
    })
}

fn store(gate: &Gate) -> StoreFigures {
    let stats = gate.stats();
    let trouble = gate.store_trouble();
    StoreFigures {
        bytes: stats.bytes(),
        commit_p99_s: stats.commit_p99().map(|took| took.as_secs_f64()),
        state: match gate.phase() {
            Phase::Starting => StoreState::Recovering,
            _ if trouble.unavailable.is_some() => StoreState::Unavailable,
            _ if trouble.low_space.is_some() => StoreState::LowSpace,
            Phase::Unavailable | Phase::Ready | Phase::Draining => StoreState::Ok,
        },
    }
}

/// The members, and what the router says.
#[utoipa::path(
    get,
    path = "/v1/engines",
    tag = "state",
    responses((status = 200, description = "By address", body = Engines))
)]
pub(super) async fn engines(AppState(app): AppState<App>, _: NoQuery) -> Response {
    json(StatusCode::OK, &engines_of(&app))
}

/// The members, and what the router says.
#[must_use]
pub fn engines_of(app: &App) -> Engines {
    let shown = app.shown();
    let details = app.fleet();
    let items = shown
        .view
        .engines
        .iter()
        .map(|view| engine(view, &details, &shown))
        .collect();
    Engines {
        items,
        router: router(&details, &shown),
    }
}

fn router(details: &FleetDetails, shown: &Shown) -> Option<Router> {
    let failure = shown.view.router_failure;
    (details.has_router || failure.is_some()).then(|| Router {
        kind: details.router_kind.clone(),
        last_error: failure.map(words::router_failure),
        bad_entries: details
            .bad_entries
            .iter()
            .map(|(entry, reason)| BadRouterEntry {
                entry: entry.clone(),
                reason: reason.clone(),
            })
            .collect(),
    })
}

fn engine(view: &EngineView, details: &FleetDetails, shown: &Shown) -> Engine {
    let details = details.engines.get(view.id.as_str());
    let read = view.reading.as_ref().map(|(_, reading)| reading);
    Engine {
        url: view.id.as_str().to_owned(),
        member: true,
        counted: view.counted,
        healthy: view.healthy,
        role: role(view.role),
        kind: read.map(|reading| kind(reading.kind)),
        capacity: read.map(|reading| reading.capacity.get()),
        used: read.and_then(|reading| Some(reading.used?.get())),
        evictable: read.and_then(|reading| Some(reading.evictable?.get())),
        available: read.and_then(|reading| Some(reading.available?.get())),
        usage: read.and_then(|reading| reading.usage.map(ratio)),
        running: read.and_then(|reading| reading.running),
        queued: read.and_then(|reading| reading.queued),
        ranks: read.map(|reading| reading.ranks),
        source: read.map(|reading| source(reading.source)),
        age_s: view
            .reading
            .as_ref()
            .map(|(at, _)| seconds(shown.now.since(*at))),
        fresh: view.fresh,
        last_error: view.failure.map(words::read_failure),
        joined_epoch: view.joined.0,
        close_support: details.and_then(|details| details.close_support),
    }
}

const fn role(role: Role) -> EngineRole {
    match role {
        Role::Regular => EngineRole::Regular,
        Role::Decode => EngineRole::Decode,
        Role::Prefill => EngineRole::Prefill,
        Role::Other => EngineRole::Other,
    }
}

const fn kind(kind: reading::EngineKind) -> EngineKind {
    match kind {
        reading::EngineKind::Sglang => EngineKind::Sglang,
        reading::EngineKind::Vllm => EngineKind::Vllm,
    }
}

const fn source(source: Source) -> ReadingSource {
    match source {
        Source::Loads => ReadingSource::Loads,
        Source::Metrics => ReadingSource::Metrics,
    }
}
