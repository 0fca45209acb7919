//! Rows of tables that several pages show: waiters, leases, sessions, closes, decisions.

use askama::Template;
use kvgate_api::{
    Close, CloseEngineState, CloseState, Decision, DecisionAction, Lease, Listing, Scope, Session,
    WaitReason, Waiter,
};

use super::format::{clock_part, counted, grouped, secs};
use super::link::{link, to};
use super::page::Look;
use crate::http::{Fault, Query, Shown};

/// Rows of a page of a list.
pub(super) const ROWS: usize = 50;

/// Engines of a close that are drawn one by one; more are counted only.
const CELLS_MAX: usize = 24;

/// Shown where there is nothing to show.
const NONE: &str = "–";

// ---- helpers -----------------------------------------------------------------------------------

/// A stable id of a row, whatever the text is: an id in a page has no blanks.
pub(super) fn row_id(kind: &str, text: &str) -> String {
    format!("{kind}-{:08x}", crc32fast::hash(text.as_bytes()))
}

/// Day and time of a time of the API.
pub(super) fn day_and_time(at: &str) -> String {
    let (day, time) = (at.get(..10), at.get(11..19));
    day.zip(time)
        .map_or_else(|| at.to_owned(), |(day, time)| format!("{day} {time} UTC"))
}

/// Part of a whole as the width of a bar of 100.
pub(super) fn width(part: f64, whole: f64) -> String {
    let share = if whole > 0.0 { part / whole } else { 0.0 };
    format!("{:.1}", share.clamp(0.0, 1.0) * 100.0)
}

pub(super) fn or_none(text: Option<&str>) -> String {
    text.unwrap_or(NONE).to_owned()
}

const fn scope_word(scope: Scope) -> &'static str {
    match scope {
        Scope::Train => "train",
        Scope::Eval => "eval",
    }
}

/// The wall clock as pages show it, to tell how long ago something was.
pub(super) struct Now(jiff::Timestamp);

impl Now {
    pub(super) fn of(shown: &Shown) -> Self {
        let millis = i64::try_from(shown.line.wall_millis(shown.now)).unwrap_or(i64::MAX);
        Self(jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::MAX))
    }

    /// Seconds since a time of the API.
    pub(super) fn since(&self, at: &str) -> f64 {
        let at: Result<jiff::Timestamp, _> = at.parse();
        at.map_or(0.0, |at| self.0.duration_since(at).as_secs_f64().max(0.0))
    }

    /// The same in words.
    pub(super) fn age(&self, at: &str) -> String {
        secs(self.since(at))
    }
}

// ---- a page of a list --------------------------------------------------------------------------

/// Where a page of a list stands in it, and the way on.
pub(super) struct Pager {
    /// `50 of 1,200`.
    pub(super) shown: String,
    /// To the first page, when this is another.
    pub(super) first: Option<String>,
    pub(super) next: Option<String>,
}

/// The parameters of a page of a list: what it is called with, without what is empty.
pub(super) struct Asked {
    page: &'static str,
    pub(super) query: Query,
    names: &'static [&'static str],
}

