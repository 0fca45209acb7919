//! Lists of leases, of the queue, of sessions, of closes and of epochs.
//!
//! The gate hands out slices of a bounded number of rows; filters and pages are done here, with a
//! rest for other calls between two slices. A page without a filter is one slice, which tells the total
//! of the same moment.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{Close, CloseState, EpochChange, Lease, Listing, Problem, Session, Waiter};
use kvgate_core::close::CloseIntent;
use kvgate_core::command::{SLICE_MAX, Slice};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{LeaseView, Page, SessionView, WaiterView};
use kvgate_core::ids::{CloseNo, Issue, RowNo, SessionId, SessionNo};
use kvgate_core::ticket::Terms;
use serde::Serialize;
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};

use super::answer::json;
use super::app::{App, Shown};
use super::convert;
use super::extract::Query;
use super::problem::Fault;
use crate::gate::{Gate, GateError};

pub(super) const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1_000;

// ---- pages -------------------------------------------------------------------------------------

/// Which of the rows that match are shown.
#[derive(Debug)]
pub(super) struct Paging {
    pub(super) limit: usize,
    /// First key of the page; `None` for the first page.
    pub(super) from: Option<u64>,
}

impl Paging {
    pub(super) fn read(query: &mut Query) -> Result<Self, Fault> {
        let limit = limit(query)?.unwrap_or(LIMIT_DEFAULT);
        let from = query.take("cursor").map(|text| {
            text.strip_prefix('c')
                .and_then(|number| u64::from_str_radix(number, 36).ok())
                .ok_or_else(|| Fault::field("?cursor", "must be the `next` of a page before"))
        });
        Ok(Self {
            limit,
            from: from.transpose()?,
        })
    }
}

/// What every list takes, as the document describes it.
impl IntoParams for Paging {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let parameter = |name: &str, schema: ObjectBuilder, description: &str| {
            ParameterBuilder::new()
                .name(name)
                .parameter_in(ParameterIn::Query)
                .description(Some(description))
                .schema(Some(schema.build()))
                .build()
        };
        let limit = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .minimum(Some(1))
            .maximum(Some(LIMIT_MAX));
        let cursor = ObjectBuilder::new().schema_type(Type::String);
        vec![
            parameter("limit", limit, "Rows of a page; 100 when absent"),
            parameter("cursor", cursor, "`next` of the page before"),
        ]
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
pub(super) fn cursor(mut key: u64) -> String {
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

/// In which order keys come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    OldestFirst,
    NewestFirst,
}

impl Order {
    /// Where to read on behind a key; `None` behind the last one there can be.
    const fn behind(self, key: u64) -> Option<u64> {
        match self {
            Self::OldestFirst => key.checked_add(1),
            Self::NewestFirst => key.checked_sub(1),
        }
    }

    const fn first(self) -> u64 {
        match self {
            Self::OldestFirst => 0,
            Self::NewestFirst => u64::MAX,
        }
    }

    const fn is_before(self, key: u64, from: u64) -> bool {
        match self {
            Self::OldestFirst => key < from,
            Self::NewestFirst => key > from,
        }
    }
}

/// A page as it is gathered from rows in the order of their keys.
struct Gathered<T> {
    order: Order,
    page: Paging,
    items: Vec<T>,
    next: Option<u64>,
    total: u64,
}

impl<T> Gathered<T> {
    const fn new(order: Order, page: Paging) -> Self {
        Self {
            order,
            page,
            items: Vec::new(),
            next: None,
            total: 0,
        }
    }

    /// One row that matches.
    fn add(&mut self, key: u64, item: impl FnOnce() -> T) {
        self.total = self.total.saturating_add(1);
        if self
            .page
            .from
            .is_some_and(|from| self.order.is_before(key, from))
        {
            return;
        }
        if self.items.len() < self.page.limit {
            self.items.push(item());
        } else if self.next.is_none() {
            self.next = Some(key);
        }
    }

    fn listing(self) -> Listing<T> {
        Listing {
            items: self.items,
            next: self.next.map(cursor),
            total: self.total,
        }
    }
}

/// A kind of row that the gate hands out in slices.
pub(super) trait Row: Sized + Send {
    type Item: Serialize + Send;
    const ORDER: Order;

    /// At most so many from a key on.
    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send;
    fn key(&self) -> u64;
    fn item(&self, shown: &Shown) -> Self::Item;
}

impl Row for LeaseView {
    type Item = Lease;
    const ORDER: Order = Order::OldestFirst;

    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send {
        let from = Issue(from);
        gate.list_leases(Slice { from, rows })
    }

    fn key(&self) -> u64 {
        self.lease.id.issue.0
    }

    fn item(&self, shown: &Shown) -> Lease {
        convert::lease(self, false, shown)
    }
}

impl Row for WaiterView {
    type Item = Waiter;
    const ORDER: Order = Order::OldestFirst;

    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send {
        let from = RowNo(from);
        gate.list_queue(Slice { from, rows })
    }

