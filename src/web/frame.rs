//! What every page has around it: navigation with counts, epoch, age of the reading, the one thing to
//! know first, and the figures of the process.

use askama::Template;
use axum::http::HeaderMap;
use axum::response::Response;
use kvgate_api::State;
use kvgate_core::capacity::EngineView;
use kvgate_core::decision::DegradedReason;
use kvgate_core::units::Span;

use super::assets;
use super::format::{bare, bytes, counted, duration, grouped};
use super::page::{Parts, Screen, Tab, Told, Trouble, html};
use crate::gate::Phase;
use crate::http::{App, Fault};
use crate::words;

#[derive(Template)]
#[template(path = "base.html")]
struct Base<'a> {
    assets: &'static str,
    title: &'a str,
    refresh: Option<u8>,
    parts: &'a Parts,
    marks: &'a str,
    body: &'a str,
}

#[derive(Template)]
#[template(path = "parts/nav.html")]
struct Nav {
    links: Vec<Link>,
}

struct Link {
    href: &'static str,
    name: &'static str,
    key: &'static str,
    icon: &'static str,
    current: bool,
    count: Option<String>,
    /// The figure of `GET /v1/state` that the count is.
    fig: Option<&'static str>,
    bad: bool,
}

#[derive(Template)]
#[template(path = "parts/top.html")]
struct Top<'a> {
    title: &'a str,
    epoch: u64,
    mode: &'static str,
    age: Option<String>,
    stale: bool,
    can_act: bool,
    paused: bool,
    admission: bool,
    /// The switch of the range, where the page has one.
    range: String,
}

#[derive(Template)]
#[template(path = "parts/alert.html")]
struct Alert {
    alert: Option<Known>,
    more: usize,
}

/// One thing to know.
struct Known {
    code: String,
    text: String,
    error: bool,
}

#[derive(Template)]
#[template(path = "parts/node.html")]
struct Node {
    uptime: String,
    store: String,
    commit_p99: String,
    version: String,
}

#[derive(Template)]
#[template(path = "parts/told.html")]
struct ToldPart<'a> {
    told: Option<&'a str>,
    bad: bool,
    without: &'a str,
}

#[derive(Template)]
#[template(path = "fault.html")]
struct FaultPage<'a> {
    assets: &'static str,
    status: u16,
    title: &'a str,
    detail: &'a str,
    code: &'a str,
    /// Each place in the request, and what is wrong there.
    errors: Vec<(&'a str, &'a str)>,
}

/// Adds the regions of the frame to a page.
pub(super) fn add(
    screen: &mut Screen,
    app: &App,
    state: &State,
    can_act: bool,
) -> Result<(), Trouble> {
    let shown = app.shown();
    let newest = shown
        .view
        .engines
        .iter()
        .filter_map(|engine| engine.reading.as_ref().map(|(at, _)| *at))
        .max();
    let age = newest.map(|at| shown.now.since(at));
    let engines = shown.view.engines.len();
    let counted = shown
        .view
        .engines
        .iter()
        .filter(|engine| engine.counted)
        .count();
    let links = Tab::ALL.map(|tab| link(tab, Some(tab) == screen.tab, state, counted, engines));
    let parts = &mut screen.parts;
    let range = parts.html("p-range").to_owned();
    parts.add(
        "p-nav",
        &Nav {
            links: links.into(),
        },
    )?;
    parts.add(
        "p-top",
        &Top {
            title: &screen.title,
            epoch: state.epoch,
            mode: mode(state),
            age: age.map(duration),
            stale: age.is_none_or(|age| age > Span::from_secs(3)),
            can_act,
            paused: state.features.paused,
            admission: state.features.program_admission,
            range,
        },
    )?;
    let mut told = alerts(app, state);
    let more = told.len().saturating_sub(1);
    parts.add(
        "p-alert",
        &Alert {
            alert: (!told.is_empty()).then(|| told.swap_remove(0)),
            more,
        },
    )?;
    parts.add(
        "p-node",
        &Node {
            uptime: duration(app.uptime()),
            store: bytes(state.store.bytes),
            commit_p99: app.gate().stats().commit_p99().map_or_else(
                || "–".to_owned(),
                |time| format!("{:.1} ms", time.as_secs_f64() * 1e3),
            ),
            version: state.version.clone(),
        },
    )
}