impl Asked {
    pub(super) fn new(page: &'static str, look: &Look, names: &'static [&'static str]) -> Self {
        let mut query = look.query.clone();
        query.drop_empty();
        Self { page, query, names }
    }

    pub(super) fn value(&self, name: &str) -> String {
        self.query.get(name).unwrap_or_default().to_owned()
    }

    /// The rows are chosen.
    pub(super) fn is_filtered(&self) -> bool {
        self.names.iter().any(|name| self.query.get(name).is_some())
    }

    /// How many rows there are, where `all` stand in the list without a filter.
    pub(super) fn total<T>(&self, all: u64, list: &Listing<T>) -> u64 {
        if self.is_filtered() { list.total } else { all }
    }

    /// What the reader of the list is asked. How many rows a page has is not to be chosen, so that it stays small.
    pub(super) fn to_read(&self) -> Result<Query, Fault> {
        let mut query = self.query.clone();
        if query.get("limit").is_some() {
            let rows = format!("a page has {ROWS} rows; the API takes a limit");
            return Err(Fault::field("?limit", rows));
        }
        query.put("limit", ROWS.to_string());
        Ok(query)
    }

    /// The same page with other values of some parameters.
    pub(super) fn with(&self, others: &[(&str, &str)]) -> String {
        let kept = self.names.iter().filter_map(|name| {
            let replaced = others.iter().any(|(other, _)| other == name);
            let value = self.query.get(name).filter(|_| !replaced);
            value.map(|value| (*name, value))
        });
        let parameters: Vec<(&str, &str)> = kept.chain(others.iter().copied()).collect();
        link(self.page, &parameters)
    }

    pub(super) fn pager<T>(&self, list: &Listing<T>) -> Pager {
        let paged = self.query.get("cursor").is_some();
        let count = list.items.len() as u64;
        let shown = if count == list.total {
            format!("all {}", grouped(count))
        } else {
            format!("{} of {}", grouped(count), grouped(list.total))
        };
        Pager {
            shown,
            first: paged.then(|| self.with(&[])),
            next: list
                .next
                .as_deref()
                .map(|cursor| self.with(&[("cursor", cursor)])),
        }
    }
}

/// A list, or why there is none: while the store is away a page shows what is known without it.
pub(super) fn known<T>(
    read: Result<Listing<T>, Fault>,
) -> Result<(Listing<T>, Option<String>), Fault> {
    match read {
        Ok(list) => Ok((list, None)),
        Err(fault) if fault.status().is_server_error() => {
            let empty = Listing {
                items: Vec::new(),
                next: None,
                total: 0,
            };
            Ok((empty, Some(fault.detail().to_owned())))
        }
        Err(fault) => Err(fault),
    }
}

/// One choice of a group.
pub(super) struct Choice {
    pub(super) name: String,
    pub(super) href: String,
    pub(super) chosen: bool,
}

/// A filter in a form, answered on the server.
#[derive(Template)]
#[template(path = "parts/filter.html")]
pub(super) struct Filter {
    pub(super) page: &'static str,
    pub(super) fields: Vec<Field>,
    /// Values that go along.
    pub(super) kept: Vec<(&'static str, String)>,
    pub(super) is_filtered: bool,
}

/// The filters that leases and waiters share.
pub(super) const OF_TICKETS: &[&str] = &["q", "session_id", "client", "scope"];

impl Filter {
    /// By [`OF_TICKETS`]; `q` says what a text is looked for in.
    pub(super) fn of_tickets(page: &'static str, q: &'static str, asked: &Asked) -> Self {
        Self {
            page,
            fields: vec![
                Field::text(asked, "q", q),
                Field::text(asked, "session_id", "Session"),
                Field::text(asked, "client", "Client"),
                Field::scope(asked),
            ],
            kept: Vec::new(),
            is_filtered: asked.is_filtered(),
        }
    }
}

/// One field of a filter.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) label: &'static str,
    pub(super) value: String,
    /// What may be chosen; text when empty.
    pub(super) options: Vec<(&'static str, &'static str, bool)>,
}

impl Field {
    pub(super) fn text(asked: &Asked, name: &'static str, label: &'static str) -> Self {
        Self {
            name,
            label,
            value: asked.value(name),
            options: Vec::new(),
        }
    }

