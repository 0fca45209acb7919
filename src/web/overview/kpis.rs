//! Six figures, each with what it was lately.

use askama::Template;
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::tally::{LeaseEnd, Tally};
use kvgate_core::units::Span;

use super::Moment;
use crate::history::Series;
use crate::web::format::{grouped, percent_of, precise, secs};
use crate::web::plot::{self, Spark};

/// Rates are taken over so long.
const RATE_OVER: Span = Span::from_secs(60);
/// What is rare is counted over so long.
const RARE_OVER: Span = Span::from_secs(900);
/// Reasons of bypasses that are named.
const REASONS_SHOWN: usize = 2;

#[derive(Template)]
#[template(path = "overview/kpis.html")]
pub(super) struct Kpis {
    kpis: [Kpi; 6],
}

struct Kpi {
    href: &'static str,
    label: &'static str,
    /// What the figure is, in full.
    title: &'static str,
    value: String,
    unit: &'static str,
    /// The figure of `GET /v1/state` that it is.
    fig: Option<&'static str>,
    below: Vec<Note>,
    /// Colour of the small plot.
    kind: &'static str,
    spark: Spark,
}

/// A few words, and how they look.
struct Note {
    class: &'static str,
    text: String,
}

fn plain(text: impl Into<String>) -> Note {
    Note {
        class: "",
        text: text.into(),
    }
}

impl Kpis {
    pub(super) fn new(moment: &Moment) -> Self {
        Self {
            kpis: [
                waiting(moment),
                wait(moment),
                admitted(moment),
                bypassed(moment),
                leases(moment),
                closes(moment),
            ],
        }
    }
}

fn spark(moment: &Moment, series: Series) -> Spark {
    let history = moment.look.app.history();
    let points = plot::points(
        history,
        series,
        moment.range,
        &moment.axis,
        moment.shown.now,
    );
    plot::spark(&points, &moment.axis)
}

/// What was counted in about the last `over`, and in how long a time.
fn counted(moment: &Moment, over: Span) -> Option<(Span, Tally)> {
    let history = moment.look.app.history();
    let counted = history.counted(&moment.shown.view.tally, moment.shown.now, over)?;
    (counted.0 > Span::ZERO).then_some(counted)
}

/// In a minute, at the rate of the time that it was counted in.
fn per_minute(count: u64, over: Span) -> String {
    grouped((count as f64 * 60_000.0 / over.millis().max(1) as f64).round() as u64)
}

fn sum(tally: &Tally, count: impl Fn(&kvgate_core::tally::ScopeTally) -> u64) -> u64 {
    Scope::ALL
        .iter()
        .map(|scope| count(tally.scope(*scope)))
        .sum()
}

/// Bypasses where admission applies (CNT1), with their reasons.
const REASONS: [(BypassReason, &str); 5] = [
    (BypassReason::Aged, "aged"),
    (BypassReason::Degraded, "degraded"),
    (BypassReason::Oversize, "oversize"),
    (BypassReason::QueueFull, "queue full"),
    (BypassReason::Protected, "protected"),
];

fn waiting(moment: &Moment) -> Kpi {
    let queue = &moment.look.state.queue;
    let below = match queue.oldest_age_s {
        Some(age) => format!("oldest {}", secs(age)),
        None => "nothing waits".to_owned(),
    };
    Kpi {
        href: "queue",
        label: "Waiting",
        title: "Tickets in line now",
        value: grouped(queue.waiting),
        unit: "",
        fig: Some("queue.waiting"),
        below: vec![plain(below)],
        kind: "w",
        spark: spark(moment, Series::Waiting),
    }
}

fn wait(moment: &Moment) -> Kpi {
    let waits = moment.look.app.gate().stats().waits();
    let below = match waits {
        Some(waits) => format!("p50 {} · max {}", precise(waits.p50), precise(waits.max)),
        None => "no grant after a wait in 60 s".to_owned(),
    };
    Kpi {
        href: "queue",
        label: "Wait p95",
        title: "Queue times of the grants of the last minute, of those that had to wait",
        value: waits.map_or_else(|| "–".to_owned(), |waits| precise(waits.p95)),
        unit: "",
        fig: None,
        below: vec![plain(below)],
        kind: "w",
        spark: spark(moment, Series::WaitP95),
    }
}

