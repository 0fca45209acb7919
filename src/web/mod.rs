//! The pages for people. They read what the API tells, in its words, and change nothing but through
//! the actions that are confirmed; each is complete without script.

mod assets;
mod checks;
mod format;
mod frame;
mod overview;
mod page;
mod plot;
mod why;

use axum::Router;
use axum::routing::get;
use tower_http::compression::CompressionLayer;

use self::page::Web;
use crate::http::App;

/// The pages, and the files that they refer to.
pub fn routes(app: App) -> Router {
    Router::new()
        .route("/", get(overview::show))
        .route("/static/{name}", get(assets::serve))
        .layer(CompressionLayer::new().gzip(true))
        .with_state(Web::new(app))
}
