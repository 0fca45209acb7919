//! The overview.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_core::command::Slice;
use kvgate_core::decision::WaitReason;
use kvgate_core::effect::WaiterView;
use kvgate_core::ids::RowNo;

use super::format::{duration, grouped};
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};

/// Waiters that the overview shows.
const QUEUE_ROWS: usize = 12;

#[derive(Template)]
#[template(path = "overview.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "parts/queue.html")]
struct QueuePart {
    waiting: String,
    tokens: String,
    max_wait: String,
    rows: Vec<QueueRow>,
    more: Option<String>,
}

struct QueueRow {
    position: String,
    ticket: String,
    session: String,
    tokens: String,
    age: String,
    bypass_in: String,
    waits_for: String,
    head: bool,
}

/// `GET /`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(look: Look) -> Result<Screen, Trouble> {
    let slice = Slice {
        from: RowNo(0),
        rows: QUEUE_ROWS,
    };
    // While the store is away the page still shows the last good state.
    let queue = look.app.gate().list_queue(slice).await;
    let queue = queue.map(|page| page.items).unwrap_or_default();
    let more = look.state.queue.waiting.saturating_sub(queue.len() as u64);
    let mut parts = Parts::default();
    parts.add(
        "p-queue",
        &QueuePart {
            waiting: grouped(look.state.queue.waiting),
            tokens: grouped(look.state.queue.tokens),
            max_wait: duration(look.app.gate().view().policy.max_wait),
            rows: queue.iter().map(QueueRow::new).collect(),
            more: (more > 0).then(|| grouped(more)),
        },
    )?;
    Ok(Screen {
        tab: Tab::Overview,
        title: "Overview".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

impl QueueRow {
    fn new(waiter: &WaiterView) -> Self {
        let status = &waiter.status;
        Self {
            position: grouped(status.position),
            ticket: waiter.ticket.as_str().to_owned(),
            session: waiter.session.as_str().to_owned(),
            tokens: grouped(waiter.terms.reservation.get()),
            age: duration(status.age),
            bypass_in: duration(status.bypass_in),
            waits_for: match status.reason {
                WaitReason::BehindOlder => "behind #1".to_owned(),
                WaitReason::PressureGuard => "engine pressure".to_owned(),
                WaitReason::CapacityExhausted => format!("{} short", grouped(status.short.get())),
            },
            head: status.position == 1,
        }
    }
}
