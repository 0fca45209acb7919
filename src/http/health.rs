//! What probes and people ask first.

use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use kvgate_api::{Health, Problem, ProblemCode, Version};
use kvgate_core::units::Span;

use super::advice::{Advice, advice};
use super::answer::json;
use super::app::App;
use super::problem::{self, Fault, title};
use crate::gate::Phase;
use crate::web::problems;

/// Without progress of the writer for longer than this the process is not healthy (DUR3).
pub const STUCK_AFTER: Span = Span::from_secs(30);

/// Whether the process is alive: also while it starts and recovers.
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "operation",
    responses((status = 200, description = "Alive", body = Health))
)]
pub(super) async fn healthz(State(app): State<App>) -> Result<Response, Fault> {
    if app.is_stuck() {
        return Err(Fault::new(
            ProblemCode::StoreUnavailable,
            "The writer makes no progress: the disk does not answer.",
        ));
    }
    let status = match app.gate().phase() {
        Phase::Starting => "starting",
        Phase::Unavailable => "recovering",
        Phase::Ready | Phase::Draining => "ok",
    };
    Ok(json(StatusCode::OK, &health(status)))
}

/// Whether the service decides. Degraded is ready, since the gate fails open.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "operation",
    responses((status = 200, description = "Ready", body = Health))
)]
pub(super) async fn readyz(State(app): State<App>) -> Result<Response, Fault> {
    match app.gate().phase() {
        Phase::Ready => Ok(json(StatusCode::OK, &health("ready"))),
        Phase::Starting | Phase::Unavailable => Err(problem::recovering()),
        Phase::Draining => Err(problem::draining()),
    }
}

fn health(status: &str) -> Health {
    Health {
        status: status.to_owned(),
    }
}

/// Which program this is.
#[utoipa::path(
    get,
    path = "/version",
    tag = "operation",
    responses((status = 200, description = "Name and version", body = Version))
)]
pub(super) async fn version() -> Response {
    let body = Version {
        name: env!("CARGO_PKG_NAME").to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    json(StatusCode::OK, &body)
}

/// What to do about a problem: the page that `type` leads to.
#[utoipa::path(
    get,
    path = "/problems/{code}",
    tag = "operation",
    params(("code" = ProblemCode, Path, description = "Code of a problem")),
    responses(
        (status = 200, description = "For people", content_type = "text/html", body = String),
        (status = 404, description = "`not_found`", body = Problem),
    )
)]
pub(super) async fn problem_page(Path(code): Path<String>) -> Result<Response, Fault> {
    let code = ProblemCode::ALL
        .iter()
        .copied()
        .find(|known| known.as_str() == code)
        .ok_or_else(problem::not_found)?;
    let Advice {
        happened,
        client,
        operator,
    } = advice(code);
    let status = Fault::new(code, "").status().as_u16();
    let page = problems::page(
        title(code),
        code.as_str(),
        status,
        happened,
        client,
        operator,
    )
    .map_err(|error| {
        tracing::error!(%error, "a page was not rendered");
        Fault::bad_request("The page could not be written.")
            .with_status(StatusCode::INTERNAL_SERVER_ERROR)
    })?;
    let kind = [(
        CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    )];
    Ok((kind, page).into_response())
}
