//! Step reports, with the keys that trackers know (REP1), and the last decisions.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{Decision, DecisionAction, Decisions, Listing, Problem, StepReport, StepRequest};
use kvgate_core::command::Slice;
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::decisions::{Decided, DecisionEntry, DecisionsPlace, DecisionsWanted, Moment};
use kvgate_core::effect::Page;
use kvgate_core::ids::{RunId, SessionId, StepNo, TicketId};
use kvgate_core::report;
use kvgate_core::tally::{CancelledHow, LeaseEnd};
use kvgate_core::units::{TOKENS_MAX, Tokens};

use super::answer::{json, with_seq};
use super::app::{App, Shown};
use super::convert;
use super::extract::{JsonBody, NoQuery, Query};
use super::lists::{self, LIMIT_DEFAULT, Order, Paging, Row, limit};
use super::problem::Fault;
use crate::clock;
use crate::gate::{Gate, GateError};

/// The report of a step. It begins a new window of its run.
#[utoipa::path(
    post,
    path = "/v1/steps",
    operation_id = "take_step",
    tag = "reports",
    request_body = StepRequest,
    responses(
        (status = 200, description = "The report; asked again, the same", body = StepReport),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn take(
    State(app): State<App>,
    _: NoQuery,
    JsonBody(request): JsonBody<StepRequest>,
) -> Result<Response, Fault> {
    let run = RunId::new(&request.run).map_err(|rule| Fault::id("/run", rule))?;
    if request.step > TOKENS_MAX {
        let range = format!("must be an integer from 0 to {TOKENS_MAX}");
        return Err(Fault::field("/step", range));
    }
    let answered = app.gate().take_step(run, request.step).await?;
    let body = step_report(&answered.value);
    Ok(with_seq(json(StatusCode::OK, &body), answered.seq))
}

/// The reports that were taken, newest first.
#[utoipa::path(
    get,
    path = "/v1/steps",
    operation_id = "steps",
    tag = "reports",
    params(
        ("run" = Option<String>, Query, description = "Steps of this run"),
        Paging,
    ),
    responses(
        (status = 200, description = "One page", body = Listing<StepReport>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn list(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let page = read_steps(&app, query).await?;
    Ok(json(StatusCode::OK, &page))
}

/// The page of step reports that the query names.
pub async fn read_steps(app: &App, mut query: Query) -> Result<Listing<StepReport>, Fault> {
    let run = query.take("run");
    let page = Paging::read(&mut query)?;
    query.done()?;
    let Some(run) = run else {
        return lists::list_all::<report::StepReport>(app, page).await;
    };
    lists::list::<report::StepReport>(app, page, |report| run == report.run.as_str()).await
}

impl Row for report::StepReport {
    type Item = StepReport;
    const ORDER: Order = Order::NewestFirst;

    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send {
        let from = StepNo(from);
        gate.list_steps(Slice { from, rows })
    }

    /// Every report that is kept has a number.
    fn key(&self) -> u64 {
        self.number.map_or(0, |number| number.0)
    }

    fn item(&self, _: &Shown) -> StepReport {
        step_report(self)
    }
}

/// A look at the window of a run, which goes on.
#[utoipa::path(
    get,
    path = "/v1/steps/current",
    operation_id = "current_step",
    tag = "reports",
    params(("run" = Option<String>, Query, description = "The run; the one without a name when absent")),
    responses(
        (status = 200, description = "The window as it stands; `step` is null", body = StepReport),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn current(State(app): State<App>, mut query: Query) -> Result<Response, Fault> {
    let run = query.take("run").unwrap_or_default();
    query.done()?;
    let report = read_current_step(&app, &run).await?;
    Ok(json(StatusCode::OK, &report))
}

/// The window of a run as it stands.
pub async fn read_current_step(app: &App, run: &str) -> Result<StepReport, Fault> {
    let run = RunId::new(run).map_err(|rule| Fault::field("?run", rule.to_string()))?;
    let report = app.gate().peek_step(run).await?;
    Ok(step_report(&report))
}

/// A slice of the step reports with their numbers, newest first: `from` is the highest number looked
/// at. And whether there are more.
pub async fn read_step_slice(
    app: &App,
    from: u64,
    rows: usize,
) -> Result<(Vec<(u64, StepReport)>, bool), Fault> {
    let slice = Slice {
        from: StepNo(from),
        rows,
    };
    let page = app.gate().list_steps(slice).await?;
    let items = page.items.iter();
    let items = items.map(|report| (report.key(), step_report(report)));
    Ok((items.collect(), page.more))
}

/// The last decisions and ends of leases, oldest first, each with the figures of its moment.
#[utoipa::path(
    get,
    path = "/v1/decisions",
    tag = "reports",
    params(
        ("after" = Option<u64>, Query, description = "The first ones after this number; the last ones when absent"),
        ("before" = Option<u64>, Query, description = "The last ones before this number; not together with `after`"),
        ("limit" = Option<u32>, Query, description = "Decisions at most: 1 to 1000, 100 when absent"),
        ("action" = Option<DecisionAction>, Query, description = "`admit`, `wait`, `bypass`, `cancelled` or `ended`"),
        ("reason" = Option<String>, Query, description = "A word that stands in `reason`"),
        ("ticket_id" = Option<String>, Query, description = "About this ticket"),
        ("session_id" = Option<String>, Query, description = "Of this session"),
        ("q" = Option<String>, Query, description = "A part of ticket, session or client"),
    ),
    responses(
        (status = 200, description = "Decisions; 20,000 are remembered, in memory only", body = Decisions),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn decisions(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let body = read_decisions(&app, query).await?;
    Ok(json(StatusCode::OK, &body))
}

/// The decisions that the query names.
pub async fn read_decisions(app: &App, query: Query) -> Result<Decisions, Fault> {
    let has_place = query.get("after").or(query.get("before")).is_some();
    let Some((wanted, after)) = decisions_wanted(query)? else {
        return Ok(Decisions {
            items: Vec::new(),
            next: 0,
            more: false,
        });
    };
    let page = app.gate().decisions(wanted).await?;
    let shown = app.shown();
    let last = page.items.last().map(|entry| entry.number);
    Ok(Decisions {
        next: last.or(after).unwrap_or(0),
        items: page
            .items
            .iter()
            .map(|entry| decision(entry, &shown))
            .collect(),
        // A reader that goes on from the last ones goes forward.
        more: page.more && has_place,
    })
}

/// What the query asks for, and its `after`; `None` for an id that no ticket or session can have.
fn decisions_wanted(mut query: Query) -> Result<Option<(DecisionsWanted, Option<u64>)>, Fault> {
    let mut number = |name: &str| match query.take(name) {
        None => Ok(None),
        Some(text) => text
            .parse::<u64>()
            .map(Some)
            .map_err(|_| Fault::field(format!("?{name}"), "must be the number of a decision")),
    };
    let after = number("after")?;
    let before = number("before")?;
    let place = match (after, before) {
        (Some(_), Some(_)) => {
            return Err(Fault::field("?before", "cannot stand beside `after`"));
        }
        (Some(after), None) => DecisionsPlace::After(after),
        (None, before) => DecisionsPlace::Before(before.unwrap_or(u64::MAX)),
    };
    let most = limit(&mut query)?.unwrap_or(LIMIT_DEFAULT);
    let decided = decided_wanted(&mut query)?;
    let (ticket, session) = (query.take("ticket_id"), query.take("session_id"));
    let part = query.take("q");
    query.done()?;
    let ticket = ticket.map(|id| TicketId::new(&id)).transpose();
    let session = session.map(|id| SessionId::new(&id)).transpose();
    let (Ok(ticket), Ok(session)) = (ticket, session) else {
        return Ok(None);
    };
    let wanted = DecisionsWanted {
        place,
        most,
        decided,
        ticket,
        session,
        part,
    };
    Ok(Some((wanted, after)))
}

/// What decisions come to that a reader may choose; nothing when all are wanted.
fn decided_wanted(query: &mut Query) -> Result<Vec<Decided>, Fault> {
    let (action, reason) = (query.take("action"), query.take("reason"));
    if action.is_none() && reason.is_none() {
        return Ok(Vec::new());
    }
    let all: Vec<Decided> = std::iter::once(Decided::Admit)
        .chain(WaitReason::ALL.map(Decided::Wait))
        .chain(BypassReason::ALL.map(Decided::Bypass))
        .chain(CancelledHow::ALL.map(Decided::Cancelled))
        .chain(LeaseEnd::ALL.map(Decided::Ended))
        .collect();
    let of_action = |decided: &Decided| {
        let is = |action: &str| action == action_word(words_of(*decided).0);
        action.as_deref().is_none_or(is)
    };
    let mut chosen: Vec<Decided> = all.into_iter().filter(of_action).collect();
    if chosen.is_empty() {
        return Err(Fault::field(
            "?action",
            "must be admit, wait, bypass, cancelled or ended",
        ));
    }
    if let Some(reason) = reason {
        chosen.retain(|decided| words_of(*decided).1 == reason);
        if chosen.is_empty() {
            return Err(Fault::field("?reason", "must be a reason of the action"));
        }
    }
    Ok(chosen)
}

const fn action_word(action: DecisionAction) -> &'static str {
    match action {
        DecisionAction::Admit => "admit",
        DecisionAction::Wait => "wait",
        DecisionAction::Bypass => "bypass",
        DecisionAction::Cancelled => "cancelled",
        DecisionAction::Ended => "ended",
    }
}

/// Action and reason.
const fn words_of(decided: Decided) -> (DecisionAction, &'static str) {
    match decided {
        Decided::Admit => (DecisionAction::Admit, "capacity_available"),
        Decided::Wait(reason) => (DecisionAction::Wait, convert::wait_word(reason)),
        Decided::Bypass(reason) => (DecisionAction::Bypass, convert::bypass_word(reason)),
        Decided::Cancelled(how) => (DecisionAction::Cancelled, convert::cancelled_word(how)),
        Decided::Ended(how) => (DecisionAction::Ended, convert::lease_end_word(how)),
    }
}

/// Its times are those of kvgate's own line as they were stored: a report that is asked for again is
/// the same to the letter, whatever the wall clock has done since.
fn step_report(report: &report::StepReport) -> StepReport {
    StepReport {
        run: report.run.as_str().to_owned(),
        step: report.step,
        from: clock::text(report.from),
        to: clock::text(report.to),
        metrics: metrics(report),
    }
}

/// Counts are far below 2^53, where a float is still exact.
#[expect(
    clippy::cast_precision_loss,
    clippy::as_conversions,
    reason = "trackers take floats; a count above 2^53 may lose its last digits"
)]
fn float(count: u64) -> f64 {
    count as f64
}

/// A ratio whose denominator may be missing; then there is none.
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| float(part) / float(whole))
}