    fn key(&self) -> u64 {
        self.row.0
    }

    fn item(&self, _: &Shown) -> Waiter {
        convert::waiter(self)
    }
}

impl Row for SessionView {
    type Item = Session;
    const ORDER: Order = Order::OldestFirst;

    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send {
        let from = SessionNo(from);
        gate.list_sessions(Slice { from, rows })
    }

    fn key(&self) -> u64 {
        self.number.0
    }

    fn item(&self, shown: &Shown) -> Session {
        convert::session(self, shown)
    }
}

impl Row for CloseIntent {
    type Item = Close;
    const ORDER: Order = Order::NewestFirst;

    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send {
        let from = CloseNo(from);
        gate.list_closes(Slice { from, rows })
    }

    fn key(&self) -> u64 {
        self.id.number.0
    }

    fn item(&self, shown: &Shown) -> Close {
        convert::close(self, shown)
    }
}

/// A page of all rows: one slice.
pub(super) async fn list_all<R: Row>(app: &App, page: Paging) -> Result<Listing<R::Item>, Fault> {
    let from = page.from.unwrap_or(R::ORDER.first());
    let read = R::slice(app.gate(), from, page.limit).await?;
    let shown = app.shown();
    let behind = |last: &R| R::ORDER.behind(last.key());
    let next = read.items.last().filter(|_| read.more).and_then(behind);
    let items: Vec<R::Item> = read.items.iter().map(|row| row.item(&shown)).collect();
    Ok(Listing {
        items,
        next: next.map(cursor),
        total: read.total,
    })
}

/// A page of those that match. Looks at all rows, since the answer says how many do.
pub(super) async fn list<R: Row>(
    app: &App,
    page: Paging,
    takes: impl Fn(&R) -> bool + Send,
) -> Result<Listing<R::Item>, Fault> {
    let mut gathered = Gathered::new(R::ORDER, page);
    let shown = app.shown();
    let mut from = Some(R::ORDER.first());
    while let Some(first) = from.take() {
        let read = R::slice(app.gate(), first, SLICE_MAX).await?;
        for row in read.items.iter().filter(|row| takes(row)) {
            gathered.add(row.key(), || row.item(&shown));
        }
        if let Some(last) = read.items.last().filter(|_| read.more) {
            from = R::ORDER.behind(last.key());
            tokio::task::yield_now().await;
        }
    }
    Ok(gathered.listing())
}

// ---- filters -----------------------------------------------------------------------------------

/// Which leases or waiters are wanted.
#[derive(Debug)]
struct Filter {
    session: Option<String>,
    scope: Option<Scope>,
    client: Option<String>,
    part: Option<String>,
}

impl Filter {
    fn read(mut query: Query) -> Result<(Self, Paging), Fault> {
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
        };
        let page = Paging::read(&mut query)?;
        query.done()?;
        Ok((filter, page))
    }

