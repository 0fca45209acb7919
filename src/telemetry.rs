//! Logs and metrics.
//!
//! Logs are structured lines on stderr, as text or JSON; what is logged follows `RUST_LOG`.

use std::io::IsTerminal;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

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
        lines.json().try_init()
    } else {
        lines.try_init()
    };
}

/// What went wrong with the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Trouble {
    /// A commit failed: its outcome is unknown (DUR4).
    Commit,
    /// It could not be opened again.
    Open,
    /// It could not be closed in order.
    Close,
}

impl EncodeLabelValue for Trouble {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Commit => "commit",
            Self::Open => "open",
            Self::Close => "close",
        };
        EncodeLabelValue::encode(&word, encoder)
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Kind {
    kind: Trouble,
}

/// Figures of the store, cumulative since the start.
#[derive(Debug)]
pub struct StoreMetrics {
    commit_seconds: Histogram,
    commit_commands: Histogram,
    errors: Family<Kind, Counter>,
}

impl Default for StoreMetrics {
    fn default() -> Self {
        let metrics = Self {
            // From 0.1 ms, below which no disk syncs, to 3 s.
            commit_seconds: Histogram::new(exponential_buckets(0.000_1, 2.0, 16)),
            // Up to the bound of a turn.
            commit_commands: Histogram::new(exponential_buckets(1.0, 2.0, 13)),
            errors: Family::default(),
        };
        // Shown from the start, so that a rate has a beginning.
        for kind in [Trouble::Commit, Trouble::Open, Trouble::Close] {
            metrics.errors.get_or_create(&Kind { kind }).inc_by(0);
        }
        metrics
    }
}

impl StoreMetrics {
    /// A turn is durable.
    pub fn committed(&self, took: Duration, commands: usize) {
        self.commit_seconds.observe(took.as_secs_f64());
        self.commit_commands.observe(commands as f64);
    }

    /// Something went wrong.
    pub fn failed(&self, kind: Trouble) {
        self.errors.get_or_create(&Kind { kind }).inc();
    }

    /// Puts the figures into a registry; `bytes` on disk and whether the store takes commits are as of now.
    pub fn register(&self, registry: &mut Registry, bytes: u64, up: bool) {
        let store = registry.sub_registry_with_prefix("kvgate_store");
        store.register_with_unit(
            "commit",
            "Time of a commit, its sync included",
            Unit::Seconds,
            self.commit_seconds.clone(),
        );
        store.register(
            "commit_commands",
            "Commands in a commit",
            self.commit_commands.clone(),
        );
        store.register("errors", "Faults of the store", self.errors.clone());
        let on_disk: Gauge = Gauge::default();
        on_disk.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        store.register("bytes", "Size of the store on disk", on_disk);
        let takes_commits: Gauge = Gauge::default();
        takes_commits.set(i64::from(up));
        store.register("up", "Whether the store takes commits", takes_commits);
    }
}
