//! The engines: what each holds and does, how it was in the past hour, what its readings and closes
//! came to; the router; and the history of the worker set.

use std::collections::BTreeMap;

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_api::{Engine, EngineKind, EngineRole, Engines, ReadingSource};
use kvgate_core::close::CloseIntent;
use kvgate_core::command::{SLICE_MAX, Slice};
use kvgate_core::ids::{CloseNo, EngineId};
use kvgate_core::state::{EpochCause, EpochEntry};
use kvgate_core::units::{Span, Timestamp, Tokens};

use super::format::{bare, counted, duration, grouped, percent, percent_of, secs, short, wall};
use super::line;
use super::link::link;
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use crate::history::{EngineStep, Series};
use crate::http::{EngineDetails, Fault, Shown, read};
use crate::telemetry::ReadingResult;

/// Engines of one page.
const ROWS: usize = 50;
/// Epochs of one page.
const EPOCHS: usize = 25;
/// Names of engines that one row of the epochs lists.
const NAMES: usize = 4;
/// Steps of the past hour that are one point of its line.
const STEPS_A_POINT: usize = 6;
/// Size of the line of the past hour.
const HOUR: (f64, f64) = (72.0, 22.0);

const STATES: [(&str, &str); 3] = [("", "All"), ("counted", "Counted"), ("away", "Not counted")];

#[derive(Template)]
#[template(path = "engines.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "parts/engines-fleet.html")]
struct FleetPart {
    counted: String,
    members: String,
    away: String,
    capacity: String,
    ceiling: String,
    headroom: String,
    used: String,
    used_share: String,
    cached: String,
    cached_share: String,
    worst: String,
    worst_engine: Option<String>,
    threshold: String,
}

#[derive(Template)]
#[template(path = "parts/engines-members.html")]
struct MembersPart<'a> {
    matching: String,
    members: String,
    total: usize,
    filtered: bool,
    q: &'a str,
    state: &'a str,
    states: &'static [(&'static str, &'static str)],
    rows: Vec<Row>,
    tick: String,
    threshold: String,
    before: Option<String>,
    next: Option<String>,
    more: String,
    shown: String,
}

struct Row {
    id: String,
    url: String,
    name: String,
    counted: bool,
    word: &'static str,
    about: String,
    usage: String,
    hot: bool,
    bar: Option<Bar>,
    told: String,
    locked: String,
    cached: String,
    free: String,
    capacity: String,
    load: String,
    usage_hour: Option<Hour>,
    running_hour: Option<Hour>,
    age: String,
    error: Option<String>,
    readings: String,
    closes: &'static str,
    closes_failed: Option<String>,
}

/// Widths out of 100.
struct Bar {
    locked: String,
    cached_to: String,
}

struct Hour {
    path: String,
    told: String,
}

#[derive(Template)]
#[template(path = "parts/engines-router.html")]
struct RouterPart {
    kind: Option<String>,
    error: Option<String>,
    state: String,
    bad: Vec<(String, String)>,
}

#[derive(Template)]
#[template(path = "parts/engines-epochs.html")]
struct EpochsPart {
    count: String,
    total: usize,
    rows: Vec<EpochRow>,
    newest: Option<String>,
    next: Option<String>,
    more: String,
}

struct EpochRow {
    id: String,
    number: u64,
    epoch: String,
    at: String,
    when: String,
    ago: String,
    why: &'static str,
    who: String,
    before: String,
    after: String,
}

/// What the address asks for.
struct Asked {
    q: String,
    state: String,
    from: usize,
    before: Option<u64>,
}

