//! The audit: what operators did (SET3), and by which name.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{AuditAction, AuditEntry, Listing, Problem};
use kvgate_core::audit::{self, AuditAct};
use kvgate_core::command::Slice;
use kvgate_core::effect::Page;
use kvgate_core::ids::{AuditNo, Label};

use super::answer::json;
use super::app::{App, Shown};
use super::convert::time;
use super::extract::Query;
use super::lists::{self, Order, Paging, Row};
use super::problem::Fault;
use crate::access::Caller;
use crate::gate::{Gate, GateError};
use crate::words;

/// What operators did, newest first.
#[utoipa::path(
    get,
    path = "/v1/audit",
    tag = "operation",
    operation_id = "audit",
    params(Paging),
    responses(
        (status = 200, description = "One page", body = Listing<AuditEntry>),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn list(State(app): State<App>, mut query: Query) -> Result<Response, Fault> {
    let page = Paging::read(&mut query)?;
    query.done()?;
    let page = lists::list_all::<audit::AuditEntry>(&app, page).await?;
    Ok(json(StatusCode::OK, &page))
}

/// A slice of the audit with the numbers of its entries, newest first: `from` is the highest number
/// looked at. And whether there are more.
pub async fn read_audit_slice(
    app: &App,
    from: u64,
    rows: usize,
) -> Result<(Vec<(u64, AuditEntry)>, bool), Fault> {
    let slice = Slice {
        from: AuditNo(from),
        rows,
    };
    let page = app.gate().list_audit(slice).await?;
    let shown = app.shown();
    let items = page.items.iter();
    let items = items.map(|entry| (entry.key(), entry.item(&shown)));
    Ok((items.collect(), page.more))
}

impl Row for audit::AuditEntry {
    type Item = AuditEntry;
    const ORDER: Order = Order::NewestFirst;

    fn slice(
        gate: &Gate,
        from: u64,
        rows: usize,
    ) -> impl Future<Output = Result<Page<Self>, GateError>> + Send {
        let from = AuditNo(from);
        gate.list_audit(Slice { from, rows })
    }

    fn key(&self) -> u64 {
        self.no.0
    }

    fn item(&self, shown: &Shown) -> AuditEntry {
        AuditEntry {
            at: time(self.at, shown),
            who: self.who.as_str().to_owned(),
            action: action(&self.act),
            detail: words::audit_detail(&self.act),
        }
    }
}

const fn action(act: &AuditAct) -> AuditAction {
    match act {
        AuditAct::SettingsChanged(_) => AuditAction::SettingsChanged,
        AuditAct::SettingsReset(_) => AuditAction::SettingsReset,
        AuditAct::LeaseRevoked { .. } => AuditAction::LeaseRevoked,
        AuditAct::TicketCancelled { .. } => AuditAction::TicketCancelled,
        AuditAct::SessionClosed { .. } => AuditAction::SessionClosed,
        AuditAct::CloseRetried { .. } => AuditAction::CloseRetried,
    }
}

/// Who acts, as the audit keeps it.
pub fn named(caller: &Caller) -> Result<Label, Fault> {
    Label::new(&caller.name).map_err(|rule| {
        Fault::bad_request(format!(
            "The name of the token cannot stand in the audit: {rule}. Give it another name."
        ))
    })
}
