//! Leases: acquire, release, renew, revoke, read.

use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use kvgate_api::{
    AcquireAnswer, AcquireRequest, Lease, Problem, ReleaseRequest, ReleaseResult, RenewRequest,
    RevokeOutcome, RevokeResult,
};
use kvgate_core::effect::{LeaseGone, Outcome};
use kvgate_core::ids::LeaseId;

use super::answer::{held_open, json, with_receipts, with_seq};
use super::app::App;
use super::audit::named;
use super::convert::{self, CallFacts};
use super::extract::{JsonBody, LeasePath, NoFields, NoQuery, OptionalJson};
use super::problem::Fault;
use super::read;
use super::shares::MayWait;
use crate::access::Caller;
use crate::gate::GateError;

/// Ask for a lease, and wait for the decision for at most `wait_s`.
#[utoipa::path(
    post,
    path = "/v1/leases",
    tag = "leases",
    request_body = AcquireRequest,
    responses(
        (status = 200, description = "Decided: admit, bypass or cancelled", body = AcquireAnswer),
        (status = 202, description = "The ticket keeps its place: ask again with the same body", body = AcquireAnswer),
        (status = 409, description = "`ticket_conflict`", body = Problem),
    )
)]
pub(super) async fn acquire(
    State(app): State<App>,
    may_wait: MayWait,
    _: NoQuery,
    JsonBody(request): JsonBody<AcquireRequest>,
) -> Result<Response, Fault> {
    let asked = convert::asked(&request, app.config())?;
    // Thousands of calls wait at once: what was read is not kept until then.
    drop(request);
    let wait = convert::spread(asked.wait, asked.acquire.ticket.as_str());
    let (wait, _place) = may_wait.for_at_most(wait);
    let may_wait = !wait.is_zero();
    let began = Instant::now();
    let taken = app.gate().acquire(asked.acquire.clone(), wait).await;
    let answered = match taken {
        Ok(answered) => answered,
        Err(GateError::StoreUnavailable) => {
            let answer = convert::store_unavailable(&asked, &app);
            // The call got through: what it brought is not sent again.
            if !asked.local_bypasses.is_empty() {
                app.gate().local_bypasses(asked.local_bypasses);
            }
            let response = json(StatusCode::OK, &answer);
            return Ok(held_open(response, may_wait));
        }
        // It may have been held open until the trouble came.
        Err(error) => return Ok(held_open(Fault::from(error).into_response(), may_wait)),
    };
    let decision = answered.value?;
    if !asked.local_bypasses.is_empty() {
        // Only now: a call that was refused brings them again.
        app.gate().local_bypasses(asked.local_bypasses);
    }
    let facts = CallFacts {
        ttl_clamped: asked.ttl_clamped,
        waited_out: !wait.is_zero() && began.elapsed() >= wait,
    };
    let status = acquire_status(&decision.answer.outcome);
    let body = convert::acquire_answer(decision.answer, facts, &app.shown());
    let response = with_seq(json(status, &body), answered.seq);
    let response = held_open(response, decision.held_open);
    Ok(with_receipts(response, decision.receipt))
}

/// A decision is 200, a wait 202.
pub(super) const fn acquire_status(outcome: &Outcome) -> StatusCode {
    match outcome {
        Outcome::Wait(_) => StatusCode::ACCEPTED,
        Outcome::Admit { .. } | Outcome::Bypass(_) | Outcome::Cancelled(_) => StatusCode::OK,
    }
}

/// Give a lease back, and say what the request really used.
#[utoipa::path(
    post,
    path = "/v1/leases/{lease_id}/release",
    tag = "leases",
    params(LeasePath),
    request_body(content = Option<ReleaseRequest>, description = "Optional"),
    responses(
        (status = 200, description = "Given back, now or before", body = ReleaseResult),
        (status = 404, description = "`lease_not_found`", body = Problem),
        (status = 410, description = "`lease_expired`", body = Problem),
    )
)]
pub(super) async fn release(
    State(app): State<App>,
    LeasePath(lease): LeasePath,
    _: NoQuery,
    OptionalJson(usage): OptionalJson<ReleaseRequest>,
) -> Result<Response, Fault> {
    convert::check_usage(&usage)?;
    give_back(&app, lease).await
}

