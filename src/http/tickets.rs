//! Tickets: cancel, read, and wait for many.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use kvgate_api::{
    CancelResult, Problem, TicketAnswer, UnknownTicket, WaitRequest, WaitResult, WaitResults,
};

use super::answer::{held_open, json, with_receipts, with_seq};
use super::app::App;
use super::convert;
use super::extract::{JsonBody, NoQuery, TicketPath};
use super::problem::Fault;
use super::read;
use super::shares::MayWait;

/// Tickets that one call may wait for.
const TICKETS_MAX: usize = 1_000;

/// Withdraw a ticket in whatever state.
#[utoipa::path(
    delete,
    path = "/v1/tickets/{ticket_id}",
    tag = "tickets",
    params(TicketPath),
    responses((status = 200, description = "What the cancel met", body = CancelResult))
)]
pub(super) async fn cancel(
    State(app): State<App>,
    TicketPath(ticket): TicketPath,
    _: NoQuery,
) -> Result<Response, Fault> {
    let answered = app.gate().cancel(ticket).await?;
    let body = CancelResult {
        outcome: convert::cancel_outcome(answered.value),
    };
    Ok(with_seq(json(StatusCode::OK, &body), answered.seq))
}

/// Read what an acquire of the ticket would answer, without side effects.
#[utoipa::path(
    get,
    path = "/v1/tickets/{ticket_id}",
    tag = "tickets",
    operation_id = "read_ticket",
    params(TicketPath),
    responses(
        (status = 200, description = "How the ticket stands", body = TicketAnswer),
        (status = 404, description = "`ticket_not_found`", body = Problem),
    )
)]
pub(super) async fn read(
    State(app): State<App>,
    TicketPath(ticket): TicketPath,
    _: NoQuery,
) -> Result<Response, Fault> {
    let body = read::ticket(&app, ticket).await?;
    Ok(json(StatusCode::OK, &body))
}

/// Wait until one of up to 1,000 tickets is decided; then all that are.
#[utoipa::path(
    post,
    path = "/v1/wait",
    tag = "tickets",
    request_body = WaitRequest,
    responses(
        (status = 200, description = "All that are decided, in the order asked", body = WaitResults),
        (status = 202, description = "None was decided within `wait_s`", body = WaitResults),
    )
)]
pub(super) async fn wait(
    State(app): State<App>,
    may_wait: MayWait,
    _: NoQuery,
    JsonBody(request): JsonBody<WaitRequest>,
) -> Result<Response, Fault> {
    let Some(first) = request.ticket_ids.first() else {
        return Err(Fault::field("/ticket_ids", "must name at least one ticket"));
    };
    if request.ticket_ids.len() > TICKETS_MAX {
        return Err(Fault::field(
            "/ticket_ids",
            format!("at most {TICKETS_MAX} tickets"),
        ));
    }
    let wait = convert::spread(convert::wait(request.wait_s)?, first);
    let tickets = request
        .ticket_ids
        .iter()
        .enumerate()
        .map(|(index, text)| convert::ticket(&format!("/ticket_ids/{index}"), text))
        .collect::<Result<Vec<_>, _>>()?;
    drop(request);
    let (wait, _place) = may_wait.for_at_most(wait);
    let watched = match app.gate().watch(tickets, wait).await {
        Ok(watched) => watched,
        Err(error) => return Ok(held_open(Fault::from(error).into_response(), true)),
    };
    let shown = app.shown();
    let mut results = Vec::with_capacity(watched.len());
    let mut receipts = Vec::new();
    for (ticket, decision) in watched {
        match decision {
            Some(decision) => {
                results.extend(convert::wait_result(decision.answer, &shown));
                receipts.extend(decision.receipt);
            }
            None => results.push(WaitResult::Unknown(UnknownTicket {
                ticket_id: ticket.as_str().to_owned(),
            })),
        }
    }
    let status = if results.is_empty() {
        StatusCode::ACCEPTED
    } else {
        StatusCode::OK
    };
    let response = json(status, &WaitResults { results });
    // It waits by its nature, whether or not something was decided already.
    Ok(with_receipts(held_open(response, true), receipts))
}