    pub(super) fn scope(asked: &Asked) -> Self {
        let value = asked.value("scope");
        let options = [("", "any"), ("train", "train"), ("eval", "eval")];
        Self {
            name: "scope",
            label: "Scope",
            options: options
                .map(|(option, label)| (option, label, option == value))
                .into(),
            value,
        }
    }
}

// ---- waiters -----------------------------------------------------------------------------------

pub(super) struct WaiterRow {
    pub(super) id: String,
    pub(super) ticket: String,
    pub(super) href: String,
    pub(super) session: String,
    pub(super) session_href: String,
    pub(super) client: String,
    pub(super) scope: &'static str,
    pub(super) position: String,
    pub(super) tokens: String,
    pub(super) age: String,
    pub(super) age_width: String,
    /// Three quarters of the longest wait are over.
    pub(super) is_near: bool,
    pub(super) bypass_in: String,
    pub(super) waits_for: String,
    pub(super) is_head: bool,
    pub(super) cancel: String,
}

impl WaiterRow {
    /// `head_waits_for` is what holds up the head of the line.
    pub(super) fn new(waiter: &Waiter, head_waits_for: Option<&str>) -> Self {
        let whole = waiter.age_s + waiter.bypass_in_s;
        let is_head = waiter.position == 1;
        let waits_for = match (waiter.reason, head_waits_for) {
            (_, Some(head)) if is_head => head,
            (WaitReason::BehindOlder, _) => "behind #1",
            (WaitReason::PressureGuard, _) => "engine pressure",
            (WaitReason::CapacityExhausted, _) => "room under the ceiling",
        };
        Self {
            id: row_id("w", &waiter.ticket_id),
            ticket: waiter.ticket_id.clone(),
            href: to("ticket", &waiter.ticket_id),
            session: waiter.session_id.clone(),
            session_href: to("session", &waiter.session_id),
            client: or_none(waiter.client.as_deref()),
            scope: scope_word(waiter.scope),
            position: grouped(waiter.position),
            tokens: grouped(waiter.reservation_tokens),
            age: secs(waiter.age_s),
            age_width: width(waiter.age_s, whole),
            is_near: waiter.age_s >= whole * 0.75,
            bypass_in: secs(waiter.bypass_in_s),
            waits_for: waits_for.to_owned(),
            is_head,
            cancel: link(
                "confirm",
                &[("do", "cancel"), ("ticket", &waiter.ticket_id)],
            ),
        }
    }
}

// ---- leases ------------------------------------------------------------------------------------

pub(super) struct LeaseRow {
    pub(super) id: String,
    pub(super) href: String,
    pub(super) ticket: String,
    pub(super) ticket_href: String,
    pub(super) session: String,
    pub(super) session_href: String,
    pub(super) tokens: String,
    pub(super) held: String,
    pub(super) granted_at: String,
    pub(super) left: String,
    pub(super) left_width: String,
    /// Less than a tenth of its life is left.
    pub(super) is_near: bool,
    pub(super) epoch: String,
    pub(super) scope: &'static str,
    pub(super) client: String,
    pub(super) request: String,
    pub(super) revoke: String,
}

impl LeaseRow {
    pub(super) fn new(lease: &Lease, now: &Now) -> Self {
        Self {
            id: lease.lease_id.clone(),
            href: to("lease", &lease.lease_id),
            ticket: lease.ticket_id.clone(),
            ticket_href: to("ticket", &lease.ticket_id),
            session: lease.session_id.clone(),
            session_href: to("session", &lease.session_id),
            tokens: grouped(lease.reservation_tokens),
            held: now.age(&lease.granted_at),
            granted_at: day_and_time(&lease.granted_at),
            left: secs(lease.expires_in_s),
            left_width: width(lease.expires_in_s, lease.ttl_s),
            is_near: lease.expires_in_s < lease.ttl_s * 0.1,
            epoch: grouped(lease.epoch),
            scope: scope_word(lease.scope),
            client: or_none(lease.client.as_deref()),
            request: or_none(lease.request_id.as_deref()),
            revoke: link("confirm", &[("do", "revoke"), ("lease", &lease.lease_id)]),
        }
    }
}

// ---- closes ------------------------------------------------------------------------------------

/// Engines in one state, as they are drawn.
pub(super) struct Cells {
    /// One class for each engine; empty when there are too many.
    pub(super) each: Vec<&'static str>,
    /// The same in words.
    pub(super) label: String,
}

pub(super) struct CloseRow {
    pub(super) id: String,
    pub(super) href: String,
    pub(super) session: String,
    pub(super) session_href: String,
    pub(super) state: &'static str,
    pub(super) class: &'static str,
    pub(super) failed: bool,
    pub(super) cells: Cells,
    pub(super) settled: String,
    pub(super) note: String,
    pub(super) age: String,
    pub(super) requested_at: String,
    pub(super) retry: Option<String>,
}

pub(super) const fn engine_state_word(state: CloseEngineState) -> &'static str {
    match state {
        CloseEngineState::Pending => "pending",
        CloseEngineState::Delivered => "delivered",
        CloseEngineState::Refused => "refused",
        CloseEngineState::Unsupported => "unsupported",
        CloseEngineState::Restarted => "restarted",
        CloseEngineState::Superseded => "superseded",
        CloseEngineState::Failed => "failed",
        CloseEngineState::Gone => "gone",
    }
}