/// Adds the region that tells what an act came to.
pub(super) fn tell(screen: &mut Screen, told: Option<&Told>) -> Result<(), Trouble> {
    let part = ToldPart {
        told: told.map(|told| told.outcome.text.as_str()),
        bad: told.is_some_and(|told| told.outcome.bad),
        without: told.map_or("?", |told| told.without.as_str()),
    };
    screen.parts.add("p-told", &part)
}

/// The whole document.
pub(super) fn page(screen: &Screen, body: &str, marks: &str) -> askama::Result<String> {
    Base {
        assets: assets::version(),
        title: &screen.title,
        refresh: refresh(screen.tab),
        parts: &screen.parts,
        marks,
        body,
    }
    .render()
}

/// Without script a page loads itself anew after so many seconds: later where rows are chosen, and
/// never where text is typed.
const fn refresh(tab: Option<Tab>) -> Option<u8> {
    match tab {
        None | Some(Tab::Overview | Tab::Engines | Tab::Decisions | Tab::Steps) => Some(5),
        Some(Tab::Queue | Tab::Leases | Tab::Sessions) => Some(30),
        Some(Tab::Settings) => None,
    }
}

/// A page for what cannot be shown.
pub(crate) fn fault_page(fault: &Fault) -> Response {
    let page = FaultPage {
        assets: assets::version(),
        status: fault.status().as_u16(),
        title: fault.title(),
        detail: fault.detail(),
        code: fault.code().as_str(),
        errors: fault.errors().collect(),
    };
    let text = page.render().unwrap_or_default();
    html(fault.status(), HeaderMap::new(), text)
}

fn link(tab: Tab, current: bool, state: &State, counted: usize, engines: usize) -> Link {
    let count = |count: u64| (count > 0).then(|| grouped(count));
    let (href, name, key, icon, shown, bad) = match tab {
        Tab::Overview => (
            "./",
            "Overview",
            "o",
            "M2.5 2.5h4.6v4.6H2.5zM8.9 2.5h4.6v4.6H8.9zM2.5 8.9h4.6v4.6H2.5zM8.9 8.9h4.6v4.6H8.9z",
            None,
            false,
        ),
        Tab::Queue => (
            "queue",
            "Queue",
            "q",
            "M2.5 4h11M2.5 8h11M2.5 12h6.5",
            count(state.queue.waiting),
            false,
        ),
        Tab::Leases => (
            "leases",
            "Leases",
            "l",
            "M8 1.8a6.2 6.2 0 1 0 0 12.4A6.2 6.2 0 0 0 8 1.8zM8 4.6V8l2.4 1.6",
            count(state.leases.count),
            false,
        ),
        Tab::Engines => (
            "engines",
            "Engines",
            "e",
            "M3 3h10v4H3zM3 9h10v4H3zM5.2 5h.1M5.2 11h.1",
            (engines > 0).then(|| {
                if counted == engines {
                    grouped(engines as u64)
                } else {
                    format!("{counted} / {engines}")
                }
            }),
            counted < engines,
        ),
        Tab::Sessions => (
            "sessions",
            "Sessions",
            "s",
            "M2.5 4.5h11v8h-11zM5.5 4.5V2.8h5v1.7M5.6 8.5l1.6 1.6 3.2-3.2",
            count(state.closes.failed),
            true,
        ),
        Tab::Decisions => (
            "decisions",
            "Decisions",
            "d",
            "M3 13V3M3 5h6l3 3-3 3H3",
            None,
            false,
        ),
        Tab::Steps => (
            "steps",
            "Reports",
            "r",
            "M2.5 13.2h11M4.5 10.8V8M8 10.8V3.5M11.5 10.8V6",
            None,
            false,
        ),
        Tab::Settings => (
            "settings",
            "Settings",
            "t",
            "M2.5 5h6M11.5 5h2M2.5 11h2M7.5 11h6M10 3.4v3.2M6 9.4v3.2",
            None,
            false,
        ),
    };
    Link {
        href,
        name,
        key,
        icon,
        current,
        count: shown,
        fig: match tab {
            Tab::Queue => Some("queue.waiting"),
            Tab::Leases => Some("leases.count"),
            Tab::Sessions => Some("closes.failed"),
            Tab::Overview | Tab::Engines | Tab::Decisions | Tab::Steps | Tab::Settings => None,
        },
        bad,
    }
}

