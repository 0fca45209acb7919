//! `GET /metrics`: cumulative, never drained, safe for any number of readers.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::app::App;
use super::problem::Fault;
use crate::gate::{GateError, Phase};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The store's figures.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "operation",
    responses((status = 200, description = "OpenMetrics text", body = String, content_type = OPEN_METRICS))
)]
pub(super) async fn metrics(State(app): State<App>) -> Result<Response, Fault> {
    let gate = app.gate();
    let stats = gate.stats();
    let up = matches!(gate.phase(), Phase::Ready | Phase::Draining);
    let mut registry = Registry::default();
    stats.metrics().register(&mut registry, stats.bytes(), up);
    let mut text = String::new();
    // Writing to a text cannot fail; if the library finds a fault it is said and not hidden.
    encode(&mut text, &registry).map_err(|error| {
        tracing::error!(%error, "the metrics cannot be written");
        Fault::from(GateError::Overloaded)
    })?;
    Ok(([(CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}