/// Give a lease back.
#[utoipa::path(
    delete,
    path = "/v1/leases/{lease_id}",
    tag = "leases",
    operation_id = "delete_lease",
    params(LeasePath),
    responses(
        (status = 200, description = "Given back, now or before", body = ReleaseResult),
        (status = 404, description = "`lease_not_found`", body = Problem),
        (status = 410, description = "`lease_expired`", body = Problem),
    )
)]
pub(super) async fn delete(
    State(app): State<App>,
    LeasePath(lease): LeasePath,
    _: NoQuery,
) -> Result<Response, Fault> {
    give_back(&app, lease).await
}

async fn give_back(app: &App, lease: Option<LeaseId>) -> Result<Response, Fault> {
    let answered = app.gate().release(known(lease)?).await?;
    let body = ReleaseResult {
        outcome: convert::release_outcome(answered.value?),
    };
    Ok(with_seq(json(StatusCode::OK, &body), answered.seq))
}

/// Begin a lease's life anew.
#[utoipa::path(
    post,
    path = "/v1/leases/{lease_id}/renew",
    tag = "leases",
    params(LeasePath),
    request_body(content = Option<RenewRequest>, description = "Optional: without `ttl_s` the life stays as it is"),
    responses(
        (status = 200, description = "Renewed", body = Lease),
        (status = 404, description = "`lease_not_found`", body = Problem),
        (status = 410, description = "`lease_expired` or `lease_released`", body = Problem),
    )
)]
pub(super) async fn renew(
    State(app): State<App>,
    LeasePath(lease): LeasePath,
    _: NoQuery,
    OptionalJson(request): OptionalJson<RenewRequest>,
) -> Result<Response, Fault> {
    let asked = request.ttl_s.map(convert::ttl);
    let clamped = asked.is_some_and(|(_, clamped)| clamped);
    let answered = app
        .gate()
        .renew(known(lease)?, asked.map(|(ttl, _)| ttl))
        .await?;
    let body = convert::lease(&answered.value?, clamped, &app.shown());
    Ok(with_seq(json(StatusCode::OK, &body), answered.seq))
}

/// Take a lease away from its holder, as an operator.
#[utoipa::path(
    post,
    path = "/v1/leases/{lease_id}/revoke",
    tag = "operation",
    operation_id = "revoke_lease",
    params(LeasePath),
    responses(
        (status = 200, description = "Revoked; its tokens are free", body = RevokeResult),
        (status = 404, description = "`lease_not_found`", body = Problem),
        (status = 410, description = "`lease_expired` or `lease_released`", body = Problem),
    )
)]
pub(super) async fn revoke(
    State(app): State<App>,
    caller: Caller,
    LeasePath(lease): LeasePath,
    _: NoQuery,
    _: OptionalJson<NoFields>,
) -> Result<Response, Fault> {
    let answered = app.gate().revoke(named(&caller)?, known(lease)?).await?;
    answered.value?;
    let body = RevokeResult {
        outcome: RevokeOutcome::Revoked,
    };
    Ok(with_seq(json(StatusCode::OK, &body), answered.seq))
}

/// Read a held lease.
#[utoipa::path(
    get,
    path = "/v1/leases/{lease_id}",
    tag = "leases",
    operation_id = "read_lease",
    params(LeasePath),
    responses(
        (status = 200, description = "Held", body = Lease),
        (status = 404, description = "`lease_not_found`", body = Problem),
        (status = 410, description = "`lease_expired` or `lease_released`", body = Problem),
    )
)]
pub(super) async fn read(
    State(app): State<App>,
    LeasePath(lease): LeasePath,
    _: NoQuery,
) -> Result<Response, Fault> {
    let body = read::lease(&app, known(lease)?).await?;
    Ok(json(StatusCode::OK, &body).into_response())
}

/// What is no lease id was never issued.
pub(super) fn known(lease: Option<LeaseId>) -> Result<LeaseId, Fault> {
    lease.ok_or_else(|| LeaseGone::NotFound.into())
}
