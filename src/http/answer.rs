//! Good answers: JSON, the number of the change, and who must hear whether it arrived.

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use kvgate_core::ids::Seq;
use serde::Serialize;

use super::delivery::Receipts;
use crate::gate::Receipt;

/// Number of the committed change (DUR6).
pub(super) const KVGATE_SEQ: HeaderName = HeaderName::from_static("kvgate-seq");

/// Marks the answer to a call that was held open: how long that was says nothing of the service.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldOpen;

/// The answer, marked when its call was held open.
pub(super) fn held_open(mut response: Response, held_open: bool) -> Response {
    if held_open {
        response.extensions_mut().insert(HeldOpen);
    }
    response
}

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let bytes = serde_json::to_vec(body).unwrap_or_else(|error| {
        tracing::error!(%error, "an answer could not be written as JSON");
        Vec::new()
    });
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The answer, with the number of the change that the call made.
pub(super) fn with_seq(mut response: Response, seq: Option<Seq>) -> Response {
    if let Some(seq) = seq {
        response
            .headers_mut()
            .insert(KVGATE_SEQ, HeaderValue::from(seq.0));
    }
    response
}

/// The answer, with the receipts that are due when it was written whole (TIC4).
pub(super) fn with_receipts(
    mut response: Response,
    receipts: impl IntoIterator<Item = Receipt>,
) -> Response {
    response.extensions_mut().insert(Receipts::new(receipts));
    response
}
