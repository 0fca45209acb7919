//! The overview: what the gate does now and did lately, at one look.
//!
//! It reads the view, the history, and a few rows of each list in one turn of the writer. While the
//! store is away it shows the last rows that were read.

mod budget;
mod closes;
mod decisions;
mod engines;
mod facts;
mod kpis;
mod queue;

use std::sync::{Arc, Mutex, PoisonError};

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_api::Decision;
use kvgate_core::close::CloseIntent;
use kvgate_core::command::Slice;
use kvgate_core::effect::{LeaseView, WaiterView};
use kvgate_core::ids::{CloseNo, Epoch, Issue, RowNo};
use kvgate_core::state::EpochEntry;
use kvgate_core::units::Span;

use super::checks::{Check, Health, checks};
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use super::plot::{Axis, RANGES, Range};
use super::why;
use crate::history::Series;
use crate::http::{App, Fault, Query, Shown, read};

/// Rows of the queue that the overview shows.
const QUEUE_ROWS: usize = 9;
/// Closes that are looked through for those that need a look.
const CLOSES_READ: usize = 32;
/// Decisions that it shows.
const DECISIONS_ROWS: usize = 12;
/// A history that is shorter is shown whole.
const SHORT_HISTORY: Span = Span::from_secs(900);

#[derive(Template)]
#[template(path = "overview.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "overview/range.html")]
struct RangePart {
    now: &'static str,
    ranges: [Range; RANGES.len()],
}

#[derive(Template)]
#[template(path = "overview/checks.html")]
struct ChecksPart {
    checks: Vec<Check>,
    all: usize,
    look: usize,
}

/// Rows of the lists, as they were read last.
#[derive(Clone, Default)]
struct Rows {
    queue: Vec<WaiterView>,
    leases: Vec<LeaseView>,
    closes: Vec<CloseIntent>,
    /// Newest first.
    decisions: Vec<Decision>,
    /// Newest first, and the generation that they were read in.
    epochs: (Option<Epoch>, Arc<[EpochEntry]>),
    /// The gate does not answer now.
    old: bool,
}

/// The rows that were read last, for the time when none can be read.
#[derive(Clone, Default)]
pub(super) struct Kept(Arc<Mutex<Rows>>);

impl Kept {
    fn last(&self) -> Rows {
        let rows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rows.clone()
    }

    async fn read(&self, app: &App, shown: &Shown) -> Rows {
        let last = self.last();
        match fresh(app, shown, &last).await {
            Ok(rows) => {
                let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                kept.clone_from(&rows);
                rows
            }
            Err(_) => Rows { old: true, ..last },
        }
    }
}

/// All lists are asked for at once, so that one turn of the writer answers them.
async fn fresh(app: &App, shown: &Shown, last: &Rows) -> Result<Rows, Fault> {
    let gate = app.gate();
    let queue = gate.list_queue(Slice {
        from: RowNo(0),
        rows: QUEUE_ROWS,
    });
    let leases = async {
        let slice = Slice {
            from: Issue(0),
            rows: why::HOLDERS_AMONG,
        };
        match shown.view.waiting {
            // Who holds the tokens is asked when somebody waits for them.
            0 => Ok(Vec::new()),
            _ => gate.list_leases(slice).await.map(|page| page.items),
        }
    };
    let closes = gate.list_closes(Slice {
        from: CloseNo(u64::MAX),
        rows: CLOSES_READ,
    });
    let decisions = read::decisions(app, Query::of([("limit", DECISIONS_ROWS.to_string())]));
    let epochs = async {
        match &last.epochs {
            (Some(epoch), entries) if *epoch == shown.view.epoch => Ok(Arc::clone(entries)),
            _ => gate.epochs().await.map(Arc::from),
        }
    };
    let (queue, leases, closes, decisions, epochs) =
        tokio::join!(queue, leases, closes, decisions, epochs);
    let mut decisions = decisions?.items;
    decisions.reverse();
    Ok(Rows {
        queue: queue?.items,
        leases: leases?,
        closes: closes?.items,
        decisions,
        epochs: (Some(shown.view.epoch), epochs?),
        old: false,
    })
}

/// What the regions are made from.
struct Moment {
    look: Look,
    shown: Shown,
    rows: Rows,
    range: Range,
    axis: Axis,
}

/// `GET /`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    let kept = web.overview().clone();
    web.show(ask, |look| build(look, kept)).await
}

async fn build(mut look: Look, kept: Kept) -> Result<Screen, Trouble> {
    let chosen = look.query.take("range");
    std::mem::replace(&mut look.query, Query::of([])).done()?;
    let shown = look.app.shown();
    let range = match chosen {
        Some(word) => Range::named(&word)
            .ok_or_else(|| Fault::field("?range", "must be 15m, 1h, 6h, 24h or 7d"))?,
        None => usual_range(&look.app, &shown),
    };
    let rows = kept.read(&look.app, &shown).await;
    let axis = Axis::of(range, shown.now);
    let moment = Moment {
        look,
        shown,
        rows,
        range,
        axis,
    };
    let checks = checks(&facts::of(&moment));
    let mut parts = Parts::default();
    parts.add(
        "p-range",
        &RangePart {
            now: range.word,
            ranges: RANGES,
        },
    )?;
    parts.add("p-kpis", &kpis::Kpis::new(&moment))?;
    parts.add("p-budget", &budget::BudgetPart::new(&moment))?;
    parts.add("p-plot", &budget::PlotPart::new(&moment))?;
    parts.add("p-queue", &queue::QueuePart::new(&moment))?;
    parts.add("p-engines", &engines::EnginesPart::new(&moment))?;
    parts.add("p-closes", &closes::ClosesPart::new(&moment))?;
    parts.add(
        "p-checks",
        &ChecksPart {
            all: checks.len(),
            look: checks
                .iter()
                .filter(|check| check.health > Health::Ok)
                .count(),
            checks,
        },
    )?;
    parts.add("p-decisions", &decisions::DecisionsPart::new(&moment))?;
    Ok(Screen {
        tab: Some(Tab::Overview),
        title: "Overview".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

/// An hour, or less while there is less.
fn usual_range(app: &App, shown: &Shown) -> Range {
    let [short, hour, ..] = RANGES;
    let window = app
        .history()
        .window(Series::Reserved, shown.now, hour.secs, 10);
    let first = window.points.iter().position(Option::is_some);
    let old = first.is_some_and(|steps| {
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        let at = window
            .from
            .after(Span::from_secs(steps.saturating_mul(window.step_s)));
        shown.now.since(at) > SHORT_HISTORY
    });
    if old { hour } else { short }
}