fn mode(state: &State) -> &'static str {
    match (state.features.program_admission, state.features.paused) {
        (false, _) => "observing",
        (true, true) => "paused",
        (true, false) => "admission on",
    }
}

/// What to know, the most serious first.
fn alerts(app: &App, state: &State) -> Vec<Known> {
    let error = |code: &str, text: String| Known {
        code: code.to_owned(),
        text,
        error: true,
    };
    let mut told = Vec::new();
    match app.gate().phase() {
        Phase::Starting => told.push(error("recovering", "The store is being loaded.".to_owned())),
        Phase::Draining => told.push(error(
            "draining",
            "The service stops; waiting callers come back later.".to_owned(),
        )),
        Phase::Unavailable | Phase::Ready => {}
    }
    if state.degraded {
        told.push(error(
            "degraded",
            format!("All work bypasses: {}.", degraded(app)),
        ));
    }
    told.extend(away(app));
    // What is only to be known stands among the checks.
    let notices = state
        .notices
        .iter()
        .filter(|notice| notice.severity != kvgate_api::Severity::Info);
    told.extend(notices.map(|notice| Known {
        code: notice.code.clone(),
        text: notice.text.clone(),
        error: notice.severity == kvgate_api::Severity::Error,
    }));
    told.sort_by_key(|told| !told.error);
    told
}

/// Engines that should count and do not.
fn away(app: &App) -> Option<Known> {
    let view = app.gate().view();
    let away: Vec<&EngineView> = view
        .engines
        .iter()
        .filter(|engine| engine.role.counts() && !engine.counted)
        .collect();
    let lost = away.iter().filter_map(|engine| engine.reading.as_ref());
    let lost: u64 = lost.map(|(_, reading)| reading.capacity.get()).sum();
    let first = away.first()?;
    let why = first.failure.map_or_else(
        || "no fresh reading of a healthy engine".to_owned(),
        words::read_failure,
    );
    let who = match away.len() {
        1 => bare(first.id.as_str()).to_owned(),
        count => format!(
            "{count} of {}, {} among them",
            counted(view.engines.len() as u64, "engine"),
            bare(first.id.as_str())
        ),
    };
    let tokens = if lost > 0 {
        format!(" {} tokens left the ceiling.", grouped(lost))
    } else {
        String::new()
    };
    Some(Known {
        code: "not counted".to_owned(),
        text: format!("{who}: {why}.{tokens}"),
        error: true,
    })
}

/// Why there is no usable ceiling, in words.
pub(super) fn degraded(app: &App) -> String {
    let view = app.gate().view();
    let grace = duration(view.policy.stale_after);
    let router = |otherwise: String| view.router_failure.map_or(otherwise, words::router_failure);
    match view.measure.degraded {
        None | Some(DegradedReason::NoFleet) => "no router and no engine is configured".to_owned(),
        Some(DegradedReason::RouterUnreachable) => {
            router(format!("the router lists no worker for {grace}"))
        }
        Some(DegradedReason::NoFreshReading) => {
            router(format!("no engine gave a reading within {grace}"))
        }
        Some(DegradedReason::NoCapacity) => "no engine that counts has a KV capacity".to_owned(),
    }
}
