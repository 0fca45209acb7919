//! The page for people: reads the latest view, renders complete HTML, changes nothing.

mod assets;
mod format;
mod pages;
pub(crate) mod problems;

use axum::Router;
use axum::routing::get;

use crate::gate::Gate;

/// What pages read.
#[derive(Clone, Debug)]
pub struct WebState {
    /// Views and bounded lists.
    pub gate: Gate,
}

/// The routes of the page and its style sheet.
pub fn routes(state: WebState) -> Router {
    Router::new()
        .route("/", get(pages::overview))
        .route("/static/app.css", get(assets::style))
        .route("/static/icon.svg", get(assets::icon))
        .with_state(state)
}
