//! `kvgate queue`: who waits, from the head.

use clap::Args;
use kvgate_api::Waiter;

use super::client::{Client, Service};
use super::list::{self, Filters, Shown};
use super::table::{Kind, duration, grouped, text};
use super::{Ended, word};

/// Options of the command.
#[derive(Args, Debug)]
pub(super) struct Queue {
    #[command(flatten)]
    filters: Filters,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    service: Service,
}

const COLUMNS: &[(&str, Kind)] = &[
    ("position", Kind::Number),
    ("ticket", Kind::Text),
    ("session", Kind::Text),
    ("tokens", Kind::Number),
    ("age", Kind::Number),
    ("bypass in", Kind::Number),
    ("reason", Kind::Word),
];

/// Shows the waiters.
pub(super) fn run(queue: &Queue) -> Result<(), Ended> {
    let client = Client::new(&queue.service)?;
    let query = queue.filters.query();
    list::show(
        &client,
        &["v1", "queue"],
        &query,
        &queue.shown,
        COLUMNS,
        row,
    )
}

fn row(waiter: &Waiter) -> Vec<String> {
    vec![
        grouped(waiter.position),
        text(Some(&waiter.ticket_id)),
        text(Some(&waiter.session_id)),
        grouped(waiter.reservation_tokens),
        duration(waiter.age_s),
        duration(waiter.bypass_in_s),
        word(&waiter.reason),
    ]
}