pub(super) const fn engine_state_class(state: CloseEngineState) -> &'static str {
    match state {
        CloseEngineState::Delivered => "g",
        CloseEngineState::Pending => "p",
        CloseEngineState::Refused | CloseEngineState::Failed => "b",
        CloseEngineState::Unsupported
        | CloseEngineState::Restarted
        | CloseEngineState::Superseded
        | CloseEngineState::Gone => "n",
    }
}

pub(super) const fn close_state_word(state: CloseState) -> &'static str {
    match state {
        CloseState::Joining => "joining",
        CloseState::Delivering => "delivering",
        CloseState::Done => "done",
    }
}

pub(super) const fn close_class(close: &Close) -> &'static str {
    match close.state {
        CloseState::Joining => "wait",
        CloseState::Delivering => "closing",
        CloseState::Done if close.failed => "failed",
        CloseState::Done => "closed",
    }
}

/// What a retry would send again.
pub(super) fn can_retry(close: &Close) -> bool {
    let again = [
        CloseEngineState::Refused,
        CloseEngineState::Failed,
        CloseEngineState::Gone,
    ];
    close.state == CloseState::Done
        && (close.failed || again.iter().any(|state| close.counts.contains_key(state)))
}

fn cells(close: &Close) -> Cells {
    let counts = close.counts.iter();
    let parts: Vec<String> = counts
        .clone()
        .map(|(state, count)| {
            format!(
                "{} {}",
                grouped(u64::from(*count)),
                engine_state_word(*state)
            )
        })
        .collect();
    let total: usize = close
        .counts
        .values()
        .map(|count| usize::try_from(*count).unwrap_or(usize::MAX))
        .fold(0, usize::saturating_add);
    let each = if total > CELLS_MAX {
        Vec::new()
    } else {
        counts
            .flat_map(|(state, count)| (0..*count).map(|_| engine_state_class(*state)))
            .collect()
    };
    Cells {
        each,
        label: if parts.is_empty() {
            "no engine yet".to_owned()
        } else {
            parts.join(", ")
        },
    }
}

/// What to know of a close in a few words.
fn close_note(close: &Close) -> String {
    let worst = close
        .engines
        .iter()
        .filter(|engine| engine.last_error.is_some() || engine.last_status.is_some())
        .max_by_key(|engine| engine.attempts);
    match (close.state, worst) {
        (CloseState::Joining, _) => "waits for its leases".to_owned(),
        (_, Some(engine)) => {
            let status = engine.last_status.map(|status| format!("HTTP {status}"));
            let why = status.or(engine.last_error.clone()).unwrap_or_default();
            match engine.attempts {
                0 => why,
                attempts => format!("{why} · {}", counted(u64::from(attempts), "attempt")),
            }
        }
        (CloseState::Delivering, None) => "in flight".to_owned(),
        (CloseState::Done, None) if close.failed => "found no engine".to_owned(),
        (CloseState::Done, None) => String::new(),
    }
}

impl CloseRow {
    pub(super) fn new(close: &Close, now: &Now) -> Self {
        let total: u32 = close.counts.values().copied().fold(0, u32::saturating_add);
        let pending = close.counts.get(&CloseEngineState::Pending);
        let settled = total.saturating_sub(pending.copied().unwrap_or(0));
        let retry = || link("confirm", &[("do", "retry"), ("close", &close.close_id)]);
        Self {
            id: close.close_id.clone(),
            href: to("close", &close.close_id),
            session: close.session_id.clone(),
            session_href: to("session", &close.session_id),
            state: close_state_word(close.state),
            class: close_class(close),
            failed: close.failed,
            cells: cells(close),
            settled: format!(
                "{} of {}",
                grouped(u64::from(settled)),
                grouped(u64::from(total))
            ),
            note: close_note(close),
            age: now.age(&close.requested_at),
            requested_at: day_and_time(&close.requested_at),
            retry: can_retry(close).then(retry),
        }
    }
}

