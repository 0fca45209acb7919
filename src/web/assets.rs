//! Files that pages refer to, part of the binary.

use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::IntoResponse;

/// Asked anew each hour at the most: a new version of kvgate may bring another sheet.
const KEPT: &str = "max-age=3600";

/// The style sheet.
pub(super) async fn style() -> impl IntoResponse {
    (
        [
            (CONTENT_TYPE, "text/css; charset=utf-8"),
            (CACHE_CONTROL, KEPT),
        ],
        include_str!("../../static/app.css"),
    )
}

/// The icon.
pub(super) async fn icon() -> impl IntoResponse {
    (
        [(CONTENT_TYPE, "image/svg+xml"), (CACHE_CONTROL, KEPT)],
        include_str!("../../static/icon.svg"),
    )
}
