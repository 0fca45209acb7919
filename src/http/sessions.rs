//! Sessions and closes: close, read, retry.
//!
//! A close is answered as soon as its promise is on disk (CLO2); engines are called by others.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{Close, CloseDisabled, CloseRequest, Problem, Session};
use kvgate_core::close::CloseIntent;
use kvgate_core::effect::{CloseReply, RetryRefused};

use super::answer::{held_open, json, with_seq};
use super::app::App;
use super::convert;
use super::extract::{ClosePath, NoFields, NoQuery, OptionalJson, Query, SessionPath};
use super::problem::{self, Fault};
use super::read;
use super::shares::MayWait;

/// End a session: release its KV on every engine, once its last lease has ended.
#[utoipa::path(
    post,
    path = "/v1/sessions/{session_id}/close",
    tag = "sessions",
    operation_id = "close_session",
    params(
        SessionPath,
        (
            "wait_s" = Option<f64>, Query, minimum = 0, maximum = 60,
            description = "Longest time in seconds that the call stays open for the close to be done; 0 when absent"
        ),
    ),
    request_body(content = Option<CloseRequest>, description = "Optional"),
    responses(
        (status = 200, description = "The lifecycle feature is off: nothing is kept and nothing is sent", body = CloseDisabled),
        (status = 202, description = "Promised, or joined to the close that runs already", body = Close),
    )
)]
pub(super) async fn close(
    State(app): State<App>,
    SessionPath(session): SessionPath,
    may_wait: MayWait,
    mut query: Query,
    OptionalJson(request): OptionalJson<CloseRequest>,
) -> Result<Response, Fault> {
    let wait = wait(&mut query)?;
    query.done()?;
    let request = convert::close_request(session, request);
    let answered = app.gate().close_session(request).await?;
    let taken = match answered.value {
        CloseReply::Taken(taken) => taken,
        CloseReply::Disabled => return Ok(json(StatusCode::OK, &convert::CLOSE_DISABLED)),
        CloseReply::Full => return Err(problem::too_many_closes()),
    };
    let (wait, _place) = may_wait.for_at_most(wait);
    let waits = !taken.is_done() && !wait.is_zero();
    let close = if !waits {
        taken
    } else {
        done(&app, taken, wait).await
    };
    let body = convert::close(&close, &app.shown());
    let response = held_open(json(StatusCode::ACCEPTED, &body), waits);
    Ok(with_seq(response, answered.seq))
}

fn wait(query: &mut Query) -> Result<Duration, Fault> {
    query.take("wait_s").map_or(Ok(Duration::ZERO), |text| {
        // What is no number is in no range either.
        convert::open_for("?wait_s", text.parse().unwrap_or(f64::NAN))
    })
}

/// The close when it is done, or as it stands when the time is over. The promise was made already,
/// so whatever goes wrong from here on is no reason to take the answer back.
async fn done(app: &App, taken: CloseIntent, wait: Duration) -> CloseIntent {
    let gate = app.gate();
    if let Some(close) = gate.close_done(taken.id, wait).await {
        return close;
    }
    match gate.read_close(taken.id).await {
        Ok(Some(close)) => close,
        Ok(None) | Err(_) => taken,
    }
}

/// Read a session: its leases, its waiters and its closes.
#[utoipa::path(
    get,
    path = "/v1/sessions/{session_id}",
    tag = "sessions",
    operation_id = "read_session",
    params(SessionPath),
    responses(
        (status = 200, description = "As it stands", body = Session),
        (status = 400, description = "`invalid_id`", body = Problem),
        (status = 404, description = "`session_not_found`", body = Problem),
    )
)]
pub(super) async fn read(
    State(app): State<App>,
    SessionPath(session): SessionPath,
    _: NoQuery,
) -> Result<Response, Fault> {
    let session = read::session(&app, session).await?;
    Ok(json(StatusCode::OK, &session))
}

/// Read a close.
#[utoipa::path(
    get,
    path = "/v1/closes/{close_id}",
    tag = "sessions",
    params(ClosePath),
    responses(
        (status = 200, description = "As it stands", body = Close),
        (status = 404, description = "`close_not_found`", body = Problem),
    )
)]
pub(super) async fn read_close(
    State(app): State<App>,
    ClosePath(close): ClosePath,
    _: NoQuery,
) -> Result<Response, Fault> {
    let id = close.ok_or_else(problem::close_not_found)?;
    let close = read::close(&app, id).await?;
    Ok(json(StatusCode::OK, &close))
}

/// Send a close once more to the engines where it failed.
#[utoipa::path(
    post,
    path = "/v1/closes/{close_id}/retry",
    tag = "sessions",
    operation_id = "retry_close",
    params(ClosePath),
    responses(
        (status = 200, description = "The lifecycle feature is off: nothing is sent", body = CloseDisabled),
        (status = 202, description = "The close as it stands now", body = Close),
        (status = 404, description = "`close_not_found`", body = Problem),
        (status = 409, description = "`close_superseded`", body = Problem),
    )
)]
pub(super) async fn retry(
    State(app): State<App>,
    ClosePath(close): ClosePath,
    _: NoQuery,
    _: OptionalJson<NoFields>,
) -> Result<Response, Fault> {
    let id = close.ok_or_else(problem::close_not_found)?;
    let answered = app.gate().retry_close(id).await?;
    match answered.value {
        Ok(close) => {
            let body = convert::close(&close, &app.shown());
            Ok(with_seq(json(StatusCode::ACCEPTED, &body), answered.seq))
        }
        Err(RetryRefused::NotFound) => Err(problem::close_not_found()),
        Err(RetryRefused::Superseded) => Err(problem::close_superseded()),
        Err(RetryRefused::Disabled) => Ok(json(StatusCode::OK, &convert::CLOSE_DISABLED)),
    }
}
