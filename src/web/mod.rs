//! The pages for people. They read what the API tells, in its words, and change nothing but through
//! the actions that are confirmed; each is complete without script.

mod actions;
mod assets;
mod checks;
mod decisions;
mod details;
mod engines;
mod format;
mod frame;
mod leases;
mod line;
mod link;
mod login;
mod overview;
mod page;
mod plot;
pub(crate) mod problems;
mod queue;
mod rows;
mod search;
mod sessions;
mod settings;
mod steps;
mod why;

use axum::Router;
use axum::routing::{get, post};
use tower_http::compression::CompressionLayer;

use self::page::Web;
use crate::http::App;

pub(crate) use frame::fault_page;
pub(crate) use login::form as login_form;

/// What pages may load and where they may send: everything from here only, no inline script, no frame around them. The
/// front puts it on every page.
pub(crate) const CONTENT_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

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
        .route("/engines", get(engines::show))
        .route("/settings", get(settings::show))
        .route("/confirm", get(actions::confirm).post(actions::confirm))
        .route("/act", post(actions::act))
        .route("/steps", get(steps::show))
        .route("/steps.csv", get(steps::csv))
        .route("/steps.json", get(steps::json))
        .route("/login", get(login::page).post(login::log_in))
        .route("/logout", post(login::log_out))
        .route("/static/{name}", get(assets::serve))
        .layer(CompressionLayer::new().gzip(true))
        .with_state(Web::new(app))
}
