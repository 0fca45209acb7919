//! Lists of leases, of the queue and of epochs.
//!
//! The gate hands out slices of a bounded number of rows; filters and pages are done here, with a
//! rest for other calls between two slices.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{EpochChange, Lease, Listing, Problem, Waiter};
use kvgate_core::command::{SLICE_MAX, Slice};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{LeaseView, WaiterView};
use kvgate_core::ids::{Issue, RowNo};
use kvgate_core::ticket::Terms;

use super::answer::json;
use super::app::App;
use super::convert;
use super::extract::Query;
use super::problem::Fault;

pub(super) const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1_000;

/// Which rows are wanted.
#[derive(Debug)]
struct Filter {
    session: Option<String>,
    scope: Option<Scope>,
    client: Option<String>,
    part: Option<String>,
    page: Paging,
}

/// Which of them are shown.
#[derive(Debug)]
pub(super) struct Paging {
    limit: usize,
    /// First key of the page.
    from: u64,
}

impl Paging {
    /// `from` is the first key of the first page.
    pub(super) fn read(query: &mut Query, from: u64) -> Result<Self, Fault> {
        let limit = limit(query)?.unwrap_or(LIMIT_DEFAULT);
        let from = match query.take("cursor") {
            None => from,
            Some(text) => text
                .strip_prefix('c')
                .and_then(|number| u64::from_str_radix(number, 36).ok())
                .ok_or_else(|| Fault::field("?cursor", "must be the `next` of a page before"))?,
        };
        Ok(Self { limit, from })
    }
}

/// Rows that are wanted at most.
pub(super) fn limit(query: &mut Query) -> Result<Option<usize>, Fault> {
    let Some(text) = query.take("limit") else {
        return Ok(None);
    };
    let limit = text.parse().ok();
    limit
        .filter(|limit| (1..=LIMIT_MAX).contains(limit))
        .map(Some)
        .ok_or_else(|| Fault::field("?limit", "must be an integer from 1 to 1000"))
}

/// What a page is continued with. Opaque to callers.
fn cursor(mut key: u64) -> String {
    let mut digits = Vec::new();
    loop {
        let digit = u32::try_from(key % 36).unwrap_or(0);
        digits.extend(char::from_digit(digit, 36));
        key /= 36;
        if key == 0 {
            break;
        }
    }
    std::iter::once('c')
        .chain(digits.into_iter().rev())
        .collect()
}

impl Filter {
    fn read(mut query: Query) -> Result<Self, Fault> {
        let scope = match query.take("scope").as_deref() {
            None => None,
            Some("train") => Some(Scope::Train),
            Some("eval") => Some(Scope::Eval),
            Some(_) => return Err(Fault::field("?scope", "must be train or eval")),
        };
        let filter = Self {
            session: query.take("session_id"),
            scope,
            client: query.take("client"),
            part: query.take("q"),
            page: Paging::read(&mut query, 0)?,
        };
        query.done()?;
        Ok(filter)
    }

    fn takes(&self, session: &str, terms: &Terms, texts: &[&str]) -> bool {
        let client = terms.client.as_ref().map(|client| client.as_str());
        let matches = |wanted: &Option<String>, found: Option<&str>| {
            wanted.is_none() || wanted.as_deref() == found
        };
        matches(&self.session, Some(session))
            && matches(&self.client, client)
            && self.scope.is_none_or(|scope| scope == terms.scope)
            && self.part.as_deref().is_none_or(|part| {
                texts
                    .iter()
                    .copied()
                    .chain([session])
                    .chain(client)
                    .any(|text| text.contains(part))
            })
    }
}

/// A page as it is gathered from rows in the order of their keys.
pub(super) struct Gathered<T> {
    page: Paging,
    /// Keys fall from row to row.
    newest_first: bool,
    items: Vec<T>,
    next: Option<u64>,
    total: u64,
}

impl<T> Gathered<T> {
    fn new(page: Paging) -> Self {
        Self {
            page,
            newest_first: false,
            items: Vec::new(),
            next: None,
            total: 0,
        }
    }

    /// The same from rows in the opposite order.
    pub(super) fn newest_first(page: Paging) -> Self {
        Self {
            newest_first: true,
            ..Self::new(page)
        }
    }

    /// One row that matches.
    pub(super) fn add(&mut self, key: u64, item: impl FnOnce() -> T) {
        self.total = self.total.saturating_add(1);
        let is_before = if self.newest_first {
            key > self.page.from
        } else {
            key < self.page.from
        };
        if is_before {
            return;
        }
        if self.items.len() < self.page.limit {
            self.items.push(item());
        } else if self.next.is_none() {
            self.next = Some(key);
        }
    }

    pub(super) fn listing(self) -> Listing<T> {
        Listing {
            items: self.items,
            next: self.next.map(cursor),
            total: self.total,
        }
    }
}

