//! The backup: a logical copy of the store, streamed while the service runs.

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::response::Response;
use futures_util::stream;
use kvgate_api::{Problem, ProblemCode};
use kvgate_core::units::Timestamp;
use tokio::sync::OwnedSemaphorePermit;

use super::app::App;
use super::extract::Query;
use super::problem::Fault;
use crate::clock;

/// A consistent logical copy of the store, as of one moment; `kvgate store restore` reads it.
#[utoipa::path(
    get,
    path = "/v1/backup",
    tag = "operation",
    responses(
        (status = 200, description = "One JSON object a line; the last one has a sum over all lines", content_type = "application/x-ndjson", body = String),
        (status = 422, description = "`invalid_request`", body = Problem),
    )
)]
pub(super) async fn backup(State(app): State<App>, query: Query) -> Result<Response, Fault> {
    query.done()?;
    let permit = app.backup_permit().ok_or_else(|| {
        Fault::new(
            ProblemCode::Overloaded,
            "Another backup is being taken. Come back when it is done.",
        )
    })?;
    let copy = app.gate().backup().await?;
    let shown = app.shown();
    let wall = Timestamp::from_millis(shown.line.wall_millis(shown.now));
    let name = format!(
        "attachment; filename=\"kvgate-{}.ndjson\"",
        clock::file_stamp(wall)
    );
    let pieces = copy.map(move |piece| {
        let _held: &OwnedSemaphorePermit = &permit;
        Ok::<_, std::convert::Infallible>(Bytes::from(piece))
    });
    let mut response = Response::new(Body::from_stream(stream::iter(pieces)));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/x-ndjson"),
    );
    if let Ok(name) = HeaderValue::from_str(&name) {
        headers.insert(CONTENT_DISPOSITION, name);
    }
    Ok(response)
}