// ---- sessions ----------------------------------------------------------------------------------

pub(super) struct SessionRow {
    pub(super) id: String,
    pub(super) session: String,
    pub(super) href: String,
    pub(super) state: &'static str,
    pub(super) class: &'static str,
    pub(super) leases: String,
    pub(super) waiting: String,
    pub(super) tokens: String,
    pub(super) last_use: String,
    pub(super) closes: String,
    pub(super) close: Option<String>,
}

/// The word and the colour for how a session stands.
pub(super) fn session_state(session: &Session) -> (&'static str, &'static str) {
    let newest = session.closes.first();
    match newest {
        Some(close) if close.state != CloseState::Done => ("closing", "closing"),
        _ if !session.leases.is_empty() => ("active", "admit"),
        _ if !session.waiting.is_empty() => ("waiting", "wait"),
        Some(close) if close.failed => ("close failed", "failed"),
        Some(_) => ("closed", "closed"),
        None => ("idle", "idle"),
    }
}

/// Tokens that a session holds.
pub(super) fn tokens_of(leases: &[Lease]) -> u64 {
    leases
        .iter()
        .map(|lease| lease.reservation_tokens)
        .fold(0, u64::saturating_add)
}

impl SessionRow {
    pub(super) fn new(session: &Session, now: &Now, lifecycle: bool) -> Self {
        let (state, class) = session_state(session);
        let closing = state == "closing";
        let close = || {
            link(
                "confirm",
                &[("do", "close"), ("session", &session.session_id)],
            )
        };
        Self {
            id: row_id("s", &session.session_id),
            session: session.session_id.clone(),
            href: to("session", &session.session_id),
            state,
            class,
            leases: grouped(session.leases.len() as u64),
            waiting: grouped(session.waiting.len() as u64),
            tokens: grouped(tokens_of(&session.leases)),
            last_use: session
                .last_use_at
                .as_deref()
                .map_or_else(|| NONE.to_owned(), |at| format!("{} ago", now.age(at))),
            closes: grouped(session.closes.len() as u64),
            close: (lifecycle && !closing).then(close),
        }
    }
}

// ---- decisions ---------------------------------------------------------------------------------