/// `GET /engines`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(mut look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::take(&mut look)?;
    let engines = read::engines(&look.app);
    let mut parts = Parts::default();
    parts.add("p-fleet", &fleet(&look, &engines))?;
    // While the store is away nothing is told of closes.
    let closes = look.app.gate().list_closes(Slice {
        from: CloseNo(u64::MAX),
        rows: SLICE_MAX,
    });
    let closes = closes.await.map(|page| page.items).unwrap_or_default();
    parts.add("p-members", &members(&look, &engines, &asked, &closes))?;
    parts.add("p-router", &router(&look, &engines))?;
    let epochs = look.app.gate().epochs().await.unwrap_or_default();
    parts.add("epochs", &history(&look, &epochs, &asked))?;
    Ok(Screen {
        tab: Some(Tab::Engines),
        title: "Engines".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

impl Asked {
    fn take(look: &mut Look) -> Result<Self, Fault> {
        let mut query = std::mem::take(&mut look.query);
        let state = query.take("state").unwrap_or_default();
        if !STATES.iter().any(|(value, _)| *value == state) {
            return Err(Fault::field("?state", "must be counted or away"));
        }
        let number = |text: Option<String>, name: &str| {
            text.map(|text| text.parse::<u64>())
                .transpose()
                .map_err(|_| Fault::field(name, "must be a number"))
        };
        let asked = Self {
            q: query.take("q").unwrap_or_default(),
            state,
            from: number(query.take("from"), "?from")?
                .and_then(|from| usize::try_from(from).ok())
                .unwrap_or_default(),
            before: number(query.take("before"), "?before")?,
        };
        query.done()?;
        Ok(asked)
    }

    fn takes(&self, engine: &Engine) -> bool {
        let state = match self.state.as_str() {
            "counted" => engine.counted,
            "away" => !engine.counted,
            _ => true,
        };
        state && engine.url.contains(&self.q)
    }

    fn page(&self, from: usize) -> String {
        let from = if from == 0 {
            String::new()
        } else {
            from.to_string()
        };
        link(
            "engines",
            &[("q", &self.q), ("state", &self.state), ("from", &from)],
        )
    }

    fn epochs(&self, before: &str) -> String {
        let page = link(
            "engines",
            &[("q", &self.q), ("state", &self.state), ("before", before)],
        );
        format!("{page}#epochs")
    }
}

// ---- the fleet ---------------------------------------------------------------------------------

fn fleet(look: &Look, engines: &Engines) -> FleetPart {
    let view = look.app.gate().view();
    let state = &look.state;
    let counting = || engines.items.iter().filter(|engine| engine.counted);
    let sum = |part: fn(&Engine) -> Option<u64>| -> u64 { counting().filter_map(part).sum() };
    let (used, cached) = (sum(|engine| engine.used), sum(|engine| engine.evictable));
    let capacity = state.budget.capacity;
    let away = engines.items.len().saturating_sub(counting().count());
    let worst = view.measure.pressure.as_ref();
    FleetPart {
        counted: grouped(counting().count() as u64),
        members: grouped(engines.items.len() as u64),
        away: if away == 0 {
            String::new()
        } else {
            format!(
                "{} not",
                if away == 1 {
                    "1 does".to_owned()
                } else {
                    format!("{away} do")
                }
            )
        },
        capacity: grouped(capacity),
        ceiling: grouped(state.budget.ceiling),
        headroom: percent(view.policy.headroom),
        used: grouped(used),
        used_share: percent_of(used, capacity),
        cached: grouped(cached),
        cached_share: percent_of(cached, capacity),
        worst: worst.map_or_else(|| "–".to_owned(), |(worst, _)| percent(*worst)),
        worst_engine: worst.map(|(_, engine)| bare(engine.as_str()).to_owned()),
        threshold: percent(view.policy.pressure_threshold),
    }
}

fn router(look: &Look, engines: &Engines) -> RouterPart {
    let Some(router) = &engines.router else {
        return RouterPart {
            kind: None,
            error: None,
            state: "none is configured: the engines were named one by one".to_owned(),
            bad: Vec::new(),
        };
    };
    let view = look.app.gate().view();
    RouterPart {
        kind: router.kind.clone(),
        error: router.last_error.clone(),
        state: format!("lists {}", counted(view.engines.len() as u64, "engine")),
        bad: router
            .bad_entries
            .iter()
            .map(|entry| (entry.entry.clone(), entry.reason.clone()))
            .collect(),
    }
}

// ---- the engines -------------------------------------------------------------------------------

fn members<'a>(
    look: &Look,
    engines: &Engines,
    asked: &'a Asked,
    closes: &[CloseIntent],
) -> MembersPart<'a> {
    let view = look.app.gate().view();
    let matching: Vec<&Engine> = engines
        .items
        .iter()
        .filter(|engine| asked.takes(engine))
        .collect();
    let page = matching.iter().skip(asked.from).take(ROWS);
    let details = look.app.fleet();
    let failures = failures(closes);
    let now = look.app.shown().now;
    let threshold = view.policy.pressure_threshold;
    let rows: Vec<Row> = page
        .map(|engine| {
            let hour = look.app.history().engine(&EngineId::new(&engine.url), now);
            let hot = view.engines.iter().any(|known| {
                known.id.as_str() == engine.url
                    && known.pressure.is_some_and(|worst| worst >= threshold)
            });
            let failed = failures
                .get(engine.url.as_str())
                .copied()
                .unwrap_or_default();
            row(
                engine,
                details.engines.get(&engine.url),
                &hour,
                hot,
                (failed, closes.len()),
            )
        })
        .collect();
    let end = asked.from.saturating_add(rows.len());
    let beyond = matching.len().saturating_sub(end);
    MembersPart {
        matching: grouped(matching.len() as u64),
        members: grouped(engines.items.len() as u64),
        total: engines.items.len(),
        filtered: !asked.q.is_empty() || !asked.state.is_empty(),
        q: &asked.q,
        state: &asked.state,
        states: &STATES,
        tick: format!("{:.1}", f64::from(threshold.get()) / 1e4 - 0.4),
        threshold: percent(threshold),
        before: (asked.from > 0).then(|| asked.page(asked.from.saturating_sub(ROWS))),
        next: (beyond > 0).then(|| asked.page(end)),
        more: grouped(beyond as u64),
        shown: grouped(rows.len() as u64),
        rows,
    }
}