    /// Nothing is left out.
    const fn is_none(&self) -> bool {
        self.session.is_none()
            && self.scope.is_none()
            && self.client.is_none()
            && self.part.is_none()
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

fn takes_lease(filter: &Filter, view: &LeaseView) -> bool {
    let id = view.lease.id.to_text();
    filter.takes(
        view.session.as_str(),
        &view.terms,
        &[view.ticket.as_str(), &id],
    )
}

fn takes_waiter(filter: &Filter, view: &WaiterView) -> bool {
    filter.takes(view.session.as_str(), &view.terms, &[view.ticket.as_str()])
}

/// Whether a text stands in the id of a session, or in what it holds.
fn session_has(view: &SessionView, part: &str) -> bool {
    let named = |ticket: &str, terms: &Terms| {
        let client = terms.client.as_ref();
        ticket.contains(part) || client.is_some_and(|client| client.as_str().contains(part))
    };
    view.id.as_str().contains(part)
        || view.leases.iter().any(|view| {
            named(view.ticket.as_str(), &view.terms) || view.lease.id.to_text().contains(part)
        })
        || view
            .waiting
            .iter()
            .any(|view| named(view.ticket.as_str(), &view.terms))
        || view
            .closes
            .iter()
            .any(|close| close.id.to_text().contains(part))
}

fn flag(query: &mut Query, name: &str) -> Result<Option<bool>, Fault> {
    match query.take(name).as_deref() {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(_) => Err(Fault::field(format!("?{name}"), "must be true or false")),
    }
}

fn close_state(query: &mut Query) -> Result<Option<CloseState>, Fault> {
    match query.take("state").as_deref() {
        None => Ok(None),
        Some("joining") => Ok(Some(CloseState::Joining)),
        Some("delivering") => Ok(Some(CloseState::Delivering)),
        Some("done") => Ok(Some(CloseState::Done)),
        Some(_) => Err(Fault::field(
            "?state",
            "must be joining, delivering or done",
        )),
    }
}

// ---- lists -------------------------------------------------------------------------------------

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
        Paging,
    ),
    responses(
        (status = 200, description = "One page", body = Listing<Lease>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn leases(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let page = read_leases(&app, query).await?;
    Ok(json(StatusCode::OK, &page))
}

/// The page of leases that the query names.
pub async fn read_leases(app: &App, query: Query) -> Result<Listing<Lease>, Fault> {
    let (filter, page) = Filter::read(query)?;
    if filter.is_none() {
        return list_all::<LeaseView>(app, page).await;
    }
    list::<LeaseView>(app, page, |view| takes_lease(&filter, view)).await
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
        Paging,
    ),
    responses(
        (status = 200, description = "One page", body = Listing<Waiter>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn queue(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let page = read_queue(&app, query).await?;
    Ok(json(StatusCode::OK, &page))
}

/// The page of the queue that the query names.
pub async fn read_queue(app: &App, query: Query) -> Result<Listing<Waiter>, Fault> {
    let (filter, page) = Filter::read(query)?;
    if filter.is_none() {
        return list_all::<WaiterView>(app, page).await;
    }
    list::<WaiterView>(app, page, |view| takes_waiter(&filter, view)).await
}

/// The sessions that are remembered, in the order of their first use.
#[utoipa::path(
    get,
    path = "/v1/sessions",
    tag = "lists",
    params(
        ("session_id" = Option<String>, Query, description = "This session"),
        ("q" = Option<String>, Query, description = "A part of the session, or of a ticket, lease id, client or close id in it"),
        Paging,
    ),
    responses(
        (status = 200, description = "One page", body = Listing<Session>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn sessions(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let page = read_sessions(&app, query).await?;
    Ok(json(StatusCode::OK, &page))
}

/// The page of sessions that the query names.
pub async fn read_sessions(app: &App, mut query: Query) -> Result<Listing<Session>, Fault> {
    let session = query.take("session_id");
    let part = query.take("q");
    let page = Paging::read(&mut query)?;
    query.done()?;
    if session.is_none() && part.is_none() {
        return list_all::<SessionView>(app, page).await;
    }
    let takes = |view: &SessionView| part.as_deref().is_none_or(|part| session_has(view, part));
    let Some(session) = session else {
        return list::<SessionView>(app, page, takes).await;
    };
    // One session is found without a look at all others; what is no id names none.
    let found = match SessionId::new(&session) {
        Ok(session) => app.gate().read_session(session).await?,
        Err(_) => None,
    };
    let mut gathered = Gathered::new(SessionView::ORDER, page);
    let shown = app.shown();
    if let Some(view) = found.filter(takes) {
        gathered.add(view.key(), || view.item(&shown));
    }
    Ok(gathered.listing())
}

/// The closes that are remembered, newest first.
#[utoipa::path(
    get,
    path = "/v1/closes",
    tag = "lists",
    params(
        ("state" = Option<CloseState>, Query, description = "`joining`, `delivering` or `done`"),
        ("failed" = Option<bool>, Query, description = "Those that failed, or those that did not"),
        ("session_id" = Option<String>, Query, description = "Closes of this session"),
        ("q" = Option<String>, Query, description = "A part of session or close id"),
        Paging,
    ),
    responses(
        (status = 200, description = "One page", body = Listing<Close>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn closes(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let page = read_closes(&app, query).await?;
    Ok(json(StatusCode::OK, &page))
}

/// The page of closes that the query names.
pub async fn read_closes(app: &App, mut query: Query) -> Result<Listing<Close>, Fault> {
    let state = close_state(&mut query)?;
    let failed = flag(&mut query, "failed")?;
    let session = query.take("session_id");
    let part = query.take("q");
    let page = Paging::read(&mut query)?;
    query.done()?;
    if state.is_none() && failed.is_none() && session.is_none() && part.is_none() {
        return list_all::<CloseIntent>(app, page).await;
    }
    list::<CloseIntent>(app, page, |close| {
        let name = close.session.as_str();
        failed.is_none_or(|failed| failed == close.has_failed())
            && state.is_none_or(|state| state == convert::close_state(close))
            && session.as_deref().is_none_or(|session| session == name)
            && part
                .as_deref()
                .is_none_or(|part| name.contains(part) || close.id.to_text().contains(part))
    })
    .await
}

/// The changes of the worker set, newest first.
#[utoipa::path(
    get,
    path = "/v1/epochs",
    tag = "lists",
    params(Paging),
    responses(
        (status = 200, description = "One page", body = Listing<EpochChange>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn epochs(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    let page = read_epochs(&app, query).await?;
    Ok(json(StatusCode::OK, &page))
}

/// The page of epochs that the query names.
pub async fn read_epochs(app: &App, mut query: Query) -> Result<Listing<EpochChange>, Fault> {
    let page = Paging::read(&mut query)?;
    query.done()?;
    let entries = app.gate().epochs().await?;
    let shown = app.shown();
    let mut gathered = Gathered::new(Order::NewestFirst, page);
    for entry in &entries {
        gathered.add(entry.epoch.0, || convert::epoch(entry, &shown));
    }
    Ok(gathered.listing())
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
