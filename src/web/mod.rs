//! The page for people: reads the latest view, renders complete HTML, changes nothing.

mod assets;
mod format;
mod login;
mod pages;
pub(crate) mod problems;

use axum::Router;
use axum::routing::{get, post};

use crate::access::Access;
use crate::gate::Gate;

pub(crate) use login::form as login_form;

/// What pages may load and where they may send: everything from here only, no inline script, no frame around them. The
/// front puts it on every page.
pub(crate) const CONTENT_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// What pages read.
#[derive(Clone, Debug)]
pub struct WebState {
    /// Views and bounded lists.
    pub gate: Gate,
    /// Who is let in.
    pub access: Access,
}

/// The routes of the page and its style sheet.
pub fn routes(state: WebState) -> Router {
    Router::new()
        .route("/", get(pages::overview))
        .route("/login", get(login::page).post(login::log_in))
        .route("/logout", post(login::log_out))
        .route("/static/app.css", get(assets::style))
        .route("/static/icon.svg", get(assets::icon))
        .with_state(state)
}
