//! `GET /metrics`: cumulative, never drained, safe for any number of readers.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT, CONTENT_TYPE, VARY};
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::{prometheus_text, text};

use super::app::App;
use super::problem::Fault;
use crate::gate::GateError;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Everything that is counted and measured.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "operation",
    responses((
        status = 200,
        description = "OpenMetrics text; the older text format for a reader that asks for `text/plain` only",
        body = String,
        content_type = OPEN_METRICS
    ))
)]
pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Result<Response, Fault> {
    let mut body = String::new();
    let registry = app.registry();
    let (kind, written) = if wants_plain_text(&headers) {
        let written = prometheus_text::encode(&mut body, registry);
        (prometheus_text::CONTENT_TYPE, written)
    } else {
        (OPEN_METRICS, text::encode(&mut body, registry))
    };
    // Writing to a text cannot fail; if the library finds a fault it is said and not hidden.
    written.map_err(|error| {
        tracing::error!(%error, "the metrics cannot be written");
        Fault::from(GateError::Overloaded)
    })?;
    Ok(([(CONTENT_TYPE, kind), (VARY, "Accept")], body).into_response())
}

/// A reader that names the older format and not this one. A browser and `*/*` get OpenMetrics.
fn wants_plain_text(headers: &HeaderMap) -> bool {
    let mut plain = false;
    let values = headers.get_all(ACCEPT).iter();
    for value in values.filter_map(|value| value.to_str().ok()) {
        for range in value.split(',') {
            let essence = range.split(';').next().unwrap_or_default().trim();
            if essence.eq_ignore_ascii_case("application/openmetrics-text") {
                return false;
            }
            plain |= essence.eq_ignore_ascii_case("text/plain");
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prometheus prefers OpenMetrics and names both; a linter of the older format names only that.
    #[test]
    fn the_older_format_is_for_those_who_name_nothing_better() {
        let accepts = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, value.parse().unwrap());
            wants_plain_text(&headers)
        };
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert!(!accepts(prometheus));
        assert!(!accepts("*/*"));
        assert!(!accepts("text/html,application/xhtml+xml,*/*;q=0.8"));
        assert!(accepts("text/plain;version=0.0.4"));
        assert!(accepts("text/plain, */*;q=0.1"));
        assert!(!wants_plain_text(&HeaderMap::new()));
    }
}
