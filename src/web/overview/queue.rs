//! The head of the queue, and why it waits.

use askama::Template;
use kvgate_core::decision::WaitReason;
use kvgate_core::effect::WaiterView;
use kvgate_core::view::View;

use super::Moment;
use crate::web::format::{about, cut, duration, escaped, grouped, set};
use crate::web::why::{self, Holder};

/// From this share of the longest wait on, the bypass is near.
const NEAR: f64 = 70.0;

#[derive(Template)]
#[template(path = "overview/queue.html")]
pub(super) struct QueuePart {
    waiting: String,
    tokens: String,
    drain: Option<String>,
    max_wait: String,
    rows: Vec<Row>,
    more: Option<String>,
    /// What keeps the first in line, and who holds the tokens.
    blocked: Option<String>,
    holders: Vec<Holder>,
    among: Option<String>,
    bypass_in: Option<String>,
    can_act: bool,
    old: bool,
}

struct Row {
    row: u64,
    position: String,
    ticket: String,
    ticket_cut: String,
    ticket_id: String,
    session: String,
    session_cut: String,
    session_id: String,
    client: Option<String>,
    tokens: String,
    age: String,
    /// Of the longest wait, in percent.
    share: String,
    near: bool,
    waits_for: String,
    capacity: bool,
    head: bool,
}

impl QueuePart {
    pub(super) fn new(moment: &Moment) -> Self {
        let view = &moment.shown.view;
        let state = &moment.look.state.queue;
        let rows = &moment.rows.queue;
        let shown = u64::try_from(rows.len()).unwrap_or(u64::MAX);
        let more = state.waiting.saturating_sub(shown);
        let rate = why::grant_rate(&moment.look.app, view, moment.shown.now);
        let drain = why::drain(state.waiting, rate).filter(|_| state.waiting > 0);
        let head = rows.first();
        let leases = &moment.rows.leases;
        let among = u64::try_from(leases.len()).unwrap_or(u64::MAX);
        let some = leases.len() >= why::HOLDERS_AMONG && among < view.leases;
        Self {
            waiting: grouped(state.waiting),
            tokens: grouped(state.tokens),
            drain: drain.map(about),
            max_wait: set(view.policy.max_wait),
            rows: rows.iter().map(|waiter| Row::new(waiter, view)).collect(),
            more: (more > 0).then(|| grouped(more)),
            blocked: head.map(|head| why::blocked(head, None, view)),
            holders: why::holders(leases, view),
            among: some.then(|| grouped(among)),
            bypass_in: head.map(|head| duration(head.status.bypass_in)),
            can_act: moment.look.can_act,
            old: moment.rows.old,
        }
    }
}

impl Row {
    fn new(waiter: &WaiterView, view: &View) -> Self {
        let status = &waiter.status;
        let longest = view.policy.max_wait.millis().max(1);
        let share = (status.age.millis() as f64 / longest as f64 * 100.0).min(100.0);
        Self {
            row: waiter.row.0,
            position: grouped(status.position),
            ticket: waiter.ticket.as_str().to_owned(),
            ticket_cut: cut(waiter.ticket.as_str()),
            ticket_id: escaped(waiter.ticket.as_str()),
            session: waiter.session.as_str().to_owned(),
            session_cut: cut(waiter.session.as_str()),
            session_id: escaped(waiter.session.as_str()),
            client: waiter
                .terms
                .client
                .as_ref()
                .map(|client| client.as_str().to_owned()),
            tokens: grouped(waiter.terms.reservation.get()),
            age: duration(status.age),
            share: format!("{share:.1}"),
            near: share >= NEAR,
            waits_for: why::waits_for(status, view),
            capacity: status.reason != WaitReason::BehindOlder,
            head: status.position == 1,
        }
    }
}
