//! What the handlers share: the gate, what other rooms tell of themselves, and the settings.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvgate_api::Severity;
use kvgate_core::units::{Span, Timestamp};
use kvgate_core::view::View;
use prometheus_client::registry::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::exposition::Present;
use crate::access::{Access, AllowedHost};
use crate::clock::Clock;
use crate::config::{self, Origins};
use crate::gate::{Gate, Phase};
use crate::history::History;
use crate::telemetry::{HttpMetrics, Readings, RequestId};

/// Each backup under way keeps a picture of the store in memory.
const BACKUPS_AT_ONCE: usize = 1;

/// Settings of the HTTP room.
#[derive(Clone, Debug)]
pub struct HttpConfig {
    /// The ports that the service listens on.
    pub bound: Vec<SocketAddr>,
    /// Host names besides loopback and the bound address.
    pub allowed_hosts: Vec<AllowedHost>,
    /// Who is let in.
    pub access: Access,
    /// `/metrics` needs a right too.
    pub metrics_auth: bool,
    /// Life of a lease whose acquire names none.
    pub default_ttl: Span,
    /// Where the configured values come from of settings that can be changed at run time.
    pub origins: Origins,
    /// Every setting of the start with its value and who set it; no secret is among them.
    pub configured: Vec<config::Shown>,
    /// Without progress of the writer for this long the process is not healthy (DUR3).
    pub stuck_after: Span,
}

/// What the readings of a fleet tell beyond what the core keeps. The poller publishes it; until it
/// does, nothing is known.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FleetDetails {
    /// A router is configured.
    pub has_router: bool,
    /// What software the router is, as far as its answers tell.
    pub router_kind: Option<String>,
    /// Entries of its list that were skipped: the entry, shortened, and why.
    pub bad_entries: Vec<(String, String)>,
    /// By base URL.
    pub engines: BTreeMap<String, EngineDetails>,
}

/// What is known of one engine beyond its readings.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EngineDetails {
    /// Whether it takes session closes; `None` while that is not known.
    pub close_support: Option<bool>,
    /// Version of its software, as it says itself.
    pub version: Option<String>,
    /// How its metrics are spelled, once they were read: what stands behind the name of the software.
    pub dialect: Option<&'static str>,
    /// Readings by result, since it was first asked.
    pub readings: Readings,
}

/// A notice of the shell: the core has its own in the view.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShellNotice {
    /// Stable name.
    pub code: String,
    /// How serious it is.
    pub severity: Severity,
    /// For people.
    pub text: String,
    /// Since when, on kvgate's line.
    pub since: Timestamp,
}

/// What the handlers share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct App {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gate: Gate,
    config: HttpConfig,
    fleet: watch::Receiver<Arc<FleetDetails>>,
    notices: watch::Receiver<Vec<ShellNotice>>,
    history: History,
    started: Instant,
    request_salt: u64,
    requests: AtomicU64,
    backups: Arc<Semaphore>,
    metrics: HttpMetrics,
    registry: Registry,
}

impl App {
    /// Joins what the handlers need. `request_salt` is the random part of request ids.
    #[must_use]
    pub fn new(
        gate: Gate,
        config: HttpConfig,
        fleet: watch::Receiver<Arc<FleetDetails>>,
        notices: watch::Receiver<Vec<ShellNotice>>,
        history: History,
        request_salt: u64,
    ) -> Self {
        let metrics = HttpMetrics::default();
        let mut registry = Registry::default();
        gate.stats().metrics().register(&mut registry);
        metrics.register(&mut registry);
        registry.register_collector(Box::new(Present {
            gate: gate.clone(),
            fleet: fleet.clone(),
        }));
        Self {
            inner: Arc::new(Inner {
                gate,
                config,
                fleet,
                notices,
                history,
                started: Instant::now(),
                request_salt,
                requests: AtomicU64::new(1),
                backups: Arc::new(Semaphore::new(BACKUPS_AT_ONCE)),
                metrics,
                registry,
            }),
        }
    }

    /// The gate.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.inner.gate
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &HttpConfig {
        &self.inner.config
    }

    /// What the last reading round told beyond the core.
    #[must_use]
    pub fn fleet(&self) -> Arc<FleetDetails> {
        Arc::clone(&self.inner.fleet.borrow())
    }

    /// Figures over time.
    #[must_use]
    pub fn history(&self) -> &History {
        &self.inner.history
    }

    /// Notices of the shell.
    #[must_use]
    pub fn shell_notices(&self) -> Vec<ShellNotice> {
        self.inner.notices.borrow().clone()
    }

    /// Figures of this room.
    pub(super) fn metrics(&self) -> &HttpMetrics {
        &self.inner.metrics
    }

    /// Everything that `/metrics` shows.
    pub(super) fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    /// Now, and how its times are shown.
    #[must_use]
    pub fn shown(&self) -> Shown {
        // Without a line nothing was decided yet, and there are no times to show.
        let line = self.gate().line().unwrap_or_else(Clock::start);
        Shown {
            view: self.gate().view(),
            now: line.now(),
            line,
        }
    }

    /// Room for one more backup; `None` while another one is under way.
    pub(super) fn backup_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.backups).try_acquire_owned().ok()
    }

    /// Whether the writer makes no progress, so that the process does not do its work (DUR3).
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        let gate = self.gate();
        match gate.phase() {
            // A store is opened in whatever time it takes, and again until it answers.
            Phase::Starting | Phase::Unavailable => false,
            Phase::Ready | Phase::Draining => gate.line().is_some_and(|line| {
                line.now().since(gate.stats().last_turn()) > self.config().stuck_after
            }),
        }
    }

    /// How long the process runs.
    #[must_use]
    pub fn uptime(&self) -> Span {
        let up = self.inner.started.elapsed().as_millis();
        Span::from_millis(u64::try_from(up).unwrap_or(u64::MAX))
    }

    /// When the process started, on the line.
    pub(super) fn started_at(&self, now: Timestamp) -> Timestamp {
        now.before(self.uptime())
    }

    /// A new request id.
    pub(super) fn next_request_id(&self) -> RequestId {
        let number = self.inner.requests.fetch_add(1, Ordering::Relaxed);
        RequestId::new(self.inner.request_salt, number)
    }
}

/// The picture that an answer is made from.
#[derive(Clone, Debug)]
pub struct Shown {
    /// State as of the last committed turn.
    pub view: Arc<View>,
    /// Now, on the line.
    pub now: Timestamp,
    /// kvgate's line.
    pub line: Clock,
}