/// The held leases, in the order of their grants.
#[utoipa::path(
    get,
    path = "/v1/leases",
    tag = "lists",
    params(
        ("session_id" = Option<String>, Query, description = "Leases of this session"),
        ("scope" = Option<kvgate_api::Scope>, Query, description = "`train` or `eval`"),
        ("client" = Option<String>, Query, description = "Leases of this client"),
        ("q" = Option<String>, Query, description = "A part of ticket, session, lease id or client"),
        ("limit" = Option<u32>, Query, description = "Rows of a page: 1 to 1000, 100 when absent"),
        ("cursor" = Option<String>, Query, description = "`next` of the page before"),
    ),
    responses(
        (status = 200, description = "One page", body = Listing<Lease>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn leases(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let mut filter = Filter::read(query)?;
    let page = std::mem::replace(&mut filter.page, Paging { limit: 0, from: 0 });
    let mut gathered = Gathered::new(page);
    let shown = app.shown();
    let mut from = 0;
    loop {
        let slice = Slice {
            from: Issue(from),
            rows: SLICE_MAX,
        };
        let read = app.gate().list_leases(slice).await?;
        for view in &read.items {
            let key = view.lease.id.issue.0;
            from = key.saturating_add(1);
            if takes_lease(&filter, view) {
                gathered.add(key, || convert::lease(view, false, &shown));
            }
        }
        if !read.more || read.items.is_empty() {
            break;
        }
        tokio::task::yield_now().await;
    }
    Ok(json(StatusCode::OK, &gathered.listing()))
}

fn takes_lease(filter: &Filter, view: &LeaseView) -> bool {
    let id = view.lease.id.to_text();
    filter.takes(
        view.session.as_str(),
        &view.terms,
        &[view.ticket.as_str(), &id],
    )
}

/// The queue, from the head.
#[utoipa::path(
    get,
    path = "/v1/queue",
    tag = "lists",
    params(
        ("session_id" = Option<String>, Query, description = "Waiters of this session"),
        ("scope" = Option<kvgate_api::Scope>, Query, description = "`train` or `eval`"),
        ("client" = Option<String>, Query, description = "Waiters of this client"),
        ("q" = Option<String>, Query, description = "A part of ticket, session or client"),
        ("limit" = Option<u32>, Query, description = "Rows of a page: 1 to 1000, 100 when absent"),
        ("cursor" = Option<String>, Query, description = "`next` of the page before"),
    ),
    responses(
        (status = 200, description = "One page", body = Listing<Waiter>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn queue(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let mut filter = Filter::read(query)?;
    let page = std::mem::replace(&mut filter.page, Paging { limit: 0, from: 0 });
    let mut gathered = Gathered::new(page);
    let mut from = 0;
    loop {
        let slice = Slice {
            from: RowNo(from),
            rows: SLICE_MAX,
        };
        let read = app.gate().list_queue(slice).await?;
        for view in &read.items {
            let key = view.row.0;
            from = key.saturating_add(1);
            if takes_waiter(&filter, view) {
                gathered.add(key, || convert::waiter(view));
            }
        }
        if !read.more || read.items.is_empty() {
            break;
        }
        tokio::task::yield_now().await;
    }
    Ok(json(StatusCode::OK, &gathered.listing()))
}

fn takes_waiter(filter: &Filter, view: &WaiterView) -> bool {
    filter.takes(view.session.as_str(), &view.terms, &[view.ticket.as_str()])
}

/// The changes of the worker set, newest first.
#[utoipa::path(
    get,
    path = "/v1/epochs",
    tag = "lists",
    params(
        ("limit" = Option<u32>, Query, description = "Rows of a page: 1 to 1000, 100 when absent"),
        ("cursor" = Option<String>, Query, description = "`next` of the page before"),
    ),
    responses(
        (status = 200, description = "One page", body = Listing<EpochChange>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn epochs(State(app): State<App>, mut query: Query) -> Result<Response, Fault> {
    let page = Paging::read(&mut query, u64::MAX)?;
    query.done()?;
    let entries = app.gate().epochs().await?;
    let shown = app.shown();
    let total = u64::try_from(entries.len()).unwrap_or(u64::MAX);
    let mut rest = entries.iter().skip_while(|entry| entry.epoch.0 > page.from);
    let items = rest
        .by_ref()
        .take(page.limit)
        .map(|entry| convert::epoch(entry, &shown))
        .collect();
    let listing = Listing {
        items,
        next: rest.next().map(|entry| cursor(entry.epoch.0)),
        total,
    };
    Ok(json(StatusCode::OK, &listing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_back() {
        for key in [0, 1, 35, 36, 1_295, u64::MAX] {
            let text = cursor(key);
            let number = text.strip_prefix('c').unwrap();
            assert_eq!(u64::from_str_radix(number, 36), Ok(key), "{text}");
        }
    }
}
