//! The queue: its head, the ages of those who wait, and the whole list.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_core::command::{SLICE_MAX, Slice};
use kvgate_core::effect::WaiterView;
use kvgate_core::ids::{Issue, RowNo};

use super::format::{about, grouped, secs, span};
use super::link::to;
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use super::rows::{Asked, Filter, OF_TICKETS, Pager, ROWS, WaiterRow, known};
use super::why::{self, HOLDERS_AMONG, Why};
use crate::http::read;

/// Columns of the histogram of ages.
const AGES: usize = 12;

/// A table of waiters.
#[derive(Template)]
#[template(path = "parts/waiters.html")]
pub(super) struct Waiters {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) total: String,
    pub(super) count: u64,
    /// The list is the whole queue, whose figures are those of the state.
    pub(super) is_queue: bool,
    pub(super) tokens: Option<String>,
    pub(super) max_wait: String,
    pub(super) rows: Vec<WaiterRow>,
    pub(super) pager: Option<Pager>,
    pub(super) none: String,
    pub(super) can_act: bool,
}

#[derive(Template)]
#[template(path = "queue.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "parts/head.html")]
struct Head {
    head: Option<HeadCard>,
    none: String,
}

struct HeadCard {
    ticket: String,
    href: String,
    session: String,
    session_href: String,
    why: Why,
}

#[derive(Template)]
#[template(path = "parts/ages.html")]
struct Ages {
    columns: Vec<Column>,
    max_wait: String,
    half: String,
    label: String,
    note: String,
}

struct Column {
    x: String,
    y: String,
    height: String,
    is_near: bool,
    title: String,
}

/// `GET /queue`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::new("queue", &look, OF_TICKETS);
    let gate = look.app.gate();
    let (list, trouble) = known(read::queue(&look.app, asked.to_read()?).await)?;
    // The oldest ones: a slice is what a read costs at most.
    let slice = Slice {
        from: RowNo(0),
        rows: SLICE_MAX,
    };
    let oldest = gate.list_queue(slice).await;
    let oldest = oldest.map(|page| page.items).unwrap_or_default();
    let shown = look.app.shown();
    let view = &shown.view;
    let head = oldest.first();
    let head_waits_for = head.map(|head| why::waits_for(&head.status, view));
    let mut parts = Parts::default();
    let card = match head {
        None => None,
        Some(head) => Some(HeadCard {
            ticket: head.ticket.as_str().to_owned(),
            href: to("ticket", head.ticket.as_str()),
            session: head.session.as_str().to_owned(),
            session_href: to("session", head.session.as_str()),
            why: why_of(&look, head, Some(head)).await,
        }),
    };
    parts.add(
        "p-head",
        &Head {
            head: card,
            none: trouble
                .clone()
                .unwrap_or_else(|| "Nobody waits: what fits is admitted at once.".to_owned()),
        },
    )?;
    let max_wait_s = std::time::Duration::from_millis(view.policy.max_wait.millis()).as_secs_f64();
    parts.add(
        "p-ages",
        &ages(&oldest, max_wait_s, look.state.queue.waiting),
    )?;
    parts.add(
        "p-filter",
        &Filter::of_tickets("queue", "Ticket, session or client", &asked),
    )?;
    let is_queue = !asked.is_filtered();
    let total = asked.total(look.state.queue.waiting, &list);
    let rows = list.items.iter();
    parts.add(
        "p-waiters",
        &Waiters {
            id: "p-waiters",
            title: "Waiters",
            total: grouped(total),
            count: total,
            is_queue,
            tokens: is_queue.then(|| grouped(look.state.queue.tokens)),
            max_wait: about(view.policy.max_wait),
            rows: rows
                .take(ROWS)
                .map(|waiter| WaiterRow::new(waiter, head_waits_for.as_deref()))
                .collect(),
            pager: Some(asked.pager(&list)),
            none: trouble.unwrap_or_else(|| {
                if is_queue {
                    "Nobody waits.".to_owned()
                } else {
                    "No waiter matches the filter.".to_owned()
                }
            }),
            can_act: look.can_act,
        },
    )?;
    Ok(Screen {
        tab: Some(Tab::Queue),
        title: "Queue".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

/// Why a waiter waits. Who holds the tokens is looked for in one slice of the leases.
pub(super) async fn why_of(look: &Look, waiter: &WaiterView, head: Option<&WaiterView>) -> Why {
    let slice = Slice {
        from: Issue(0),
        rows: HOLDERS_AMONG,
    };
    let leases = look.app.gate().list_leases(slice).await;
    let leases = leases.map(|page| page.items).unwrap_or_default();
    let shown = look.app.shown();
    let view = &shown.view;
    let holders = why::holders(&leases, view);
    let rate = why::grant_rate(&look.app, view, shown.now);
    Why::of(waiter, head, view, holders, leases.len(), rate)
}

/// How many wait how long, by twelfths of the longest wait.
fn ages(oldest: &[WaiterView], max_wait_s: f64, waiting: u64) -> Ages {
    let step = max_wait_s / AGES as f64;
    let mut counts = [0_u64; AGES];
    for waiter in oldest {
        let age = std::time::Duration::from_millis(waiter.status.age.millis()).as_secs_f64();
        let column = counts
            .iter_mut()
            .zip(1_u32..)
            .find(|(_, end)| age < step * f64::from(*end));
        // Who is older than the longest wait leaves with the next turn.
        match column {
            Some((count, _)) => *count += 1,
            None => {
                if let Some(last) = counts.last_mut() {
                    *last += 1;
                }
            }
        }
    }
    let highest = counts.iter().copied().max().unwrap_or(0).max(1);
    let near = counts.iter().skip(AGES * 3 / 4).sum::<u64>();
    let columns = counts.iter().zip(0_u32..).map(|(count, place)| {
        let from = step * f64::from(place);
        let height = *count as f64 / highest as f64 * 46.0;
        Column {
            x: format!("{:.2}", f64::from(place) * 100.0 / AGES as f64 + 0.6),
            y: format!("{:.1}", 48.0 - height),
            height: format!("{height:.1}"),
            is_near: usize::try_from(place).is_ok_and(|place| place >= AGES * 3 / 4),
            title: format!(
                "{} to {}: {} waiting",
                secs(from),
                secs(from + step),
                grouped(*count)
            ),
        }
    });
    let seen = oldest.len() as u64;
    Ages {
        columns: columns.collect(),
        max_wait: about(span(max_wait_s)),
        half: about(span(max_wait_s / 2.0)),
        label: format!(
            "Ages of {} waiters; {} of them have waited three quarters of the longest wait or more.",
            grouped(seen),
            grouped(near)
        ),
        note: if seen < waiting {
            format!("the first {} of {}", grouped(seen), grouped(waiting))
        } else {
            format!("all {}", grouped(seen))
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_in_an_empty_histogram() {
        let ages = ages(&[], 30.0, 0);
        assert_eq!(ages.columns.len(), AGES);
        assert!(ages.columns.iter().all(|column| column.height == "0.0"));
        assert_eq!(ages.note, "all 0");
    }
}