pub(super) struct DecisionRow {
    pub(super) number: u64,
    pub(super) at: String,
    pub(super) time: String,
    pub(super) word: String,
    pub(super) class: &'static str,
    pub(super) ticket: String,
    pub(super) ticket_href: String,
    pub(super) session: Option<(String, String)>,
    pub(super) client: String,
    pub(super) scope: &'static str,
    pub(super) tokens: String,
    pub(super) note: String,
    pub(super) explanation: String,
    pub(super) reserved: String,
    pub(super) sum: String,
    /// The sum without the reservation, for a lease that ended.
    pub(super) is_end: bool,
    pub(super) ceiling: String,
    /// What is left under the ceiling, or by how much it was missed.
    pub(super) balance: (&'static str, String),
    pub(super) full_ceiling: String,
    pub(super) waiting: String,
    pub(super) pressure: String,
    pub(super) epoch: String,
}

/// A sentence of the API with its numbers in groups of three digits.
fn with_groups(sentence: &str) -> String {
    let mut grouped_text = String::with_capacity(sentence.len() + 8);
    let mut digits = String::new();
    // What follows a point are decimals.
    let mut is_whole = true;
    for sign in sentence.chars().chain(['\0']) {
        if sign.is_ascii_digit() {
            digits.push(sign);
            continue;
        }
        match digits.parse() {
            Ok(number) if is_whole => grouped_text.push_str(&grouped(number)),
            _ => grouped_text.push_str(&digits),
        }
        is_whole = sign != '.' || digits.is_empty();
        digits.clear();
        if sign != '\0' {
            grouped_text.push(sign);
        }
    }
    grouped_text
}

fn share(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// What was to go on without a lease anyway is calm; what the gate could not serve is not.
pub(super) fn bypass_class(reason: &str) -> &'static str {
    match reason {
        "protected" | "out_of_scope" | "disabled" => "bypass",
        _ => "aged",
    }
}

impl DecisionRow {
    pub(super) fn new(decision: &Decision) -> Self {
        let spaced = || decision.reason.replace('_', " ");
        let (word, class) = match decision.action {
            DecisionAction::Admit => ("admit".to_owned(), "admit"),
            DecisionAction::Wait => ("wait".to_owned(), "wait"),
            DecisionAction::Bypass => (spaced(), bypass_class(&decision.reason)),
            DecisionAction::Cancelled => ("cancelled".to_owned(), "cancelled"),
            DecisionAction::Ended if decision.reason == "released" => {
                ("release".to_owned(), "release")
            }
            DecisionAction::Ended => (spaced(), "expired"),
        };
        let waited = secs(decision.waited_s);
        let note = match decision.action {
            DecisionAction::Admit if decision.waited_s > 0.0 => format!("waited {waited}"),
            DecisionAction::Admit => "at once".to_owned(),
            DecisionAction::Wait => spaced(),
            DecisionAction::Bypass if decision.waited_s > 0.0 => {
                format!("bypass after {waited}")
            }
            DecisionAction::Bypass => "bypass".to_owned(),
            DecisionAction::Cancelled => spaced(),
            DecisionAction::Ended => format!("held {}", secs(decision.held_s.unwrap_or(0.0))),
        };
        let is_end = decision.action == DecisionAction::Ended;
        let sum = if is_end {
            decision
                .reserved
                .saturating_sub(decision.reservation_tokens)
        } else {
            decision
                .reserved
                .saturating_add(decision.reservation_tokens)
        };
        let threshold = share(decision.pressure_threshold);
        Self {
            number: decision.number,
            at: decision.at.clone(),
            time: clock_part(&decision.at).to_owned(),
            word,
            class,
            ticket: decision.ticket_id.clone(),
            ticket_href: to("ticket", &decision.ticket_id),
            session: decision
                .session_id
                .as_ref()
                .map(|session| (session.clone(), to("session", session))),
            client: or_none(decision.client.as_deref()),
            scope: scope_word(decision.scope),
            tokens: grouped(decision.reservation_tokens),
            note,
            explanation: with_groups(&decision.explanation),
            reserved: grouped(decision.reserved),
            sum: grouped(sum),
            is_end,
            ceiling: grouped(decision.ceiling),
            balance: if sum > decision.ceiling {
                ("Short by", grouped(sum - decision.ceiling))
            } else {
                ("Left under it", grouped(decision.ceiling - sum))
            },
            full_ceiling: grouped(decision.full_ceiling),
            waiting: grouped(decision.waiting),
            pressure: match decision.pressure {
                Some(worst) if decision.paced => {
                    format!("{} of {threshold}, paced", share(worst))
                }
                Some(worst) => format!("{} of {threshold}", share(worst)),
                None => format!("unknown, threshold {threshold}"),
            },
            epoch: grouped(decision.epoch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_widths() {
        assert_eq!(
            day_and_time("2026-11-30T00:53:20.123Z"),
            "2026-11-30 00:53:20 UTC"
        );
        assert_eq!(width(22.4, 30.0), "74.7");
        assert_eq!(width(31.0, 30.0), "100.0");
        assert_eq!(width(1.0, 0.0), "0.0");
        assert_eq!(row_id("w", "a b"), row_id("w", "a b"));
        assert!(!row_id("w", "a b").contains(' '));
    }

    #[test]
    fn numbers_of_a_sentence_are_grouped() {
        assert_eq!(
            with_groups("31788 + 1383858 reserved <= 1432800 ceiling."),
            "31,788 + 1,383,858 reserved <= 1,432,800 ceiling."
        );
        assert_eq!(
            with_groups("It waited 1030.12345 s, 7 of 1000."),
            "It waited 1,030.12345 s, 7 of 1,000."
        );
    }
}
