//! Good answers: JSON, the number of the change, and who must hear whether it arrived.

use std::fmt::Display;
use std::io::Write;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
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

/// Headers that an answer has when it is sent: the map is made that large once, and does not grow with each of them.
const HEADERS: usize = 16;

/// Bytes that hold most answers.
const USUAL_BYTES: usize = 512;

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let mut bytes = Vec::with_capacity(USUAL_BYTES);
    if let Err(error) = serde_json::to_writer(&mut bytes, body) {
        tracing::error!(%error, "an answer could not be written as JSON");
        bytes.clear();
    }
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    let mut headers = HeaderMap::with_capacity(HEADERS);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    *response.headers_mut() = headers;
    response
}

/// The answer, with the number of the change that the call made.
pub(super) fn with_seq(mut response: Response, seq: Option<Seq>) -> Response {
    if let Some(value) = seq.and_then(|seq| short(seq.0)) {
        response.headers_mut().insert(KVGATE_SEQ, value);
    }
    response
}

/// The header value of a number or an id, written in place: `None` when it has more than 40 bytes.
pub(super) fn short(value: impl Display) -> Option<HeaderValue> {
    let mut text = [0; 40];
    let mut rest = text.as_mut_slice();
    write!(rest, "{value}").ok()?;
    let left = rest.len();
    let len = text.len().checked_sub(left)?;
    HeaderValue::from_bytes(text.get(..len)?).ok()
}

/// The answer, with the receipts that are due when it was written whole (TIC4).
pub(super) fn with_receipts(
    mut response: Response,
    receipts: impl IntoIterator<Item = Receipt>,
) -> Response {
    response.extensions_mut().insert(Receipts::new(receipts));
    response
}