/// Of the closes that are remembered, those that an engine did not take.
fn failures(closes: &[CloseIntent]) -> BTreeMap<&str, usize> {
    let mut failures = BTreeMap::new();
    for close in closes {
        for (engine, target) in &close.targets {
            if target.state.is_failure() {
                *failures.entry(engine.as_str()).or_default() += 1;
            }
        }
    }
    failures
}

fn row(
    engine: &Engine,
    details: Option<&EngineDetails>,
    hour: &[Option<EngineStep>],
    hot: bool,
    (failed, closes): (usize, usize),
) -> Row {
    let tokens = |count: Option<u64>| count.map_or_else(|| "–".to_owned(), grouped);
    let usage = engine.usage.map_or_else(|| "–".to_owned(), share);
    Row {
        id: format!("e-{:08x}", crc32fast::hash(engine.url.as_bytes())),
        url: engine.url.clone(),
        name: bare(&engine.url).to_owned(),
        counted: engine.counted,
        word: word(engine),
        about: about(engine, details),
        told: format!(
            "{usage} in use: {} locked, {} cached, {} free of {} tokens",
            tokens(engine.used),
            tokens(engine.evictable),
            tokens(engine.available),
            tokens(engine.capacity)
        ),
        usage,
        hot,
        bar: bar(engine),
        locked: tokens(engine.used),
        cached: tokens(engine.evictable),
        free: tokens(engine.available),
        capacity: tokens(engine.capacity),
        load: format!("{} / {}", tokens(engine.running), tokens(engine.queued)),
        usage_hour: over_the_hour(hour, |step| {
            step.usage.map(|usage| f64::from(usage.get()) / 1e6)
        })
        .map(|(points, most)| Hour {
            path: line::path(&points, 1.0, HOUR.0, HOUR.1),
            told: format!("Usage of the past hour, at most {}", share(most)),
        }),
        running_hour: over_the_hour(hour, |step| {
            step.running
                .map(|running| f64::from(u32::try_from(running).unwrap_or(u32::MAX)))
        })
        .map(|(points, most)| Hour {
            path: line::path(&points, most.max(1.0), HOUR.0, HOUR.1),
            told: format!("Requests that ran in the past hour, at most {most:.0}"),
        }),
        age: engine
            .age_s
            .map_or_else(|| "no reading yet".to_owned(), secs),
        error: engine.last_error.clone(),
        readings: readings(engine, details),
        closes: match engine.close_support {
            Some(true) => "taken",
            Some(false) => "no such call",
            None => "–",
        },
        closes_failed: (failed > 0).then(|| {
            format!(
                "{} of the last {} not taken",
                grouped(failed as u64),
                grouped(closes as u64)
            )
        }),
    }
}

fn share(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn word(engine: &Engine) -> &'static str {
    match (engine.counted, engine.healthy, engine.fresh) {
        (true, ..) => "counted",
        (false, false, _) => "unhealthy, as the router says",
        (false, true, false) => "no fresh reading",
        (false, true, true) => "not counted",
    }
}