/// REP1: the keys and their meanings.
fn metrics(report: &report::StepReport) -> BTreeMap<String, f64> {
    let counts = &report.counts;
    let standing = &report.standing;
    let sum = |count: &dyn Fn(Scope) -> u64| Scope::ALL.iter().map(|scope| count(*scope)).sum();
    let bypassed = |reason| sum(&|scope| counts.scope(scope).bypasses(reason));
    let admit: u64 = sum(&|scope| counts.scope(scope).admit);
    let wait: u64 = WaitReason::ALL
        .iter()
        .map(|reason| sum(&|scope| counts.scope(scope).waits(*reason)))
        .sum();
    let cancelled: u64 = CancelledHow::ALL
        .iter()
        .map(|how| sum(&|scope| counts.scope(scope).cancels(*how)))
        .sum();
    // CNT1: where admission does not apply nothing was bypassed.
    let bypass: u64 = BypassReason::ALL
        .iter()
        .filter(|reason| !matches!(reason, BypassReason::Disabled | BypassReason::OutOfScope))
        .map(|reason| bypassed(*reason))
        .sum();
    let decided = admit + wait + bypass;

    let mut metrics = BTreeMap::new();
    let mut put = |key: &str, value: Option<f64>| {
        if let Some(value) = value {
            metrics.insert(format!("agentic_kv/{key}"), value);
        }
    };
    let counted = |count: u64| (count > 0).then(|| float(count));
    if standing.session_lifecycle {
        put("session/lifecycle_enabled", Some(1.0));
    }
    if standing.session_lifecycle || counts.closes > 0 || counts.close_failures > 0 {
        put("session/close", Some(float(counts.closes)));
        put("session/close_failure", Some(float(counts.close_failures)));
    }
    put("admission/admit", counted(admit));
    put("admission/bypass", counted(bypass));
    put("admission/wait", counted(wait));
    put("admission/cancelled", counted(cancelled));
    put("admission/waiting", Some(float(standing.waiting)));
    for reason in BypassReason::ALL {
        let key = format!("admission/bypass_{}", convert::bypass_word(reason));
        put(&key, counted(bypassed(reason)));
    }
    put("admission/defer_rate", ratio(wait, decided));
    put(
        "admission/degraded_rate",
        ratio(bypassed(BypassReason::Degraded), decided),
    );
    put(
        "admission/wait_seconds_mean",
        ratio(counts.waited_millis, counts.granted_after_wait).map(|millis| millis / 1_000.0),
    );
    let available = standing.ceiling.saturating_sub(standing.reserved);
    put("budget/ceiling", Some(float(standing.ceiling.get())));
    put("budget/reserved", Some(float(standing.reserved.get())));
    put("budget/available_tokens", Some(float(available.get())));
    put(
        "budget/reserved_utilization",
        ratio(standing.reserved.get(), standing.ceiling.get()),
    );
    put("budget/lease_count", Some(float(standing.leases)));
    put(
        "budget/lease_expired",
        Some(float(counts.ends(LeaseEnd::Expired))),
    );
    put(
        "budget/kv_token_usage_mean",
        ratio(counts.usage_sum, counts.usage_rounds).map(|millionths| millionths / 1e6),
    );
    put(
        "budget/kv_token_usage_max",
        report.usage_peak.map(convert::ratio),
    );
    put("budget/epoch", Some(float(standing.epoch.0)));
    put(
        "budget/degraded",
        Some(if standing.degraded { 1.0 } else { 0.0 }),
    );
    metrics
}

