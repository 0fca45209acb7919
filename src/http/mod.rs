//! The HTTP room: the accept loop, the routes, and the translation between the wire and the core.
//!
//! The start order is: [`Listener::bind`], then the gate, then [`serve`] with a [`router`]. Until the
//! gate is ready everything but the calls of operation is answered `recovering` (DUR3). The stop
//! order is: `Gate::begin_drain`, cancel the token of [`serve`] and wait for it, `Gate::close`.

mod advice;
mod answer;
mod app;
mod audit;
mod backup;
mod batch;
mod convert;
mod delivery;
mod exposition;
mod extract;
mod front;
#[cfg(test)]
mod fuzz;
mod health;
mod history;
mod leases;
mod listener;
mod lists;
mod metrics;
mod openapi;
mod problem;
pub mod read;
mod report;
mod rights;
mod server;
mod sessions;
mod settings;
mod shares;
mod status;
mod tickets;
mod tls;
mod without_op;

use axum::Router;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub use advice::{Advice, advice};
pub use app::{App, EngineDetails, FleetDetails, HttpConfig, ShellNotice, Shown};
pub use extract::{Fields, Form, Query};
pub use front::Passed;
pub use health::STUCK_AFTER;
pub use listener::{Endpoint, Listener};
pub use openapi::openapi;
pub use problem::{BEARER, Fault, title};
pub use server::{Limits, serve};
pub use tls::{Tls, TlsError, TlsFiles};

/// The API, and `pages` of other rooms beside it, behind the same front.
pub fn router(app: App, pages: Router) -> Router {
    let (api, _) = routes().split_for_parts();
    api.with_state(app.clone())
        .merge(pages)
        .fallback(async || problem::not_found())
        .method_not_allowed_fallback(async || problem::method_not_allowed())
        .layer(front::Before(app))
}

/// Every route of the API with its description.
fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(leases::acquire, lists::leases))
        .routes(routes!(leases::read, leases::delete))
        .routes(routes!(leases::release))
        .routes(routes!(leases::renew))
        .routes(routes!(leases::revoke))
        .routes(routes!(lists::queue))
        .routes(routes!(tickets::read, tickets::cancel))
        .routes(routes!(tickets::wait))
        .routes(routes!(batch::batch))
        .routes(routes!(sessions::close))
        .routes(routes!(sessions::read))
        .routes(routes!(sessions::read_close))
        .routes(routes!(sessions::retry))
        .routes(routes!(lists::sessions))
        .routes(routes!(lists::closes))
        .routes(routes!(status::state))
        .routes(routes!(status::engines))
        .routes(routes!(lists::epochs))
        .routes(routes!(report::take, report::list))
        .routes(routes!(report::current))
        .routes(routes!(report::decisions))
        .routes(routes!(history::history))
        .routes(routes!(settings::read, settings::change))
        .routes(routes!(audit::list))
        .routes(routes!(backup::backup))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::version))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::document))
        .routes(routes!(health::problem_page))
}
