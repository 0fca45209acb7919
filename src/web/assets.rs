//! Files that pages refer to, part of the binary. Their address carries their version, so that a
//! browser keeps them for good and a new version of kvgate brings new ones.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};

/// Name, kind, bytes.
const FILES: &[(&str, &str, &[u8])] = &[
    (
        "app.css",
        "text/css; charset=utf-8",
        include_bytes!("../../static/app.css"),
    ),
    (
        "app.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../static/app.js"),
    ),
    (
        "theme.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../static/theme.js"),
    ),
    (
        "htmx.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../../static/vendor/htmx/htmx.min.js"),
    ),
    (
        "icon.svg",
        "image/svg+xml",
        include_bytes!("../../static/icon.svg"),
    ),
];

static VERSION: LazyLock<String> = LazyLock::new(|| {
    let mut hash = crc32fast::Hasher::new();
    for (name, _, bytes) in FILES {
        hash.update(name.as_bytes());
        hash.update(bytes);
    }
    format!("{:08x}", hash.finalize())
});

/// Of all files together.
pub(super) fn version() -> &'static str {
    &VERSION
}

/// `GET /static/{name}`.
pub(super) async fn serve(Path(name): Path<String>, headers: HeaderMap) -> Response {
    let Some((_, kind, bytes)) = FILES.iter().find(|(known, ..)| *known == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let etag = format!("\"{}\"", version());
    let known = headers.get(IF_NONE_MATCH);
    let same = known.is_some_and(|known| known.as_bytes() == etag.as_bytes());
    let carried = [
        (CONTENT_TYPE, (*kind).to_owned()),
        (
            CACHE_CONTROL,
            "public, max-age=31536000, immutable".to_owned(),
        ),
        (ETAG, etag),
    ];
    if same {
        (StatusCode::NOT_MODIFIED, carried).into_response()
    } else {
        (carried, *bytes).into_response()
    }
}