fn decision(entry: &DecisionEntry, shown: &Shown) -> Decision {
    let moment = &entry.moment;
    let (action, reason) = words_of(entry.decided);
    Decision {
        number: entry.number,
        at: convert::time(entry.at, shown),
        ticket_id: entry.ticket.as_str().to_owned(),
        session_id: entry
            .session
            .as_ref()
            .map(|session| session.as_str().to_owned()),
        client: entry
            .client
            .as_ref()
            .map(|client| client.as_str().to_owned()),
        scope: convert::wire_scope(entry.scope),
        action,
        reason: reason.to_owned(),
        reservation_tokens: entry.reservation.get(),
        waited_s: convert::seconds(entry.waited),
        held_s: entry.held.map(convert::seconds),
        epoch: moment.epoch.0,
        reserved: moment.reserved.get(),
        ceiling: moment.ceiling.get(),
        full_ceiling: moment.full_ceiling.get(),
        waiting: moment.waiting,
        pressure: moment.pressure.map(convert::ratio),
        pressure_threshold: convert::ratio(moment.threshold),
        paced: moment.paced,
        explanation: explanation(entry),
    }
}

/// The arithmetic of the moment.
fn explanation(entry: &DecisionEntry) -> String {
    let Moment {
        reserved,
        ceiling,
        full_ceiling,
        waiting,
        pressure,
        threshold,
        paced,
        ..
    } = &entry.moment;
    let asked = entry.reservation.get();
    let percent = |share| format!("{:.1} %", convert::ratio(share) * 100.0);
    let short = |sum: Tokens, bound: Tokens| sum.saturating_sub(bound).get();
    match entry.decided {
        Decided::Admit => format!(
            "{asked} + {} reserved <= {} ceiling.",
            reserved.get(),
            ceiling.get()
        ),
        Decided::Wait(WaitReason::BehindOlder) if *waiting == 1 => {
            "1 older waiter stands before it.".to_owned()
        }
        Decided::Wait(WaitReason::BehindOlder) => {
            format!("{waiting} older waiters stand before it.")
        }
        Decided::Wait(WaitReason::PressureGuard) => match pressure {
            Some(worst) if worst >= threshold => format!(
                "The worst engine is at {}, the threshold is {}.",
                percent(*worst),
                percent(*threshold)
            ),
            Some(_) | None if *paced => {
                "Admission is paced after pressure: the share of this reading is used up."
                    .to_owned()
            }
            Some(_) | None => "Pressure holds new requests back.".to_owned(),
        },
        Decided::Wait(WaitReason::CapacityExhausted) => format!(
            "{asked} + {} reserved is {} more than the ceiling of {}.",
            reserved.get(),
            short(reserved.saturating_add(entry.reservation), *ceiling),
            ceiling.get()
        ),
        Decided::Bypass(BypassReason::Oversize) => format!(
            "{asked} is {} more than the full ceiling of {}: waiting could never help.",
            short(entry.reservation, *full_ceiling),
            full_ceiling.get()
        ),
        Decided::Bypass(BypassReason::QueueFull) => {
            format!("{waiting} waiters are as many as may stand in line.")
        }
        Decided::Bypass(BypassReason::Aged) => format!(
            "It waited {:.1} s, the longest that a request waits; {} of {} were reserved.",
            convert::seconds(entry.waited),
            reserved.get(),
            ceiling.get()
        ),
        Decided::Bypass(BypassReason::Degraded) => {
            "There is no usable capacity reading, so that no ceiling can be held.".to_owned()
        }
        Decided::Bypass(BypassReason::Disabled) => "Admission is off or paused.".to_owned(),
        Decided::Bypass(BypassReason::OutOfScope) => {
            "Admission does not apply to this kind of work.".to_owned()
        }
        Decided::Bypass(BypassReason::Protected) => "The caller marked it as protected.".to_owned(),
        Decided::Cancelled(CancelledHow::Withdrawn) => "Its caller cancelled it.".to_owned(),
        Decided::Cancelled(CancelledHow::SessionClosed) => "Its session was closed.".to_owned(),
        Decided::Cancelled(CancelledHow::Dropped) => {
            "Its caller was away for longer than the claim grace.".to_owned()
        }
        Decided::Cancelled(CancelledHow::TakenBack) => {
            "Its grant ended before it was claimed.".to_owned()
        }
        Decided::Ended(how) => {
            let held = entry.held.map_or(0.0, convert::seconds);
            let how = match how {
                LeaseEnd::Released => "Given back",
                LeaseEnd::Expired => "Reclaimed at its end",
                LeaseEnd::Revoked => "Revoked by an operator",
                LeaseEnd::Cancelled => "Its ticket was cancelled",
            };
            let left = short(*reserved, entry.reservation);
            format!(
                "{how} after {held:.1} s; {left} of {} stay reserved.",
                ceiling.get()
            )
        }
    }
}
