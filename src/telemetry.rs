//! Logs and metrics.
//!
//! Logs are structured lines on stderr, as text or JSON; what is logged follows `RUST_LOG`. A fault that
//! repeats is told once, and then how often ([`Repeats`]).

mod metrics;
mod repeats;
mod requests;

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

pub use metrics::{
    GateMetrics, HttpMetrics, ReadingResult, Readings, RouteMetrics, Trouble, UNMATCHED, scope,
};
pub use repeats::{Repeats, tell_repeats, tell_repeats_at_the_end};
pub use requests::RequestId;
use requests::WithRequest;

/// Begins logging. A second call changes nothing.
pub fn start_logging(json: bool) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A closed stderr must not end the task that has something to say.
        .log_internal_errors(false)
        .with_ansi(colour);
    // Fails only when logging has begun already, as in tests of one process.
    let _ = if json {
        lines
            .json()
            .map_event_format(|format| WithRequest { format, json })
            .try_init()
    } else {
        lines
            .map_event_format(|format| WithRequest {
                format: format.with_ansi(colour),
                json,
            })
            .try_init()
    };
}