fn admitted(moment: &Moment) -> Kpi {
    let minute = counted(moment, RATE_OVER);
    let rate = minute.as_ref().map(|(over, tally)| {
        let admits = sum(tally, |scope| scope.admit);
        let waits = sum(tally, |scope| {
            WaitReason::ALL.iter().map(|why| scope.waits(*why)).sum()
        });
        let bypasses: u64 = REASONS.iter().map(|(why, _)| bypasses(tally, *why)).sum();
        (
            per_minute(admits, *over),
            percent_of(waits, admits + waits + bypasses),
        )
    });
    let (value, deferred) = rate.unwrap_or_else(|| ("–".to_owned(), "–".to_owned()));
    Kpi {
        href: "decisions?action=admit",
        label: "Admitted",
        title: "Grants at the rate of the last minute; the share of decisions that were put in line",
        value,
        unit: " /min",
        fig: None,
        below: vec![plain(format!("defer rate {deferred}"))],
        kind: "",
        spark: spark(moment, Series::AdmitRate),
    }
}

fn bypasses(tally: &Tally, why: BypassReason) -> u64 {
    sum(tally, |scope| scope.bypasses(why))
}

fn bypassed(moment: &Moment) -> Kpi {
    let minute = counted(moment, RATE_OVER);
    let mut reasons: Vec<(u64, &str)> = REASONS
        .iter()
        .map(|(why, word)| {
            let tally = minute.as_ref().map(|(_, tally)| tally);
            (tally.map_or(0, |tally| bypasses(tally, *why)), *word)
        })
        .collect();
    let all: u64 = reasons.iter().map(|(count, _)| count).sum();
    // A stable sort: without bypasses the two that matter most are named.
    reasons.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let named = reasons
        .iter()
        .take(REASONS_SHOWN)
        .map(|(count, word)| format!("{word} {}", grouped(*count)));
    let below = named.collect::<Vec<_>>().join(" · ");
    Kpi {
        href: "decisions?action=bypass",
        label: "Bypassed",
        title: "Work that went ahead without a lease, at the rate of the last minute, by reason",
        value: minute.map_or_else(|| "–".to_owned(), |(over, _)| per_minute(all, over)),
        unit: " /min",
        fig: None,
        below: vec![plain(below)],
        kind: "n",
        spark: spark(moment, Series::BypassRate),
    }
}

fn leases(moment: &Moment) -> Kpi {
    let leases = &moment.look.state.leases;
    let oldest = leases.oldest_age_s.map_or("–".to_owned(), secs);
    let mut below = vec![plain(format!("oldest {oldest}"))];
    if let Some((_, tally)) = counted(moment, RARE_OVER) {
        let expired = tally.ends(LeaseEnd::Expired);
        below.push(Note {
            class: if expired > 0 { "w" } else { "" },
            text: format!("{} expired", grouped(expired)),
        });
    }
    Kpi {
        href: "leases",
        label: "Leases",
        title: "Held leases; those that expired in the last 15 minutes",
        value: grouped(leases.count),
        unit: "",
        fig: Some("leases.count"),
        below,
        kind: "",
        spark: spark(moment, Series::Leases),
    }
}

fn closes(moment: &Moment) -> Kpi {
    let on = moment.look.state.features.session_lifecycle;
    let closes = &moment.look.state.closes;
    let minute = counted(moment, RATE_OVER);
    let below = if on {
        vec![
            plain(format!("{} open", grouped(closes.pending))),
            Note {
                class: if closes.failed > 0 { "b" } else { "" },
                text: format!("{} failed", grouped(closes.failed)),
            },
        ]
    } else {
        vec![plain("session closes are off")]
    };
    Kpi {
        href: "sessions",
        label: "Closes",
        title: "Session closes at the rate of the last minute; open ones, and those that failed",
        value: match minute {
            Some((over, tally)) if on => per_minute(tally.closes, over),
            _ => "–".to_owned(),
        },
        unit: if on { " /min" } else { "" },
        fig: None,
        below,
        kind: "n",
        spark: spark(moment, Series::CloseRate),
    }
}