fn about(engine: &Engine, details: Option<&EngineDetails>) -> String {
    let mut parts = Vec::new();
    let version = details.and_then(|details| details.version.as_deref());
    let version = version.map_or_else(String::new, |version| format!(" {version}"));
    match engine.kind {
        Some(EngineKind::Sglang) => parts.push(format!("SGLang{version}")),
        Some(EngineKind::Vllm) => parts.push(format!("vLLM{version}")),
        None => {}
    }
    match engine.role {
        EngineRole::Regular => {}
        EngineRole::Decode => parts.push("decode".to_owned()),
        EngineRole::Prefill => parts.push("prefill".to_owned()),
        EngineRole::Other => parts.push("other kind".to_owned()),
    }
    if let Some(ranks) = engine.ranks.filter(|ranks| *ranks > 1) {
        parts.push(format!("{ranks} ranks"));
    }
    parts.push(format!("epoch {}", grouped(engine.joined_epoch)));
    parts.join(" · ")
}

fn bar(engine: &Engine) -> Option<Bar> {
    let capacity = engine.capacity.filter(|capacity| *capacity > 0)?;
    let part = |count: u64| {
        let tenths = u128::from(count) * 1_000 / u128::from(capacity);
        u32::try_from(tenths.min(1_000)).map_or(0.0, |tenths| f64::from(tenths) / 10.0)
    };
    // An engine that does not tell what is locked tells how much is in use.
    let locked = match (engine.used, engine.usage) {
        (Some(used), _) => part(used),
        (None, Some(usage)) => usage.clamp(0.0, 1.0) * 100.0,
        (None, None) => return None,
    };
    let cached = engine.evictable.map_or(0.0, part);
    Some(Bar {
        locked: format!("{locked:.1}"),
        cached_to: format!("{:.1}", (locked + cached).min(100.0)),
    })
}

/// One figure of the past hour, some steps to a point, and its greatest; `None` without any.
fn over_the_hour(
    hour: &[Option<EngineStep>],
    figure: impl Fn(&EngineStep) -> Option<f64>,
) -> Option<(Vec<Option<f64>>, f64)> {
    let points: Vec<Option<f64>> = hour
        .chunks(STEPS_A_POINT)
        .map(|steps| steps.iter().flatten().filter_map(&figure).reduce(f64::max))
        .collect();
    let known = points.iter().any(Option::is_some);
    known.then(|| {
        let most = line::greatest(&points);
        (points, most)
    })
}

fn readings(engine: &Engine, details: Option<&EngineDetails>) -> String {
    let mut parts = Vec::new();
    match engine.source {
        Some(ReadingSource::Loads) => parts.push("loads".to_owned()),
        Some(ReadingSource::Metrics) => parts.push("metrics".to_owned()),
        None => {}
    }
    // How the metrics are spelled tells which configuration the engine was started in.
    if let (Some(mark), Some(kind)) = (details.and_then(|details| details.dialect), engine.kind) {
        parts.push(match kind {
            EngineKind::Sglang => format!("sglang{mark}*"),
            EngineKind::Vllm => format!("vllm{mark}*"),
        });
    }
    if let Some(details) = details {
        let of = |good: bool| -> u64 {
            let results = details.readings.iter();
            results
                .filter(|(result, _)| (*result == ReadingResult::Ok) == good)
                .map(|(_, count)| count)
                .sum()
        };
        parts.push(match (of(true), of(false)) {
            (good, 0) => format!("{} good", short(good)),
            (good, bad) => format!("{} good, {} not", short(good), short(bad)),
        });
    }
    parts.join(" · ")
}

// ---- epochs ------------------------------------------------------------------------------------

fn history(look: &Look, epochs: &[EpochEntry], asked: &Asked) -> EpochsPart {
    let shown = look.app.shown();
    let from = epochs
        .iter()
        .position(|entry| asked.before.is_none_or(|before| entry.epoch.0 < before))
        .unwrap_or(epochs.len());
    let page = epochs.iter().skip(from).take(EPOCHS);
    let rows: Vec<EpochRow> = page.map(|entry| epoch(look, entry, &shown)).collect();
    let end = from.saturating_add(rows.len());
    let beyond = epochs.len().saturating_sub(end);
    let last = end.checked_sub(1).and_then(|last| epochs.get(last));
    EpochsPart {
        count: grouped(epochs.len() as u64),
        total: epochs.len(),
        newest: (from > 0).then(|| asked.epochs("")),
        next: last
            .filter(|_| beyond > 0)
            .map(|last| asked.epochs(&last.epoch.0.to_string())),
        more: grouped(beyond as u64),
        rows,
    }
}

