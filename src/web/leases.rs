//! The leases: who holds most, every one of them, and those that expired lately.

use std::collections::BTreeMap;

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_core::command::Slice;
use kvgate_core::effect::LeaseView;
use kvgate_core::ids::Issue;
use kvgate_core::tally::LeaseEnd;

use super::decisions::{Stream, stream};
use super::format::{counted, grouped, percent_of, secs};
use super::link::to;
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use super::rows::{Asked, Filter, LeaseRow, Now, OF_TICKETS, Pager, ROWS, known, width};
use super::why::HOLDERS_AMONG;
use crate::http::{Query, read};

/// Sessions that have a part of the bar of their own.
const HOLDERS: usize = 6;

/// Leases that expired lately.
const EXPIRED: usize = 8;

#[derive(Template)]
#[template(path = "leases.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

/// A table of leases.
#[derive(Template)]
#[template(path = "parts/leases.html")]
pub(super) struct Leases {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) total: String,
    pub(super) count: u64,
    /// The list is all leases, whose figures are those of the state.
    pub(super) is_all: bool,
    pub(super) note: String,
    pub(super) rows: Vec<LeaseRow>,
    pub(super) pager: Option<Pager>,
    pub(super) none: String,
    pub(super) can_act: bool,
}

#[derive(Template)]
#[template(path = "parts/holders.html")]
struct Holders {
    reserved: String,
    ceiling: String,
    used: String,
    bars: Vec<Holder>,
    note: String,
    label: String,
    ends: Vec<(&'static str, String)>,
}

struct Holder {
    session: String,
    href: Option<String>,
    tokens: String,
    share: String,
    leases: String,
    class: String,
    x: String,
    width: String,
}

/// `GET /leases`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::new("leases", &look, OF_TICKETS);
    let (list, trouble) = known(read::leases(&look.app, asked.to_read()?).await)?;
    let slice = Slice {
        from: Issue(0),
        rows: HOLDERS_AMONG,
    };
    let oldest = look.app.gate().list_leases(slice).await;
    let oldest = oldest.map(|page| page.items).unwrap_or_default();
    let mut parts = Parts::default();
    parts.add("p-holders", &holders(&look, &oldest))?;
    parts.add(
        "p-filter",
        &Filter::of_tickets("leases", "Ticket, session, lease or client", &asked),
    )?;
    let is_all = !asked.is_filtered();
    let total = asked.total(look.state.leases.count, &list);
    let now = Now::of(&look.app.shown());
    let oldest_s = look.state.leases.oldest_age_s;
    parts.add(
        "p-leases",
        &Leases {
            id: "p-leases",
            title: "Held leases",
            total: grouped(total),
            count: total,
            is_all,
            note: oldest_s
                .filter(|_| is_all)
                .map_or_else(String::new, |age| format!("the oldest for {}", secs(age))),
            rows: list
                .items
                .iter()
                .take(ROWS)
                .map(|lease| LeaseRow::new(lease, &now))
                .collect(),
            pager: Some(asked.pager(&list)),
            none: trouble.unwrap_or_else(|| {
                if is_all {
                    "No lease is held.".to_owned()
                } else {
                    "No lease matches the filter.".to_owned()
                }
            }),
            can_act: look.can_act,
        },
    )?;
    let expired = Query::of([
        ("action", "ended".to_owned()),
        ("reason", "expired".to_owned()),
        ("limit", EXPIRED.to_string()),
    ]);
    let rows = stream(&look, expired).await?;
    parts.add(
        "p-expired",
        &Stream {
            id: "p-expired",
            title: "Expired lately",
            note: "newest first · their holders neither renewed nor gave them back in time"
                .to_owned(),
            none: "No lease expired among the decisions that are remembered.".to_owned(),
            more: Some("decisions?action=ended&reason=expired".to_owned()),
            rows,
        },
    )?;
    Ok(Screen {
        tab: Some(Tab::Leases),
        title: "Leases".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

/// Who holds most, as parts of what is reserved. It is looked for among the oldest leases.
fn holders(look: &Look, oldest: &[LeaseView]) -> Holders {
    let view = look.app.gate().view();
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for lease in oldest {
        let (tokens, leases) = sums.entry(lease.session.as_str()).or_default();
        *tokens = tokens.saturating_add(lease.terms.reservation.get());
        *leases += 1;
    }
    let mut most: Vec<(&str, u64, u64)> = sums
        .into_iter()
        .map(|(session, (tokens, leases))| (session, tokens, leases))
        .collect();
    most.sort_by_key(|(_, tokens, _)| std::cmp::Reverse(*tokens));
    let sessions = most.len();
    let reserved = look.state.budget.reserved;
    let mut x = 0_u64;
    let mut bars = Vec::new();
    for (place, (session, tokens, leases)) in most.into_iter().take(HOLDERS).enumerate() {
        bars.push(Holder {
            session: session.to_owned(),
            href: Some(to("session", session)),
            tokens: grouped(tokens),
            share: percent_of(tokens, reserved),
            leases: counted(leases, "lease"),
            class: format!("h{place}"),
            x: width(x as f64, reserved as f64),
            width: width(tokens as f64, reserved as f64),
        });
        x = x.saturating_add(tokens);
    }
    let rest = reserved.saturating_sub(x);
    if rest > 0 {
        bars.push(Holder {
            session: "all others".to_owned(),
            href: None,
            tokens: grouped(rest),
            share: percent_of(rest, reserved),
            leases: String::new(),
            class: "hx".to_owned(),
            x: width(x as f64, reserved as f64),
            width: width(rest as f64, reserved as f64),
        });
    }
    let seen = oldest.len() as u64;
    let label = bars
        .iter()
        .map(|bar| format!("{} {}", bar.session, bar.share))
        .collect::<Vec<_>>()
        .join(", ");
    let ended = |how| grouped(view.tally.ends(how));
    Holders {
        reserved: grouped(reserved),
        ceiling: grouped(look.state.budget.ceiling),
        used: percent_of(reserved, look.state.budget.ceiling),
        bars,
        note: if seen < view.leases {
            format!("among the {} oldest leases", grouped(seen))
        } else {
            counted(sessions as u64, "session")
        },
        label,
        ends: vec![
            ("Released", ended(LeaseEnd::Released)),
            ("Expired", ended(LeaseEnd::Expired)),
            ("Revoked", ended(LeaseEnd::Revoked)),
            ("Cancelled", ended(LeaseEnd::Cancelled)),
        ],
    }
}
