//! The pages for people. They read what the API tells, in its words, and change nothing but through
//! the actions that are confirmed; each is complete without script.

mod assets;
mod checks;
mod decisions;
mod details;
mod format;
mod frame;
mod leases;
mod link;
mod overview;
mod page;
mod plot;
mod queue;
mod rows;
mod search;
mod sessions;
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
        .route("/queue", get(queue::show))
        .route("/leases", get(leases::show))
        .route("/sessions", get(sessions::show))
        .route("/closes", get(sessions::show_closes))
        .route("/decisions", get(decisions::show))
        .route("/ticket", get(details::ticket))
        .route("/lease", get(details::lease))
        .route("/session", get(details::session))
        .route("/close", get(details::close))
        .route("/search", get(search::show))
        .route("/static/{name}", get(assets::serve))
        .layer(CompressionLayer::new().gzip(true))
        .with_state(Web::new(app))
}