fn epoch(look: &Look, entry: &EpochEntry, shown: &Shown) -> EpochRow {
    let (before, after) = ceilings(look, entry.at, shown.now);
    let tokens = |tokens: Option<u64>| tokens.map_or_else(|| "–".to_owned(), grouped);
    EpochRow {
        id: format!("ep-{}", entry.epoch.0),
        number: entry.epoch.0,
        epoch: grouped(entry.epoch.0),
        at: wall(entry.at, shown, "%Y-%m-%dT%H:%M:%SZ"),
        when: wall(entry.at, shown, "%b %d, %H:%M:%S"),
        ago: duration(shown.now.since(entry.at)),
        why: match &entry.cause {
            EpochCause::First => "first engines",
            EpochCause::MembersChanged { .. } => "members changed",
            EpochCause::Restarted(_) => "an engine restarted",
            EpochCause::WorkerIdChanged(_) => "the router names it anew",
            EpochCause::Restored => "store restored from a copy",
        },
        who: who(look, entry),
        before: tokens(before),
        after: tokens(after),
    }
}

/// Who joined is known of those that are members still; who left is kept as a number.
fn who(look: &Look, entry: &EpochEntry) -> String {
    let engine = |engine: &EngineId| bare(engine.as_str()).to_owned();
    let joiners = || {
        let view = look.app.gate().view();
        let joiners = view
            .engines
            .iter()
            .filter(|known| known.joined == entry.epoch);
        let names: Vec<String> = joiners.map(|known| engine(&known.id)).collect();
        let beyond = names.len().saturating_sub(NAMES);
        let mut text = names.into_iter().take(NAMES).collect::<Vec<_>>().join(", ");
        if beyond > 0 {
            text.push_str(&format!(" and {beyond} more"));
        }
        text
    };
    match &entry.cause {
        EpochCause::First => joiners(),
        EpochCause::MembersChanged { joined, left } => {
            let mut parts = Vec::new();
            if *joined > 0 {
                let names = joiners();
                parts.push(if names.is_empty() {
                    format!("{} joined", counted(u64::from(*joined), "engine"))
                } else {
                    format!("{joined} joined: {names}")
                });
            }
            if *left > 0 {
                parts.push(format!("{} left", counted(u64::from(*left), "engine")));
            }
            parts.join("; ")
        }
        EpochCause::Restarted(one) | EpochCause::WorkerIdChanged(one) => engine(one),
        EpochCause::Restored => String::new(),
    }
}

/// The ceiling just before a point in time and just after it, as the history has it.
fn ceilings(look: &Look, at: Timestamp, now: Timestamp) -> (Option<u64>, Option<u64>) {
    let age_s = now.since(at).millis() / 1_000;
    let step_s = match age_s {
        0..880 => 1,
        880..21_000 => 10,
        _ => 60,
    };
    let around = Span::from_secs(step_s * 5);
    let window = look.app.history().window(
        Series::Ceiling,
        at.after(around).min(now),
        step_s * 10,
        step_s,
    );
    let at_s = at.millis() / 1_000 / step_s;
    let first_s = window.from.millis() / 1_000 / step_s;
    let steps = (first_s..).zip(&window.points);
    let known = steps.filter_map(|(step, point)| Some((step, (*point)?.mean)));
    let (mut before, mut after) = (None, None);
    for (step, mean) in known {
        if step < at_s {
            before = Some(mean);
        } else if step > at_s && after.is_none() {
            after = Some(mean);
        }
    }
    (before.and_then(tokens), after.and_then(tokens))
}

/// A sample of the history as a count; the mean of whole figures is rounded.
fn tokens(mean: f64) -> Option<u64> {
    let rounded = format!("{:.0}", mean.round());
    rounded.parse().ok().and_then(Tokens::new).map(Tokens::get)
}
