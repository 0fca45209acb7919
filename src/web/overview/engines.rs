//! The engines: use of their KV, work, and how old their readings are.

use askama::Template;
use kvgate_api::{Engine, EngineRole};

use super::Moment;
use crate::http::read;
use crate::web::format::{bare, escaped, grouped, secs, short};

/// Engines that the overview shows.
const ROWS: usize = 9;

#[derive(Template)]
#[template(path = "overview/engines.html")]
pub(super) struct EnginesPart {
    counted: usize,
    all: usize,
    router: Option<String>,
    router_failed: bool,
    rows: Vec<Row>,
    more: Option<String>,
    threshold: String,
}

struct Row {
    url: String,
    id: String,
    name: String,
    state: &'static str,
    dot: &'static str,
    usage: String,
    bar: Option<Bar>,
    hot: bool,
    running: String,
    queued: String,
    capacity: String,
    counted: bool,
    /// Age of the reading, or why there is none.
    read: String,
    failed: bool,
}

/// Shares of the pool, in percent.
struct Bar {
    locked: String,
    cached: String,
    tick: String,
    label: String,
}

impl EnginesPart {
    pub(super) fn new(moment: &Moment) -> Self {
        let threshold = moment.look.state.pressure.threshold;
        let engines = read::engines(&moment.look.app);
        let all = engines.items.len();
        let counted = engines.items.iter().filter(|engine| engine.counted).count();
        let mut items: Vec<&Engine> = engines.items.iter().collect();
        // All in the order of their addresses while there is room; then those that need a look.
        if items.len() > ROWS {
            items.sort_by(|one, other| {
                let usage = |engine: &Engine| engine.usage.unwrap_or(0.0);
                one.counted
                    .cmp(&other.counted)
                    .then(usage(other).total_cmp(&usage(one)))
            });
        }
        let rows = items.into_iter().take(ROWS);
        let more = all.saturating_sub(ROWS);
        let router = engines.router;
        let failure = router.as_ref().and_then(|router| router.last_error.clone());
        Self {
            counted,
            all,
            router_failed: failure.is_some(),
            router: failure.or_else(|| {
                let kind = router?.kind;
                Some(kind.map_or("router".to_owned(), |kind| format!("router {kind}")))
            }),
            rows: rows.map(|engine| Row::new(engine, threshold)).collect(),
            more: (more > 0).then(|| more.to_string()),
            threshold: format!("{:.0} %", threshold * 100.0),
        }
    }
}

impl Row {
    fn new(engine: &Engine, threshold: f64) -> Self {
        let number = |count: Option<u64>| count.map_or("–".to_owned(), grouped);
        let (state, dot) = match engine.role {
            _ if engine.counted => ("Counted", "g"),
            EngineRole::Prefill | EngineRole::Other => ("Has no part in the budget", "n"),
            EngineRole::Regular | EngineRole::Decode => ("Not counted", "b"),
        };
        let away = dot == "b";
        let failure = engine.last_error.clone().or_else(|| {
            let unhealthy = away && !engine.healthy;
            unhealthy.then(|| "unhealthy".to_owned())
        });
        let age = engine.age_s.map(secs);
        Self {
            url: engine.url.clone(),
            id: escaped(&engine.url),
            name: bare(&engine.url).to_owned(),
            state,
            dot,
            usage: engine
                .usage
                .filter(|_| !away)
                .map_or("–".to_owned(), |usage| format!("{:.1}", usage * 100.0)),
            bar: (!away).then(|| Bar::new(engine, threshold)).flatten(),
            hot: engine.usage.is_some_and(|usage| usage >= threshold),
            running: number(engine.running.filter(|_| !away)),
            queued: number(engine.queued.filter(|_| !away)),
            capacity: engine.capacity.map_or("–".to_owned(), short),
            counted: engine.counted,
            failed: failure.is_some(),
            read: failure.or(age).unwrap_or("–".to_owned()),
        }
    }
}

impl Bar {
    /// Locked and cached as the engine tells them; where it tells its use only, that is locked.
    fn new(engine: &Engine, threshold: f64) -> Option<Self> {
        let capacity = engine.capacity.filter(|capacity| *capacity > 0)? as f64;
        let share = |tokens: Option<u64>| tokens.map(|tokens| tokens as f64 / capacity);
        let locked = share(engine.used).or(engine.usage)?.clamp(0.0, 1.0);
        let cached = share(engine.evictable).unwrap_or(0.0);
        let both = (locked + cached).clamp(0.0, 1.0);
        let percent = |share: f64| format!("{:.1}", share * 100.0);
        Some(Self {
            label: format!(
                "{} % locked, {} % cached, {} % free",
                percent(locked),
                percent(both - locked),
                percent(1.0 - both)
            ),
            locked: percent(locked),
            cached: percent(both),
            tick: percent(threshold.min(0.99)),
        })
    }
}
