//! What the pages show, read in the words of the API: the same filters, pages and figures.

use kvgate_api::{Close, Lease, ProblemCode, Session, TicketAnswer};
use kvgate_core::effect::{Answer, Outcome, TicketView, WaiterView};
use kvgate_core::ids::{CloseId, LeaseId, SessionId, TicketId};

use super::app::App;
use super::convert;
use super::problem::Fault;

pub use super::audit::{named as who, read_audit_slice as audit_slice};
pub use super::convert::{bypass_word, wait_word};
pub use super::history::read_history as history;
pub use super::lists::{
    read_closes as closes, read_epochs as epochs, read_leases as leases, read_queue as queue,
    read_sessions as sessions,
};
pub use super::report::{
    read_current_step as current_step, read_decisions as decisions, read_step_slice as step_slice,
    read_steps as steps,
};
pub use super::settings::{
    change_of as settings_change, refused as settings_refused, shown as settings_shown,
};
pub use super::status::{engines_of as engines, state_of as state};

/// What an acquire of the ticket would be answered.
///
/// # Errors
/// `ticket_not_found`, or what keeps the gate from answering.
pub async fn ticket(app: &App, ticket: TicketId) -> Result<TicketAnswer, Fault> {
    let view = app.gate().read_ticket(ticket.clone()).await?;
    let view =
        view.ok_or_else(|| Fault::new(ProblemCode::TicketNotFound, "The ticket is not known."))?;
    Ok(convert::ticket_answer(&ticket, view, &app.shown()))
}

/// The same of a ticket that was read as a waiter.
#[must_use]
pub fn waiting_ticket(app: &App, waiter: &WaiterView) -> TicketAnswer {
    let shown = app.shown();
    let answer = Answer {
        ticket: waiter.ticket.clone(),
        session: Some(waiter.session.clone()),
        reservation: waiter.terms.reservation,
        epoch: shown.view.epoch,
        waited: waiter.status.age,
        repeated: false,
        session_reopened: false,
        outcome: Outcome::Wait(waiter.status),
    };
    convert::ticket_answer(&waiter.ticket, TicketView::Answer(answer), &shown)
}

/// A held lease.
///
/// # Errors
/// `lease_not_found`, `lease_released`, `lease_expired`, or what keeps the gate from answering.
pub async fn lease(app: &App, lease: LeaseId) -> Result<Lease, Fault> {
    let answered = app.gate().read_lease(lease).await?;
    Ok(convert::lease(&answered.value?, false, &app.shown()))
}

/// A session with its leases, waiters and closes.
///
/// # Errors
/// `session_not_found`, or what keeps the gate from answering.
pub async fn session(app: &App, session: SessionId) -> Result<Session, Fault> {
    let view = app.gate().read_session(session).await?;
    let view =
        view.ok_or_else(|| Fault::new(ProblemCode::SessionNotFound, "The session is not known."))?;
    Ok(convert::session(&view, &app.shown()))
}

/// A close with what each engine answered.
///
/// # Errors
/// `close_not_found`, or what keeps the gate from answering.
pub async fn close(app: &App, close: CloseId) -> Result<Close, Fault> {
    let close = app.gate().read_close(close).await?;
    let close = close.ok_or_else(super::problem::close_not_found)?;
    Ok(convert::close(&close, &app.shown()))
}
